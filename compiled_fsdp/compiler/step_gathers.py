"""Which parameters a whole step gathers once where it would gather them twice.

Where forward turns into backward, dropping parameters and gathering them again at once would gain
nothing: backward reads what forward has gathered last. Those that forward gathers first may be
gathered as soon as the step before has updated them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.regions import together
from compiled_fsdp.ir.schema import UNSHARD, param_spec
from compiled_fsdp.ir.spec import AGAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, Node

    from compiled_fsdp.ir.spec import ParamSpec
    from compiled_fsdp.planning.plan import Plan


def gathered_last(forward: Graph, plan: Plan) -> dict[tuple[object, ParamSpec], Node]:
    """The parameters that would be gathered again of the last unit that forward gathers, and of
    those before it that fit into a bucket with it, for each micro-batch: by flat buffer and
    settings.

    Also those of the bucket before, if by its distance backward would gather it while forward still
    computes with the last: the new buffer would be there when the old one is dropped. Not where
    fewer than two other units are left, since then backward has nothing to gather ahead.
    """
    batches: dict[int, dict[str, list[Node]]] = {}
    for node in find(forward, UNSHARD):
        spec = param_spec(node)
        if spec.reshard == "gather" and spec.group_size > 1:
            batches.setdefault(spec.batch, {}).setdefault(spec.unit, []).append(node)
    distance = plan.distance("backward_prefetch")
    is_early = distance is not None and distance >= 1 and plan.memory_budget is None
    kept: list[Node] = []
    for units in batches.values():
        last = _last_units(units, plan)
        names = {param_spec(node).unit for node in last}
        others = {name: nodes for name, nodes in units.items() if name not in names}
        before = _last_units(others, plan) if is_early else []
        is_left = len(others) >= len({param_spec(node).unit for node in before}) + 2
        kept += [*last, *(before if is_left else ())]
    return {(node.args[0], param_spec(node)): node for node in kept}


def _last_units(units: dict[str, list[Node]], plan: Plan) -> list[Node]:
    """The parameters of the last unit, and of those before it that fit into a bucket with it."""
    kept: list[Node] = []
    for nodes in reversed(units.values()):
        joined = [*kept, *nodes]
        limit = plan.bucket_limit(param_spec(nodes[0]).group)
        if kept and _full_bytes(joined) > limit:
            break
        kept = joined
    return kept


def gathered_first(graph: Graph, plan: Plan, room: float) -> list[Node]:
    """The parameters of the units that forward gathers first, while they are no larger than `room`
    bytes: they may be gathered when the step before has updated them. Not under a memory budget.

    Up to the first unit that has several buffers or shares a gather with others, or is gathered
    otherwise than by the plain collective from where it is computed with: what is gathered for the
    next step goes over the wire before that, and forward would wait for all of it.
    """
    units: dict[str, list[Node]] = {}
    for node in find(graph, UNSHARD):
        spec = param_spec(node)
        if spec.reshard != AGAIN and not spec.batch and spec.group_size > 1:
            units.setdefault(spec.unit, []).append(node)
    if plan.memory_budget is not None or not units:
        return []
    limit = plan.bucket_limit(param_spec(next(iter(units.values()))[0]).group)
    found: list[Node] = []
    for bucket in together(units.values(), _full_bytes, limit):
        (nodes, *others), specs = bucket, [param_spec(node) for node in bucket[0]]
        room -= _full_bytes(nodes)
        is_plain = not any(s.gather_algorithm or s.device or s.forward_after for s in specs)
        flat, *flats = {cast("Node", node.args[0]) for node in nodes}
        is_one = not others and not flats and flat.op == "placeholder"
        if room < 0 or not (is_plain and is_one):
            break
        found += nodes
    return found


def _full_bytes(nodes: Sequence[Node]) -> int:
    return sum(param_spec(node).full_bytes() for node in nodes)
