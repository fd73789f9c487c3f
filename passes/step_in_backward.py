"""Let the optimizer step a unit inside backward, where its gradients are reduced, instead of
returning them.

Before, in a graph that returns `%y` and `%g1`:

    %r1 = reduce_scatter(%rows1)
    %g1 = div(wait(%r1), world)
    mark_grads_(%g1, %flat1, offsets1)
    %y = compute(%rows1)

After, in one that returns `%y` and None:

    %r1 = reduce_scatter(%rows1)
    %g1 = div(wait(%r1), world)
    step_(%g1, %flat1, offsets1)
    %y = compute(%rows1)

So a gradient lives no longer than it takes to use it, and what forward gathers again may be
gathered while backward computes on (`overlap.py`). Like the optimizers in backward of Lv et al.
(LOMO, 2023) and of torch's `_apply_optimizer_in_backward`.

Requires: the final order of waits.
Ensures: what is still marked and returned is handed to the optimizer where it is marked, and the
    graph returns None for it. The flat buffer is written there, after everything that reads it.
Leaves alone: units that did not ask for it (`overlap`); reductions left in flight, whose units are
    stepped as they arrive; flat buffers that anything reads later, or a collective that is not
    awaited by then; gradients that something else reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compiled_fsdp.ir.graph import Builder, find, last_read, order, output
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.schema import MARK_GRADS, STEP
from compiled_fsdp.ir.spec import IN_BACKWARD, ParamSpec

from .base import consume

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def step_in_backward(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    position, end = order(gm.graph), output(gm.graph)
    for mark in find(gm.graph, MARK_GRADS):
        root: Any = mark.args[0]
        flat: Any = mark.args[1]
        spec = _spec(root)
        if (
            spec.overlap == IN_BACKWARD
            and set(root.users) == {mark, end}
            and last_read(flat, position) < position[mark]
        ):
            consume(gm, unit=spec.unit)
            Builder(mark, mark)(STEP, *mark.args)
            gm.graph.erase_node(mark)
            end.args = (tuple(None if entry is root else entry for entry in end.args[0]),)  # type: ignore[union-attr]
    return gm


def _spec(root: Node) -> ParamSpec:
    """Returns the first of the parameters whose gradients a flat gradient was put together from."""
    node = root
    while (tag := get_tag(node)) is None:
        node = node.all_input_nodes[0]
    return tag.specs[0]
