"""Formulas for the floating-point operations of heavy kernels: torch's, those that anybody has
registered with `torch.utils.flop_counter`, and what torch counts nothing for.

Up to torch 2.15 that is `aten._grouped_mm`, by which mixtures of experts compute all of a rank's
experts at once: most of what they compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


def grouped_mm_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """Of a product for each group: of groups of rows [N, K] with [G, K, M], of [G, N, K] with
    groups of columns [K, M], of groups of what is summed over [N, K] and [K, M], or of [G, N, K]
    and [G, K, M]. Groups share rows, columns or the sum; none computes with those of another.
    """
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * int(a.shape[-2]) * int(a.shape[-1]) * int(b.shape[-1])


OURS: dict[Any, Callable[..., Any]] = {aten._grouped_mm: grouped_mm_flops}


def formulas() -> dict[Any, Callable[..., Any]]:
    """All of them, by operator; torch's go first."""
    return {**OURS, **flop_registry}


def formula_of(packet: Any) -> Callable[..., Any] | None:
    """The formula for an operator, which takes its arguments; None if there is none."""
    formula: Callable[..., Any] | None = flop_registry.get(packet) or OURS.get(packet)
    return formula
