"""Which parameters of a unit travel as codes of eight bits (`Plan.gather_quantized`,
`Plan.reduce_quantized`), and what they cannot be combined with.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import asked_by
from compiled_fsdp.ir.quantized import BLOCK

if TYPE_CHECKING:
    import torch

    from .mesh import MeshInfo
    from .param import ShardedParam
    from .unit import Unit

    Codes = torch.dtype | None


def codes_of(unit: Unit, info: MeshInfo, param: ShardedParam) -> tuple[Codes, Codes]:
    """The dtypes of the codes in which a parameter is gathered and its gradient is reduced; None:
    as it is.

    Exact are: what has fewer than two dims (norms, biases), or less than a block on each rank; what
    is no floating point, or of 64 bits; what the user has named; and where nothing travels. A flat
    parameter of FSDP1 travels as a whole: exact if none of its originals has two dims, or if some
    is named.
    """
    settings, dtype = unit.settings, param.sharded.dtype
    is_exact = (
        info.shard_size == 1
        or param.num_dims < 2
        or param.layout.numel < BLOCK
        or not dtype.is_floating_point
        or dtype.itemsize > 4
        or any(fnmatchcase(name, p) for name in param.names for p in settings.exact)
        or bool(refusal(unit))
    )
    return (None, None) if is_exact else (settings.gather_quantized, settings.reduce_quantized)


def refusal(unit: Unit) -> str:
    """Why a unit cannot do what the plan asks of it; "" if it can."""
    settings = unit.settings
    gathers, reduces = settings.gather_quantized, settings.reduce_quantized
    if not (gathers or reduces):
        return ""
    asked = " and ".join(
        f"Plan({name}={codes})"
        for name, codes in (("gather_quantized", gathers), ("reduce_quantized", reduces))
        if codes
    )
    reasons = {
        "all-gather extensions of tensor subclasses (fsdp_pre_all_gather)": unit.has_extensions,
        "CPU offload beside an accelerator": bool(unit.offload and unit.offload.device),
        asked_by(settings.all_gather, "set_custom_all_gather"): bool(
            gathers and settings.all_gather
        ),
        asked_by(settings.reduce_scatter, "set_custom_reduce_scatter"): bool(
            reduces and settings.reduce_scatter
        ),
        "a communication hook (register_comm_hook)": reduces and unit.is_reduced_by_user,
    }
    found = next((what for what, applies in reasons.items() if applies), "")
    if not found:
        return ""
    return (
        f"{asked}: unit {unit.name!r} uses {found}, which is not supported with it yet. Leave out "
        "one of the two"
    )
