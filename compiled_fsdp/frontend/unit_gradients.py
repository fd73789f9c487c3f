"""Which gradients a call of a subgraph has, and which it would make up.

AOTAutograd differentiates a graph by all its results at once. Where each op is differentiated by
itself, a value that leads to none of these has no gradient: None. `invoke_subgraph` gives zeros to
each of its arguments that needs a gradient, as soon as one of its results has one; an optimizer
then moves by weight decay what it would have passed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.ir.graph import op_name
from compiled_fsdp.ir.meta import traced_value
from compiled_fsdp.torch_private.subgraphs import AsItStands

from .written import OPERATORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, GraphModule, Node

# Take only the dtype, the device or the shape of what is not their first argument.
LOOK_ONLY = ("type_as", "to", "expand_as", "view_as", "reshape_as")


def needs_grad(node: Node) -> bool:
    """Whether autograd follows what a node of Dynamo's graph yields; a mesh, and whatever else is
    no tensor, it does not.
    """
    values = traced_value(node)
    return any(
        isinstance(value, torch.Tensor) and value.requires_grad
        for value in (values if isinstance(values, list | tuple) else [values])
    )


def that_lead_out(graph: Graph) -> set[Node]:
    """What the results of a graph have a gradient for. What is written into a view of something
    alone is left out: who reads that is not followed.
    """
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in found or _written_to(node) in found:
            found.update(each for each in _differentiated(node) if needs_grad(each))
    return found


def _written_to(node: Node) -> object:
    """What a node writes to in place, `y` of `y.add_(x)`, `y += x` and `y[0] = x`; None if it does
    not.
    """
    name = op_name(node.target)
    is_write = node.target in OPERATORS or (name.endswith("_") and not name.endswith("__"))
    return node.args[0] if is_write and node.args else None


def _differentiated(node: Node) -> list[Node]:
    if node.op == "output":
        return [each for each in node.all_input_nodes if each.op != "get_attr"]
    name = op_name(node.target)
    first = node.args[:1] if name in LOOK_ONLY else node.all_input_nodes
    return [each for each in first if isinstance(each, torch.fx.Node) and each.op != "get_attr"]


def gradients_of(body: GraphModule, inputs: Sequence[Any]) -> list[set[int]]:
    """For each result of a graph, which of its inputs has a gradient from it,
    found out on fake tensors like `inputs`.
    """
    with inputs[0].fake_mode, torch.enable_grad():
        given = [
            torch.empty_strided(
                t.shape, t.stride(), dtype=t.dtype, device=t.device, requires_grad=t.requires_grad
            )
            for t in inputs
        ]
        results = AsItStands(body).run(*given)
        wanted = [i for i, t in enumerate(given) if t.requires_grad]
        found = []
        for result in results:
            grads: Sequence[Any] = ()
            if result.requires_grad and wanted:
                grads = torch.autograd.grad(
                    result,
                    [given[i] for i in wanted],
                    torch.empty_like(result),
                    retain_graph=True,
                    allow_unused=True,
                )
            found.append({i for i, g in zip(wanted, grads, strict=False) if g is not None})
    return found
