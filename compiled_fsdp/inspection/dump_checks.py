"""Compares the graphs of dumps, and checks them again."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from compiled_fsdp.dump.counts import Counts
from compiled_fsdp.ir.collectives import CONVERT, is_own_group
from compiled_fsdp.ir.graph import find, starts
from compiled_fsdp.ir.meta import get_tag, set_captured
from compiled_fsdp.ir.printer import collectives, printable, show
from compiled_fsdp.ir.sequence import same_where_known, sequence_over
from compiled_fsdp.passes.verify import check
from compiled_fsdp.planning.costs import nbytes
from compiled_fsdp.planning.memory import profile
from compiled_fsdp.verification.invariant import GraphInvariantError
from compiled_fsdp.verification.meaning import Captured

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import GraphModule

    from .dump_folder import Dumped, DumpedGraph, DumpedRank


def difference(before: Dumped, after: Dumped) -> str:
    """Returns what communicates, casts and frees in two graphs, and their peaks; "" if that is all
    the same.
    """
    lines = [
        f"  {name}: {old} -> {new}"
        for (name, old), (_, new) in zip(totals(before.gm), totals(after.gm), strict=True)
        if old != new
    ]
    one, two = collectives(before.gm.graph), collectives(after.gm.graph)
    lines += difflib.unified_diff(one, two, before.where, after.where, lineterm="", n=2)
    return "\n".join([f"{before.where} -> {after.where}", *lines]) if lines else ""


def totals(gm: GraphModule) -> list[tuple[str, str]]:
    """How much a graph communicates, and its peak."""
    counts = Counts.of(gm.graph)
    sent = int(sum(nbytes(n) for start in starts(gm.graph) for n in start.all_input_nodes))
    casts = sum(get_tag(node) is not None for node in find(gm.graph, CONVERT))
    return [
        ("all-gathers", str(counts.gathers)),
        ("reductions", str(counts.reductions)),
        ("bytes put into collectives", str(sent)),
        ("casts of parameters and gradients", str(casts)),
        ("frees", str(counts.frees)),
        ("peak above rest", f"{profile(gm.graph).peak} bytes"),
    ]


# -- checking


def violations(ranks: list[DumpedRank]) -> Iterator[str]:
    """Yields what is wrong with the graphs of a dump, each as a text of its own: every invariant
    after every pass, the texts beside the graphs, and that ranks which share a group communicate
    alike over it.
    """
    for rank in ranks:
        for graph in rank.graphs:
            yield from _check_graph(graph)
    yield from _check_agreement(ranks)


def _check_graph(graph: DumpedGraph) -> Iterator[str]:
    captured = Captured(graph.passes[0].gm.graph) if graph.is_half else None
    is_lowered = False
    for entry in graph.passes:
        if show(entry.gm.graph) != entry.text.partition("\n")[2].rstrip("\n"):
            yield (
                f"{entry.where}: the text is not that of the graph in the .json.gz beside it; one "
                "of them was changed"
            )
        is_lowered = is_lowered or entry.name == "lower"
        if captured is None or not is_lowered:
            continue
        set_captured(entry.gm, captured)
        try:
            check(entry.gm, entry.plan, f"{entry.name} in {graph.path}")
        except GraphInvariantError as error:
            yield f"{entry.where}: {error}"
            return


def _check_agreement(ranks: list[DumpedRank]) -> Iterator[str]:
    """Each group's ranks have the same collectives over it, in the same order."""
    seen: dict[tuple[bool, tuple[int, ...]], tuple[int, list[str]]] = {}
    for rank in ranks:
        for name, members in rank.settings["groups"].items():
            lines = [
                line
                for g in rank.graphs
                if g.is_half
                for line in sequence_over(g.after(None).gm.graph, name)
            ]
            # Ranks may call a group differently, and some have a second one for exchanges.
            which = is_own_group(name), tuple(members)
            number, known = seen.setdefault(which, (rank.rank, lines))
            if not same_where_known(["\n".join(known), "\n".join(lines)]):
                changes = list(
                    difflib.unified_diff(
                        known, lines, f"rank {number}", f"rank {rank.rank}", lineterm="", n=2
                    )
                )
                shown = "\n".join(changes[:40])
                yield (
                    f"ranks {number} and {rank.rank} communicate differently over group "
                    f"{printable(repr(name))}:\n{shown}"
                )
