"""Run programs on pools of workers, judge them, and shrink those with faults."""

from __future__ import annotations

import pickle
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kit.pool import START, Pool, WorkerError
from programs.kinds import SLOW, place_of, run_kinds
from programs.program import Program
from programs.shrink import smallest
from programs.source import Script, script
from programs.verdict import Outcomes, Verdict, judge, plain_of

if TYPE_CHECKING:
    from programs.kinds import Outcome

LIMIT = 180.0  # seconds for a kind of a script


@dataclass
class Result:
    """The verdict of each kind, or why the unsharded model does not run it; what stock does; what
    ours announced.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    invalid: str = ""
    stock: Verdict | None = None
    said: set[str] = field(default_factory=set)

    @property
    def faults(self) -> list[Verdict]:
        return [v for v in self.verdicts if v.is_fault]


class Hunter:
    """Runs scripts, each kind on every rank; with a `plant`, ours has that fault (`planted.py`)."""

    def __init__(self, pools: dict[int, Pool], plant: str = "", limit: float = LIMIT) -> None:
        self.pools, self.plant, self.limit = pools, plant, limit

    def outcomes(self, script: Script, kinds: tuple[str, ...]) -> Outcomes:
        """What each kind does, all in one call of a pool; a text for one that hangs or dies, and
        the rest in another call.
        """
        found: Outcomes = {}
        while left := tuple(kind for kind in kinds if kind not in found):
            with tempfile.TemporaryDirectory() as folder:
                error = self._call(script, left, folder)
                done = _read(Path(folder), left, script.world)
            first = next((kind for kind in left if kind not in done), None)
            if (
                error and first is not None
            ):  # else the last rank came to the end after the others had given it up
                done[first] = error
            found |= done
            if is_invalid(found.get("unsharded", "")):
                break
        return found

    def _call(self, script: Script, kinds: tuple[str, ...], folder: str) -> str:
        pool = self.pools[script.world]
        arguments = (script.source, script.dim, script.bucket, script.budget, self.plant)
        arguments += (script.mesh,)
        longest = START + self.limit * sum(SLOW.get(kind, 1) for kind in kinds)
        try:
            is_whole = all(
                pool.run(run_kinds, kinds, folder, self.limit, *arguments, timeout=longest)
            )
        except WorkerError as error:
            return str(error)
        if not is_whole:
            pool.close()  # one rank has left the others in the middle of something
        return ""

    def check(self, script: Script) -> Result:
        """Every kind of a script; the unsharded model compiled by torch alone is asked where it
        decides.
        """
        outcomes = self.outcomes(script, ("unsharded", *script.kinds, "stock"))
        reference = outcomes["unsharded"]
        if is_invalid(reference):
            return Result(invalid=reference if isinstance(reference, str) else reference[0].text)
        verdicts = [self._judge(script, kind, outcomes) for kind in script.kinds]
        plain = tuple(dict.fromkeys(plain_of(v.kind) for v in verdicts if v.is_fault))
        if plain := tuple(filter(None, plain)):
            outcomes |= self.outcomes(script, plain)
            verdicts = [self._judge(script, kind, outcomes) for kind in script.kinds]
        said = {
            text
            for found in outcomes.values()
            if isinstance(found, list)
            for o in found
            for text in o.warnings
        }
        return Result(verdicts, stock=self._judge(script, "stock", outcomes), said=said)

    def _judge(self, script: Script, kind: str, outcomes: Outcomes) -> Verdict:
        return judge(kind, outcomes, script)

    def shrink(self, program: Program, kind: str, tries: int = 60) -> tuple[Program, Verdict]:
        """The smallest program found in which this kind has a fault of the same sort."""
        program = replace(program, kinds=(kind,))
        verdict = next(iter(self.check(script(program)).faults), None)
        if verdict is None:
            return program, Verdict(kind, "fault", "does not fail again")
        sort = sort_of(verdict)

        def fails(candidate: Program) -> Verdict | None:
            found = next(iter(self.check(script(candidate)).faults), None)
            return found if found is not None and sort_of(found) == sort else None

        return smallest(program, verdict, fails, tries)


def is_invalid(reference: list[Outcome] | str) -> bool:
    """Whether the unsharded model does not run the script."""
    return bool(reference) and (isinstance(reference, str) or any(o.error for o in reference))


def _read(folder: Path, kinds: tuple[str, ...], world: int) -> Outcomes:
    """The kinds that ended on every rank."""
    found: Outcomes = {}
    for kind in kinds:
        places = [place_of(folder, kind, rank) for rank in range(world)]
        if all(place.exists() for place in places):
            found[kind] = [pickle.loads(place.read_bytes()) for place in places]
    return found


def sort_of(verdict: Verdict) -> str:
    """Differences, hangs, silence, and each type of error."""
    words = verdict.detail.split()
    return " ".join(words[:2]) if words[0] == "raises" else words[0]
