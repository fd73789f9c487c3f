"""The full parameters of one unit in eager mode: gathered in the background, registered, and freed.

The unsharded parameters are autograd leaves whose storage is emptied and refilled, so that what
autograd saved stays valid. How they are gathered: `gathering.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.ir import transfers
from compiled_fsdp.options import is_verifying
from compiled_fsdp.torch_private.autograd import set_versions
from compiled_fsdp.units.extension import Extension, fill_all
from compiled_fsdp.units.unwritten import (
    BEFORE_FORWARD,
    IN_FORWARD,
    WHILE_KEPT,
    check_unwritten,
    checksum,
)
from compiled_fsdp.wire import agreement, ranges
from compiled_fsdp.wire.leaving import outside
from compiled_fsdp.wire.ops import TRACED

from .gathering import extension_gathers, fill, start_gathers
from .resident import drop as drop_resident
from .resident import num_steps
from .tree import WHO, in_backward

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    from compiled_fsdp.units.flat import FlatBuffer
    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.units.unit import Unit

    from .gathering import ExtensionGathers, Gathers

# Gathers of a unit whose bits are compared: what forward writes in one, it does in all.
NUM_LOOKED = 4


def span(what: str, unit: str) -> AbstractContextManager[object]:
    """A range in the profile, named as stock names it."""
    return ranges.stock(f"FSDP::{what} ({unit})")


class FullParams:
    """Gathers and frees the parameters of one unit.

    is_unsharded: the modules hold full parameters.
    is_left_over: a forward has left them, and no backward has come since.
    full_versions: of the full parameters when they were filled: users may write to them.
    full_checksums: the same of their bits, since versions do not count writes through `.data`: of
        the first gathers, and with COMPILED_FSDP_VERIFY of all.
    were_trained: whether each was trained when it was registered: users may freeze or unfreeze
        either form since then.
    slices: what int reshard keeps between forward and backward, by parameter.
    versions: of the flat buffers when they were gathered; an optimizer step since then makes full
        parameters stale.
    pending: gathers under way.
    checksums: of the flat buffers when gathers under way were started ahead.
    ahead_of: what they were started ahead of, for errors.
    kept: checksums of the flat buffers when full parameters began to be kept for another forward.
    num_gathered: how often full parameters were registered.
    num_compiled: how often a compiled call of the unit, or around it, has begun.
    pending_extensions: the same of `extensions`.
    extensions: how parameters that bring an all-gather of their own are gathered.
    resident_versions: of the flat buffers when `resident.prepare` gathered them.
    is_agreed: the other ranks ran this unit eagerly too.
    asks_anew: Dynamo has just broken a graph here, perhaps here alone: the others are asked.
    freed: full parameters without memory, and their versions of before.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.is_unsharded = self.is_left_over = False
        self.full_versions: list[tuple[ShardedParam, tuple[int, int]]] = []
        self.full_checksums: list[tuple[ShardedParam, Tensor]] = []
        self.were_trained: list[tuple[ShardedParam, bool]] = []
        self.slices: dict[ShardedParam, Tensor] = {}
        self.versions: list[int] = []
        self.pending: Gathers = []
        self.pending_versions: list[int] = []
        self.checksums: list[tuple[FlatBuffer, Tensor]] = []
        self.kept: list[tuple[FlatBuffer, Tensor]] = []
        self.ahead_of = IN_FORWARD
        self.num_gathered = self.num_compiled = 0
        self.extensions: dict[ShardedParam, Extension] = {}
        self.pending_extensions: ExtensionGathers = []
        self.resident_versions: list[int] = []
        self.is_agreed = self.asks_anew = False
        self.freed: list[tuple[Tensor, int]] = []

    def start_unshard(self) -> bool:
        """Start to gather ahead of use; not if gathered or under way already."""
        is_started = self._start_ahead()
        self._start_collectives()
        return is_started

    def start_copies(self) -> bool:
        """Start what comes before the gathers: to copy what rests on the host."""
        return any(param.spec.device for param in self.unit.params) and self._start_ahead()

    def _start_ahead(self) -> bool:
        if self.is_unsharded or self._has_pending():
            return False
        self._start()
        if not in_backward():  # what runs between here and a forward may write to parameters
            self._sum_up(IN_FORWARD)
        return True

    def _start_collectives(self) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            for program, *_ in self.pending:
                program.pass_copies()

    def _start(self) -> None:
        check_not_meta(self.unit)
        self.drop_pending()
        self.pending_versions = self.versions_now()
        with torch.inference_mode(mode=False), torch.no_grad(), span("all_gather", self.unit.name):
            self.pending = self.start_gathers()
            self.pending_extensions = extension_gathers(self.unit, self.extensions)
            for program, *_ in self.pending_extensions:
                program.advance()

    def _sum_up(self, ahead_of: str) -> None:
        self.ahead_of = ahead_of
        self.checksums = [(flat, checksum(flat.data)) for flat in self.unit.flats]

    def keep(self) -> None:
        """Full parameters stay for another forward: from now on, writes to the sharded ones count,
        unless both are the same.
        """
        if self.is_unsharded:
            apart = [
                flat
                for flat in self.unit.flats
                if not all(param.is_borrowed for param in flat.params)
            ]
            self.kept = [(flat, checksum(flat.data)) for flat in apart]

    def drop_stale(self) -> None:
        """Before a forward: full parameters that were kept are not used if the sharded ones have
        changed.
        """
        if self.is_unsharded and self.versions != self.versions_now():
            self.reshard()
        elif self.is_unsharded:
            _check_unwritten(self.kept, WHILE_KEPT)

    @property
    def flats(self) -> list[FlatBuffer]:
        """See `gathers.Gather`."""
        return self.unit.flats

    @property
    def num_bytes(self) -> int:
        """See `gathers.Gather`."""
        return sum(p.spec.full_bytes() for p in self.unit.params)

    def part(self, flat: FlatBuffer) -> tuple[int, int]:
        """See `gathers.Gather`."""
        return 0, flat.layout.numel

    def start(self) -> None:
        """See `gathers.Gather`."""
        self.unit.options.consume(WHO, "overlap_optimizer")
        self.start_unshard()
        self._sum_up(BEFORE_FORWARD)

    def unshard(self) -> None:
        """Gather, unless gathered already, and register the full parameters."""
        if not in_backward():
            self.unit.on_gather(self)
        if self.is_unsharded:
            return
        if self._has_pending():
            _check_unwritten(self.checksums, self.ahead_of)
        else:
            self._start()
        self._start_collectives()
        pending, self.pending = self.pending, []
        extensions, self.pending_extensions = self.pending_extensions, []
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            span("all_gather_copy_out", self.unit.name),
        ):
            for program, gathered, members in pending:
                program.finish()
                bucket = transfers.GatheredBucket([spec for _, spec in members])
                for place, (param, _) in enumerate(members):
                    fill(param, gathered.tensor, bucket, place)
            self._unmark_freed()
            for program, gathered, inputs in extensions:
                program.finish()
                fill_all(gathered.tensor, inputs)
        for param in self.unit.params:
            assert param.unsharded is not None
            _set_requires_grad(param.unsharded, param.sharded.requires_grad)
            param.register(param.unsharded)
        self.is_unsharded = True
        self.full_versions, self.full_checksums = [(p, _version(p)) for p in self.unit.params], []
        self.full_checksums = (
            [(p, checksum(p.gathered)) for p in self._own_memory()]
            if is_verifying() or self.num_gathered < NUM_LOOKED
            else []
        )
        self.were_trained = [(p, p.sharded.requires_grad) for p in self.unit.params]
        self.checksums = []
        self.num_gathered += 1
        self.versions = self.pending_versions

    def reshard(self, *, keeps_storage: bool = False) -> None:
        """Register the sharded parameters and empty the storage of the full ones, unless what
        autograd saved of it is needed.
        """
        drop_resident(self)
        if not self.is_unsharded:
            return
        self.follow_requires_grad()
        written = {param for param, version in self.full_versions if _version(param) != version}
        written |= {
            param for param, before in self.full_checksums if checksum(param.gathered) != before
        }
        say_they_are_lost([p.fqn for p in self._own_memory() if p in written])
        self.is_unsharded = self.is_left_over = False  # first: an interrupt may come between
        self.kept = []
        for param in self.unit.params:
            param.register(param.sharded)
        if not keeps_storage:
            self.free()

    def _own_memory(self) -> list[ShardedParam]:
        """Parameters that are gathered into memory apart from their shards."""
        return [p for p in self.unit.params if not (p.is_borrowed or p in self.extensions)]

    def follow_requires_grad(self) -> None:
        """Freeze or unfreeze what is hidden as the user did what is registered, or the other way
        around: both are one parameter.
        """
        for param, was_trained in self.were_trained if self.is_unsharded else ():
            full, sharded = param.unsharded, param.sharded
            assert full is not None
            is_trained = (
                full.requires_grad if full.requires_grad != was_trained else sharded.requires_grad
            )
            _set_requires_grad(full, is_trained)
            _set_requires_grad(sharded, is_trained)
        self.were_trained = [(param, param.sharded.requires_grad) for param, _ in self.were_trained]

    def free(self) -> None:
        """Empty the storage of full parameters that are not registered, unless it is to be kept."""
        self.unit.options.consume(WHO, "set_keep_unsharded_storage")
        if self.unit.settings.keep_unsharded_storage:
            return
        freed = []
        for param in self.unit.params if not self.is_unsharded else ():
            if param in self.extensions:
                self.extensions[param].free()
            elif param.unsharded is not None and not param.is_borrowed:
                param.gathered.untyped_storage().resize_(0)
                freed.append(param.unsharded)
        if self.unit.settings.unshard_in_backward:
            self._mark_freed(freed)

    def _mark_freed(self, full: Iterable[Tensor]) -> None:
        """Let a backward raise where it comes to what another unit's forward read of them: nothing
        gathers it again.
        """
        known = {id(tensor) for tensor, _ in self.freed}
        marked = [(tensor, tensor._version) for tensor in full if id(tensor) not in known]
        set_versions([tensor for tensor, _ in marked], [version + 1 for _, version in marked])
        self.freed += marked

    def _unmark_freed(self) -> None:
        """They are filled again, with what autograd has saved."""
        set_versions([tensor for tensor, _ in self.freed], [version for _, version in self.freed])
        self.freed = []

    def drop_pending(self, *, is_end_of_backward: bool = False) -> None:
        """Await gathers under way, which nobody used or which are out of date, and forget them; at
        the end of a backward, not those that it has started for the next forward.
        """
        for program, *_ in (*self.pending, *self.pending_extensions):
            program.drop()
        self.pending, self.pending_extensions, self.checksums = [], [], []
        for flat in self.unit.flats:
            if not (is_end_of_backward and flat.is_stepped):
                flat.drop_ahead()

    def outdate_pending(self) -> None:
        """Let gathers under way not be used: whoever needs the parameters drops them, and gathers
        anew.
        """
        if self.pending or self.pending_extensions:
            self.pending_versions = []

    def _has_pending(self) -> bool:
        if (
            self.pending or self.pending_extensions
        ) and self.pending_versions != self.versions_now():
            self.drop_pending()
        return bool(self.pending or self.pending_extensions)

    def versions_now(self) -> list[int]:
        """How often optimizers stepped, and the flat buffers were written."""
        return [num_steps()] + [version for flat in self.unit.flats for version in flat.version()]

    def start_gathers(self) -> Gathers:
        """Agree with the other ranks, and start."""
        self.unit.was_read = True
        self._agree()
        return start_gathers(self.unit, self.slices)

    @property
    def is_in_graphs(self) -> bool:
        """Whether graphs read the unit."""
        return self.unit.key in TRACED

    def why_outside(self) -> str:
        """Why the unit runs outside a graph, if it is known; for errors."""
        return next(reversed(self.unit.why_eager), "")

    def _agree(self) -> None:
        """Count a gather; before the first, and before each of a unit that graphs read too, the
        other ranks are asked whether they are about to gather the same, eagerly too. An outermost
        unit of no parameters asks as well, since others may be in a graph of all inside it.
        """
        asks = not self.is_agreed or self.is_in_graphs
        names = ", ".join(param.fqn for param in self.unit.params) or "nothing"
        infos = [flat.mesh_info for flat in self.unit.flats]
        if not infos and self.unit.is_outermost:
            infos = [self.unit.mesh_info]
        groups = dict.fromkeys(info.shard_group.group_name for info in infos)
        how: agreement.Asks = "anew" if self.asks_anew else "if new" if asks else "never"
        text = outside(self.unit.name, names)
        if agreement.before_run(text, list(groups), asks=how, why=self.why_outside()):
            self.unit.on_left_graph()
        self.is_agreed, self.asks_anew = True, False


