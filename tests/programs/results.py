"""What became of each program: a line of JSON each, and a table of all."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from programs.source import script

if TYPE_CHECKING:
    from collections.abc import Iterable

    from programs.hunt import Result
    from programs.program import Program
    from programs.verdict import Verdict

Line = dict[str, Any]


def line_of(program: Program, result: Result, seconds: float) -> Line:
    """One program; its script only if something is wrong with it."""
    this = script(program)
    line: Line = {
        "seed": program.seed,
        "world": program.world,
        "way": program.way,
        "statements": sorted(program.names()),
    }
    line |= {"seconds": round(seconds, 2), "invalid": result.invalid[:1000]}
    line["verdicts"] = {v.kind: _words(v) for v in result.verdicts}
    line["said"] = sorted(result.said)
    if result.stock:
        line["stock"] = {"word": result.stock.word, "detail": result.stock.detail[:300]}
    if result.faults or result.invalid:
        line["script"] = this.header() + this.source
    return line


def _words(verdict: Verdict) -> dict[str, object]:
    equal = {"exact": verdict.is_exact, "as_eager": verdict.as_eager}
    return {"word": verdict.word, **equal, "detail": verdict.detail[:1000]}


def write(path: str, lines: Iterable[Line]) -> None:
    """All of them, by seed."""
    with open(path, "w") as out:
        out.writelines(
            json.dumps(line) + "\n" for line in sorted(lines, key=lambda line: line["seed"])
        )


def read(path: str) -> list[Line]:
    """Those that were written whole."""
    with open(path) as file:
        return [json.loads(text) for text in file if text.endswith("\n")]


def table(lines: Iterable[Line]) -> str:
    """How many of each kind, ranks and verdict."""
    counts: Counter[tuple[str, int, str]] = Counter()
    for line in lines:
        if line["invalid"]:
            counts["unsharded", line["world"], "invalid"] += 1
        for kind, verdict in line["verdicts"].items():
            counts[
                kind, line["world"], verdict["word"] + (" exactly" if verdict["exact"] else "")
            ] += 1
        if "stock" in line:
            word = line["stock"]["word"].replace("fault", "differs or raises")
            counts["stock", line["world"], word] += 1
    rows = [
        f"{kind:12}{world} ranks  {word:24}{number:6}"
        for (kind, world, word), number in sorted(counts.items())
    ]
    return "\n".join(rows)
