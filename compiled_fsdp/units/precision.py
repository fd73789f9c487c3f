"""The dtypes of a parameter: what it is computed in, what its gradients are reduced and kept in.

`MixedPrecisionPolicy` is torch's own. Before torch 2.15 it has no `param_dtype_override_fn`; there
it is a subclass that has one. Without a `reduce_dtype`, gradients are reduced as the installed
torch does it: up to 2.14 in the compute dtype, from 2.15 on in the parameter's `grad_dtype`, its
own dtype unless somebody sets it. A policy with `param_dtype_override_fn`, and a parameter with a
`grad_dtype`, come from 2.15, and bring this with them on every torch: the parameters of a unit are
computed or kept in two dtypes, and reduced in one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable  # who builds a policy from text asks for its annotations
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as StockPolicy

from compiled_fsdp.errors import named
from compiled_fsdp.torch_private.autograd import grad_dtype_set
from compiled_fsdp.torch_private.modules import reduces_in_grad_dtype

OVERRIDE = "param_dtype_override_fn"

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def reduce_dtype(
    policy: StockPolicy,
    original: torch.dtype,
    compute: torch.dtype,
    kept: Sequence[torch.dtype] = (),
) -> torch.dtype:
    """In which dtype gradients of a parameter travel and are added up, over ranks and over
    backwards.

    kept: of units in which a parameter has a `grad_dtype`, the dtypes in which gradients of the
        trained ones are kept. All are reduced in what these are promoted to, as since torch 2.15.
    """
    follows = reduces_in_grad_dtype() or override_of(policy) is not None
    own = functools.reduce(torch.promote_types, kept) if kept else original if follows else compute
    return policy.reduce_dtype or own


def asked_grad_dtype(parameter: nn.Parameter, name: str) -> torch.dtype | None:
    """Returns the `grad_dtype` that somebody has set on a parameter; None where nobody has.

    Raises:
        NotImplementedError: it is None, which lets a gradient have any, or none that sums over
            ranks could be made in.
    """
    is_set, wanted = grad_dtype_set(parameter)
    if not is_set:
        return None
    if wanted is None or not wanted.is_floating_point or wanted.itemsize < 2:
        raise NotImplementedError(
            f"fully_shard: parameter {name} of {parameter.dtype} has grad_dtype={wanted}, which is "
            "not supported: its gradient is a part of a flat one, reduced over the ranks. Set it "
            "to a floating-point dtype of two bytes or more, torch.float32 say, or leave it as it "
            "is"
        )
    return wanted
