"""The settings that users change on a unit after it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Settings:
    """The values that the setters of `FSDPModule` change; field by field as torch's setters say.

    is_accumulating: `set_requires_gradient_sync(False)` or `set_requires_all_reduce(False)` was
        used, so that backwards must look for what earlier ones have left.
    max_reductions_in_flight: 0 if the user did not say: one in eager mode, what the plan says in a
        graph.
    forward_prefetch: start the gather of the next unit when this one's forward begins.
    backward_prefetch: start that of the unit before when this one's backward begins ("pre"), when
        it ends ("post"), or not ("").
    forward_ahead, backward_ahead: how many units ahead a gather may start in a graph; negative: as
        the plan says.
    is_scheduled: a pipeline schedule says when the backwards of a step are over: graphs keep
        gradients until then.
    fake_all_gather, fake_reduce: communicate nothing, to see what the rest of a step takes; results
        mean nothing then.
    gather_quantized, reduce_quantized, exact: what travels as codes, see `Plan`.
    check: what is compared between ranks, see `Plan`.
    """

    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    is_accumulating: bool = False
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    keep_unsharded_storage: bool = False
    divide_factor: float | None = None
    force_sum: bool = False
    all_gather: str = ""
    reduce_scatter: str = ""
    all_reduce_hook: str = ""
    reduce_unused: bool = False
    max_reductions_in_flight: int = 0
    overlap: str = ""
    forward_prefetch: bool = True
    backward_prefetch: str = "pre"
    forward_ahead: float = -1.0
    backward_ahead: float = -1.0
    is_scheduled: bool = False
    fake_all_gather: bool = False
    fake_reduce: bool = False
    gather_quantized: torch.dtype | None = None
    reduce_quantized: torch.dtype | None = None
    exact: tuple[str, ...] = ()
    check: str | None = None

    @property
    def stays_full(self) -> bool:
        """Whether full parameters are to outlive a backward; those of a schedule do, from the first
        forward of a step on.
        """
        return self.is_scheduled or not self.reshard_after_backward

    @property
    def sync(self) -> str:
        """How far a gradient goes; see `spec.Reduction`."""
        if not self.requires_gradient_sync:
            return "retain"
        return "reduce" if self.requires_all_reduce else "scatter"
