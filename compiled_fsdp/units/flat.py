"""A flat buffer, of which its parameters are views: its gradients, when they arrive, and whether
somebody has written to it.

What the ops of graphs do with it: `owner.py`. How its gradient becomes those of the parameters:
`gradients.py`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compiled_fsdp.torch_private.dtensors import local_tensor
from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.wire.checks import checksums
from compiled_fsdp.wire.deferred import Deferred
from compiled_fsdp.wire.kernels import Piece, set_owner

from . import gradients
from .gathered_ahead import GatheredAhead
from .hooks import say_uncalled
from .in_flight import Arrival
from .layout import FlatLayout
from .mesh import MeshInfo
from .owner import BufferOwner
from .param import ShardedParam, trained
from .precision import asked_grad_dtype
from .replaced import bring_back
from .resting import Resting
from .traced_extension import no_memory
from .unwritten import ReadByGraphs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compiled_fsdp.wire.deferred import Value as Recorded

    from .unit import Unit


@dataclass(eq=False)
class FlatBuffer:
    """A flat local buffer: the parameters of a unit that share a mesh, a dtype, `requires_grad` and
    `grad_dtype`.

    is_apart: the parameters are subclasses with an all-gather extension, which cannot be views;
        only their gradients are laid out so, and `data` is empty.
    arrival: the reduction that the last backward has left in flight.
    ahead: gathers under way since the optimizer's step.
    resting: checksums of what it holds, where the unit is checked.
    is_stepped: backward has stepped parameters since the optimizer's last step; what is gathered
        ahead is for the next forward.
    retained: gradients of earlier backwards that are not reduced yet, by where they stopped
        ("rows": not reduced at all, "partial": over the shard axis only) and offset.
    read: what the first graph of a forward has read.
    reduced_last: the names of parameters whose gradients an eager backward has reduced last.
    num_replaced: how often its memory was replaced; addresses come again.
    is_mixed: parameters were replaced by some of several dtypes, and are not back in it.
    owner: what the ops of graphs find by `data`.
    """

    unit: Unit
    mesh_info: MeshInfo
    layout: FlatLayout
    params: list[ShardedParam]
    data: nn.Parameter
    is_apart: bool = False
    retained: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    arrival: Arrival | None = None
    resting: Resting = field(default_factory=Resting)
    is_stepped: bool = False
    ahead: GatheredAhead = field(default_factory=GatheredAhead)
    read: ReadByGraphs = field(default_factory=ReadByGraphs)
    reduced_last: str = ""
    num_replaced: int = 0
    is_mixed: bool = False
    owner: BufferOwner = field(init=False)

    def __post_init__(self) -> None:
        self.owner = BufferOwner(self)
        self._own_data()

    def _own_data(self) -> None:
        """Be what ops and autograd find by the buffer."""
        set_owner(self.data, self.owner)
        self._keep_grad_dtype()
        if self.data.requires_grad:
            self._watch_leaf()

    def _keep_grad_dtype(self) -> None:
        if self.params[0].grad_dtype is not None:
            self.data.grad_dtype = self.params[0].grad_dtype

    def follow_grad_dtype(self) -> None:
        """Take over a `grad_dtype` that a user has set on the sharded parameters.

        Raises:
            NotImplementedError: it is not the same for all of the buffer.
        """
        asked = {p.fqn: asked_grad_dtype(p.sharded, p.fqn) or p.grad_dtype for p in self.params}
        if len({*asked.values()}) > 1:
            told = ", ".join(f"{name}: {dtype}" for name, dtype in asked.items())
            raise NotImplementedError(
                f"{self.unit.name}: grad_dtype of its sharded parameters of {self.data.dtype} was "
                f"set on some, or to different dtypes ({told}), which is not supported: their "
                "gradients are parts of one flat gradient. Set it before fully_shard, which makes "
                "one for each, or to the same on all of these"
            )
        for param in self.params:
            param.grad_dtype = asked[param.fqn]
            param.keep_grad_dtype()
        self._keep_grad_dtype()

    def _watch_leaf(self) -> None:
        """Weakly: autograd's hooks are out of the garbage collector's sight."""
        me = weakref.ref(self)

        @untraced
        def take(leaf: Tensor) -> None:
            flat = me()
            if flat is not None:
                flat._take_leaf_grad(leaf)

        self.data.register_post_accumulate_grad_hook(take)

    @property
    def device(self) -> torch.device:
        """Where its gradients are computed."""
        return self.mesh_info.device if self.unit.offload else self.data.device

    def may_arrive_late(self, params: Sequence[ShardedParam]) -> bool:
        """Whether gradients may still be on their way to the host while backward goes on: nothing
        is added to them, nobody is called with them, and their memory is pinned.
        """
        return all(
            p.spec.device
            and p.spec.pins
            and p.sharded.grad is None
            and not p.sharded._post_accumulate_grad_hooks
            for p in params
        )

    def become(self, data: nn.Parameter) -> None:
        """Have another parameter for a buffer."""
        self.data = data
        self.num_replaced += 1
        self._own_data()

    def replace_memory(self, data: Tensor) -> None:
        """Have other memory on the same device, in the same parameter, which graphs know."""
        self.data.data = data
        self.num_replaced += 1

    def set_requires_grad(self, value: bool) -> None:
        """Begin or cease to be a leaf that gets a gradient."""
        self.data.requires_grad_(value)
        if value and not self.data._post_accumulate_grad_hooks:
            self._watch_leaf()

    def local_view(self, flat: Tensor, param: ShardedParam) -> Tensor:
        """The parameter's shard inside a buffer of this layout."""
        return param.layout.view(flat, self.mesh_info.shard_rank)

    # -- gradients

    def _take_leaf_grad(self, leaf: Tensor) -> None:
        """A compiled backward has delivered: hand its gradient on, and leave none on the leaf."""
        grad, leaf.grad = leaf.grad, None
        self.unit.on_gradients()
        marked = self.owner.take_marked()
        if grad is not None:
            self.accumulate_grad(grad, marked)

    def deliver_later(
        self, program: Deferred, flat_grad: Recorded, params: Sequence[ShardedParam]
    ) -> None:
        """Let the rest of a reduction run once somebody reads the gradients; now, where it must be
        added or hooks wait for it.
        """
        self.settle()
        self.unit.has_gradients = True
        say_uncalled(params)
        if any(p.sharded.grad is not None or p.sharded._post_accumulate_grad_hooks for p in params):
            program.finish()
            self.accumulate_grad(flat_grad.tensor, params)
            return
        self.arrival = Arrival(program, flat_grad)
        rank = self.mesh_info.shard_rank
        for param in params:
            view = partial(param.layout.view, rank=rank)
            gradients.put(param, self.arrival.make_grad(param.sharded, view))  # type: ignore[arg-type]

    def settle(self) -> None:
        """Wait for what is in flight."""
        arrival, self.arrival = self.arrival, None
        if arrival is not None:
            arrival.wait()

    def accumulate_grad(self, flat_grad: Tensor, params: Sequence[ShardedParam]) -> None:
        """Add a reduced flat gradient to `.grad` of `params`; where there is none yet, `.grad`
        becomes a view of it.

        Some may be frozen by now: what an earlier backward has kept of them is theirs all the same.
        """
        self.settle()
        self.unit.has_gradients = True
        say_uncalled(params)
        with torch.no_grad():
            gradients.add(self, flat_grad, params)
        for param in params:
            for hook in list((param.sharded._post_accumulate_grad_hooks or {}).values()):
                hook(param.sharded)

    def show_grad(self, flat_grad: Tensor, params: Sequence[ShardedParam]) -> None:
        """Let `.grad` of these, which have none, be views of a reduced flat gradient; no hooks."""
        gradients.add_each(self, flat_grad, params)

    def drop_grad(self, params: Sequence[ShardedParam]) -> None:
        """Let these have no gradient."""
        for param in params:
            param.sharded.grad = None

    def forget_dropped(self) -> None:
        """Forget what is retained where users see it, and have dropped it: not of FSDP2."""

    def show_unreduced(self) -> None:
        """Let gradients be what is retained: not of FSDP2."""

    def set_aside(self) -> Any:
        """Be as if no backward had been; returns what `put_back` takes, when parameters' `.grad` is
        as it was.
        """
        kept, self.retained = self.retained, {}
        return kept

    def put_back(self, kept: Any) -> None:
        """Forget what backwards have left since `set_aside`."""
        self.owner.marked.clear()
        self.retained = kept

    def retain(self, grads: dict[int, Tensor], where: str) -> None:
        """Keep gradients of parameters, by their offsets, for a later backward; adds to those that
        are kept. `where` is a key of `retained`.
        """
        self.forget_dropped()
        for offset, grad in grads.items():
            kept = self.retained.get((where, offset))
            if kept is None:
                self.retained[where, offset] = grad.clone()
            else:
                kept.add_(grad)

    # -- what it holds at rest, and writes to it

    def version(self) -> tuple[int, ...]:
        """Changes whenever a parameter is written to or replaced, on every rank alike.

        Unnoticed: writes through `.data`, and DTensor's foreach and fused ops. An optimizer's are
        told of otherwise (`resident.num_steps`); of others `check_unwritten` says so.
        """
        both = (tensor for p in self.params for tensor in (p.sharded, p.local))
        return self.num_replaced, self.data._version, *(tensor._version for tensor in both)

    def written(self) -> tuple[int, ...]:
        """As `version`; also what optimizers write, of checked units, changes it."""
        return *self.version(), self.resting.num_forgotten

    def sums(self) -> Tensor:
        """The checksums of all parameters' shards, padding included: [P]."""
        sizes = [p.layout.numel for p in self.params]
        with torch.no_grad():
            return checksums([self.data.detach()], 1, [self.layout.numel], sizes)[0]

    def note_rest(self, when: str) -> None:
        """Sum up all parameters' shards, and compare them with before."""
        places = range(len(self.params))
        self.resting.note(places, self.sums(), self.version(), when, len(places))

    def count_write(self) -> None:
        """Let all versions be others: something writes that torch does not see."""
        held: list[Tensor] = [each for p in self.params for each in (p.sharded, *p.held_as)]
        locals_ = (local_tensor(each) for each in held)
        torch.autograd.graph.increment_version([self.data, *held, *locals_])

    def forget_read(self) -> None:
        """Another forward begins, or parameters change as they are to."""
        self.read.forget()

    def forget_failed(self) -> None:
        """Another forward begins: a gradient that is still on the leaf is that of a backward which
        an interrupt has ended before it was taken. It is nobody's.
        """
        self.data.grad = None

    def begin_read(self) -> None:
        """A call begins in which graphs read it."""
        self.read.begin(self.data, trained(self.params))

    def end_read(self) -> None:
        """The call has ended."""
        self.read.end()

    def say_if_written(self) -> None:
        """Announce writes that were made between a graph's forward and its backward."""
        self.read.say_if_written(self.unit.name, self.data)

    # -- gathers ahead of forward

    def gather_ahead(self, piece: Piece) -> None:
        """Start to gather a piece of what the buffer holds now, for the next forward."""
        self.ahead.start(self, piece)

    def drop_ahead(self) -> None:
        """Await gathers that no forward has used, and forget them."""
        self.ahead.drop()

    # -- replaced and moved

    def refresh(self, *, is_moved: bool = False) -> None:
        """Bring parameters whose local tensor was replaced (`to`, `to_empty`, assign) back into the
        flat buffer.

        is_moved: the module was moved or cast, which does not come to parameters that no module
            holds any more (tied since): those follow the others.
        """
        if self.is_apart:
            self._follow_device()
            return
        bring_back(self, is_moved=is_moved)

    def _follow_device(self) -> None:
        """Of parameters that are no views: be where they are."""
        rests = self.params[0].local.device
        if self.data.device.type == rests.type:
            return
        self.unit.forget_handles()
        data = no_memory(self.layout.numel, self.data.dtype, rests)
        self.become(nn.Parameter(data, requires_grad=self.data.requires_grad))
