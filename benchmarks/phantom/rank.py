"""`gpu_rank.py` on the device that computes nothing: what it has not is put in its place first.

    python benchmarks/phantom/rank.py VARIANT --size 1b [--traffic]

in the environment that `build.py` names. Times mean nothing there, but for the host's own. With
`--traffic` it takes a few steps, and says which kernels of Inductor's the last one has launched,
and how many bytes the tensors have that these were given, those read and written twice.
"""

from __future__ import annotations

import ctypes
import runpy
import sys
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_fsdp.wire import captured

OPS = torch.library.Library("aten", "IMPL")


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    """What cuDNN's attention returns: as much memory, of its layout."""
    batch, heads, length, _width = query.shape
    sums = query.new_empty(batch, heads, length, 1, dtype=torch.float32)
    seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
    return torch.empty_like(query), sums, None, None, length, key.shape[2], seed, offset, None


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def put_in_place() -> None:
    """cuDNN's attention, whose engines are no functions of C; kernels compiled by NVRTC; and what
    a captured step compares on the device, where all is zero.
    """
    OPS.impl("_scaled_dot_product_cudnn_attention", _attention, "CUDA")
    OPS.impl("_scaled_dot_product_cudnn_attention_backward", _attention_backward, "CUDA")
    torch.cuda._compile_kernel = lambda *_, **__: SimpleNamespace(func=ctypes.c_void_p(8))
    captured.Captures._why_not = lambda *_: ""  # type: ignore[method-assign]


def traffic(name: str, size: str, world: int = 64) -> str:
    """A line for each kernel of a step, those with most bytes first, behind one for all."""
    from gpu_rank import SIZES, Rank
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    from compiled_fsdp.command.simulate import as_rank

    launches: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    launch = CachingAutotuner.run

    def counted(self: CachingAutotuner, *args: Any, **kwargs: Any) -> Any:
        launches[self.fn.__name__] += 1
        for argument, arg in zip(self.fn.arg_names, args, strict=False):
            if isinstance(arg, Tensor):
                num_bytes[self.fn.__name__] += arg.nbytes * (2 if "in_out" in argument else 1)
        return launch(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    rank = Rank(name, SIZES[size], world, 5e10, "cuda")
    with as_rank(rank.world):
        dist.init_process_group("nccl")
        step = rank.build()
        for _ in range(3):
            step()
        CachingAutotuner.run = counted  # type: ignore[method-assign]
        step()
    lines = [f"{sum(num_bytes.values()) / 1e9:.1f} GB, {sum(launches.values())} launches"]
    lines += [f"{n / 1e9:7.2f} GB {launches[of]:4d} x {of}" for of, n in num_bytes.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    put_in_place()
    benchmarks = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(benchmarks), str(benchmarks.parent)]
    if "--traffic" in sys.argv:
        parser = ArgumentParser()
        parser.add_argument("variant")
        parser.add_argument("--size", default="1b")
        parser.add_argument("--traffic", action="store_true")
        asked = parser.parse_args()
        sys.stdout.write(traffic(asked.variant, asked.size) + "\n")
        sys.exit()
    runpy.run_path(str(benchmarks / "gpu_rank.py"), run_name="__main__")
