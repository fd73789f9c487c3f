"""Where ranks parted before it was noticed, for the errors.

A run that all ranks know is counted and not compared (`agreement.py`). A rank that runs one of
these once more than the others, or leaves one out, is therefore found later, at a run that is new
to somebody, and what differs there may say nothing of why. So a rank that finds out publishes what
it ran before, and the error shows the first difference.
"""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING

import torch.distributed as dist

from compiled_fsdp.ir.sequence import same_where_known

from .members import Member, texts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

KEPT = 256  # runs that are looked through
SHOWN = 40  # lines of the difference


def publish(group: Member, number: int) -> None:
    """Let the others know the texts of this rank's runs before that number."""
    first = max(1, number - KEPT)
    digests = [group.digest_of_run(at) for at in range(first, number)]
    texts = {digest: texts_of.get(digest, "") for digest in digests}
    before = json.dumps(
        [first, [list(texts).index(digest) for digest in digests], [*texts.values()]]
    )
    group.store.set(f"{number}/before/{group.rank}", before)


def parting(group: Member, number: int, texts: Sequence[str]) -> list[str]:
    """Lines about the first run before that number at which the rank of the first of these texts
    and that of the first other one parted; none if they did not, or are not known to have.

    texts: by rank, of the run of that number, "" for those that are silent.
    """
    one = next((rank for rank, text in enumerate(texts) if text), None)
    two = next((rank for rank, text in enumerate(texts) if text not in ("", texts[one or 0])), None)
    if one is None or two is None:
        return []
    (first, mine), (first_of_two, theirs) = (_read(group, number, rank) for rank in (one, two))
    start = max(first, first_of_two)
    mine, theirs = mine[start - first :], theirs[start - first_of_two :]
    pairs = list(zip(mine, theirs, strict=True))
    apart = next((at for at, pair in enumerate(pairs) if not _alike(*pair)), None)
    if apart is None:
        return []
    ranks = dist.get_process_group_ranks(group.process_group)
    when = "by" if apart == 0 and start > 1 else "at"  # what was before is not looked through
    shown = max(0, apart - 2)
    diff = difflib.unified_diff(
        [_head(text) for text in mine[shown:]],
        [_head(text) for text in theirs[shown:]],
        f"rank {ranks[one]}, runs {start + shown} to {number - 1}",
        f"rank {ranks[two]}",
        lineterm="",
        n=2,
    )
    return [
        f"They parted {when} run {start + apart}; this is run {number}. Those between were known "
        "to all ranks, and such runs are counted, not compared:",
        *(line for line in list(diff)[:SHOWN] if not line.startswith("@@")),
    ]


def _read(group: Member, number: int, rank: int) -> tuple[int, list[str]]:
    key = f"{number}/before/{rank}"
    if not group.store.check([key]):
        return number, []
    first, places, texts = json.loads(group.store.get(key))
    return first, [texts[place] for place in places]


def _alike(one: str, two: str) -> bool:
    return one == two or same_where_known([one, two])


def _head(text: str) -> str:
    """A run in one line: what it is, and of an eager one, of which parameters."""
    lines = text.splitlines()
    return ": ".join(lines) if len(lines) == 2 else (lines or ["forgotten"])[0]
