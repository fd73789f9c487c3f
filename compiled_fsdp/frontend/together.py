"""Ranks that run a unit eagerly from the same call of their model on: none of them falls back
alone.

Dynamo compiles a frame so many times and then runs it as it is. Other ranks see other inputs, and
may be in a graph still, whose collectives are others. So a rank that reaches the limit keeps
compiling, and wishes that the unit were run eagerly; ranks settle from which call on all of them
do. Nobody is asked, and nothing is read but one flag a call, while nobody wishes.

[Note: rounds]
Every rank counts the calls of the outermost module (`begun`). All that follows is done by a thread
of its own, in rounds. Who wishes opens the round, in the store of the default group. A rank that
sees it open (a) lets no further call begin (`holds`), (b) then reads how many have begun, and (c)
publishes the number of the next, with its own wishes: its answer. The first of the ranks, once it
has all answers, gives the verdict: what anybody wishes, from the largest of these numbers on. A
rank that waits for a verdict for too long gives that of no change. The first verdict is kept
(`compare_set`), and whoever reads it lets calls begin again.

All switch at the same call. Ranks run the same program, so that a number means the same call on
each. A verdict has the answers of all ranks, and its number is one that no rank had begun: a main
thread writes `begun` and then reads `holds`, the other thread writes `holds` and then reads
`begun`, so that a call that did not see the flag is in the answer. A rank that gets there later
waits at `holds` until it knows.

Nobody waits in a circle. A main thread that is held waits for threads like this one only; these
wait for no main thread, not even for one that compiles or is in a collective with the rank that is
held, and for no other rank: each look at the store returns at once. A rank that has died, or ended,
or cannot answer for long, costs the others PATIENCE_S, and nothing is changed: that is right too,
as all go on to compile. So neither an exception nor an exit needs to be told.

Which ranks: those that the model's collectives connect, that is the mesh of its parameters with all
its axes (replicas, tensor parallelism; of a pipeline, one stage). A model whose units lie on meshes
of which none holds all others stays compiled.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
import weakref
from collections import deque
from math import prod
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from compiled_fsdp.torch_private.groups import default_group, group_store, groups_of
from compiled_fsdp.wire.agreement import everyones
from compiled_fsdp.wire.watcher import Watcher, pause

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from compiled_fsdp.units.unit import Unit

POLL_S = 1.0  # between two looks at whether a round is open
STEP_S = 0.01  # while one is
PATIENCE_S = 30.0  # for a verdict

NEVER, REFUSED = 0, -1  # instead of a number: this time, and for good

# What is to run eagerly, with all units inside it: a unit's number in its model; and why.
Wish = tuple[int, str]


class Together:
    """One model, as its ranks see it; see the note above.

    store: None if there is nobody to ask who could answer.
    ranks: those of the mesh, in order.
    begun: calls of the model that have begun here.
    is_sharding: its forwards communicate, not its backwards alone.
    is_inlined: it was traced into a larger graph here, whose calls nobody counts: no number could
        be answered.
    """

    def __init__(
        self, store: Any, ranks: Sequence[int], rank: int, patience: float = PATIENCE_S
    ) -> None:
        self.store, self.ranks, self.rank, self.patience = store, list(ranks), rank, patience
        self.begun = self.round = 0
        self.holds = self.is_inlined = self.is_sharding = False
        self.since = 0.0
        self.wishes: list[Wish] = []
        self.verdicts: deque[tuple[int, list[Wish]]] = deque()  # their numbers never fall
        self._may_begin = threading.Event()
        self._may_begin.set()

    @property
    def is_alone(self) -> bool:
        """Whether no other rank communicates with this one."""
        return len(self.ranks) == 1

    @property
    def can_settle(self) -> bool:
        """Whether the other ranks can be asked."""
        return self.store is not None

    def wish(self, unit: int, why: str) -> None:
        """Ask the other ranks to run a unit eagerly, from a call on that is still to come; in vain
        if they cannot be asked.
        """
        if self.can_settle:
            self.wishes.append((unit, why))

    def begin(self) -> list[Wish]:
        """A call of the model begins; what runs eagerly from it on."""
        self.begun += 1
        if not (self.holds or self.verdicts):
            return []
        self._may_begin.wait()
        due: list[Wish] = []
        while self.verdicts and self.verdicts[0][0] <= self.begun:
            due += self.verdicts.popleft()[1]
        return due

    # -- the other thread

    def look(self) -> None:
        """Go on with the round as far as that goes without waiting."""
        if self.store is None:
            return
        try:
            if not self.holds and self._is_open():
                self._answer()
            if self.holds:
                self._read_verdict()
        except (RuntimeError, dist.DistError):
            # The store is gone: the process group was destroyed, or its host has ended.
            self.store = None
            self._let_begin()

    def _is_open(self) -> bool:
        if self.wishes:
            self.store.set(self._key("open"), "")
        return bool(self.store.check([self._key("open")]))

    def _answer(self) -> None:
        self._may_begin.clear()
        self.holds, self.since = True, time.monotonic()
        number = REFUSED if self.is_inlined else self.begun + 1
        mine = self.wishes[:]
        self.store.set(self._key("answer", self.rank), json.dumps([number, mine]))
        del self.wishes[: len(mine)]

    def _read_verdict(self) -> None:
        verdict = self._key("verdict")
        answers = [self._key("answer", rank) for rank in self.ranks]
        if self.rank == self.ranks[0] and self.store.check(answers):
            self.store.compare_set(
                verdict,
                "",
                json.dumps(_combine([json.loads(self.store.get(key)) for key in answers])),
            )
        elif time.monotonic() - self.since > self.patience:
            self.store.compare_set(verdict, "", json.dumps([NEVER, []]))
        if self.store.check([verdict]):
            self._follow(*json.loads(self.store.get(verdict)))

    def _follow(self, number: int, wishes: list[list[Any]]) -> None:
        if number == REFUSED:
            self.store = None
        if wishes:
            self.verdicts.append((number, [(unit, why) for unit, why in wishes]))
        self.round += 1
        self._let_begin()

    def _let_begin(self) -> None:
        self.holds = False
        self._may_begin.set()

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self.round, *parts)))


def _combine(answers: list[tuple[int, list[Wish]]]) -> tuple[int, list[Wish]]:
    """The first call that nobody had begun, and what anybody wished."""
    if any(number == REFUSED for number, _ in answers):
        return REFUSED, []
    wishes = {unit: why for _, wishes in answers for unit, why in wishes}
    return max(number for number, _ in answers), sorted(wishes.items())


# -- the ranks of a model


_models: list[weakref.ref[Together]] = []  # copied at once, while the main thread may add to it


def _look(_: int) -> None:
    models = [model for known in list(_models) if (model := known()) is not None]
    for model in models:
        model.look()
    while any(model.holds for model in models):
        pause(STEP_S)
        for model in models:
            model.look()


_watcher = Watcher("compiled_fsdp_together", _look, POLL_S)


def meet(units: Sequence[Unit]) -> Together:
    """The ranks of a model, before its first call: collective over the axes of its widest mesh.

    They share a part of the store that no other process uses, not even one that a restarted rank
    replaces.

    Raises:
        DivergenceError: a rank does something else.
    """
    groups = [_axes(unit) for unit in units]
    token, ranks = uuid.uuid4().hex, {dist.get_rank()}
    reached = {
        rank for axes in groups for group in axes for rank in dist.get_process_group_ranks(group)
    }
    for group in max(groups, key=lambda axes: prod(group.size() for group in axes)):
        mine = json.dumps([token, as_spans(ranks), as_spans(reached)])
        told = [
            json.loads(text) for text in everyones(group.group_name, "the ranks of a model", mine)
        ]
        token = min(word for word, *_ in told)
        ranks, reached = (
            {rank for entry in told for span in entry[place] for rank in range(*span)}
            for place in (1, 2)
        )
    has_others = len(ranks) > 1 and reached == ranks
    store = group_store(default_group(), f"compiled_fsdp/together/{token}") if has_others else None
    made = Together(store, sorted(ranks), dist.get_rank())
    made.is_sharding = any(flat.mesh_info.shard_size > 1 for unit in units for flat in unit.flats)
    if has_others:
        _models[:] = [known for known in _models if known() is not None]
        _models.append(weakref.ref(made))
        _watcher.start()
    return made


def as_spans(ranks: Iterable[int]) -> list[tuple[int, int, int]]:
    """Ranks as start, stop and step: few, since a mesh places them evenly, where each rank tells
    each other one.
    """
    spans: list[tuple[int, int, int]] = []
    for rank in sorted(ranks):
        start, stop, step = spans[-1] if spans else (rank, rank, 0)
        if spans and (stop == start + 1 or rank == stop - 1 + step):
            spans[-1] = start, rank + 1, rank + 1 - stop if stop == start + 1 else step
        else:
            spans.append((rank, rank + 1, 1))
    return spans


def _axes(unit: Unit) -> list[dist.ProcessGroup]:
    """The groups of a unit's mesh, those of tensor parallelism included.

    Where the two are equal, those of the unit's: torch may give a DTensor an equal mesh of earlier
    days, whose groups are destroyed. Of several widest, that of the first parameter, on all ranks:
    the order of a set of meshes is another in each process.
    """
    meshes = [p.sharded.device_mesh for p in unit.params if isinstance(p.sharded, DTensor)]
    widest = max(meshes, key=lambda mesh: mesh.size(), default=None)
    return (
        unit.mesh_info.axes
        if widest is None or widest == unit.mesh_info.mesh
        else groups_of(widest)
    )
