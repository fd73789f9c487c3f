"""Collects what became of a sharded model, from what its units, its graphs and its options have
left behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from compiled_fsdp import log
from compiled_fsdp.dump import writer as dump
from compiled_fsdp.dump.graph_record import GraphRecord
from compiled_fsdp.ir import quantized
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.planning.plan import options as plan_options
from compiled_fsdp.torch_private.compiled import recompiles
from compiled_fsdp.torch_private.groups import common_name
from compiled_fsdp.units.unit import original_class
from compiled_fsdp.wire.ops import TRACED
from compiled_fsdp.wire.runs import Run, all_runs

from . import measured, profiles, routing
from .explanation import Explanation, GraphInfo, OptionInfo, Param, Shared, Step, UnitInfo
from .guards import in_words
from .where import BOTH, EAGER, EMPTY, GRAPH, NEVER, NOT_YET, UNLOWERED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from compiled_fsdp.eager.tree import Tree
    from compiled_fsdp.ir.spec import ParamSpec
    from compiled_fsdp.units.unit import Unit

Ran = tuple[Run, GraphRecord]

EVALUATED = (
    "its forward also ran eagerly without gradients, as when an evaluation calls the model that is "
    "not compiled"
)
CALLED_TWICE = (
    "its forward also ran with gradients outside the graphs, called by what is not compiled"
)
NOT_ITSELF = "its forward is not compiled, that of other units is"


def after_first_step(tree: Tree) -> None:
    """Log the summary of a model, on rank 0, and write what is known of it beside the dumps of its
    graphs.
    """
    units = [runtime.unit for runtime in tree.in_order()]
    outermost = next((unit for unit in units if unit.is_outermost), units[0])
    found = collect(original_class(outermost.modules[0]).__name__, units, tree, None)
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.summarise(found.summary)
    dump.write_explanation(found.as_dict())


def has_trained(units: Sequence[Unit]) -> bool:
    """Returns whether a backward has come to one of these units, in a graph or eagerly."""
    keys = {unit.key for unit in units}
    return any(unit.options.consumers("mp_policy.reduce_dtype") for unit in units) or any(
        record.kind != "forward" and not keys.isdisjoint(record.units)
        for record in (GraphRecord.parse(run.record) for run in all_runs())
    )


def collect(name: str, units: Sequence[Unit], tree: Tree, profile: Any) -> Explanation:
    """Everything that is known of a model of these units; `profile` is a finished one, or None."""
    keys = {unit.key: unit.name for unit in units}
    parsed = [(run, GraphRecord.parse(run.record)) for run in all_runs()]
    ours = [(run, record) for run, record in parsed if any(key in keys for key in record.units)]
    moments = tree.clock.moments
    last_step = [entry for entry in ours if len(moments) < 2 or entry[0].last > moments[0]]
    graphs = [record for _, record in last_step]
    in_graphs = {key for _, record in ours for key in record.units}
    has_run = bool(ours) or any(unit.num_eager_forwards or unit.key in TRACED for unit in units)
    return Explanation(
        model=name,
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        units=[_unit(unit, graphs, in_graphs, keys, has_run) for unit in units],
        graphs=[_graph(run, record, keys) for run, record in last_step],
        options=[*_unit_options(units, ours), *_plan_options(parsed)],
        step=_step(tree, graphs, profile, units),
        recompiles=[
            {"function": function, "reason": in_words(reason)} for function, reason in recompiles()
        ],
    )


# -- units


def _unit(
    unit: Unit, graphs: list[GraphRecord], in_graphs: set[str], keys: dict[str, str], has_run: bool
) -> UnitInfo:
    params = [
        Param(
            p.fqn,
            list(p.layout.shape),
            _dtype(p.sharded.dtype),
            p.sharded.dtype.itemsize * torch.Size(p.layout.shape).numel(),
            not p.sharded.requires_grad,
            _dtype(p.grad_dtype) if p.grad_dtype not in (None, p.sharded.dtype) else "",
        )
        for p in unit.params
    ]
    infos = list(dict.fromkeys(flat.mesh_info for flat in unit.flats)) or [unit.mesh_info]
    where = _where(unit, in_graphs, has_run=has_run)
    return UnitInfo(
        name=unit.name,
        where=where,
        why=_why(unit, where, bool(in_graphs)),
        params=params,
        num_bytes=sum(p.num_bytes for p in params),
        compute_dtype="/".join(dict.fromkeys(_dtype(p.spec.dtype) for p in unit.params)),
        reshard="/".join(dict.fromkeys(p.spec.reshard for p in unit.params)),
        mesh=", ".join(_mesh(info) for info in infos),
        groups=list(dict.fromkeys(name for info in infos for name in _groups(info))),
        gathers=_shared(unit, [record.gathers for record in graphs], keys),
        reductions=_shared(unit, [record.reductions for record in graphs], keys),
        wire=[*(_wire([p.spec for p in unit.params]) or _exact(unit)), *_checked(unit)],
    )


def _wire(specs: list[ParamSpec]) -> list[str]:
    """What of a unit travels as codes: the bytes that a rank sends in a step, with codes and
    without, and the bound of the error.
    """
    gathers = [
        (s, s.gather_quantized, n, s.dtype, 1 + (s.reshard == "gather"))
        for s, n in zip(specs, quantized.gathered_payloads(specs), strict=True)
    ]
    reductions = [
        (s, s.reduce_quantized, n, s.reduce_dtype, 1)
        for s, n in zip(specs, quantized.reduced_payloads(specs), strict=True)
    ]
    slices = [(s, s.over_post_group()) for s in specs if s.reshard == "slice"]
    again = sum((s.post_size - 1) * part.shard_numel * s.dtype.itemsize for s, part in slices)
    found = []
    for what, whose, way in (("gathered", "its", gathers), ("reduced", "a rank's", reductions)):
        dtypes = [codes for _, codes, *_ in way if codes is not None]
        if not dtypes:
            continue
        sent = sum((s.group_size - 1) * n * often for s, _, n, _, often in way)
        exact = sum(
            (s.group_size - 1) * s.shard_numel * dtype.itemsize * often
            for s, _, _, dtype, often in way
        )
        whole = ""
        if way is gathers and again:
            sent, exact = sent + again, exact + again
            whole = f" ({again} of them for backward, of slices, which travel as they are)"
        found.append(
            f"{what} as {_dtype(dtypes[0])}: {len(dtypes)} of {len(way)} parameters, with a scale "
            f"for each {quantized.BLOCK} elements; a rank sends {sent} bytes a step instead of "
            f"{exact}{whole}; an element is off by at most "
            f"1/{round(1 / quantized.ERROR[dtypes[0]])} of the largest in {whose} block"
        )
    return found


def _exact(unit: Unit) -> list[str]:
    """That nothing of a unit travels as codes, though the plan asks for them;
    and why that may be.
    """
    settings = unit.settings
    asked = settings.gather_quantized or settings.reduce_quantized
    if not (asked and unit.flats):
        return []
    if all(flat.mesh_info.shard_size == 1 for flat in unit.flats):
        return ["nothing travels as codes: its parameters are not sharded over several ranks"]
    return [
        "nothing travels as codes: its parameters have fewer than two dims, fewer than "
        f"{quantized.BLOCK} elements on each rank or more than 32 bits, or Plan.exact names them"
    ]


def _checked(unit: Unit) -> list[str]:
    """What of a unit is compared between ranks, and how much is read to sum it up."""
    checked = [p for p in unit.params if p.spec.is_checked]
    if not checked:
        return []
    specs = [p.spec for p in checked]
    size = specs[0].group_size
    shards = sum(p.layout.numel * p.sharded.dtype.itemsize for p in checked)
    gathers = quantized.gathered_payloads(specs)
    if not quantized.gathers_bytes(specs):
        gathers = [s.shard_numel * s.dtype.itemsize for s in specs]
    reductions = [
        n * p.sharded.requires_grad for n, p in zip(_reduced(specs), checked, strict=True)
    ]
    often = [1 + (s.reshard == "gather") for s in specs]
    travels = sum((1 + size) * n * times for n, times in zip(gathers, often, strict=True))
    kept = [s for s in specs if s.reshard == "slice"]  # gathered again over a smaller group
    travels += sum(
        (1 + s.post_size) * s.over_post_group().shard_numel * s.dtype.itemsize for s in kept
    )
    if size == 1:
        travels, reductions = 0, [0]
    casts = sum(
        p.layout.numel * p.sharded.dtype.itemsize * times
        for p, times in zip(checked, often, strict=True)
        if p.sharded.dtype != p.spec.dtype or p.spec.gather_quantized
    )
    num_bytes = travels + 2 * size * sum(reductions) + casts + 2 * shards
    costs = current_plan().costs
    seconds = f", about {1e3 * num_bytes / costs.bandwidth:.2g} ms" if costs else ""
    what = "gathers, exchanged gradients, shards and optimizer state at rest"
    replicas = ", replicas" if specs[0].replicate_size > 1 else ""
    return [
        f"checked: {len(checked)} parameters ({what}{replicas}); a step reads {num_bytes} bytes "
        f"for checksums, optimizer state aside{seconds}"
    ]


def _reduced(specs: list[ParamSpec]) -> list[int]:
    if quantized.reduces_bytes(specs):
        return quantized.reduced_payloads(specs)
    return [s.shard_numel * s.reduce_dtype.itemsize for s in specs]


def _where(unit: Unit, in_graphs: set[str], *, has_run: bool) -> str:
    if not unit.flats:
        return EMPTY
    if not has_run:
        return NOT_YET
    if unit.key in in_graphs:
        return BOTH if unit.num_eager_recorded else GRAPH
    if unit.num_eager_forwards:
        return EAGER
    return UNLOWERED if unit.key in TRACED else NEVER


def _why(unit: Unit, where: str, has_graphs: bool) -> list[str]:
    """Returns why a unit ran eagerly; nothing if it did not."""
    if where not in (GRAPH, BOTH, EAGER) or not unit.num_eager_forwards:
        return []
    if where == GRAPH:
        return [EVALUATED]
    if unit.why_eager:
        return list(unit.why_eager)
    if unit.why_outside_graphs:
        return [unit.why_outside_graphs]
    if where == BOTH:
        return [CALLED_TWICE]
    return [NOT_ITSELF if has_graphs else "the model is not compiled"]


def _mesh(info: Any) -> str:
    text = f"sharded over {info.shard_size}" if info.is_sharding else "not sharded"
    return text + (f", replicated over {info.replicate_size}" if info.replicate_size > 1 else "")


def _groups(info: Any) -> list[str]:
    groups = [info.shard_group, *([info.replicate_group] if info.replicate_size > 1 else [])]
    return [common_name(group.group_name) for group in groups]


def _shared(unit: Unit, by_graph: list[list[Any]], keys: dict[str, str]) -> list[Shared]:
    return [
        Shared(graph, number, [keys.get(key, key) for key in bucket.units])
        for graph, buckets in enumerate(by_graph)
        for number, bucket in enumerate(buckets)
        if unit.key in bucket.units
    ]


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- graphs and the step


def _graph(run: Run, record: GraphRecord, keys: dict[str, str]) -> GraphInfo:
    def shown(buckets: Iterable[Any]) -> list[dict[str, Any]]:
        return [
            {
                "units": [keys.get(key, key) for key in b.units],
                "params": b.params,
                "num_bytes": b.num_bytes,
                "dtype": b.dtype,
                "ops": b.ops,
                "groups": b.groups,
                "sent": b.sent,
            }
            for b in buckets
        ]

    return GraphInfo(
        kind=record.kind,
        num_runs=run.count,
        is_fused=record.is_fused,
        num_nodes=record.num_nodes,
        gathers=shown(record.gathers),
        reductions=shown(record.reductions),
        peak=record.peak,
        peak_at=record.peak_at,
        peak_kinds=record.peak_kinds,
        predicted=record.predicted,
        retained=[keys.get(key, key) for key in record.retained],
        regions=record.regions,
        alone=record.alone,
        inline=record.inline,
        chunks=record.chunks,
        choices=record.choices,
    )


def _step(tree: Tree, graphs: list[GraphRecord], profile: Any, units: Sequence[Unit]) -> Step:
    times = [record.predicted for record in graphs if record.predicted is not None]
    is_known = bool(graphs) and len(times) == len(graphs)
    device = units[0].mesh_info.device.type
    ranges = None if profile is None else profiles.of_profile(profile)
    profiled = None if ranges is None else profiles.choose_step(ranges)
    return Step(
        count=tree.clock.count,
        predicted_seconds=sum(t["total"] for t in times) if is_known else None,
        predicted_exposed=sum(t["exposed"] for t in times) if is_known else None,
        predicted_peak=max((record.peak for record in graphs), default=None),
        measured_seconds=tree.clock.median,
        measured_peak=None if profile is None else measured.peak(profile, device),
        profiled_seconds=None if profiled is None else profiled.span.seconds,
        profiled_exposed=measured.exposed(ranges, profiled) if ranges and profiled else None,
        notes=[] if profiled is None else profiled.notes,
        routing=(
            routing.in_words(event for event in ranges.events if event.is_in(profiled.span))
            if ranges and profiled
            else ""
        ),
    )


# -- options


def _unit_options(units: Sequence[Unit], ours: list[Ran]) -> list[OptionInfo]:
    found: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for unit in units:
        for name, asked in unit.options.asked.items():
            consumers = dict.fromkeys(
                [*unit.options.consumers(name), *_by_passes(unit, name, asked.moment, ours)]
            )
            found.setdefault((name, asked.value, tuple(consumers)), []).append(unit.name)
    return [OptionInfo(name, value, names, list(by)) for (name, value, by), names in found.items()]


def _by_passes(unit: Unit, name: str, since: int, ours: list[Ran]) -> list[str]:
    keys = (unit.key, "") if unit.is_outermost else (unit.key,)
    return [
        part
        for run, record in ours
        if run.last > since
        for option, by, units in record.consumed
        if option == name and any(key in units for key in keys)
        for part in by
    ]


def _plan_options(parsed: list[Ran]) -> list[OptionInfo]:
    """Graphs of any model count: the plan is the process'."""
    found = []
    for name, asked in plan_options.asked.items():
        field = name.removeprefix("Plan.")
        alike = [record for _, record in parsed if record.plan[field] == asked.value]
        consumers = dict.fromkeys(
            part
            for record in alike
            for option, by, _ in record.consumed
            if option == name
            for part in by
        )
        found.append(OptionInfo(name, asked.value, [], list(consumers)))
    return found
