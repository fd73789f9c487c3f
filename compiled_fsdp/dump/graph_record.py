"""The record of a finished graph: a few lines of JSON that travel with the compiled code, read by
`explain` once the graph has run.

A graph that comes out of a compile cache was made in another process, where its passes ran; its
record says what they did.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from compiled_fsdp.ir import quantized
from compiled_fsdp.ir.collectives import HOST, STARTS, group_of
from compiled_fsdp.ir.graph import phase_of, value
from compiled_fsdp.ir.regions import Region, find_regions
from compiled_fsdp.ir.repeats import Repeats, find_repeats
from compiled_fsdp.ir.schema import RETAIN
from compiled_fsdp.ir.spans import Span
from compiled_fsdp.ir.subgraphs import unit_called_by
from compiled_fsdp.options import note, text
from compiled_fsdp.planning import chunks
from compiled_fsdp.planning.costs import traffic
from compiled_fsdp.planning.plan import ASKED
from compiled_fsdp.planning.planner import predict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.fx import Graph, Node

    from compiled_fsdp.options import Consumed
    from compiled_fsdp.planning.costs import Costs
    from compiled_fsdp.planning.memory import MemoryProfile
    from compiled_fsdp.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class Bucket:
    """One communication of a graph.

    units: keys, in order.
    params: names, in the order of the buffer.
    num_bytes: of the full parameters or gradients, in the dtype that travels (uint8 where some are
        codes with scales).
    sent: bytes that each rank sends.
    """

    units: list[str]
    params: list[str]
    num_bytes: int
    dtype: str
    ops: list[str]
    groups: list[str]
    sent: int

    @classmethod
    def of(cls, region: Region) -> Bucket:
        """From a communication in a graph."""
        specs = region.tag.specs
        num_bytes, dtype = (
            (quantized.reduced_bytes(specs), specs[0].reduce_dtype)
            if region.tag.kind == "reduce"
            else (quantized.gathered_bytes(specs), specs[0].dtype)
        )
        is_bytes = any(value(n).dtype == quantized.WIRE for n in _sent(region))
        return cls(
            units=list(dict.fromkeys(s.unit for s in specs)),
            params=[s.fqn for s in specs],
            num_bytes=num_bytes,
            dtype=str(quantized.WIRE if is_bytes else dtype).removeprefix("torch."),
            ops=[getattr(n.target, "_opname", str(n.target)) for n in region.starts],
            groups=list(dict.fromkeys(group_of(n) for n in region.starts)),
            sent=int(sum(traffic(n)[0] for n in region.starts)),
        )


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """A graph after all passes.

    kind: "forward", "backward" or "step".
    is_fused: whether Inductor compiles it.
    gathers, reductions: those that it starts.
    retained: units whose gradients it keeps for a later backward, unreduced.
    consumed: (option, passes, units).
    plan: what the fields of the plan were, as text.
    peak: predicted bytes above what is at rest, `peak_at` the node, and `peak_kinds` what they are,
        in bytes.
    predicted: seconds in total, exposed, on the wire, and of copies to the host and from it, and
        the bytes "sent" by all that travels, the user's collectives included; None where nothing is
        known of costs.
    regions: computation that is compiled once and called: the first "unit", "calls", "nodes".
    alone: computation of that size that is compiled for its place: "unit", "nodes", "why".
    inline: why there are no regions; "" if there are.
    chunks: of each block that left it to costs in how many chunks its tokens travel, the "number"
        and the predicted "seconds" of each number, both ways; of the forward graph alone.
    choices: what the memory budget decided on, dearest first: "what" it is (a "slice", "keep": a
        whole parameter, "save" or "offload": an activation, by what it would be given up for, or
        "state": an optimizer's, of a flat buffer), "of" which unit or module, its "name" (of state,
        those of its tensors), whether it "is_kept" for backward (state: on the device), its
        "num_bytes", and the "seconds" that keeping it saves (None where they are not known);
        of the backward graph or a whole step.
    """

    kind: str
    is_fused: bool
    num_nodes: int
    gathers: list[Bucket]
    reductions: list[Bucket]
    consumed: list[tuple[str, list[str], list[str]]]
    plan: dict[str, str]
    peak: int
    peak_at: str
    peak_kinds: dict[str, int]
    predicted: dict[str, float] | None = None
    units: list[str] = field(default_factory=list)
    retained: list[str] = field(default_factory=list)
    regions: list[dict[str, Any]] = field(default_factory=list)
    alone: list[dict[str, Any]] = field(default_factory=list)
    inline: str = ""
    chunks: list[dict[str, Any]] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        graph: Graph,
        plan: Plan,
        asked: Plan,
        consumed: Consumed,
        inline: str,
        memory: MemoryProfile,
        choices: list[dict[str, Any]],
        *,
        is_fused: bool,
    ) -> GraphRecord:
        """From a finished graph, the plan that its passes got and as the user set it, what they
        have consumed, its memory, and what was decided for that;
        `inline` as in `passes.base.Context`.
        """
        regions = {kind: find_regions(graph, kind) for kind in ("gather", "reduce")}
        predicted = None
        if plan.costs is not None:
            predicted = _predicted(graph, plan.costs.fused(is_fused))
            note(consumed, "predictions", "Plan.costs")
        repeats = Repeats([], [], [], is_dynamic=False)
        called = _called_units(graph)
        if called:
            note(consumed, "outline_units", "Plan.regions")
        if is_fused:
            note(consumed, "outline", "Plan.regions")  # which runs when this is written
            inline = f"Plan(regions={plan.regions!r})" if plan.regions == "off" else inline
        if not inline:
            repeats = find_repeats(graph)
            inline = repeats.why_none
        return cls(
            kind=phase_of(graph),
            is_fused=is_fused,
            num_nodes=len(graph.nodes),
            gathers=[Bucket.of(r) for r in regions["gather"] if r.starts],
            reductions=[Bucket.of(r) for r in regions["reduce"] if r.starts],
            consumed=_by_option(consumed),
            plan={name: text(asked.shown(name)) for name in ASKED},
            peak=memory.peak,
            peak_at=memory.node.name,
            peak_kinds=_by_kind(memory),
            predicted=predicted,
            units=_units(r for found in regions.values() for r in found),
            retained=_units(r for r in regions["reduce"] if not r.starts and _is_retained(r)),
            regions=[
                {"unit": g[0].unit, "calls": len(g), "nodes": len(g[0].nodes)}
                for g in repeats.groups
            ]
            or called,
            alone=[
                {"unit": s.unit, "nodes": len(s.nodes), "why": repeats.why_alone(s)}
                for s in repeats.alone
            ],
            inline="" if called else inline,
            chunks=[] if phase_of(graph) == "backward" else chunks.shown(),
            choices=[] if phase_of(graph) == "forward" else choices,
        )

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    @cache
    def parse(cls, text: str) -> GraphRecord:
        """From `text`, once: each first step of a model asks for all records of its process.

        Raises:
            ValueError: it is no such JSON.
        """
        values: dict[str, Any] = json.loads(text)
        known = {f.name for f in fields(cls)}
        if not isinstance(values, dict) or set(values) != known:
            raise ValueError(f"a graph's record should have the fields {sorted(known)}")
        for name in ("gathers", "reductions"):
            values[name] = [Bucket(**bucket) for bucket in values[name]]
        values["consumed"] = [(option, by, units) for option, by, units in values["consumed"]]
        return cls(**values)


def _predicted(graph: Graph, costs: Costs) -> dict[str, float]:
    """The seconds of a graph, as `GraphRecord.predicted`."""
    line = predict(graph, costs)
    return {
        "total": line.total,
        "exposed": sum(line.exposed.values()),
        "wire": line.on_wire,
        "sent": sum(traffic(n)[0] for n in graph.nodes if n.target in STARTS),
        "to_host": line.on_the_way(HOST),
        "from_host": sum(map(line.on_the_way, line.copied)) - line.on_the_way(HOST),
    }


def _by_kind(memory: MemoryProfile) -> dict[str, int]:
    """The bytes that are alive at the peak, by what they are."""
    kinds: dict[str, int] = {}
    for alive in memory.alive:
        kinds[alive.kind] = kinds.get(alive.kind, 0) + alive.num_bytes
    return kinds


def _called_units(graph: Graph) -> list[dict[str, Any]]:
    """As regions: units that are subgraphs since Dynamo traced them, with how many calls each."""
    calls: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if unit_called_by(node) is not None:
            calls.setdefault(str(node.args[1]), []).append(node)
    return [
        {
            "unit": next(filter(None, (Span([node]).unit for node in its)), ""),
            "calls": len(its),
            "nodes": len(unit_called_by(its[0]).nodes),  # type: ignore[union-attr]
        }
        for its in calls.values()
    ]


def _sent(region: Region) -> list[Node]:
    """What its first collective sends."""
    return [n for start in region.starts[:1] for n in start.all_input_nodes]


def _units(regions: Iterable[Region]) -> list[str]:
    """The units that communications are for, in order."""
    return list(dict.fromkeys(spec.unit for region in regions for spec in region.tag.specs))


def _is_retained(region: Region) -> bool:
    """Whether a reduction's gradients are kept for a later backward."""
    return any(node.target is RETAIN for node in region.nodes)


def _by_option(consumed: Consumed) -> list[tuple[str, list[str], list[str]]]:
    """As `GraphRecord.consumed`."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (option, unit), by in consumed.items():
        found.setdefault((option, tuple(by)), []).append(unit)
    return [(option, list(by), units) for (option, by), units in found.items()]
