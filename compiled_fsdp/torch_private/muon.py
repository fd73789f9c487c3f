"""Private torch: what torch.optim.Muon makes of a learning rate.
Tried on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim._muon import _adjust_lr

if TYPE_CHECKING:
    import torch


def adjusted_lr(lr: float, adjust_lr_fn: str | None, shape: torch.Size) -> float:
    """The learning rate for a matrix of this shape."""
    adjusted: float = _adjust_lr(lr, adjust_lr_fn, shape)
    return adjusted
