"""What a dump says of a finished graph for programs: `timeline.json` and `memory.json`, from which
the report is made.

Both hold a graph twice: "plain", run as it is, and "fused", under Inductor; "executor" says which
of them runs here. Seconds begin with the graph. Names are those of the graph, as they are: whoever
shows them escapes them.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.collectives import group_of
from compiled_fsdp.ir.graph import find, is_backward, placeholders, starts, value
from compiled_fsdp.ir.meta import get_tag, module_of
from compiled_fsdp.ir.schema import traits_of
from compiled_fsdp.planning.costs import assumed, nbytes, traffic
from compiled_fsdp.planning.halves import Handed, follows, handed_over, lifetimes_after, num_saved
from compiled_fsdp.planning.lifetimes import IN_FLIGHT, Lifetimes
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.planning.planner import program, simulate
from compiled_fsdp.torch_private.groups import group_named
from compiled_fsdp.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.fx import Graph, Node

    from compiled_fsdp.planning.costs import Costs
    from compiled_fsdp.planning.lifetimes import Storage

FORMAT = 2
SHOWN = (
    "COMPILED_FSDP_",
    "TORCH_LOGS",
    "TORCHINDUCTOR_",
    "OMP_",
    "MKL_",
    "GLOO_",
    "NCCL_",
)  # environment variables
EXECUTORS = {"plain": False, "fused": True}


@dataclass(frozen=True, slots=True)
class Left:
    """What a dumped forward left to a backward, by executor; `path` is its folder, `modules` says
    where its nodes come from.
    """

    path: Path
    handed: dict[str, Handed]
    modules: dict[str, str]


# The forwards of this process whose backward may still be compiled; the graphs themselves change
# after they were dumped.
_left: list[Left] = []
MOST_LEFT = 64
NOT_SHOWN = -1  # in "waits": for a collective of the user's that is not in the list


def write_records(graph: Graph, path: Path, is_fused: bool) -> None:
    """Write both files into the folder of the graph's dump."""
    head = {"format": FORMAT, "kind": "backward" if is_backward(graph) else "forward"}
    head["executor"] = "fused" if is_fused else "plain"
    (path / "timeline.json").write_text(json.dumps({**head, **timeline(graph)}) + "\n")
    (path / "memory.json").write_text(json.dumps({**head, **memory(graph, path)}) + "\n")


# -- the timeline


def timeline(graph: Graph) -> dict[str, Any]:
    """The collectives of a graph, and when each is expected to start, travel and be awaited."""
    plan = current_plan()
    costs = plan.costs or assumed(_device(graph))
    nodes = starts(graph)
    numbers = {node: number for number, node in enumerate(nodes)}
    return {
        "costs": {
            **asdict(costs),
            "links": {n: asdict(k) for n, k in costs.links},
            "is_assumed": plan.costs is None,
        },
        "settings": settings(),
        "groups": {group: _ranks(group) for group in sorted({group_of(node) for node in nodes})},
        "collectives": [_collective(node) for node in nodes],
        "waits": [
            numbers.get(wait.all_input_nodes[0], NOT_SHOWN) for wait in find(graph, comm.WAIT)
        ],
        **{name: _run(graph, nodes, costs.fused(fused)) for name, fused in EXECUTORS.items()},
    }


def settings() -> dict[str, Any]:
    """What the graph was made under: plan, versions, this process."""
    now = current_plan()
    plan = {name: now.shown(name) for name in asdict(now) if name != "costs"}
    return {
        "plan": plan,
        "versions": {
            "compiled_fsdp": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN)
        },
    }


def _device(graph: Graph) -> str:
    """Where it computes: some of its inputs may rest on the host."""
    values = (node.meta.get("val") for node in placeholders(graph))
    found = {v.device.type for v in values if isinstance(v, torch.Tensor)}
    return next(iter(sorted(found - {"cpu"})), "cpu")


def _ranks(group: str) -> list[int]:
    """The ranks of a group; none without process groups."""
    return list(dist.get_process_group_ranks(group_named(group))) if dist.is_initialized() else []


def _collective(start: Node) -> dict[str, Any]:
    """What a collective carries: full tensors in bytes, and what this rank sends of them."""
    tag = get_tag(start)
    specs = () if tag is None else tag.specs
    kind = traits_of(start.target).starts
    sent, group = traffic(start)
    return {
        "node": start.name,
        "op": start.target._opname,  # type: ignore[union-attr]
        "kind": kind if kind in ("gather", "all_reduce") else "reduce",
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
        "dtype": str(value(start.all_input_nodes[0]).dtype).removeprefix("torch."),
        "group": group,
        "module": module_of(start),
    }


