"""A flat buffer, of which its parameters are views, and what graphs and backwards do with it.

How its gradient becomes those of the parameters: `gradients.py`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from compiled_fsdp.ir import schema, transfers
from compiled_fsdp.ir.spec import ParamSpec
from compiled_fsdp.torch_private.autograd import accumulates, backward_number, current_run
from compiled_fsdp.torch_private.dtensors import local_tensor
from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.wire.captured import each_run
from compiled_fsdp.wire.checks import checksums, parts_of
from compiled_fsdp.wire.deferred import Deferred
from compiled_fsdp.wire.kernels import Piece, set_owner

from . import gradients
from .gathered_ahead import GatheredAhead, name_of
from .gathers import PieceGather
from .hooks import say_uncalled
from .in_flight import Arrival
from .layout import FlatLayout
from .matrices import updates_of
from .mesh import MeshInfo
from .param import ShardedParam
from .replaced import bring_back
from .resting import Resting
from .traced_extension import no_memory
from .unwritten import ReadByGraphs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch.distributed as dist

    from compiled_fsdp.wire.deferred import Value as Recorded

    from .unit import Unit


@dataclass(eq=False)
class FlatBuffer:
    """A flat local buffer: the parameters of a unit that share a mesh, a dtype and `requires_grad`.

    is_apart: the parameters are subclasses with an all-gather extension, which cannot be views;
        only their gradients are laid out so, and `data` is empty.
    marked: offsets of the parameters whose gradients a backward delivers, by its number: one that
        fails leaves nothing to others.
    arrival: the reduction that the last backward has left in flight.
    ahead: gathers under way since the optimizer's step.
    resting: checksums of what it holds, where the unit is checked.
    is_stepped: backward has stepped parameters since the optimizer's last step; what is gathered
        ahead is for the next forward.
    left_out: a run of a backward graph, and the offsets of parameters to which it does not lead;
        see `wire/unused_outputs.py`.
    retained: gradients of earlier backwards that are not reduced yet, by where they stopped
        ("rows": not reduced at all, "partial": over the shard axis only) and offset.
    read: what the first graph of a forward has read.
    reduced_last: the names of parameters whose gradients an eager backward has reduced last.
    """

    unit: Unit
    mesh_info: MeshInfo
    layout: FlatLayout
    params: list[ShardedParam]
    data: nn.Parameter
    is_apart: bool = False
    marked: dict[int, set[int]] = field(default_factory=dict)
    retained: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    arrival: Arrival | None = None
    resting: Resting = field(default_factory=Resting)
    is_stepped: bool = False
    left_out: tuple[tuple[int, int], set[int]] = ((-1, -1), set())
    ahead: GatheredAhead = field(default_factory=GatheredAhead)
    read: ReadByGraphs = field(default_factory=ReadByGraphs)
    reduced_last: str = ""

    def __post_init__(self) -> None:
        set_owner(self.data, self)
        if self.data.requires_grad:
            self._watch_leaf()

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
        self.__post_init__()

    def set_requires_grad(self, value: bool) -> None:
        """Begin or cease to be a leaf that gets a gradient."""
        self.data.requires_grad_(value)
        if value and not self.data._post_accumulate_grad_hooks:
            self._watch_leaf()

    def local_view(self, flat: Tensor, param: ShardedParam) -> Tensor:
        """The parameter's shard inside a buffer of this layout."""
        return param.layout.view(flat, self.mesh_info.shard_rank)

    # -- called by ops

    def is_reached(self) -> bool:
        """See `kernels.Owner`."""
        return accumulates(self.data)

    def groups(self) -> list[dist.ProcessGroup]:
        """See `kernels.Owner`."""
        info = self.mesh_info
        return [
            info.shard_group,
            *([info.replicate_group] if info.replicate_group is not None else []),
        ]

    def leave_out(self, run: tuple[int, int], offsets: set[int]) -> None:
        """See `kernels.Owner`."""
        self.left_out = run, offsets

    def _led_to(self, offsets: Sequence[int]) -> list[int]:
        """Those that the running backward graph leads to: some output that it takes a gradient for
        was used.
        """
        run, out = self.left_out
        if not out or run != (backward_number(), current_run()):
            return list(offsets)
        return [offset for offset in offsets if offset not in out]

    def mark(self, offsets: Sequence[int]) -> None:
        """See `kernels.Owner`."""
        self._say_if_written()
        self.marked.setdefault(backward_number(), set()).update(self._led_to(offsets))
        if (
            self.unit.settings.is_accumulating
        ):  # others may have left gradients that only the end of this backward sees
            self.unit.on_retained()

    def retain(self, grads: Tensor, offsets: Sequence[int], where: str) -> None:
        """See `kernels.Owner`."""
        self.unit.on_retained()
        self.unit.on_kept(self)
        led_to = self._led_to(offsets)
        for offset, piece in self._pieces(grads, offsets):
            if offset not in led_to:
                continue
            kept = self.retained.get((where, offset))
            if kept is None:
                self.retained[where, offset] = piece.clone()
            else:
                kept.add_(piece)

    def add_retained(self, grads: Tensor, offsets: Sequence[int], where: str) -> None:
        """See `kernels.Owner`."""
        led_to = self._led_to(offsets)  # what was kept of others waits for the end of this backward
        for offset, piece in self._pieces(grads, offsets):
            kept = self.retained.pop((where, offset), None) if offset in led_to else None
            if kept is not None:
                piece.add_(kept)

    def reduce_later(
        self, started: Tensor, offsets: Sequence[int], codes: Sequence[str], spec: ParamSpec
    ) -> None:
        """See `kernels.Owner`."""
        self._say_if_written()
        self.unit.on_gradients()
        if self.unit.settings.is_accumulating:
            self.unit.on_retained()
        params = [p for p in self.params if p.layout.offset in offsets]
        specs = [p.spec for p in params]
        group = spec.replicate_group if spec.replicate_size > 1 else spec.reduce_group
        run = Deferred(f"reduction of {self.unit.name} ({', '.join(p.fqn for p in params)})", group)
        numels = [s.shard_numel for s in specs]
        reduced = transfers.finish_bucket(run, started, spec, self.data.dtype, numels, codes)
        led_to = self._led_to(offsets)
        placed = transfers.place_bucket(run, reduced, specs, self.layout.numel)
        self.deliver_later(run, placed, _trained(p for p in params if p.layout.offset in led_to))

    def step(self, flat_grad: Tensor, offsets: Sequence[int]) -> None:
        """See `kernels.Owner`."""
        self._say_if_written()
        self.forget_read()
        self.unit.on_gradients()
        if self.unit.settings.is_accumulating:
            self.unit.on_retained()
        led_to = self._led_to(offsets)
        params = _trained(p for p in self.params if p.layout.offset in led_to)
        with torch.inference_mode(mode=False), torch.no_grad():
            if not self.unit.on_reduced(self, flat_grad, params):
                self.accumulate_grad(flat_grad, params)

    def update(
        self,
        flat_grad: Tensor,
        offsets: Sequence[int],
        step: str,
        found_inf: Tensor | None,
        state: Tensor | None,
    ) -> None:
        """See `kernels.Owner`."""
        each_run(self._note_update)
        params = _trained(p for p in self.params if p.layout.offset in offsets)
        with torch.inference_mode(mode=False), torch.no_grad():
            if step == schema.BACKWARD:
                self.unit.on_gradients()
                self.accumulate_grad(flat_grad.clone(), params)  # a compiler may use it again
            elif state is None:
                self.unit.on_update[step](self, flat_grad, params, found_inf)
            else:
                with self.unit.on_states[step].lent(self, offsets, state):
                    self.unit.on_update[step](self, flat_grad, params, found_inf)

    def _note_update(self) -> None:
        self._say_if_written()
        self.forget_read()
        self.marked.pop(backward_number(), None)  # no leaf takes these: they end here

    def fetch_state(
        self, offsets: Sequence[int], step: str, numel: int
    ) -> tuple[Tensor, dist.Work | None]:
        """See `kernels.Owner`."""
        with torch.inference_mode(mode=False), torch.no_grad():
            return self.unit.on_states[step].fetch(self, offsets, numel)

    def store_state(self, state: Tensor, offsets: Sequence[int], step: str) -> dist.Work:
        """See `kernels.Owner`."""
        with torch.inference_mode(mode=False), torch.no_grad():
            return self.unit.on_states[step].store(self, offsets, state)

    def momentum(
        self,
        flat_grad: Tensor,
        offsets: Sequence[int],
        step: str,
        numel: int,
        dtype: torch.dtype,
        found_inf: Tensor | None,
    ) -> Tensor:
        """See `kernels.Owner`."""
        self.marked.pop(backward_number(), None)  # as for `update`
        with torch.inference_mode(mode=False), torch.no_grad():
            pieces = flat_grad.new_zeros(numel, dtype=dtype)
            on = self.unit.on_matrices[step]
            on.momentum(self, flat_grad, self._at(offsets), pieces, found_inf)
        return pieces

    def orthogonalize(
        self, received: Tensor, offsets: Sequence[int], owners: Sequence[int], step: str
    ) -> Tensor:
        """See `kernels.Owner`."""
        rank = self.mesh_info.shard_rank
        mine = [param for param, at in zip(self._at(offsets), owners, strict=True) if at == rank]
        with torch.inference_mode(mode=False), torch.no_grad():
            on = self.unit.on_matrices[step]
            return updates_of(mine, received, self.layout.num_shards, on)

    def update_matrices(self, pieces: Tensor, offsets: Sequence[int], step: str) -> None:
        """See `kernels.Owner`."""
        with torch.inference_mode(mode=False), torch.no_grad():
            self.unit.on_matrices[step].update_matrices(self, pieces, self._at(offsets))

    def _at(self, offsets: Sequence[int]) -> list[ShardedParam]:
        """The parameters that begin at these, in this order."""
        params = {param.layout.offset: param for param in self.params}
        return [params[offset] for offset in offsets]

    def norms(self, flat_grad: Tensor, offsets: Sequence[int]) -> Tensor:
        """See `kernels.Owner`."""
        views = [self.local_view(flat_grad, param) for param in self._at(offsets)]
        return torch.stack(list(torch._foreach_norm(views, 2)))

    def judge(self, step: str) -> None:
        """See `kernels.Owner`."""
        with torch.inference_mode(mode=False), torch.no_grad():
            self.unit.on_verdict[step]()

    def rested(self, sums: Tensor, names: Sequence[str], phase: str) -> tuple[int, ...]:
        """See `kernels.Owner`."""
        known = [p.fqn for p in self.params]
        places = [known.index(parts_of(name)[1]) for name in names]
        self.resting.note(places, sums, self.version(), f"its all-gather in {phase}", len(known))
        return self.written()

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

    def gather(self, shard: Tensor, piece: Piece) -> Tensor:
        """See `kernels.Owner`."""
        self.unit.on_gather(PieceGather(self, piece))
        ahead = self.ahead.take(self, piece)
        if ahead is not None:
            return ahead
        started: Tensor = schema.ALL_GATHER(
            shard, list(piece.sizes), piece.group_size, piece.group, name_of(self, piece), "forward"
        )
        return started

    def _pieces(self, grads: Tensor, offsets: Sequence[int]) -> Iterable[tuple[int, Tensor]]:
        """The columns of each parameter in a bucket."""
        sizes = {p.layout.offset: p.layout.numel for p in self.params}
        pieces = grads.split([sizes[o] for o in offsets], dim=-1)
        return zip(offsets, pieces, strict=True)

    # -- gradients

    def _take_leaf_grad(self, leaf: Tensor) -> None:
        """A compiled backward has delivered: hand its gradient on, and leave none on the leaf."""
        grad, leaf.grad = leaf.grad, None
        self.unit.on_gradients()
        marked = self.marked.pop(backward_number(), set())
        if grad is not None:
            self.accumulate_grad(
                grad, _trained(p for p in self.params if p.layout.offset in marked)
            )

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
            param.sharded.grad = self.arrival.make_grad(param.sharded, view)  # type: ignore[arg-type]

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

    # -- gathers ahead of forward

    def version(self) -> tuple[int, ...]:
        """Changes whenever a parameter is written to or replaced, on every rank alike.

        Unnoticed: writes through `.data`, and DTensor's foreach and fused ops. An optimizer's are
        told of otherwise (`resident.num_steps`); of others `check_unwritten` says so.
        """
        both = (tensor for p in self.params for tensor in (p.sharded, p.local))
        return self.data.data_ptr(), self.data._version, *(tensor._version for tensor in both)

    def count_write(self) -> None:
        """Let all versions be others: something writes that torch does not see."""
        held: list[Tensor] = [each for p in self.params for each in (p.sharded, *p.held_as)]
        locals_ = (local_tensor(each) for each in held)
        torch.autograd.graph.increment_version([self.data, *held, *locals_])

    def forget_read(self) -> None:
        """Another forward begins, or parameters change as they are to."""
        self.read.forget()

    def begin_read(self) -> None:
        """A call begins in which graphs read it."""
        self.read.begin(self.data, _trained(self.params))

    def end_read(self) -> None:
        """The call has ended."""
        self.read.end()

    def _say_if_written(self) -> None:
        self.read.say_if_written(self.unit.name, self.data)

    def gather_ahead(self, piece: Piece) -> None:
        """See `kernels.Owner`."""
        self.ahead.start(self, piece)

    def drop_ahead(self) -> None:
        """Await gathers that no forward has used, and forget them."""
        self.ahead.drop()

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


def _trained(params: Iterable[ShardedParam]) -> list[ShardedParam]:
    """Autograd adds nothing to a parameter that was frozen after forward."""
    return [param for param in params if param.sharded.requires_grad]
