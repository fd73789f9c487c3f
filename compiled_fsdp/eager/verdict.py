"""The end of a backward of checked units: ranks compare their checksums,
and refuse the step if some differ.

[Note: verdict]
Of each mesh: one all-reduce over the group that shards adds up, for each sum that was taken, what
should come to zero (`wire/checks.py`). With replicas (HSDP) two more over those: one before it, of
what has to be the same on all of them, and one after it, so that all ranks come to the same
verdict. With several meshes, or tensor parallelism, one integer goes over all groups for that
(`spread.py`). One value is read on the host. Only if something differs do ranks tell each other
their sums, through the store, find out whose they are,
and try once more what was communicated (`replay.py`).
"""

from __future__ import annotations

import json
from dataclasses import astuple
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.checksums import REPLICATED
from compiled_fsdp.torch_private.groups import backend_of
from compiled_fsdp.wire import agreement
from compiled_fsdp.wire.checks import ChecksumError, Entry, Fault, difference, parts_of

from . import replay, spread, state_sums
from .blame import blame, of_replicas, unwritten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compiled_fsdp.units.flat import FlatBuffer
    from compiled_fsdp.units.mesh import MeshInfo
    from compiled_fsdp.units.unit import Unit

REST, STATE = "shard at rest", "optimizer state at rest"


def compare(units: Sequence[Unit], step: int) -> None:
    """At the end of a backward, in this step of their optimizer: compare what these units have
    summed up since the last time.

    Raises:
        ChecksumError: something differs; gradients were dropped.
        NotImplementedError: some ranks would not hear of what others find.
    """
    checked = [unit for unit in units if unit.settings.check]
    entries = [entry for unit in checked for entry in unit.ledger.take()]
    if not entries:
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        verdicts = _by_mesh(checked, entries)
        if verdicts[0].is_fake:
            return
        groups = spread.groups_of(checked)
        left = groups  # over which others have to hear of what is found
        if len(verdicts) == 1 and all(p.full is None for unit in checked for p in unit.params):
            left = verdicts[0].replica_groups
        spread.check_reach(checked, left, verdicts[0].device)
        flags = torch.stack([verdict.differs() for verdict in verdicts]).amax()
        if not bool(spread.largest(flags, left).item()):
            return
        found = [astuple(fault) for verdict in verdicts for fault in verdict.faults()]
        told = spread.everyones(found, "checksums differ: faults", groups)
        faults = sorted({_fault(entry) for entry in told})
        for verdict in verdicts:
            verdict.clear()
    if not faults:
        return
    for unit in checked:
        _drop_gradients(unit)
    raise ChecksumError(_text(faults, step), step, faults)


def _by_mesh(units: Sequence[Unit], entries: Sequence[Entry]) -> list[Verdict]:
    """One for each mesh over which flat buffers of these units are sharded, in the same order on
    every rank.
    """
    flats: dict[MeshInfo, list[FlatBuffer]] = {}
    infos: dict[str, MeshInfo] = {}
    for flat in (flat for unit in units for flat in unit.flats):
        flats.setdefault(flat.mesh_info, []).append(flat)
        infos.update(dict.fromkeys(_names(flat), flat.mesh_info))
    first = next(iter(flats))  # of a unit that has got another name since its graph was traced
    return [
        Verdict(own, [entry for entry in entries if infos.get(entry.names[0], first) == info])
        for info, own in flats.items()
    ]


