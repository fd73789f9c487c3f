"""The dtypes of a parameter: what it is computed in, and what its gradients are reduced in.

`MixedPrecisionPolicy` is torch's own. Before torch 2.15 it has no `param_dtype_override_fn`; there
it is a subclass that has one. Without a `reduce_dtype`, gradients are reduced as the installed
torch does it: up to 2.14 in the compute dtype, from 2.15 on in the parameter's own (its
`grad_dtype`, which is the same unless somebody sets it). A policy with `param_dtype_override_fn`
comes from 2.15, and brings this with it on every torch: the parameters of a unit are computed in
two dtypes, and reduced in one.
"""

from __future__ import annotations

from collections.abc import Callable  # who builds a policy from text asks for its annotations
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as StockPolicy

from compiled_fsdp.errors import named
from compiled_fsdp.torch_private.modules import reduces_in_grad_dtype

OVERRIDE = "param_dtype_override_fn"

if TYPE_CHECKING or OVERRIDE in {f.name for f in fields(StockPolicy)}:
    MixedPrecisionPolicy = StockPolicy
else:

    @dataclass(frozen=True)
    class MixedPrecisionPolicy(StockPolicy):
        """Torch's own, with what torch 2.15 adds.

        param_dtype_override_fn: is asked for each parameter; the parameter's own dtype leaves it as
            it is, None or `param_dtype` treats it as the others.
        """

        param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
            default=None, kw_only=True
        )


def override_of(policy: StockPolicy) -> Any:
    """The function that a policy asks for each parameter's dtype, or None."""
    return getattr(policy, OVERRIDE, None)


def ask_override(policy: StockPolicy, parameter: nn.Parameter, name: str) -> torch.dtype | None:
    """Returns what a policy says of this parameter alone; None: what it says of all.

    Raises:
        ValueError: neither None, nor `param_dtype`, nor the parameter's own dtype.
    """
    override = override_of(policy)
    dtype = override(parameter) if override is not None else None
    if dtype is None or (
        isinstance(dtype, torch.dtype) and dtype in (policy.param_dtype, parameter.dtype)
    ):
        return dtype
    raise ValueError(
        f"fully_shard: mp_policy.param_dtype_override_fn returned {named(dtype)} for parameter "
        f"{name}, whose own dtype is {parameter.dtype}; should return None, that dtype, or "
        f"param_dtype={policy.param_dtype}"
    )


def policy_of(policy: StockPolicy, dtype: torch.dtype | None) -> StockPolicy:
    """The policy of one parameter of which `ask_override` said `dtype`."""
    if override_of(policy) is None:
        return policy
    asks: Any = policy
    own: StockPolicy = replace(asks, param_dtype_override_fn=None)
    return own if dtype is None else replace(own, param_dtype=dtype)


def reduce_dtype(policy: StockPolicy, original: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """In which dtype gradients of a parameter travel and are added up, over ranks and over
    backwards.
    """
    follows = reduces_in_grad_dtype() or override_of(policy) is not None
    return policy.reduce_dtype or (original if follows else compute)


def check_grad_dtype(parameter: nn.Parameter, name: str) -> None:
    """Gradients have the dtype of their parameter.

    Raises:
        NotImplementedError: `grad_dtype` of this one asks for another.
    """
    wanted = getattr(parameter, "grad_dtype", parameter.dtype)
    if wanted != parameter.dtype:
        raise NotImplementedError(
            f"fully_shard: parameter {name} of {parameter.dtype} has grad_dtype={wanted}, which is "
            f"not supported: its gradient is a part of a flat one of {parameter.dtype}. Leave "
            "grad_dtype as it is; mp_policy.reduce_dtype says what gradients are reduced in"
        )
