"""Programs until every pair has been in one: what is refused or wrong is shrunk, and left out of
those that follow.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pairs.verdict import shrunk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pairs.cover import Cover
    from pairs.verdict import Judge


def hunt(
    cover: Cover, judge: Judge, until: float, *, shrinks: bool = True
) -> Iterator[dict[str, Any]]:
    """A line for each program, which it prints."""
    for program in cover:
        if time.time() > until:
            return
        began = time.monotonic()
        verdict = judge(program)
        seconds = time.monotonic() - began
        names = program
        if verdict.word == "equal":
            cover.done(program)
        else:
            if shrinks:
                names, verdict = shrunk(judge, program, verdict)
            cover.refuse(names)
        line = {
            "program": sorted(program),
            "word": verdict.word,
            "of": sorted(names),
            "text": verdict.text,
            "unused": verdict.unused,
            "seconds": round(seconds, 1),
            "left": len(cover.left),
        }
        print(
            f"{len(cover.left):5} {seconds:5.1f} s {verdict.word:8} {' '.join(sorted(names))}: "
            f"{verdict.text[:700]} {' '.join(verdict.unused)}",
            flush=True,
        )
        yield line
