"""A kernel that occupies a stream of a device for a time.

It reads the device's clock of nanoseconds: `torch.cuda._sleep` counts cycles of a clock that falls
under load, and a wire made of it would be slower beside matmuls than alone.

Private torch used here (tried on 2.11): `torch.cuda._compile_kernel`, which needs NVRTC, and
`torch.cuda._utils._get_gpu_runtime_library`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

SPINNING = ("cuda",)  # the types of devices that have such a kernel
LONGEST = 1.0  # seconds of one launch: the kernel takes nanoseconds as an int of 32 bits
SOURCE = """
extern "C" __global__ void spin(int nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < (unsigned long long)nanoseconds);
}
"""


def spin(seconds: float) -> None:
    """Let the current stream of the current CUDA device do nothing for so long; nothing for none.

    Raises:
        RuntimeError: there is no NVRTC, or it cannot compile.
    """
    while seconds > 0:
        part = min(seconds, LONGEST)
        _launcher(torch.cuda.current_device())(max(1, round(1e9 * part)))
        seconds -= part


@cache
def _launcher(_device: int) -> Callable[[int], None]:
    """What launches the kernel, which is loaded for one device: a hundred microseconds less than
    torch's own launcher, which looks for the driver's library in each call.
    """
    try:
        function = torch.cuda._compile_kernel(SOURCE, "spin").func
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            "a timed world on a CUDA device: the kernel that takes the time of a collective could "
            f"not be compiled by NVRTC, which comes with torch's CUDA builds ({error}). Simulate "
            "on the CPU, or with --machine"
        ) from error
    launch = torch.cuda._utils._get_gpu_runtime_library().cuLaunchKernel

    def launched(nanoseconds: int) -> None:
        value = ctypes.c_int(nanoseconds)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(value))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        # Grid and block of one, no shared memory.
        if code := launch(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None):
            raise RuntimeError(f"a timed world: the driver could not start a kernel, error {code}")

    return launched
