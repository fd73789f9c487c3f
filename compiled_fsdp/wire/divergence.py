"""Errors for ranks that communicate differently, or do not come, and the text that says how."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import torch.distributed as dist

from . import leaving

if TYPE_CHECKING:
    from collections.abc import Sequence


class DivergenceError(RuntimeError):
    """Ranks that share a process group are about to communicate differently."""


class CommunicationError(RuntimeError):
    """A collective failed because another rank died, raised or stalls.

    said, peer: the backend's words, and the rank in the group that was waited for, if that is
    known.
    """

    def __init__(self, text: str, said: str, peer: int | None) -> None:
        super().__init__(text)
        self.said, self.peer = said, peer


def describe(
    process_group: dist.ProcessGroup,
    texts: list[str],
    reasons: Sequence[str] = (),
    parting: Sequence[str] = (),
) -> str:
    """The error for texts that differ: who has which, and the first difference as a diff; what
    ranks say of why, where they parted before, and what to do.
    """
    ranks = dist.get_process_group_ranks(process_group)
    kinds: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        kinds.setdefault(text, []).append(rank)
    names = [
        f"  ranks {who}: {text.splitlines()[0] if text else 'silent'}"
        for text, who in kinds.items()
    ]
    shown = [(text, who) for text, who in kinds.items() if text]
    lines: list[str] = []
    if len(shown) > 1:
        (one, first), (two, second) = shown[:2]
        names_of_two = f"rank {first[0]}", f"rank {second[0]}"
        lines = list(
            difflib.unified_diff(
                one.splitlines(), two.splitlines(), *names_of_two, lineterm="", n=2
            )
        )[:60]
    said = [f"  rank {rank} {why}" for rank, why in zip(ranks, reasons, strict=False) if why]
    do = (
        "Look for different models, a branch that depends on data or on the rank, or a rank that "
        "does not compile"
    )
    if any(map(leaving.is_reduction, texts)):
        do = (
            "Look for parameters that have gradients on some ranks only (of an expert without "
            "tokens, a modality); set_reduce_scatter_unused_params(True) lets the others reduce "
            "zeros for them"
        )
    elif any(map(leaving.is_outside, texts)) and any(
        t and not leaving.is_outside(t) for t in texts
    ):
        do = (
            "Some run a unit in a graph and others outside, as where Dynamo breaks the graph on "
            "some ranks only, at `if rank == 0: print(x)` in forward. Return what one rank needs "
            "and print it behind the call, let all ranks do the same, or do not compile that module"
        )
    return "\n".join(
        [
            f"compiled_fsdp: the ranks of process group {process_group.group_name!r} are about to "
            "communicate differently:",
            *names,
            *lines,
            *said,
            *parting,
            "Ranks that share a group must run the same collectives in the same order. "
            f"{do}; none of this was communicated",
        ]
    )
