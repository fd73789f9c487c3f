"""Units whose shards, gradients and optimizer states rest in host memory (CPU offload)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_fsdp.wire import copies

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Offload:
    """Where a unit computes, if it rests on the host.

    device: the type of that device; "": the host itself, so that nothing is copied.
    pins: whether what rests is in pinned memory.
    """

    device: str
    pins: bool

    @classmethod
    def beside(cls, device: torch.device, *, pins: bool) -> Offload:
        """For units that compute on `device`."""
        return cls(device.type if copies.is_apart(device) else "", pins)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat buffer on the host."""
        made = torch.zeros(numel, dtype=dtype, device=CPU)
        return copies.pinned(made) if self.pins else made


def can_pin() -> bool:
    """Whether there is a device that host memory can be pinned for."""
    return torch.accelerator.is_available()
