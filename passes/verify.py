"""Check the invariants of a finished graph; changes nothing.

Each invariant is one function below; its docstring is the rule that an error quotes.

Requires: a lowered graph in its final order.
Ensures: the graph keeps every rule, or `GraphInvariantError` names the first one broken, with the nodes around the place.
Leaves alone: everything.
"""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import TYPE_CHECKING

from compiled_fsdp.collectives import GATHERS, WAIT
from compiled_fsdp.errors import GraphInvariantError
from compiled_fsdp.graph import aliases, find, order, output, starts
from compiled_fsdp.meta import get_tag, saved_for_backward
from compiled_fsdp.planner import REDUCTIONS
from compiled_fsdp.regions import find_regions
from compiled_fsdp.schema import FREE, MARK_GRADS, REDUCE_GRAD, REDUCE_LATER, UNSHARD, UNSHARD_SLICE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import GraphModule, Node

    from compiled_fsdp.plan import Plan

    Violations = Iterator[tuple[Node, str]]


def verify(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    for invariant in INVARIANTS:
        for node, detail in invariant(gm, plan):
            rule = (invariant.__doc__ or "").strip()
            raise GraphInvariantError("the pipeline", rule, detail, node)
    return gm


def lowered(gm: GraphModule, plan: Plan) -> Violations:
    """Every fsdp op that communicates has been lowered to collectives."""
    for node in find(gm.graph, UNSHARD, UNSHARD_SLICE, REDUCE_GRAD):
        yield node, f"%{node.name} is still an fsdp op"


def waited_once(gm: GraphModule, plan: Plan) -> Violations:
    """Every collective is awaited exactly once, or its wait is left to the unit, and nothing else reads its result."""
    for node in starts(gm.graph):
        users = list(node.users)
        if len(users) != 1 or users[0].target not in (WAIT, REDUCE_LATER):
            yield node, f"%{node.name} is read by {[f'%{u.name}' for u in users]}"


def gathered_once(gm: GraphModule, plan: Plan) -> Violations:
    """Every parameter is gathered at most once over a group in a graph."""
    seen: dict[tuple[str, str, str], Node] = {}
    for region in find_regions(gm.graph, "gather"):
        for spec in region.tag.specs:
            before = seen.setdefault((spec.unit, spec.fqn, spec.group), region.nodes[0])
            if before is not region.nodes[0]:
                yield region.nodes[0], f"{spec.fqn} is gathered here and at %{before.name}"


def uniform_buckets(gm: GraphModule, plan: Plan) -> Violations:
    """All members of a bucket have the same group, dtype and way of reducing."""
    for kind in ("gather", "reduce"):
        for region in find_regions(gm.graph, kind):
            ways = {(s.group, s.dtype, s.reduction if kind == "reduce" else None) for s in region.tag.specs}
            if len(ways) > 1:
                yield region.nodes[0], f"members of the bucket of {region.tag.unit} differ: {sorted(map(str, ways))}"


def no_use_after_free(gm: GraphModule, plan: Plan) -> Violations:
    """No gathered buffer, nor a view of it, is read after its free."""
    position = order(gm.graph)
    for free in find(gm.graph, FREE):
        for alias in aliases(free.all_input_nodes[0]):
            for user in alias.users:
                if position[user] > position[free]:
                    yield user, f"%{user.name} reads %{alias.name} after it is freed"


def nothing_gathered_saved(gm: GraphModule, plan: Plan) -> Violations:
    """No graph saves storage of a parameter that is to be dropped after forward; what the user returns is the user's."""
    saved = set(saved_for_backward(output(gm.graph)))
    for wait in find(gm.graph, WAIT):
        tag = get_tag(wait)
        if tag is None or tag.kind != "gather" or wait.all_input_nodes[0].target not in GATHERS:
            continue
        kept = [s.fqn for s in tag.specs if s.reshard == "keep"]
        for alias in aliases(wait):
            if alias in saved and not kept:
                names = [s.fqn for s in tag.specs]
                yield alias, f"%{alias.name} is saved for backward and shares storage with the gathered {names}"


def gradients_marked(gm: GraphModule, plan: Plan) -> Violations:
    """Every fully reduced gradient is named by exactly one mark_grads_ or reduce_later_."""
    marked = Counter(offset for node in find(gm.graph, MARK_GRADS, REDUCE_LATER) for offset in node.args[2])  # type: ignore[union-attr]
    regions = find_regions(gm.graph, "reduce")
    reduced = Counter(spec.offset for region in regions for spec in region.tag.specs if spec.sync == "reduce")
    if marked != reduced:
        where = regions[0].nodes[0] if regions else output(gm.graph)
        yield where, f"offsets reduced {dict(reduced)} are not the offsets marked {dict(marked)}"


def bounded_in_flight(gm: GraphModule, plan: Plan) -> Violations:
    """No more reductions that the graph awaits are under way at once than the plan, or the user for a unit, allows."""
    first_waits = {r.waits[0]: r for r in find_regions(gm.graph, "reduce") if r.starts and r.waits}
    first_starts = {r.starts[0] for r in first_waits.values()}
    distance = plan.distance("reduces_in_flight")
    asked = [r.spec.reduces_in_flight or (REDUCTIONS if distance is None else distance) for r in first_waits.values()]
    limit = max(1, *map(ceil, asked)) if asked else 1
    under_way = 0
    for node in gm.graph.nodes:
        under_way += (node in first_starts) - (node in first_waits)
        if under_way > limit:
            yield node, f"%{node.name} is the {under_way}th reduction under way; the plan allows {limit}"


INVARIANTS: tuple[Callable[[GraphModule, Plan], Violations], ...] = (
    lowered,
    waited_once,
    gathered_once,
    uniform_buckets,
    no_use_after_free,
    nothing_gathered_saved,
    gradients_marked,
    bounded_in_flight,
)
