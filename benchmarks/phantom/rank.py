"""`gpu_rank.py` on the device that computes nothing: what it has not is put in its place first.

    python benchmarks/phantom/rank.py VARIANT --size 1b < /dev/null

in the environment that `build.py` names. Times mean nothing there, but for the host's own. In the
end it says, too, which kernels of Inductor's the last step has launched, and how many bytes the
tensors have that these were given.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

sys.path.insert(0, str(Path(__file__).parents[1]))
import gpu_rank
from deepseek import DeepSeekConfig

from compiled_fsdp.wire import captured

STEPS = 20  # whose median is taken
OPS = torch.library.Library("aten", "IMPL")


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    """What cuDNN's attention returns: as much memory, of its layout."""
    batch, heads, length, _width = query.shape
    sums = query.new_empty(batch, heads, length, 1, dtype=torch.float32)
    seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
    order = sorted(range(4), key=query.stride, reverse=True)
    found = torch.empty_permuted(
        (*query.shape[:3], value.shape[3]), order, dtype=query.dtype, device=query.device
    )
    return found, sums, None, None, length, key.shape[2], seed, offset, None


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


def route(size: gpu_rank.Size) -> None:
    """Let the host read, where it asks for the tokens that ranks send each other, that each gets as
    many: on this device all such numbers are zero.
    """
    config = size.config
    if not isinstance(config, DeepSeekConfig):
        return
    tokens = size.batch * size.length * config.top // size.expert_ranks

    def read(number: Tensor) -> Any:
        is_count = number.dtype == torch.int64 and number.is_cuda
        return tokens if is_count else number.cpu().tolist()

    def read_copy(number: Tensor) -> Any:
        """Of all counts at once: one for each of these ranks."""
        found: Any = number.tolist()
        is_count = number.dtype == torch.int64 and found == 0
        num_bytes = number.untyped_storage().nbytes()
        return tokens if is_count and num_bytes == 8 * size.expert_ranks else found

    OPS.impl("_local_scalar_dense", read, "CUDA")
    OPS.impl("_local_scalar_dense", read_copy, "CPU")


class Launches:
    """The kernels of Inductor's that a step has launched: how often each, and the bytes of the
    tensors that it was given, of those that it reads and writes twice.
    """

    def __init__(self) -> None:
        self.times: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self._launch = launch = CachingAutotuner.run

        def counted(kernel: CachingAutotuner, *args: Any, **kwargs: Any) -> Any:
            name = kernel.fn.__name__
            self.times[name] += 1
            for argument, given in zip(kernel.fn.arg_names, args, strict=False):
                if isinstance(given, Tensor):
                    self.num_bytes[name] += given.nbytes * (2 if "in_out" in argument else 1)
            return launch(kernel, *args, **kwargs)  # type: ignore[no-untyped-call]

        CachingAutotuner.run = counted  # type: ignore[method-assign, assignment]

    def stop(self) -> None:
        """Count no more."""
        CachingAutotuner.run = self._launch  # type: ignore[method-assign]

    def clear(self) -> None:
        """Another step begins."""
        self.times.clear()
        self.num_bytes.clear()

    def __str__(self) -> str:
        total = f"{sum(self.num_bytes.values()) / 1e9:.1f} GB, {self.times.total()} launches"
        most = self.num_bytes.most_common()
        lines = [f"{n / 1e9:7.2f} GB {self.times[of]:4d} x {of}" for of, n in most]
        return "\n".join([total, *lines])


class CountedRank(gpu_rank.Rank):
    """One that says which kernels its last step has launched, too; none where steps are replayed
    from a CUDA graph.
    """

    def build(self) -> gpu_rank.Step:
        """The step, counted."""
        route(self.size)
        self.launches = Launches()
        self._step = super().build()

        def counted() -> Tensor:
            self.launches.clear()
            return self._step()

        return counted

    def _peak(self) -> dict[str, Any]:
        launches = self.launches
        found = {
            **super()._peak(),
            "traffic": sum(launches.num_bytes.values()),
            "launches": launches.times.total(),
            "kernels": str(launches),
        }
        launches.stop()
        return {**found, "host": self._host()}

    def _host(self) -> float:
        """Seconds of the processor for a step: all that it takes here."""
        times = []
        for _ in range(STEPS):
            begin = time.process_time()
            self._step()
            times.append(time.process_time() - begin)
        return statistics.median(times)


if __name__ == "__main__":
    put_in_place()
    gpu_rank.main(CountedRank)
