"""Private torch: what a `GradScaler` knows of an optimizer between two updates.
Tried on torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.amp.grad_scaler import OptState

if TYPE_CHECKING:
    import torch
    from torch.amp import GradScaler


def is_ready(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's gradients were neither unscaled nor used since the last update."""
    ready: bool = scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    return ready


def note_step(
    scaler: GradScaler, optimizer: torch.optim.Optimizer, found_inf: torch.Tensor
) -> None:
    """Leave what `scaler.step(optimizer)` leaves for `scaler.update()`. found_inf: 0 or 1, fp32."""
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"] = OptState.STEPPED
    state["found_inf_per_device"] = {found_inf.device: found_inf}
