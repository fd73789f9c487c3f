"""A flat buffer, how its parameters are views of it, and how its gradient becomes theirs."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir import schema, transfers
from compiled_fsdp.ir.spec import ParamSpec
from compiled_fsdp.options import is_verifying
from compiled_fsdp.torch_private.autograd import accumulates, backward_number, current_run, next_run
from compiled_fsdp.torch_private.dtensors import make_dtensor
from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.torch_private.groups import register_work
from compiled_fsdp.wire import launch
from compiled_fsdp.wire.checks import checksums, parts_of
from compiled_fsdp.wire.deferred import Deferred
from compiled_fsdp.wire.kernels import Piece, set_owner

from .gathers import PieceGather
from .hooks import say_uncalled
from .in_flight import Arrival
from .layout import FlatLayout
from .mesh import MeshInfo
from .param import ShardedParam
from .resting import Resting

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch.distributed as dist

    from compiled_fsdp.wire.deferred import Value as Recorded

    from .unit import Unit


DEVICE_MESSAGE = 254  # characters that `_assert_async` takes on CUDA
# Where a write was missed, and what to do; see `FlatBuffer.check_unwritten`.
_INSTEAD = "No version counts such writes: write to each parameter itself under torch.no_grad()"
BEFORE_FORWARD = (
    "between optimizer.step() and forward, and had been gathered already. "
    f"{_INSTEAD}, or pass max_ahead_bytes=0 to overlap_optimizer "
    "or compile_step"
)
IN_FORWARD = (
    "after the gather for their forward was started: ahead, by the unit before, by a prefetch "
    f"list, or by unshard(async_op=True). {_INSTEAD}, or run the unit's forward under "
    "torch.no_grad() if it is not trained"
)
WHILE_KEPT = (
    "while the full parameters were kept for another forward (reshard_after_forward=False, "
    f"set_reshard_after_backward(False), or unshard()). {_INSTEAD}, or call reshard() on the "
    "module afterwards"
)


@dataclass(eq=False)
class FlatBuffer:
    """A flat local buffer: the parameters of a unit that share a mesh, a dtype and `requires_grad`.

    is_apart: the parameters are subclasses with an all-gather extension, which cannot be views;
        only their gradients are laid out so, and `data` is empty.
    marked: offsets of the parameters whose gradients a backward delivers, by its number: one that
        fails leaves nothing to others.
    arrival: the reduction that the last backward has left in flight.
    ahead: gathers under way since the optimizer's step, with version and checksum of what they
        gather.
    resting: checksums of what it holds, where the unit is checked.
    is_stepped: backward has stepped parameters since the optimizer's last step; what is gathered
        ahead is for the next forward.
    left_out: a run of a backward graph, and the offsets of parameters to which it does not lead;
        see `wire/unused_outputs.py`.
    retained: gradients of earlier backwards that are not reduced yet, by where they stopped
        ("rows": not reduced at all, "partial": over the shard axis only) and offset.
    read_as: with COMPILED_FSDP_VERIFY, a checksum of what the first graph of a forward has read.
    read_at: the versions that its trained parameters had then; `is_read_back` once a backward has
        come for it, since when the next graph reads anew.
    read_in: the calls that have read so, by the runs that autograd recorded in each, from the first
        to behind the last; none while a call lasts. What others have read is not known.
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
    ahead: dict[Piece, tuple[tuple[int, ...], Tensor, Tensor, Any]] = field(default_factory=dict)
    read_as: Tensor | None = None
    read_at: list[tuple[ShardedParam, int]] | None = None
    is_read_back: bool = False
    read_in: list[tuple[int, int | None]] = field(default_factory=list)

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
        self, flat_grad: Tensor, offsets: Sequence[int], step: str, found_inf: Tensor | None
    ) -> None:
        """See `kernels.Owner`."""
        self._say_if_written()
        self.forget_read()
        self.marked.pop(backward_number(), None)  # no leaf takes these: they end here
        params = _trained(p for p in self.params if p.layout.offset in offsets)
        with torch.inference_mode(mode=False), torch.no_grad():
            if step == schema.BACKWARD:
                self.unit.on_gradients()
                self.accumulate_grad(flat_grad.clone(), params)  # a compiler may use it again
            else:
                self.unit.on_update[step](self, flat_grad, params, found_inf)

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
        numel = sum(param.layout.numel for param in mine)
        with torch.inference_mode(mode=False), torch.no_grad():
            updates = torch.zeros_like(received)
            rows = [
                each[: self.layout.num_shards * numel].view(self.layout.num_shards, numel)
                for each in (received, updates)
            ]
            start = 0
            for param in mine:
                place = replace(param.layout, offset=start)
                pieces = [place.view(row, number) for number, row in enumerate(rows[0])]
                matrix = pieces[0] if len(pieces) == 1 else torch.cat(pieces, place.dim)
                update = self.unit.on_matrices[step].orthogonalize(param, matrix)
                for number, row in enumerate(rows[1]):
                    place.view(row, number).copy_(place.cut(update, number))
                start += place.numel
        return updates

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
        if piece in self.ahead:
            version, checksum, gathered, work = self.ahead.pop(piece)
            if version == self.version():
                if not self.unit.settings.check:  # else all ranks find it, and say so together
                    self.check_unwritten(checksum, BEFORE_FORWARD)
                register_work(gathered, work)
                return gathered
            work.wait()
        started: Tensor = schema.ALL_GATHER(
            shard, list(piece.sizes), piece.group_size, piece.group, self._named(piece), "forward"
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
        fresh = [p for p in params if p.sharded.grad is None]
        with torch.no_grad():
            buffer = None if fresh else self._gradient_buffer(params)
            if buffer is not None:
                buffer.add_(flat_grad)
            else:
                for param in params:
                    self._accumulate_one(param, self.local_view(flat_grad, param))
        for param in params:
            for hook in list((param.sharded._post_accumulate_grad_hooks or {}).values()):
                hook(param.sharded)

    def show_grad(self, flat_grad: Tensor, params: Sequence[ShardedParam]) -> None:
        """Let `.grad` of these, which have none, be views of a reduced flat gradient; no hooks."""
        for param in params:
            self._accumulate_one(param, self.local_view(flat_grad, param))

    def drop_grad(self, params: Sequence[ShardedParam]) -> None:
        """Let these have no gradient."""
        for param in params:
            param.sharded.grad = None

    def _accumulate_one(self, param: ShardedParam, view: Tensor) -> None:
        if param.sharded.grad is None:
            param.sharded.grad = make_dtensor(view, param.sharded)
        else:
            _local(param.sharded.grad).add_(view)

    def _gradient_buffer(self, params: Sequence[ShardedParam]) -> Tensor | None:
        """The one buffer that all gradients are still views of, if they are: then one addition does
        for all.
        """
        if len(params) != len(self.params):
            return None
        grads = [_local(p.sharded.grad) for p in params]
        starts = {g.storage_offset() - p.layout.offset for g, p in zip(grads, params, strict=True)}
        storages = {(g.untyped_storage()._cdata, g.dtype) for g in grads}
        if len(starts) > 1 or len(storages) > 1:
            return None
        (start,) = starts
        if grads[0].untyped_storage().nbytes() < (start + self.layout.numel) * grads[0].itemsize:
            return None
        return grads[0].as_strided((self.layout.numel,), (1,), start)

    # -- gathers ahead of forward

    def version(self) -> tuple[int, ...]:
        """Changes whenever a parameter is written to or replaced, on every rank alike.

        Unnoticed: writes through `.data`, and DTensor's foreach and fused ops. An optimizer's are
        told of otherwise (`resident.num_steps`); of others `check_unwritten` says so.
        """
        both = (tensor for p in self.params for tensor in (p.sharded, _local(p.sharded)))
        return self.data.data_ptr(), self.data._version, *(tensor._version for tensor in both)

    def checksum(self) -> Tensor:
        """Returns a checksum of every bit, to notice also what `version` does not."""
        return checksum(self.data)

    def check_unwritten(self, before: Tensor, why: str) -> None:
        """Fail if the buffer has changed without a new version: other ranks may not know, so
        gathering again could hang.
        """
        text = f"parameters of {self.unit.name} were written to through .data, or by a foreach op, {why}"
        torch._assert_async(self.checksum() == before, _for_device(text, before.device))

    def forget_read(self) -> None:
        """Another forward begins, or parameters change as they are to."""
        self.read_as = self.read_at = None
        self.read_in.clear()

    def begin_read(self) -> None:
        """Remember what a graph that records for a backward is going to read, if it is the first."""
        if not torch.is_grad_enabled():
            return
        if backward_number() == -1 and (self.read_at is None or self.is_read_back):
            self.is_read_back = False
            self.read_at = [(p, p.sharded._version) for p in _trained(self.params)]
            self.read_as = self.checksum() if is_verifying() else None
            self.read_in.clear()
        self.read_in.append((next_run(), None))

    def end_read(self) -> None:
        """The call that reads has ended."""
        under_way = [i for i, (_, behind) in enumerate(self.read_in) if behind is None]
        if under_way:
            self.read_in[under_way[-1]] = self.read_in[under_way[-1]][0], next_run()

    def _is_known(self, run: int) -> bool:
        """Whether a run was recorded in a call that `read_at` is about. A function that is compiled
        around a model, or instead of it, reads as well.
        """
        return run == -1 or any(
            first <= run and (behind is None or run < behind) for first, behind in self.read_in
        )

    def _say_if_written(self) -> None:
        """In a backward: announce that parameters have changed since; who wrote outside of graphs
        was seen by none. No version counts writes through `.data`.
        """
        if not self._is_known(current_run()):
            return
        before, self.read_as, self.is_read_back = self.read_as, None, True
        is_written = any(p.sharded._version != version for p, version in self.read_at or ())
        if is_written or (before is not None and before != self.checksum()):
            warn_once(
                f"compiled_fsdp: parameters of {self.unit.name} were written to between a graph "
                "that read them and its backward, in code that no graph sees. That backward finds "
                "the old value where the full parameter was kept and the new one where it is "
                "gathered again; the plan decides which. Write to them after backward, or freeze "
                "them if they are not trained"
            )

    def gather_ahead(self, piece: Piece) -> None:
        """See `kernels.Owner`."""
        for other in [p for p in self.ahead if p == piece or self.ahead[p][0] != self.version()]:
            self.ahead.pop(other)[-1].wait()  # of values that are no longer these
        with torch.no_grad():
            rests = self.data.detach()[piece.start : piece.start + piece.numel]
            here = comm.from_host(launch.call, rests, self.params[0].spec)
            shard = _payload(here, piece) if piece.codes else here.to(piece.dtype)
            self.ahead[piece] = (
                self.version(),
                self.checksum(),
                *launch.start_gather(
                    shard, piece.sizes, piece.group_size, piece.group, self._named(piece), "forward"
                ),
            )

    def _named(self, piece: Piece) -> str:
        """The unit and the parameters, for errors."""
        names = [
            p.fqn for p in self.params if piece.start <= p.layout.offset < piece.start + piece.numel
        ]
        return f"{self.unit.name} ({', '.join(names)})"

    def drop_ahead(self) -> None:
        """Await gathers that no forward has used, and forget them."""
        ahead, self.ahead = self.ahead, {}
        for *_, work in ahead.values():
            work.wait()

    def refresh(self, *, is_moved: bool = False) -> None:
        """Bring parameters whose local tensor was replaced (`to`, `to_empty`, assign) back into the
        flat buffer.

        is_moved: the module was moved or cast, which does not come to parameters that no module
            holds any more (tied since): those follow the others.
        """
        if self.is_apart:
            return
        flat = self.data
        locals_ = [_local(p.sharded) for p in self.params]
        replaced = [
            a
            for a, p in zip(locals_, self.params, strict=True)
            if a.untyped_storage()._cdata != flat.untyped_storage()._cdata
            or (a.numel() and a.storage_offset() != self.local_view(flat, p).storage_offset())
        ]
        if not replaced:
            return
        holds = self.unit.in_use()
        held = [a for a, p in zip(locals_, self.params, strict=True) if p.is_held_in(holds)]
        if any(a.device.type == "meta" for a in held or locals_):
            return
        self._check_sizes(locals_)
        given = [local for local in locals_ if local.device.type != "meta"]
        first = replaced[0] if is_moved else (given or locals_)[0]
        fresh = self.unit.zeros(self.layout.numel, first.dtype, first.device)
        with torch.no_grad():
            for param, local in zip(self.params, locals_, strict=True):
                view = self.local_view(fresh, param)
                if local.device.type == "meta":  # nobody holds it, so nobody gave it values
                    if view.is_floating_point():
                        view.fill_(math.nan)
                    placed = make_dtensor(view.data, param.sharded)
                    param.sharded = nn.Parameter(placed, requires_grad=param.sharded.requires_grad)
                    param.register(param.sharded)
                    continue
                view.copy_(local)
                placed = make_dtensor(view.data, param.sharded)
                param.sharded.data = (
                    placed  # takes over all but the local tensor; Dynamo looks at the offset
                )
                param.sharded._local_tensor = placed._local_tensor  # type: ignore[attr-defined]
            if flat.device.type == fresh.device.type:
                flat.data = fresh
                return
        self.unit.forget_handles()
        self.data = nn.Parameter(
            fresh, requires_grad=flat.requires_grad
        )  # e.g. from meta: `.data` cannot change the device
        self.__post_init__()

    def _check_sizes(self, locals_: Sequence[Tensor]) -> None:
        wrong = [
            f"{param.fqn}: {tuple(local.shape)} instead of {tuple(view.shape)}"
            for param, local in zip(self.params, locals_, strict=True)
            if (view := self.local_view(self.data, param)).shape != local.shape
        ]
        if wrong:
            raise AssertionError(
                f"{self.unit.name}: local tensors were replaced by some of another size: "
                f"{'; '.join(wrong)}. A rank's shard keeps its size; load a state dict to change "
                "values"
            )


def _payload(shard: Tensor, piece: Piece) -> Tensor:
    """What a rank sends of a piece of which bytes travel: [bytes]."""
    parts = [
        (part if name else part.to(piece.dtype)).view(1, -1)
        for part, name in zip(shard.split(list(piece.numels)), piece.codes, strict=True)
    ]
    payload: Tensor = schema.ENCODE(parts, list(piece.codes))
    return payload.view(-1)


def checksum(tensor: Tensor) -> Tensor:
    """Returns a checksum of every bit."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    return data[:whole].view(torch.int64).sum() + data[whole:].sum()


def _trained(params: Iterable[ShardedParam]) -> list[ShardedParam]:
    """Autograd adds nothing to a parameter that was frozen after forward."""
    return [param for param in params if param.sharded.requires_grad]


def _for_device(text: str, device: torch.device) -> str:
    """The text, cut to what a failing kernel can print."""
    return text if device.type == "cpu" else text[:DEVICE_MESSAGE]


def _local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor
