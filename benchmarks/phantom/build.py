"""Build the device that computes nothing for the torch that is installed, and say what a process
needs in its environment to find it.

    env $(python benchmarks/phantom/build.py out/phantom) python benchmarks/phantom/rank.py ours

Private to CUDA builds of torch: the names of their libraries, where the headers of the runtime are,
and what Triton calls of the driver. Tried on 2.11 with CUDA 13.0 and Triton 3.6, 2.14 with 13.0 and
3.8, and 2.15 with 13.2 and 3.9.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
LIBRARIES = ("c10_cuda", "torch_cuda", "torch_python", "torch_cpu", "torch_cuda_linalg")
PREFIXES = r"(?:__cuda|cu|nccl)[A-Za-z0-9_]+"
# What torch and Triton look up by name.
LOOKED_UP = (
    "cuCtxSetCurrent cuCtxSetLimit cuCtxSynchronize cuFuncSetAttribute cuFuncSetCacheConfig "
    "cuMemcpyHtoD_v2 cuMemsetD32Async cuMemsetD8Async cuModuleUnload cuStreamSynchronize "
    "cuStreamWriteValue32 cuTensorMapEncodeIm2col cuTensorMapEncodeTiled"
)

# The part of CUDA's headers that its compiler brings: marks for functions, which gcc needs not.
MARKS = """#pragma once
#define CUDARTAPI
#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
"""


def build(folder: Path) -> dict[str, str]:
    """Compile it into `folder`.

    Returns: variables of the environment of a process that is to run on it.

    Raises:
        RuntimeError: torch is no CUDA build, or there are no headers of its runtime.
        subprocess.CalledProcessError: `nm` or `gcc` failed; what they said is on stderr.
    """
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is no CUDA build, which this needs")
    packages = Path(torch.__file__).parents[1]
    headers = [*packages.glob("nvidia/**/include/driver_types.h")]
    if not headers:
        raise RuntimeError(f"no driver_types.h under {packages}/nvidia: pip install cuda-toolkit")
    (folder / "crt").mkdir(parents=True, exist_ok=True)
    (folder / "crt" / "host_defines.h").write_text(MARKS)
    text = (HERE / "device.c").read_text() + (HERE / "libraries.h").read_text()
    written = set(re.findall(rf"\b({PREFIXES})\(|\((c[A-Za-z0-9_]+|nccl\w+)[,)]", text))
    have = {name for pair in written for name in pair}
    wanted = sorted((_undefined(packages) | set(LOOKED_UP.split())) - have)
    (folder / "rest.h").write_text("".join(f"int {name}() {{ return 0; }}\n" for name in wanted))
    library = folder / "libphantom.so"
    subprocess.run(
        [
            *("gcc", "-shared", "-fPIC", "-O1", "-w", f"-I{folder}", f"-I{headers[0].parent}"),
            *("-o", library, HERE / "device.c", "-lpthread", "-ldl"),
        ],
        check=True,
    )
    driver = folder / "libcuda.so.1"
    driver.unlink(missing_ok=True)
    driver.symlink_to(library.name)  # one library, so that both names share what it knows
    return {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
    }


def _undefined(packages: Path) -> set[str]:
    """Names of CUDA's functions that torch's libraries need."""
    found: set[str] = set()
    for name in LIBRARIES:
        said = subprocess.run(
            ["nm", "-D", "--undefined-only", packages / "torch" / "lib" / f"lib{name}.so"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        found.update(re.findall(rf"\bU ({PREFIXES})", said))
    return found


if __name__ == "__main__":
    made = build(Path(sys.argv[1]).resolve())
    print(*(f"{name}={value}" for name, value in made.items()))  # noqa: T201