def _run(graph: Graph, nodes: list[Node], costs: Costs) -> dict[str, Any]:
    """A simulated run: `times[i]` is of the i-th collective, `compute` the stretches of the
    training thread that compute, and `nodes[i]` when the i-th node of the graph begins.

    What starting a collective costs the thread is `issuing`, and no computation.
    """
    points = program(graph, costs)
    line = simulate(points)
    begins = {p.node: line.reached[p.node] + line.exposed.get(p.start, 0.0) for p in points}  # type: ignore[arg-type]
    waits = {p.start: p.node for p in points if p.start is not None}
    issuing = {node: costs.compute(node) for node in nodes}
    compute = [
        [begins[p.node] + taken, begins[p.node] + p.seconds, p.node.name, module_of(p.node)]
        for p in points
        if p.seconds > (taken := issuing.get(p.node, 0.0))
    ]
    times = []
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


# -- memory


def memory(graph: Graph, path: Path) -> dict[str, Any]:
    """The storages of a graph and the bytes of each kind at each node; a backward goes on from the
    forward that it belongs to.
    """
    backward = is_backward(graph)
    before = next(
        (left for left in reversed(_left) if backward and _is_half(graph, path, left)), None
    )
    found: dict[str, Any] = {
        "after": before.path.name if before else None,
        "nodes": [n.name for n in graph.nodes],
    }
    handed, modules = {}, {node.name: module_of(node) for node in graph.nodes}
    for name, fused in EXECUTORS.items():
        if before:
            lifetimes = lifetimes_after(graph, before.handed[name], fused)
        else:
            lifetimes = Lifetimes(graph, fused)
            handed[name] = handed_over(lifetimes, 0 if backward else num_saved(graph))
        found[name] = _profile(lifetimes, modules, before.modules if before else {})
    if not backward:
        _left.append(Left(path, handed, modules))
        del _left[:-MOST_LEFT]
    return found


def _is_half(graph: Graph, path: Path, left: Left) -> bool:
    return left.path.parent == path.parent and all(
        follows(graph, handed) for handed in left.handed.values()
    )


def _profile(lifetimes: Lifetimes, own: dict[str, str], saved: dict[str, str]) -> dict[str, Any]:
    """Storages as [kind, owner, bytes, first node, last node, [[start, wait] of collectives on
    it]]; kinds add up to `during`.

    own, saved: the modules of nodes of this graph, and of those of the forward that it goes on
    from.
    """
    nodes = list(lifetimes.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    curve = lifetimes.curve(nodes)
    stored = [s for s in lifetimes.storages if s.num_bytes]
    return {
        "peak": curve.peak,
        "where": curve.where,
        "at_rest": lifetimes.at_rest,
        "during": curve.during,
        "kinds": stack(stored, position),
        "storages": [
            [s.kind, _owner(s, own, saved), s.num_bytes, *s.span(position), _under_way(s, position)]
            for s in stored
        ],
    }


def _owner(storage: Storage, own: dict[str, str], saved: dict[str, str]) -> str:
    """A parameter, a unit, or a node with the module that it comes from."""
    known = saved if storage.node.op == "placeholder" else own
    module = known.get(storage.owner, "")
    return f"{storage.owner} in {module}" if module else storage.owner


def _under_way(storage: Storage, position: dict[Node, int]) -> list[tuple[int, int]]:
    return [(position[start], position[wait]) for start, wait in storage.under_way]


def stack(storages: list[Storage], position: dict[Node, int]) -> dict[str, list[int]]:
    """Bytes of each kind while each node runs; what is written over its input counts once, as the
    new value.
    """
    changes: dict[str, list[int]] = {}

    def add(kind: str, first: int, last: int, num_bytes: int) -> None:
        change = changes.setdefault(kind, [0] * (len(position) + 1))
        change[first] += num_bytes
        change[last + 1] -= num_bytes

    over: dict[int, tuple[int, str]] = {}
    ends = {storage: storage.span(position)[1] for storage in storages}
    for storage in storages:
        for kind, first, last in _stretches(storage, position):
            add(kind, first, last, storage.num_bytes)
        born = storage.first(position)
        for old in (s for s in storage.over if ends.get(s) == born and not s.is_kept):
            over[born] = max(
                over.get(born, (0, "")), (storage.num_bytes, old.kind_at(born, position))
            )
    for at, (num_bytes, kind) in over.items():
        add(kind, at, at, -num_bytes)
    return {kind: list(accumulate(change))[:-1] for kind, change in changes.items()}


def _stretches(storage: Storage, position: dict[Node, int]) -> Iterator[tuple[str, int, int]]:
    """The life of a storage, cut where a collective on it starts or ends: kind, first and last
    position.
    """
    first, last = storage.span(position)
    for start, end in sorted(_under_way(storage, position)):
        if start > first:
            yield storage.kind, first, start - 1
        if end >= first:
            yield IN_FLIGHT, max(start, first), end
        first = max(first, end + 1)
    if first <= last:
        yield storage.kind, first, last
