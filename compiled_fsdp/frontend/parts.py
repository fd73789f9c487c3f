"""An optimizer's step, taken for some of its parameters at a time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from compiled_fsdp.torch_private.dtensors import local_tensor, make_dtensor

from .states_at_rest import bring_home

if TYPE_CHECKING:
    from torch import nn

# Each parameter's step depends on that parameter alone, and all state is the parameter's: so parts
# of a step make up the whole.
ONE_BY_ONE: tuple[type[optim.Optimizer], ...] = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)


def check_one_by_one(optimizer: optim.Optimizer, doing: str) -> None:
    """Check that parts of this optimizer's step make up the whole.

    Raises:
        TypeError: it is of another class than those of which that is known.
    """
    if isinstance(optimizer, optim.Muon):
        raise TypeError(
            f"{doing}: {type(optimizer).__module__}.{type(optimizer).__name__} orthogonalizes "
            "whole matrices, whose parts lie on several ranks, so that its step cannot be taken "
            "unit by unit. Give the matrices to a compiled_fsdp.Muon, which computes the same and "
            "has them whole at one rank each: compile_step(model, [muon, adamw]), or "
            "overlap_optimizer(model, muon) with the loop"
        )
    if type(optimizer) not in ONE_BY_ONE:
        name = type(optimizer).__name__
        raise TypeError(
            f"{doing}: {type(optimizer).__module__}.{name} is not an optimizer whose "
            f"step can be taken unit by unit; known are {[kind.__name__ for kind in ONE_BY_ONE]} "
            f"of torch.optim, not subclasses. Leave out {doing}"
        )


def check_ahead_bytes(max_ahead_bytes: object, doing: str) -> None:
    """Check an argument `max_ahead_bytes`.

    Raises:
        ValueError: it is no size.
    """
    is_size = isinstance(max_ahead_bytes, int) and not isinstance(max_ahead_bytes, bool)
    if not is_size or max_ahead_bytes < 0:  # type: ignore[operator]
        raise ValueError(
            f"{doing}: max_ahead_bytes={max_ahead_bytes!r}; should be a number of bytes, at least 0"
        )


def step_part(
    optimizer: optim.Optimizer, base: type[optim.Optimizer], params: set[int], **given: object
) -> None:
    """The optimizer's own step, as `base` has it and without hooks, for the parameters of these
    identities: on a stand-in that shares its state, settings and hyperparameters, and has these
    attributes too.
    """
    groups = []
    for group in optimizer.param_groups:
        part: list[Tensor] = [p for p in group["params"] if id(p) in params]
        if part:
            groups.append({**group, "params": part})
    if not groups:
        return
    bring_home(optimizer, [p for group in groups for p in group["params"]])
    attributes = {**optimizer.__dict__, **given}
    stand_ins = _stand_ins(groups, optimizer.state) if base in ONE_BY_ONE else None
    if stand_ins is None:
        _step(base, {**attributes, "param_groups": groups})
    else:
        _step_locals(base, groups, attributes, stand_ins)


@dataclass(frozen=True, slots=True)
class _StandIn:
    """The local tensor of a DTensor, with its gradient, and what is remembered of it, likewise."""

    local: Tensor
    state: dict[str, Any]

    @classmethod
    def of(cls, param: Tensor, state: dict[str, Any]) -> _StandIn | None:
        """Returns None where a step of the local tensor may be another than the parameter's."""
        grad = param.grad
        if not (isinstance(param, DTensor) and isinstance(grad, DTensor) and param.ndim):
            return None
        local, locals_ = local_tensor(param).detach(), {"grad": local_tensor(grad)}
        values = dict(state)
        for name, value in state.items():
            if isinstance(value, DTensor):
                values[name] = locals_[name] = local_tensor(value)
            elif isinstance(value, Tensor) and value.ndim:
                return None
        if any(each.shape != local.shape for each in locals_.values()):
            return None
        local.grad_dtype = locals_["grad"].dtype
        local.grad = locals_["grad"]
        return cls(local, values)