class Verdict:
    """What ranks compare at the end of one backward, of flat buffers that share a mesh.

    rests: flat buffers, of which the shards are compared with those of before.
    states: what optimizers remember, each with whether it has changed.
    replicated: what has to be the same on all replicas: a name, and the sums.
    """

    def __init__(self, flats: Sequence[FlatBuffer], entries: Sequence[Entry]) -> None:
        self.flats = flats
        self.info: MeshInfo = flats[0].mesh_info
        travelled = [e for e in entries if e.collective != REPLICATED]
        self.travelled = sorted(travelled, key=_group_size, reverse=True)  # slices come last
        self.rests: list[FlatBuffer] = [f for f in flats if not f.is_apart]
        self.is_fake = backend_of(self.info.shard_group) == "fake"
        self.device = flats[0].data.device
        for flat in self.rests:
            flat.note_rest("the end of backward")
        self.states = state_sums.changed(flats)
        self.replicated: list[tuple[str, str, tuple[str, ...], Tensor]] = []
        if self.has_replicas:
            self.replicated = [
                (e.collective, e.phase, e.names, e.received[0])
                for e in entries
                if e.collective == REPLICATED
            ]
            self.replicated += [
                ("replicas", "", _names(flat), flat.resting.sums)
                for flat in self.rests
                if flat.resting.sums is not None
            ]
        self.bad = torch.zeros(0)
        self.bad_replicas = torch.zeros(0, dtype=torch.bool)

    @property
    def has_replicas(self) -> bool:
        """Whether other ranks hold the same shards."""
        return self.info.replicate_size > 1

    @property
    def replica_groups(self) -> list[dist.ProcessGroup]:
        """Of the ranks that hold the same shards, if there are others."""
        group = self.info.replicate_group if self.has_replicas else None
        return [] if group is None else [group]

    def differs(self) -> Tensor:
        """Whether anything differs, an integer that is the same on all ranks that shard; of
        replicas, what differs between them counts on all that hold it.
        """
        found = [self._of_travelled()]
        found += [f.resting.changed.long() for f in self.rests if f.resting.changed is not None]
        states = [changed.reshape(1).long() for *_, changed in self.states]
        found.append(torch.cat(states).sum()[None] if states else self._zeros(1))
        found.append(self._of_replicas().long())
        total = torch.cat(found)
        if self.info.shard_size > 1:
            dist.all_reduce(total, group=self.info.shard_group)
        self.bad = total
        return (total != 0).any().long()

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=torch.int64, device=self.device)

    def _of_travelled(self) -> Tensor:
        if not self.travelled:
            return self._zeros(0)
        found = []
        for size, of_size in groupby(self.travelled, _group_size):
            entries = list(of_size)
            sent = torch.cat([e.sent.expand(size, -1) for e in entries], 1)
            received = torch.cat([e.received for e in entries], 1)
            found.append(difference(sent, received, self.info.shard_rank % size))
        return torch.cat(found)

    def _of_replicas(self) -> Tensor:
        """Whether the largest of all replicas' sums is their smallest."""
        if not self.replicated:
            return self.bad_replicas.to(self.device)
        own = torch.cat([sums for *_, sums in self.replicated])
        both = torch.cat([own, ~own])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.info.replicate_group)
        largest, smallest = both.chunk(2)
        self.bad_replicas = largest != ~smallest
        return self.bad_replicas

    # -- once something differs

    def faults(self) -> list[Fault]:
        """Whose sums differ, as far as these ranks can tell. What the program has written itself is
        none.
        """
        group = self.info.shard_group
        ranks = dist.get_process_group_ranks(group)
        said = _everyones(group, "evidence", self._evidence())
        written = unwritten(said)
        again = self._travelled_again(said[0]["travelled"])
        tried = _everyones(group, "what came of trying again", again)
        faults = blame(said, written, ranks, tried)
        self._accept(written)
        if self.has_replicas:
            others = self.info.replicate_group
            assert others is not None
            shown = _everyones(others, "replicas", self._shown_to_replicas())
            faults += of_replicas(shown, dist.get_process_group_ranks(others))
        return faults

    def clear(self) -> None:
        """What has changed at rest is told; if it stays so, the next sums tell it again."""
        for flat in self.rests:
            if flat.resting.changed is not None:
                flat.resting.changed.zero_()

    def _evidence(self) -> dict[str, Any]:
        """What this rank knows of sums that differ; what rests is read again."""
        travelled, at = [], 0
        for number, entry in enumerate(self.travelled):
            for place, name in enumerate(entry.names):
                if self.bad[at]:
                    unit, parameter = parts_of(name)
                    sent = entry.sent.expand(_group_size(entry), -1)[:, place].tolist()
                    received = entry.received[:, place].tolist()
                    where = [number, entry.collective, entry.phase, unit, parameter]
                    travelled.append([*where, sent, received])
                at += 1
        rests = []
        for flat in self.rests:
            resting = flat.resting
            now = flat.sums() if self.bad[at : at + len(flat.params)].any() else None
            for place, param in enumerate(flat.params):
                seen = resting.seen[place]
                is_changed = resting.changed is not None and bool(resting.changed[place])
                if now is not None and self.bad[at]:
                    when = seen[1] if seen else ""
                    holds = param.layout.local_rows(self.info.shard_rank) > 0
                    is_still = is_changed and _differs(resting.sums, now, place)
                    where = [REST, flat.unit.name, param.fqn, holds]
                    rests.append([*where, is_changed, when, resting.latest, is_still])
                at += 1
        names = {id(p.sharded): (f.unit.name, p.fqn) for f in self.flats for p in f.params}
        still = [state for _, state, is_so in state_sums.changed(self.flats) if is_so]
        for optimizer, state, changed in self.states if self.bad[at] else ():
            what = f"{STATE}: {type(optimizer).__name__} {state.key}"
            between = "the last update", "the end of backward"
            is_still = any(state is each for each in still)
            rests.append([what, *names[state.param], True, bool(changed), *between, is_still])
        return {"travelled": travelled, "rests": rests}

    def _travelled_again(self, travelled: Sequence[list[Any]]) -> list[replay.Again]:
        """What comes of trying each of these again, which is what all ranks of the group have."""
        rank, size = self.info.shard_rank, self.info.shard_size
        tried: dict[int, replay.Again] = {}
        found = []
        for number, _, _, unit, parameter, *_ in travelled:
            if number not in tried:
                tried[number] = replay.again(self.travelled[number], rank, size)
            names = [parts_of(name) for name in self.travelled[number].names]
            found.append({**tried[number], "at": names.index((unit, parameter))})
        return found

    def _shown_to_replicas(self) -> list[list[Any]]:
        """The sums that differ from another replica's; their collectives are tried again, by all
        replicas, which show the same.
        """
        shown: list[list[Any]] = []
        at = 0
        tried: replay.Again
        flats = {_names(flat): flat for flat in self.rests}
        for collective, phase, names, sums in self.replicated:
            is_bad = self.bad_replicas[at : at + len(names)].tolist()
            at += len(names)
            if not any(is_bad):
                continue
            if phase:
                entry = Entry(collective, phase, names, sums, sums)
                tried = replay.again(entry, 0, self.info.replicate_size)
            else:
                now = flats[names].sums()
                tried = {"still": [_differs(sums, now, place) for place in range(len(names))]}
            for place, (name, value) in enumerate(zip(names, sums.tolist(), strict=True)):
                if is_bad[place]:
                    shown.append(
                        [collective, phase, *parts_of(name), {**tried, "at": place}, value]
                    )
        return shown

    def _accept(self, written: Sequence[tuple[str, str, str]]) -> None:
        """What the program has written in a way that no version counts is right."""
        if not written:
            return
        warn_once(
            f"compiled_fsdp: {written[0][2]} was written to between two steps in a way that no "
            "version counts (through .data, or by a foreach op), on all ranks: it is taken for the "
            "program's own write, and Plan(check='checksums') goes on from there. Write to it "
            "under torch.no_grad(), and memory that fails in the same moment is still found",
            about="uncounted writes of checked parameters",
        )
        for flat in self.rests:
            places = [
                place
                for place, param in enumerate(flat.params)
                if (REST, flat.unit.name, param.fqn) in written
            ]
            if places:
                flat.resting.accept(places)
        names = {id(p.sharded): (f.unit.name, p.fqn) for f in self.flats for p in f.params}
        for optimizer, state, _ in self.states:
            what = f"{STATE}: {type(optimizer).__name__} {state.key}"
            if (what, *names[state.param]) in written:
                state_sums.accept(optimizer, [state])