def check_not_meta(unit: Unit) -> None:
    """A unit can be gathered once its parameters have values.

    Raises:
        RuntimeError: some are on the meta device.
    """
    meta = [p.fqn for p in unit.params if p.sharded.device.type == "meta"]
    if meta:
        raise RuntimeError(
            f"unshard of {unit.name}: parameters {shortened(meta)} are on the meta device and have "
            "no values to gather. Call module.to_empty(device=...) and then "
            "reset_parameters(), or load a state dict, before the first use"
        )


def _check_unwritten(checksums: Sequence[tuple[FlatBuffer, Tensor]], why: str) -> None:
    for flat, before in checksums:
        check_unwritten(flat.unit.name, flat.data, before, why)


def _version(param: ShardedParam) -> tuple[int, int]:
    """The version of a full parameter: it changes when a user writes to it, or puts other memory in
    its place (`.data = x`).
    """
    assert param.unsharded is not None
    return param.unsharded._version, param.gathered.untyped_storage()._cdata


def _set_requires_grad(tensor: Tensor, value: bool) -> None:
    """Inside of `torch.func`'s transformations torch refuses even to set it to what it is."""
    if tensor.requires_grad is not value:
        tensor.requires_grad_(value)


def say_they_are_lost(fqns: Sequence[str]) -> None:
    """Announce writes to full parameters, which last no longer than those do."""
    if not fqns:
        return
    warn_once(
        f"compiled_fsdp: parameter {shortened(fqns, 1)} is written to in place while it is "
        "gathered. What follows in the same forward sees it; the sharded parameter is not changed, "
        "so the write is lost when the full parameter is freed, as in torch's FSDP2. To keep it, "
        "write to the sharded parameter, outside of forward"
    )
