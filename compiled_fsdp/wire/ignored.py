"""Parameters that no unit has, as the graph of a whole step finds them: experts that are divided
among ranks (expert parallelism), and whatever else `fully_shard` was told to ignore.

Such a parameter is an input of the graph by itself, a DTensor as its local tensor. Nothing gathers
it, and nothing reduces its gradient: each rank keeps, and updates, what it has of it. Its `update_`
has no offsets, which are those of parameters in a flat buffer, and finds it by the tensor.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from compiled_fsdp.torch_private.dtensors import make_dtensor
from compiled_fsdp.torch_private.groups import common_name, groups_of, name_axes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    OnUpdate = Callable[["Ignored", Tensor, Tensor | None], None]

# By the parameter and by its local tensor; held weakly, by the steps alone.
_known: Any = WeakTensorKeyDictionary()


class Ignored:
    """A parameter that no unit has, in one or more whole steps.

    fqn: its name in the model.
    axes: the groups that cut it, by name and size, in the order of its mesh;
        of a plain tensor none.
    on_update: called with it, its gradient and `found_inf`, by the step's name.
    on_verdict: called before anything is updated, by the step's name.
    """

    def __init__(self, param: nn.Parameter, fqn: str) -> None:
        self.param, self.fqn = param, fqn
        self.on_update: dict[str, OnUpdate] = {}
        self.on_verdict: dict[str, Callable[[], None]] = {}

    @classmethod
    def of(cls, param: nn.Parameter, fqn: str) -> Ignored:
        """The same for the same parameter, while some step holds it."""
        return ignored_of(param) or cls(param, fqn)

    @property
    def local(self) -> Tensor:
        """What this rank has of it."""
        param: Any = self.param
        local: Tensor = param._local_tensor if isinstance(param, DTensor) else param
        return local

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """See the class."""
        param: Any = self.param
        if not isinstance(param, DTensor):
            return ()
        mesh = param.device_mesh
        name_axes(mesh)
        return tuple(
            (common_name(group.group_name), group.size())
            for group, placement in zip(groups_of(mesh), param.placements, strict=True)
            if not placement.is_replicate()
        )

    def attach(self) -> None:
        """Let graphs find it, also if its local tensor was replaced."""
        for tensor in (self.param, self.local):
            if ignored_of(tensor) is not self:
                _known[tensor] = weakref.ref(self)

    def grad_of(self, local: Tensor, *, copies: bool) -> Tensor:
        """A gradient as autograd would leave it, in the strides and the `grad_dtype` of the
        parameter. copies: in memory of its own.
        """
        own, wanted = self.local, self.param.grad_dtype or local.dtype
        if copies or local.stride() != own.stride() or local.dtype != wanted:
            local = torch.empty_like(own, dtype=wanted).copy_(local)
        return make_dtensor(local, self.param) if isinstance(self.param, DTensor) else local

    # -- called by ops

    def update(self, grad: Tensor, step: str, found_inf: Tensor | None) -> None:
        """Its gradient, for the optimizer of the whole step of this name; see `kernels.Owner`."""
        with torch.inference_mode(mode=False), torch.no_grad():
            self.on_update[step](self, grad, found_inf)

    def judge(self, step: str) -> None:
        """See `kernels.Owner`."""
        with torch.inference_mode(mode=False), torch.no_grad():
            self.on_verdict[step]()


def ignored_of(tensor: object) -> Ignored | None:
    """What a parameter, or its local tensor, is to whole steps; None if it is nothing to any."""
    found = _known.get(tensor) if isinstance(tensor, torch.Tensor) else None
    ignored: Ignored | None = None if found is None else found()
    return ignored


def taken_of(tensor: Tensor, op: str) -> Ignored:
    """The parameter that an input of a graph is; `op` names who asks, for errors."""
    ignored = ignored_of(tensor)
    if ignored is None:
        raise RuntimeError(
            f"fsdp::{op}: no parameter of the step has the tensor of shape "
            f"{tuple(tensor.shape)}. The graph must be given the parameter itself, of a DTensor "
            "the local tensor, not a copy"
        )
    return ignored
