"""The timeline of a finished graph: `timeline.json.gz` of a dump, from which the report is made.

Names are those of the graph, as they are: whoever shows them escapes them.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.collectives import group_of
from compiled_fsdp.ir.graph import find, placeholders, starts, value
from compiled_fsdp.ir.meta import get_tag, module_of
from compiled_fsdp.ir.schema import EXCHANGE, traits_of
from compiled_fsdp.planning.costs import assumed, nbytes, traffic
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.planning.planner import program, simulate
from compiled_fsdp.torch_private.groups import group_named

from .settings import environment, settings

if TYPE_CHECKING:
    from torch.fx import Graph, Node

    from compiled_fsdp.planning.costs import Costs

    from . import layout
    from .layout import Collective, Head, Interval, Run, Timeline, Times

NOT_SHOWN = -1  # in "waits": for a collective of the user's that is not in the list


def timeline(graph: Graph, head: Head) -> Timeline:
    """The collectives of a graph, and when each is expected to start, travel and be awaited."""
    measured = current_plan().costs
    costs = measured or assumed(_device(graph))
    nodes = starts(graph)
    numbers = {node: number for number, node in enumerate(nodes)}
    return {
        **head,
        "costs": _costs(costs, is_assumed=measured is None),
        "settings": {**settings(), "environment": environment()},
        "groups": {group: _ranks(group) for group in sorted({group_of(node) for node in nodes})},
        "collectives": [_collective(node) for node in nodes],
        "waits": [
            numbers.get(wait.all_input_nodes[0], NOT_SHOWN) for wait in find(graph, comm.WAIT)
        ],
        "plain": _run(graph, nodes, costs.fused(False)),
        "fused": _run(graph, nodes, costs.fused(True)),
    }


def _costs(costs: Costs, *, is_assumed: bool) -> layout.Costs:
    return {
        "flops": costs.flops,
        "bandwidth": costs.bandwidth,
        "overhead": costs.overhead,
        "links": {name: asdict(link) for name, link in costs.links},
        "is_fused": costs.is_fused,
        "kernels": list(costs.kernels),
        "is_assumed": is_assumed,
    }


def _device(graph: Graph) -> str:
    """Returns where it computes: some of its inputs may rest on the host."""
    values = (node.meta.get("val") for node in placeholders(graph))
    found = {v.device.type for v in values if isinstance(v, torch.Tensor)}
    return next(iter(sorted(found - {"cpu"})), "cpu")


def _ranks(group: str) -> list[int]:
    """The ranks of a group; none without process groups."""
    if not dist.is_initialized():
        return []
    first = group_named(comm.shared_group(group))  # a second one is made when the graph runs
    return list(dist.get_process_group_ranks(first))


def _collective(start: Node) -> Collective:
    """Returns what a collective carries: bytes of full tensors, and what this rank sends."""
    tag = get_tag(start)
    specs = () if tag is None else tag.specs
    kind = traits_of(start.target).starts
    sent, group = traffic(start)
    return {
        "node": start.name,
        "op": start.target._opname,  # type: ignore[union-attr]
        "kind": (
            "exchange"
            if start.target is EXCHANGE
            else kind
            if kind in ("gather", "all_reduce")
            else "reduce"
        ),
        "is_ours": tag is not None,
        "units": list(dict.fromkeys(spec.unit.split("#")[0] for spec in specs)),
        "parameters": [
            {
                "name": s.fqn,
                "unit": s.unit.split("#")[0],
                "shape": list(s.shape),
                "bytes": s.full_bytes(),
            }
            for s in specs
        ],
        "bytes": int(
            nbytes(start) if kind == "gather" else sum(map(nbytes, start.all_input_nodes))
        ),
        "sent": int(sent),
        "row": _row(start),
        "dtype": str(value(start.all_input_nodes[0]).dtype).removeprefix("torch."),
        "group": group,
        "module": module_of(start),
    }


def _row(start: Node) -> int:
    """Bytes of a row of what a collective sends; 0 where that depends on data."""
    sent = value(start.all_input_nodes[0])
    sizes = [sent.element_size(), *sent.shape[1:]]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0


def _run(graph: Graph, nodes: list[Node], costs: Costs) -> Run:
    """Returns a simulated run. What starting a collective costs the thread is `issuing`, and no
    computation.
    """
    points = program(graph, costs)
    line = simulate(points)
    begins = {
        p.node: line.reached[p.node] + line.exposed.get(p.start, 0.0)  # type: ignore[arg-type]
        for p in points
    }
    waits = {p.start: p.node for p in points if p.start is not None}
    issuing = {node: costs.compute(node) for node in nodes}
    compute: list[Interval] = [
        (begins[p.node] + issued, begins[p.node] + p.seconds, p.node.name, module_of(p.node))
        for p in points
        if p.seconds > (issued := issuing.get(p.node, 0.0))
    ]
    times: list[Times] = []
    for node in nodes:
        begin, end = line.carried[node]
        awaited = line.reached[waits[node]] if node in waits else None
        times.append(
            {
                "issued": line.reached[node],
                "issuing": issuing[node],
                "begin": begin,
                "end": end,
                "awaited": awaited,
                "exposed": line.exposed.get(node, 0.0),
            }
        )
    now, each = 0.0, []
    for node in graph.nodes:
        now = begins.get(node, now)
        each.append(now)
        now += costs.compute(node)
    return {"total": line.total, "times": times, "compute": compute, "nodes": each}