def _group_size(entry: Entry) -> int:
    """Of the ranks that have communicated: all that a parameter is cut over, or, for slices, of
    these so many neighbours.
    """
    return entry.received.shape[0]


def _differs(before: Tensor | None, now: Tensor, place: int) -> bool:
    return before is not None and bool(before[place] != now[place])


def _names(flat: FlatBuffer) -> tuple[str, ...]:
    return tuple(f"{flat.unit.key}:{p.fqn}" for p in flat.params)


def _everyones(group: dist.ProcessGroup, what: str, mine: Any) -> list[Any]:
    said = agreement.everyones(group.group_name, f"checksums differ: {what}", json.dumps(mine))
    return [json.loads(text) for text in said]


def _fault(entry: list[Any]) -> Fault:
    rank, among, *others = entry
    return Fault(rank, tuple(among), *others)


def _drop_gradients(unit: Unit) -> None:
    """Nothing is left of the step that could be applied."""
    unit.drop_gradients()
    for module in unit.modules:
        for param in module.parameters():
            param.grad = None
    for sharded in (param.sharded for param in unit.params):
        sharded.grad = None


def _text(faults: Sequence[Fault], step: int) -> str:
    lines = [
        f"  unit {f.unit!r}, {f.parameter}, {f.collective}"
        + (f" in {f.phase}" if f.phase else "")
        + f": {f.text}"
        for f in faults
    ]
    rests = any("at rest" in f.collective or f.collective == "replicas" for f in faults)
    lasts = any(f.again == "wrong" for f in faults)
    advice = (
        "Parameters or optimizer state are no longer what they were: load the last checkpoint"
        if rests
        else "Parameters and optimizer state are those of before the step: run it again, from "
        "zero_grad() on"
    )
    advice += (
        ". It was wrong a second time: take that rank out of service"
        if lasts and not rests
        else ", and take that rank out of service if it happens again"
    )
    return "\n".join(
        [
            f"compiled_fsdp: checksums differ in step {step}; nothing of it is applied, and all "
            "gradients were dropped:",
            *lines,
            advice,
        ]
    )
