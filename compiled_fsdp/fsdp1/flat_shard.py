"""A flat parameter as the one parameter of its unit, and its flat buffer; see [Note: two split
rules] in `views.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compiled_fsdp.units.flat import FlatBuffer
from compiled_fsdp.units.handles import OPEN, Handle
from compiled_fsdp.units.hooks import say_uncalled_flat
from compiled_fsdp.units.param import ShardedParam
from compiled_fsdp.units.tensor_parallel import Full, key_of
from compiled_fsdp.units.views import View, key_of_view, memory_order

from .gradients import (
    accumulate,
    low_precision,
    put_grad,
    reads_at_once,
    set_grad,
    show_unsharded_grads,
)
from .stock import clean_tensor_name, log_post_backward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compiled_fsdp.wire.deferred import Deferred
    from compiled_fsdp.wire.deferred import Value as Recorded

    from .stock import FlatParamHandle


logger = logging.getLogger("torch.distributed.fsdp._runtime_utils")  # stock's own


@dataclass(frozen=True, slots=True)
class Member:
    """An original parameter: what holds it, and where it lies in the flat parameter.

    index: its number among the originals.
    full: the key of the DTensor that the view becomes (`tensor_parallel.Full`), or "".
    """

    module: nn.Module
    name: str
    view: View
    index: int
    full: str


def members_of(flat: Any) -> list[Member]:
    """All that hold original parameters, shared ones once for each holder."""
    starts, start = [], 0
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            starts.append(start)
        start += numel
    found = []
    for i, (name, module, _) in enumerate(flat._param_infos):
        shape, stride = tuple(flat._shapes[i]), tuple(flat._strides[i])
        order = memory_order(shape, stride, is_contiguous=flat._contiguities[i])
        spec = flat._param_extensions[i]  # of a parameter that was a DTensor
        found.append(
            Member(
                module,
                name,
                View(starts[i], shape, order),
                i,
                key_of(Full(spec) if spec is not None else None),
            )
        )
    first = {(member.module, member.name): member for member in found}
    for name, module, _, first_name, first_module, _ in flat._shared_param_infos:
        known = first[first_module, first_name]
        found.append(Member(module, name, known.view, known.index, known.full))
    return found


@dataclass(eq=False)
class FlatShard(ShardedParam):
    """The flat parameter: what is cut, gathered and reduced; the originals are views of it.

    keeper: stock's handle, which owns the flat parameter at rest.
    is_shown: whether the modules hold views of the unsharded flat parameter, from a forward.
    hides_after_forward: whether they hold sharded parameters after forward even if the full one is
        kept (FULL_SHARD's root).
    """

    keeper: FlatParamHandle = None  # type: ignore[assignment]
    members: list[Member] = field(default_factory=list)
    is_shown: bool = False
    hides_after_forward: bool = True
    _shown_handles: dict[object, tuple[Handle, Handle]] = field(default_factory=dict)
    _views_shown: list[Tensor] = field(default_factory=list)

    def is_frozen(self, member: Member) -> bool:
        """Whether the user froze this original, in a flat parameter that requires a gradient."""
        originals = self.keeper.flat_param._params
        return bool(
            originals and self.sharded.requires_grad and not originals[member.index].requires_grad
        )

    @property
    def held_as(self) -> list[nn.Parameter]:
        """See `ShardedParam`; the originals, with `use_orig_params`."""
        flat: Any = self.keeper.flat_param
        return list(flat._params) if self.keeper._use_orig_params else [self.sharded]

    @property
    def names(self) -> list[str]:
        """See `ShardedParam`; the originals, without what the wrappers add."""
        above = self.fqn.removesuffix("_flat_param")
        return [clean_tensor_name(above + name) for name in self.keeper.flat_param._fqns]

    @property
    def num_dims(self) -> int:
        """See `ShardedParam`."""
        return max(len(shape) for shape in self.keeper.flat_param._shapes)

    @property
    def is_shard_whole(self) -> bool:
        """NO_SHARD without a lower precision: as in stock there is one copy of the parameters."""
        is_here = self.spec.group_size == 1 and not self.spec.device
        return is_here and self.spec.dtype == self.sharded.dtype

    def register(self, param: nn.Parameter) -> None:
        """Let the modules hold sharded parameters; views of the unsharded one are shown when a
        forward begins.
        """
        if param is self.sharded:
            self.hide()

    def begin_forward(self) -> None:
        """Show views of the unsharded flat parameter, which autograd records."""
        assert self.unsharded is not None
        full = self.unsharded
        self._views_shown = []
        self.is_shown = True  # first: an interrupt may come between
        with torch.enable_grad():
            for member, view in zip(self.members, self._views(full), strict=True):
                self.keeper._setattr_tensor(
                    member.module, member.name, view.detach() if self.is_frozen(member) else view
                )
                if self.keeper._use_orig_params:
                    shown = member.module.__dict__.pop(member.name)
                    member.module._parameters[member.name] = shown
                    self._views_shown.append(shown)
        self._register_flat(full)

    def _views(self, full: Tensor) -> list[Tensor]:
        views = list(self.keeper._get_unflat_views(full))
        return [views[member.index] for member in self.members]

    def end_forward(self) -> None:
        """Show the sharded parameters again, for strategies that reshard after forward; the flat
        parameter always.
        """
        self._register_flat(self.sharded)
        if self.hides_after_forward:
            self.hide()

    def end_backward(self) -> None:
        """Show the sharded parameters; say that gradients are there, at the debug level that asks
        for it.

        Raises:
            RuntimeError: the gradient is differentiable.
        """
        self.hide()
        grad = self.unsharded.grad if self.unsharded is not None else None
        if grad is not None and grad.requires_grad:
            raise RuntimeError("FSDP does not support gradients of gradients")
        if grad is not None:
            log_post_backward(self.root, self.keeper, logger)

    def hide(self) -> None:
        """Show the sharded parameters; without `use_orig_params` that is the flat parameter."""
        if self.is_shown and self.keeper._use_orig_params:
            self.keeper._use_sharded_views()
        if self.is_shown:
            self._register_flat(self.sharded)
        self.is_shown = False
        self._views_shown = []

    def _register_flat(self, flat: nn.Parameter) -> None:
        """Without `use_orig_params`: what `parameters()` gives of the wrapped module."""
        if not self.keeper._use_orig_params:
            module: Any = self.root.module
            module._parameters["_flat_param"] = flat

    def begin_backward(self) -> None:
        """Show views as in forward: activation checkpointing inside the instance computes with them
        once more.

        Raises:
            AssertionError: the user put something in the place of an original after forward.
        """
        if self.keeper._use_orig_params and not self.is_shown and self.unsharded is not None:
            self.begin_forward()
        for member, shown in zip(self.members, self._views_shown, strict=False):
            if member.module._parameters.get(member.name) is not shown:
                strategy = self.keeper._sharding_strategy
                raise AssertionError(
                    "FSDP does not support changing the parameters between forward and backward "
                    f"for {strategy}"
                )

    def show_handle(self, handle: Handle) -> None:
        """See `ShardedParam`; each holder is given its view."""
        for member in self.members:
            shown = handle if handle is OPEN else self._viewed(handle, member)
            member.module.__dict__.setdefault("_fsdp_handles", {})[member.name] = shown

    def _viewed(self, handle: Handle, member: Member) -> Handle:
        """The same object for the same settings: compiled code guards on it."""
        key = (id(handle), member.view, member.full, self.is_frozen(member))
        if key not in self._shown_handles:
            is_frozen = handle.is_frozen or self.is_frozen(member)
            viewed = replace(
                handle, view=key_of_view(member.view), full=member.full, is_frozen=is_frozen
            )
            self._shown_handles[key] = handle, viewed
        return self._shown_handles[key][1]


@dataclass(eq=False)
class FlatShardBuffer(FlatBuffer):
    """The local shard of a flat parameter as a flat buffer: `data` shares its storage and is the
    graph's input.

    shows_unreduced: whether gradients are views of what `no_sync` accumulates.
    reduced: the flat parameter's gradient meanwhile.
    """

    shows_unreduced: bool = False
    reduced: Tensor | None = None

    @property
    def shard(self) -> FlatShard:
        """Its one parameter."""
        return self.params[0]  # type: ignore[return-value]

    @property
    def keeper(self) -> FlatParamHandle:
        """Stock's handle."""
        return self.shard.keeper

    def local_view(self, flat: Tensor, param: ShardedParam) -> Tensor:
        """The whole of it, padding included, as stock has it."""
        return flat

    def version(self) -> tuple[int, ...]:
        """Changes whenever the flat parameter or an original is written to or replaced."""
        flat: Any = self.keeper.flat_param
        originals = flat._params or ()
        return (
            self.num_replaced,
            self.data._version,
            flat._version,
            *(p._version for p in originals),
        )

    def refresh(self, *, is_moved: bool = False) -> None:
        """Follow the flat parameter to where it is now: moved, cast, or replaced."""
        flat = self.keeper.flat_param
        if flat.shape != self.data.shape or flat.device.type == "meta":
            return
        if flat.data_ptr() == self.data.data_ptr() and flat.dtype == self.data.dtype:
            return
        if flat.device == self.data.device:
            self.replace_memory(flat.data)
            return
        self.unit.forget_handles()
        self.become(nn.Parameter(flat.data, requires_grad=self.data.requires_grad))

    def may_arrive_late(self, params: Sequence[ShardedParam]) -> bool:
        """See `FlatBuffer`."""
        is_read = self.shows_unreduced or low_precision(self.keeper) is not None
        return not (is_read or reads_at_once(self.keeper)) and super().may_arrive_late(params)

    def deliver_later(
        self, program: Deferred, flat_grad: Recorded, params: Sequence[ShardedParam]
    ) -> None:
        """At once: gradients are plain tensors, which somebody may hold by now."""
        program.finish()
        self.accumulate_grad(flat_grad.tensor, params)

    def accumulate_grad(self, flat_grad: Tensor, params: Sequence[ShardedParam]) -> None:
        """Add a reduced gradient of the shard to the flat parameter's, of which the originals' are
        views.
        """
        self.unit.has_gradients = True
        say_uncalled_flat(self.shard.names, self.shard.held_as)
        self.hide_unreduced()
        if params and self.keeper.flat_param.requires_grad:
            accumulate(self.keeper, flat_grad)

    def show_grad(self, flat_grad: Tensor, params: Sequence[ShardedParam]) -> None:
        """See `FlatBuffer`; the originals' are views of the flat parameter's."""
        self.accumulate_grad(flat_grad, params)

    def drop_grad(self, params: Sequence[ShardedParam]) -> None:
        """See `FlatBuffer`."""
        for held in (held for param in params for held in param.held_as):
            held.grad = None
        self.keeper.flat_param.grad = None

    def forget_dropped(self) -> None:
        """What the user dropped of the gradients that are shown (`zero_grad`) is forgotten."""
        if self.shows_unreduced and all(p.grad is None for p in self._shown()):
            self.retained.clear()
            self.reduced = None

    def _shown(self) -> list[Any]:
        """What has the gradients that the user sees."""
        flat: Any = self.keeper.flat_param
        if not self.keeper._use_orig_params:
            return [flat]
        return [p for p in flat._params if p.requires_grad]

    def hide_unreduced(self) -> None:
        """Let gradients be what is reduced again, before anybody checks shapes; what the user
        dropped meanwhile is forgotten.
        """
        if not self.shows_unreduced:
            return
        self.forget_dropped()
        flat: Any = self.keeper.flat_param
        put_grad(flat, self.reduced)
        self.reduced, self.shows_unreduced = None, False
        if self.keeper._use_orig_params:
            self.keeper._use_sharded_grad_views()

    def show_unreduced(self) -> None:
        """Let gradients be what is not reduced yet, if there is any, until a backward reduces it:
        the user may drop it, as by `zero_grad`.
        """
        kept = self.retained.get(("rows", 0))
        if kept is None:
            return
        flat = self.keeper.flat_param
        if not self.shows_unreduced:
            self.reduced, self.shows_unreduced = flat.grad, True
        full = kept.view(-1)[: self.shard.layout.shape[0]]
        set_grad(flat, full)  # with originals too: stock compares whose memory their gradients are
        if self.keeper._use_orig_params:
            show_unsharded_grads(self.keeper, full)

    def set_aside(self) -> Any:
        """See `FlatBuffer`; the flat parameter's gradient, too, if it is not the user's."""
        self.hide_unreduced()
        flat: Any = self.keeper.flat_param
        grad = flat.grad
        if self.keeper._use_orig_params:
            flat.grad = None
        return super().set_aside(), grad

    def put_back(self, kept: Any) -> None:
        """See `FlatBuffer`."""
        self.hide_unreduced()
        retained, grad = kept
        put_grad(self.keeper.flat_param, grad)
        super().put_back(retained)

    def retain(self, grads: dict[int, Tensor], where: str) -> None:
        """See `FlatBuffer`; in `no_sync` gradients are those that are not reduced yet."""
        super().retain(grads, where)
        self.show_unreduced()
