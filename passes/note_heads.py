"""Note on each flat buffer of a joint graph which outputs lead to its parameters, where not all do.

Before, and after, since nothing is rewritten:

    %y0 = mul(%x, %flat0)
    %y1 = mul(%x, %flat1)
    %g0 = reduce_grad(mul(%tangents_1, %x), %flat0)
    %g1 = reduce_grad(mul(%tangents_2, %x), %flat1)

Of two outputs, 0 leads to offset 0 of `%flat0`, and 1 leads to offset 0 of `%flat1`.

A graph has one backward for all of its outputs, and takes zeros for the gradients of those that
nobody used; an optimizer with weight decay or momentum would move what they lead to. So the joint
graph says which outputs lead to which parameters, and `watch_heads` brings that along.

Requires: a joint graph, in which each gradient is reduced once.
Ensures: the node of each flat buffer with such parameters, in either half too, says how many
    outputs have gradients and, by offset, which of them a parameter's gradient is made of.
Leaves alone: every node; parameters that no output leads to, or all do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.descriptors import differentiated
from compiled_fsdp.ir.graph import placeholders
from compiled_fsdp.ir.meta import set_heads
from compiled_fsdp.ir.schema import REDUCE_GRAD, param_spec

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def note_heads(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    tangents = [node for node in placeholders(gm.graph) if node.name.startswith("tangents")]
    outputs = list(dict.fromkeys(map(differentiated, tangents)))
    made_of = {node: frozenset([outputs.index(differentiated(node))]) for node in tangents}
    for flat, of_flat in _heads(gm.graph, made_of).items() if len(outputs) > 1 else ():
        some = {
            offset: sorted(heads)
            for offset, heads in of_flat.items()
            if 0 < len(heads) < len(outputs)
        }
        if some:
            set_heads(flat, (len(outputs), some))
    return gm


def _heads(
    joint: Graph, made_of: dict[Node, frozenset[int]]
) -> dict[Node, dict[int, frozenset[int]]]:
    """By flat buffer and offset: the outputs whose gradients a parameter's gradient is made of, by
    number; told by which a gradient that comes in is.
    """
    heads: dict[Node, dict[int, frozenset[int]]] = {}
    for node in joint.nodes:
        if node.op == "placeholder":
            continue
        made_of[node] = frozenset[int]().union(
            *(made_of.get(source, ()) for source in node.all_input_nodes)
        )
        if node.target is REDUCE_GRAD:
            grad, flat = node.args[:2]
            offset = param_spec(node).offset
            of_flat = heads.setdefault(flat, {})
            of_flat[offset] = of_flat.get(offset, frozenset()) | made_of[grad]
    return heads
