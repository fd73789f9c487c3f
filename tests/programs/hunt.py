"""Run programs on pools of workers, judge them, and shrink those with faults."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pool import Pool, WorkerError
from programs.kinds import Outcome, run
from programs.program import Program
from programs.shrink import smallest
from programs.source import Script, script
from programs.verdict import Outcomes, Verdict, judge

TIMEOUT = {"inductor": 300.0}
COMPILED = ("compiled", "aot_eager", "inductor")


@dataclass
class Result:
    """The verdict of each kind, or why the unsharded model does not run it; what stock does, where somebody asked."""

    verdicts: list[Verdict] = field(default_factory=list)
    invalid: str = ""
    stock: str = "not asked"

    @property
    def faults(self) -> list[Verdict]:
        return [v for v in self.verdicts if v.is_fault]


class Hunter:
    """Runs scripts, each kind on every rank; with a `plant`, ours has that fault (`planted.py`)."""

    def __init__(self, pools: dict[int, Pool], plant: str = "") -> None:
        self.pools, self.plant = pools, plant

    def outcome(self, script: Script, kind: str) -> list[Outcome] | str:
        """What a kind does; a text if it hangs or dies."""
        pool = self.pools[script.world]
        try:
            arguments = (kind, script.source, script.dim, script.bucket, script.budget, self.plant)
            found: list[Outcome] = pool.run(run, *arguments, timeout=TIMEOUT.get(kind, 60.0))
        except WorkerError as error:
            return str(error)
        if len({o.error for o in found}) > 1:
            pool.close()  # one rank has left the others in the middle of something
        return found

    def check(self, script: Script) -> Result:
        """Every kind of a script; what decides a doubtful one is run when it is needed."""
        outcomes: Outcomes = {"unsharded": self.outcome(script, "unsharded")}
        reference = outcomes["unsharded"]
        if isinstance(reference, str) or any(o.error for o in reference):
            return Result(invalid=reference if isinstance(reference, str) else reference[0].text)
        result = Result()
        for kind in script.kinds:
            outcomes[kind] = self.outcome(script, kind)
            verdict = self._judge(script, kind, outcomes)
            if verdict.is_fault and not verdict.detail.startswith("hangs"):
                for other in ("stock", "plain") if kind in COMPILED else ("stock",):
                    outcomes[other] = outcomes.get(other) or self.outcome(script, other)
                verdict = self._judge(script, kind, outcomes)
            result.verdicts.append(verdict)
        if "stock" in outcomes:
            stock = self._judge(script, "stock", outcomes)
            result.stock = " ".join([stock.word.replace("fault", ""), *stock.detail.splitlines()[:1]])
        return result

    def _judge(self, script: Script, kind: str, outcomes: Outcomes) -> Verdict:
        return judge(kind, outcomes, low_precision=script.low_precision, is_whole=script.is_whole)

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


def sort_of(verdict: Verdict) -> str:
    """Differences, hangs, silence, and each type of error."""
    words = verdict.detail.split()
    return " ".join(words[:2]) if words[0] == "raises" else words[0]
