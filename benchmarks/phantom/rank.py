"""`gpu_rank.py` on the device that computes nothing: what it has not is put in its place first.

    python benchmarks/phantom/rank.py VARIANT --size 1b

in the environment that `build.py` names. Times mean nothing there, but for the host's own.
"""

from __future__ import annotations

import ctypes
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
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


if __name__ == "__main__":
    put_in_place()
    benchmarks = Path(__file__).resolve().parent.parent
    sys.path.insert(0, str(benchmarks))
    runpy.run_path(str(benchmarks / "gpu_rank.py"), run_name="__main__")
