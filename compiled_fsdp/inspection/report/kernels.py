"""Which module computes when, in a measured run: heavy kernels by the order of their ops."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiled_fsdp.dump.layout import Interval
    from compiled_fsdp.inspection.dump_folder import DumpedGraph
    from compiled_fsdp.inspection.profiles import Event


def heavy(ops: list[Event], graph: DumpedGraph) -> list[tuple[Event, str, str]]:
    """Returns the ops that are heavy kernels of the graph, each with its node and module.

    The n-th `aten::mm` that ran is the graph's n-th `mm`, wherever there are as many.
    """
    run = graph.expected
    rows: dict[str, list[tuple[str, str]]] = {}
    for _, _, node, module in run["compute"]:
        rows.setdefault(re.sub(r"_\d+$", "", node), []).append((node, module))
    by_name: dict[str, list[Event]] = {}
    for op in ops:
        by_name.setdefault(op.name.removeprefix("aten::"), []).append(op)
    found = [
        (op, *named)
        for name, ran in by_name.items()
        if len(ran) == len(rows.get(name, ()))
        for op, named in zip(ran, rows[name], strict=True)
    ]
    return sorted(found, key=lambda entry: entry[0].begin)


def computing(
    intervals: list[tuple[float, float]], ops: list[Event], begin: float, graph: DumpedGraph
) -> list[Interval]:
    """Returns intervals of computation cut where a heavy kernel begins: from there on it is that
    kernel and the light ones after it.
    """
    found: list[Interval] = []
    known = [(op.begin - begin, node, module) for op, node, module in heavy(ops, graph)]
    for start, end in intervals:
        inside = [entry for entry in known if start <= entry[0] < end]
        cuts = [(start, "", ""), *inside]
        ends = [cut[0] for cut in cuts[1:]] + [end]
        found += [
            (at, until, node, module)
            for (at, node, module), until in zip(cuts, ends, strict=True)
            if until > at
        ]
    return found