def _stand_ins(groups: list[dict[str, Any]], state: Any) -> dict[Tensor, _StandIn] | None:
    """Returns one for each of these parameters that has a gradient; None if one of them cannot have
    one, or if autograd is to see the step.
    """
    if any(group.get("differentiable") for group in groups):
        return None
    found = {}
    for param in (p for group in groups for p in group["params"] if p.grad is not None):
        stand_in = _StandIn.of(param, state.get(param) or {})
        if stand_in is None:
            return None
        found[param] = stand_in
    return found


def _step_locals(
    base: type[optim.Optimizer],
    groups: list[dict[str, Any]],
    attributes: dict[str, Any],
    stand_ins: dict[Tensor, _StandIn],
) -> None:
    """Takes the same step on the local tensors: DTensors find out anew for each operation what
    comes of their placements, which takes longer than to step a small parameter.

    What is decided by the type of a parameter is decided as for DTensors: none is stepped by
    foreach operations unless that was asked for.
    """
    parts = []
    for group in groups:
        own = [stand_ins[p].local for p in group["params"] if p in stand_ins]
        foreach = {"foreach": bool(group["foreach"])} if "foreach" in group else {}
        parts.append({**group, "params": own, **foreach})
    found: dict[Tensor, Any] = defaultdict(dict)
    found.update((each.local, dict(each.state)) for each in stand_ins.values() if each.state)
    _step(base, {**attributes, "param_groups": parts, "state": found})
    for param, each in stand_ins.items():
        for name, value in found[each.local].items() if each.local in found else ():
            if value is not each.state.get(name):
                is_like = isinstance(value, Tensor) and value.shape == each.local.shape
                own_value = make_dtensor(value, param) if is_like else value
                attributes["state"][param][name] = own_value
    written = [p for group in groups if not _is_fused(group) for p in group["params"]]
    torch.autograd.graph.increment_version(p for p in written if p in stand_ins)


def _is_fused(group: dict[str, Any]) -> bool:
    """Whether torch steps these by operations on lists, which count no version."""
    return bool(group.get("fused") or group.get("foreach"))


def remembered(
    optimizer: optim.Optimizer, group: dict[str, Any], param: nn.Parameter
) -> tuple[str, ...]:
    """The names of what an optimizer of `ONE_BY_ONE` remembers of a parameter of this group, in
    tensors of its shape and dtype; as a step would have it, for a parameter of two elements, unless
    it is there already.
    """
    like, state = param, optimizer.state.get(param)
    if not state:
        like = torch.nn.Parameter(torch.zeros(2, dtype=param.dtype, device=param.device))
        give_zeros(like, param)
        found: dict[Any, dict[str, Any]] = defaultdict(dict)
        step_alone(optimizer, {**group, "params": [like]}, found)
        state = found[like]
    return tuple(sorted(name for name, each in state.items() if _is_like(each, like)))


def give_zeros(like: nn.Parameter, param: Tensor) -> None:
    """Let a parameter have a gradient of zeros, in the dtype in which that of `param` is kept."""
    like.grad_dtype = param.grad_dtype
    like.grad = torch.zeros_like(like, dtype=param.grad_dtype)


def step_alone(
    optimizer: optim.Optimizer, group: dict[str, Any], state: dict[Any, Any], **given: object
) -> None:
    """The step of an optimizer of `ONE_BY_ONE` for this group, with this state instead of its own,
    on a stand-in that has these attributes too.
    """
    attributes = {**optimizer.__dict__, "param_groups": [group], "state": state, **given}
    _step(type(optimizer), attributes)


def _is_like(value: object, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and value.dtype == param.dtype


def _step(base: type[optim.Optimizer], attributes: dict[str, Any]) -> None:
    stand_in = object.__new__(base)
    stand_in.__dict__ = attributes
    step: Any = base.step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(stand_in)
