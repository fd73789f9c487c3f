"""Private torch: subgraphs that Inductor lowers once and calls. Tried on torch 2.11, 2.13 and 2.15."""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor import config, graph, ir
from torch._inductor.virtualized import V


def calls_subgraphs() -> bool:
    """Whether Inductor makes functions of subgraphs: not of its C++ wrapper, nor, as nobody has
    tried it with ours, for CUDA graphs.
    """
    return not config.cpp_wrapper and not config.triton.cudagraphs


def keep_memory_apart() -> None:
    """Let a subgraph's memory be its own, once for all.

    Before 2.15 a subgraph of a backward takes its inputs for the outer graph's of the same number,
    and may write into those that the outer one was given for good ("donated"). And a result that
    lies in an input, or in another result, is a buffer of its own to the outer graph: then none of
    them may be used again.
    """
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
        names = [each.get_name() for each in subgraph.graph.graph_outputs]
        if len({*names, *subgraph.graph.graph_inputs}) < len(names) + len(
            subgraph.graph.graph_inputs
        ):
            tensors = [each for each in (*operands, *results) if isinstance(each, ir.TensorBox)]
            V.graph.never_reuse_buffers.update(each.get_name() for each in tensors)
        return results

    changed: Any = graph.SubgraphLowering
    changed.__init__ = init
    invoke: Any = ir.InvokeSubgraph
    invoke.create = then_keep
