"""Private torch: subgraphs that Inductor lowers once and calls, and those of operators like `cond`.

Tried on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor import config
from torch._ops import HigherOrderOperator

# Operators that have their functions as graphs of their own up to the end: AOTAutograd inlines others.
KEEP_GRAPHS = frozenset({"cond", "while_loop", "scan", "map_impl", "flex_attention"})


def why_inline() -> str:
    """Returns why Inductor is to compile every layer for its place: its C++ wrapper has no
    functions for subgraphs, and with CUDA graphs nobody has tried them; "" where it may call them.
    """
    if config.cpp_wrapper:
        return "Inductor's C++ wrapper calls no subgraphs"
    return "not tried with CUDA graphs" if config.triton.cudagraphs else ""


def keep_memory_apart() -> None:
    """Let a subgraph's memory be its own, once for all.

    Before 2.15 a subgraph of a backward takes its inputs for the outer graph's of the same number,
    and may write into those that the outer one was given for good ("donated"). And to the outer
    graph each result is a buffer of its own, also one that lies in an argument or in another
    result: memory of such calls is never used again.
    """
    from torch._inductor import graph, ir  # more than a second: only if Inductor compiles
    from torch._inductor.virtualized import V

    made: Any = graph.SubgraphLowering.__init__
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def init(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self.bw_donated_idxs = None

    create = ir.InvokeSubgraph.create

    @functools.wraps(create)
    def then_keep(subgraph: Any, *operands: Any) -> Any:
        results = create(subgraph, *operands)
        inside = subgraph.graph
        names = [*inside.graph_inputs, *(each.get_name() for each in inside.graph_outputs)]
        if len({*names}) < len(names):
            V.graph.never_reuse_buffers.update(each.get_name() for each in (*operands, *results))
        return results

    changed: Any = graph.SubgraphLowering
    changed.__init__ = init
    invoke: Any = ir.InvokeSubgraph
    invoke.create = then_keep


def operator_name(target: object) -> str:
    """The name of an operator that is given functions, `cond` say; "" for anything else."""
    return target.name() if isinstance(target, HigherOrderOperator) else ""
