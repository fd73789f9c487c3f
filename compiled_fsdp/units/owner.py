"""A flat buffer as the ops of graphs reach it: gradients that they deliver, gathers that they come
to, and what the graph of a whole step does with an optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compiled_fsdp.ir import schema, transfers
from compiled_fsdp.torch_private.autograd import accumulates, backward_number, current_run
from compiled_fsdp.wire.captured import each_run
from compiled_fsdp.wire.checks import parts_of
from compiled_fsdp.wire.deferred import Deferred

from .gathered_ahead import name_of
from .gathers import PieceGather
from .matrices import updates_of
from .param import trained

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch.distributed as dist

    from compiled_fsdp.ir.spec import ParamSpec
    from compiled_fsdp.wire.kernels import Piece

    from .flat import FlatBuffer
    from .param import ShardedParam


@dataclass(eq=False)
class BufferOwner:
    """What ops find by a flat buffer; the methods are those of `kernels.Owner`, which says what
    each is given.

    marked: offsets of the parameters whose gradients a backward delivers, by its number: one that
        fails leaves nothing to others.
    left_out: a run of a backward graph, and the offsets of parameters to which it does not lead;
        see `wire/unused_outputs.py`.
    """

    flat: FlatBuffer
    marked: dict[int, set[int]] = field(default_factory=dict)
    left_out: tuple[tuple[int, int], set[int]] = ((-1, -1), set())

    @property
    def data(self) -> Tensor:
        """See `kernels.Owner`."""
        return self.flat.data

    def is_reached(self) -> bool:
        """See `kernels.Owner`."""
        return accumulates(self.flat.data)

    def groups(self) -> list[dist.ProcessGroup]:
        """See `kernels.Owner`."""
        info = self.flat.mesh_info
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
        self.flat.say_if_written()
        self.marked.setdefault(backward_number(), set()).update(self._led_to(offsets))
        self._look_after_retained()

    def retain(self, grads: Tensor, offsets: Sequence[int], where: str) -> None:
        """See `kernels.Owner`."""
        self.flat.unit.on_retained()
        self.flat.unit.on_kept(self.flat)
        led_to = self._led_to(offsets)
        self.flat.retain(
            {o: piece for o, piece in self._pieces(grads, offsets) if o in led_to}, where
        )

    def _look_after_retained(self) -> None:
        """Other backwards may have left gradients that only the end of this one sees."""
        if self.flat.unit.settings.is_accumulating:
            self.flat.unit.on_retained()

    def add_retained(self, grads: Tensor, offsets: Sequence[int], where: str) -> None:
        """See `kernels.Owner`."""
        self.flat.forget_dropped()
        led_to = self._led_to(offsets)  # what was kept of others waits for the end of this backward
        for offset, piece in self._pieces(grads, offsets):
            kept = self.flat.retained.pop((where, offset), None) if offset in led_to else None
            if kept is not None:
                piece.add_(kept)

    def reduce_later(
        self, started: Tensor, offsets: Sequence[int], codes: Sequence[str], spec: ParamSpec
    ) -> None:
        """See `kernels.Owner`."""
        flat = self.flat
        flat.say_if_written()
        flat.unit.on_gradients()
        self._look_after_retained()
        params = [p for p in flat.params if p.layout.offset in offsets]
        specs = [p.spec for p in params]
        group = spec.replicate_group if spec.replicate_size > 1 else spec.reduce_group
        run = Deferred(f"reduction of {flat.unit.name} ({', '.join(p.fqn for p in params)})", group)
        numels = [s.shard_numel for s in specs]
        reduced = transfers.finish_bucket(run, started, spec, flat.data.dtype, numels, codes)
        led_to = self._led_to(offsets)
        placed = transfers.place_bucket(run, reduced, specs, flat.layout.numel)
        flat.deliver_later(run, placed, trained(p for p in params if p.layout.offset in led_to))

    def step(self, flat_grad: Tensor, offsets: Sequence[int]) -> None:
        """See `kernels.Owner`."""
        self.flat.say_if_written()
        self.flat.forget_read()
        self.flat.unit.on_gradients()
        self._look_after_retained()
        led_to = self._led_to(offsets)
        params = trained(p for p in self.flat.params if p.layout.offset in led_to)
        with torch.inference_mode(mode=False), torch.no_grad():
            if not self.flat.unit.on_reduced(self.flat, flat_grad, params):
                self.flat.accumulate_grad(flat_grad, params)

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
        flat, unit = self.flat, self.flat.unit
        params = trained(p for p in flat.params if p.layout.offset in offsets)
        with torch.inference_mode(mode=False), torch.no_grad():
            if step == schema.BACKWARD:
                unit.on_gradients()
                flat.accumulate_grad(flat_grad.clone(), params)  # a compiler may use it again
            elif state is None:
                unit.on_update[step](flat, flat_grad, params, found_inf)
            else:
                with unit.on_states[step].lent(flat, offsets, state):
                    unit.on_update[step](flat, flat_grad, params, found_inf)

    def _note_update(self) -> None:
        self.flat.say_if_written()
        self.flat.forget_read()
        self.marked.pop(backward_number(), None)  # no leaf takes these: they end here

    def fetch_state(
        self, offsets: Sequence[int], step: str, numel: int
    ) -> tuple[Tensor, dist.Work | None]:
        """See `kernels.Owner`."""
        with torch.inference_mode(mode=False), torch.no_grad():
            return self.flat.unit.on_states[step].fetch(self.flat, offsets, numel)

    def store_state(self, state: Tensor, offsets: Sequence[int], step: str) -> dist.Work:
        """See `kernels.Owner`."""
        with torch.inference_mode(mode=False), torch.no_grad():
            return self.flat.unit.on_states[step].store(self.flat, offsets, state)

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
            on = self.flat.unit.on_matrices[step]
            on.momentum(self.flat, flat_grad, self._at(offsets), pieces, found_inf)
        return pieces

    def orthogonalize(
        self, received: Tensor, offsets: Sequence[int], owners: Sequence[int], step: str
    ) -> Tensor:
        """See `kernels.Owner`."""
        rank = self.flat.mesh_info.shard_rank
        mine = [param for param, at in zip(self._at(offsets), owners, strict=True) if at == rank]
        with torch.inference_mode(mode=False), torch.no_grad():
            on = self.flat.unit.on_matrices[step]
            return updates_of(mine, received, self.flat.layout.num_shards, on)

    def update_matrices(self, pieces: Tensor, offsets: Sequence[int], step: str) -> None:
        """See `kernels.Owner`."""
        with torch.inference_mode(mode=False), torch.no_grad():
            self.flat.unit.on_matrices[step].update_matrices(self.flat, pieces, self._at(offsets))

    def _at(self, offsets: Sequence[int]) -> list[ShardedParam]:
        """The parameters that begin at these, in this order."""
        params = {param.layout.offset: param for param in self.flat.params}
        return [params[offset] for offset in offsets]

    def norms(self, flat_grad: Tensor, offsets: Sequence[int]) -> Tensor:
        """See `kernels.Owner`."""
        views = [self.flat.local_view(flat_grad, param) for param in self._at(offsets)]
        return torch.stack(list(torch._foreach_norm(views, 2)))

    def judge(self, step: str) -> None:
        """See `kernels.Owner`."""
        with torch.inference_mode(mode=False), torch.no_grad():
            self.flat.unit.on_verdict[step]()

    def rested(self, sums: Tensor, names: Sequence[str], phase: str) -> tuple[int, ...]:
        """See `kernels.Owner`."""
        flat = self.flat
        known = [p.fqn for p in flat.params]
        places = [known.index(parts_of(name)[1]) for name in names]
        flat.resting.note(places, sums, flat.version(), f"its all-gather in {phase}", len(known))
        return flat.written()

    def gather(self, shard: Tensor, piece: Piece) -> Tensor:
        """See `kernels.Owner`."""
        flat = self.flat
        flat.unit.on_gather(PieceGather(flat, piece))
        ahead = flat.ahead.take(flat, piece)
        if ahead is not None:
            return ahead
        started: Tensor = schema.ALL_GATHER(
            shard, list(piece.sizes), piece.group_size, piece.group, name_of(flat, piece), "forward"
        )
        return started

    def gather_ahead(self, piece: Piece) -> None:
        """See `kernels.Owner`."""
        self.flat.gather_ahead(piece)

    def take_marked(self) -> list[ShardedParam]:
        """The parameters whose gradients the running backward delivers in the flat gradient."""
        marked = self.marked.pop(backward_number(), set())
        return trained(p for p in self.flat.params if p.layout.offset in marked)

    def _pieces(self, grads: Tensor, offsets: Sequence[int]) -> Iterable[tuple[int, Tensor]]:
        """The columns of each parameter in a bucket."""
        sizes = {p.layout.offset: p.layout.numel for p in self.flat.params}
        pieces = grads.split([sizes[o] for o in offsets], dim=-1)
        return zip(offsets, pieces, strict=True)
