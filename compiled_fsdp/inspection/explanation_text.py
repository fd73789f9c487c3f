"""The text of an `Explanation`, and the line that sums it up."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

from .where import EAGER, EMPTY, NOT_YET, ORDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .explanation import Explanation, GraphInfo, OptionInfo, Param, Step, UnitInfo

MOST_ALONE = 5  # lines about computation that is compiled for its place
RESHARD = {
    "gather": "dropped after forward, gathered again in backward",
    "keep": "kept from forward to backward",
    "slice": "a slice kept from forward to backward",
}


def text_of(e: Explanation) -> str:
    """All of it, in paragraphs."""
    parts = [_head(e), _units(e.units), _table(e), _graphs(e.graphs), _options(e.options)]
    return "\n\n".join(part for part in (*parts, _step(e), _recompiles(e.recompiles)) if part)


def summary_of(e: Explanation) -> str:
    """One line."""
    gathers = sum(len(g.gathers) for g in e.graphs)
    reductions = sum(len(g.reductions) for g in e.graphs)
    moved = sum(b["num_bytes"] for g in e.graphs for b in (*g.gathers, *g.reductions))
    counts = {kind: sum(unit.where == kind for unit in e.units) for kind in ORDER}
    units = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    text = f"compiled_fsdp: {e.model} of {_count(len(e.units), 'unit')}: {units}"
    if e.graphs:
        text += (
            f"; {_count(len(e.graphs), 'graph')} of {gathers} all-gathers and {reductions} "
            f"reductions, {_mb(moved)}"
        )
        text += f"; peak {_mb(e.step.predicted_peak or 0)} above rest (predicted)"
    return f"{text}; more by compiled_fsdp.explain(model)"


def _head(e: Explanation) -> str:
    params = [p for unit in e.units for p in unit.params]
    size = (
        f"{len(params)} parameters, {_mb(sum(p.num_bytes for p in params))} on "
        f"{_count(e.world_size, 'rank')} together"
    )
    if all(u.where in (NOT_YET, EMPTY) for u in e.units):
        return (
            f"{e.model}: {_count(len(e.units), 'unit')}, {size}. Nothing has run yet: call this "
            "again after a step"
        )
    return f"{e.model}: {_count(len(e.units), 'unit')}, {size}"


def _units(units: list[UnitInfo]) -> str:
    lines = ["Units"]
    for kind in ORDER:
        members = [u for u in units if u.where == kind]
        if members:
            lines.append(f"  {len(members)} {kind}: {_names([u.name for u in members])}")
        lines += [f"    {_names(names)}: {why}" for why, names in _reasons(members)]
    return "\n".join(lines)


def _reasons(units: Iterable[UnitInfo]) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for unit in units:
        for why in unit.why:
            found.setdefault(why, []).append(unit.name)
    return list(found.items())


def _table(e: Explanation) -> str:
    entries: list[tuple[str, str, str]] = []  # name, what is like another unit's, what is its own
    first: dict[tuple[str, ...], str] = {}
    for unit in e.units:
        own = "\n".join(f"    {line}" for line in _collectives(unit))
        alike = (_at_rest(unit, e), *(_param(p, unit.name) for p in unit.params), *unit.wire)
        if alike in first:
            entries.append((unit.name, f"as {first[alike]}", own))
        else:
            first[alike] = unit.name
            entries.append((unit.name, "\n    ".join(alike), own))
    lines = []
    for (alike_text, own), group in groupby(entries, lambda entry: entry[1:]):
        lines.append(
            "\n".join(
                filter(None, [f"  {_names([name for name, *_ in group])}: {alike_text}", own])
            )
        )
    return "\n".join(lines)


def _at_rest(unit: UnitInfo, e: Explanation) -> str:
    dtype = "/".join(dict.fromkeys(p.dtype for p in unit.params))
    cast = "" if unit.compute_dtype in ("", dtype) else f", computes in {unit.compute_dtype}"
    groups = ", ".join(repr(g) for g in unit.groups)
    return (
        f"{_mb(unit.num_bytes)} in {dtype or 'no parameters'}{cast}; {_resharded(unit, e)}; "
        f"{unit.mesh}, group {groups}"
    )


def _resharded(unit: UnitInfo, e: Explanation) -> str:
    """What becomes of its parameters behind forward: as was asked, or as graphs have it."""
    asked = RESHARD.get(unit.reshard, unit.reshard or "nothing to gather")
    gathered_in = {e.graphs[shared.graph].kind for shared in unit.gathers}
    if unit.reshard != "gather" or not gathered_in:
        return asked
    kept = sum(
        choice["of"] == unit.name and choice["what"] == "keep" and choice["is_kept"]
        for graph in e.graphs
        for choice in graph.choices
    )
    if gathered_in == {"forward"} and any(graph.kind == "backward" for graph in e.graphs):
        has_budget = any(option.name.endswith("memory_budget") for option in e.options)
        or_budget = "memory_budget keeps it, or " if has_budget else ""
        why = "memory_budget keeps it" if kept else f"{or_budget}backward needs none of it"
        return f"gathered for forward, not again in backward: {why}"
    return f"{asked}, but for {kept} that memory_budget keeps" if kept else asked


def _param(param: Param, unit: str) -> str:
    name = param.name.removeprefix(f"{unit}.")
    return (
        f"{name} {param.shape} {param.dtype}, {_mb(param.num_bytes)}"
        f"{', frozen' if param.is_frozen else ''}"
        f"{', its gradient in ' + param.grad_dtype if param.grad_dtype else ''}"
    )


def _collectives(unit: UnitInfo) -> list[str]:
    """One line for its all-gathers, one for its reductions: which one of which graph, with whom."""
    lines = []
    for what, found in (("all-gathers", unit.gathers), ("reductions", unit.reductions)):
        texts = []
        for shared in found:
            others = [name for name in shared.units if name != unit.name]
            texts.append(
                f"#{shared.number} of graph {shared.graph}"
                + (f" (with {_names(others)})" if others else "")
            )
        if texts:
            lines.append(f"{what} {', '.join(texts)}")
    return lines


def _graphs(graphs: list[GraphInfo]) -> str:
    lines = ["Graphs"] if graphs else []
    for number, graph in enumerate(graphs):
        sizes = [
            f"{_count(len(found), what)} of {_mb(sum(b['num_bytes'] for b in found))}"
            for what, found in (("all-gather", graph.gathers), ("reduction", graph.reductions))
            if found
        ]
        if graph.retained:
            sizes.append(
                f"the gradients of {_count(len(graph.retained), 'unit')} kept for a later backward "
                "(set_requires_gradient_sync(False))"
            )
        kinds = ", ".join(f"{kind} {_mb(size)}" for kind, size in graph.peak_kinds.items())
        lines += [
            f"  {number} {graph.kind}: {', '.join(sizes) or 'no communication'}; ran "
            f"{_count(graph.num_runs, 'time')}{', compiled by Inductor' if graph.is_fused else ''}",
            f"    predicted peak {_mb(graph.peak)} above rest at %{graph.peak_at}: "
            f"{kinds or 'nothing'}",
        ]
        lines += _regions(graph)
        lines += _chunks(graph)
        lines += _budgeted(graph)
        if graph.predicted:
            times = {name: f"{1e3 * seconds:.2f} ms" for name, seconds in graph.predicted.items()}
            lines.append(
                f"    predicted {times['total']}, {times['exposed']} of it exposed; "
                f"{times['wire']} on the wire"
                + (f"; {times['to_host']} to the host" if graph.predicted["to_host"] else "")
                + (f"; {times['from_host']} from the host" if graph.predicted["from_host"] else "")
            )
    return "\n".join(lines)


def _chunks(graph: GraphInfo) -> list[str]:
    """In how many chunks tokens travel, and what each number was predicted to take: blocks alike in
    one line.
    """
    alike: dict[str, int] = {}
    for block in graph.chunks:
        times = ", ".join(f"{n}: {1e3 * s:.2f} ms" for n, s in block["seconds"].items())
        line = f"in {_count(block['number'], 'chunk')} (predicted, both ways, in {times})"
        alike[line] = alike.get(line, 0) + 1
    return [f"    tokens of {_count(n, 'block')} {line}" for line, n in alike.items()]


CHOICES = {  # by what it is, and whether it is kept
    ("slice", True): "slices kept",
    ("slice", False): "slices not kept",
    ("keep", True): "parameters kept",
    ("keep", False): "parameters gathered again",
    ("save", True): "activations saved that could be computed again",
    ("save", False): "activations computed again",
    ("offload", True): "activations on the device that could be on the host",
    ("offload", False): "activations on the host from forward to backward",
    ("state", True): "optimizer states on the device that could be on the host",
    ("state", False): "optimizer states on the host between updates",
}


def _budgeted(graph: GraphInfo) -> list[str]:
    """What the memory budget decided: for each choice the bytes, the seconds, and of what; layers
    that differ by their number alone in one entry.
    """
    lines = []
    for (what, is_kept), words in CHOICES.items():
        found = [c for c in graph.choices if (c["what"], c["is_kept"]) == (what, is_kept)]
        if not found:
            continue
        seconds = [c["seconds"] for c in found if c["seconds"] is not None]
        does = "saves" if is_kept else "costs"
        cost = f", {does} {1e3 * sum(seconds):.2f} ms" if seconds else ""
        alike: dict[str, list[int]] = {}
        for choice in found:
            named = choice["name"]
            if what == "state":
                named = f"{choice['name']} of {choice['of']}"
            elif what in ("save", "offload"):
                named = f"{choice['of']} {re.sub(r'_[0-9]+$', '', named)}"
            place = re.sub(r"\d+", "*", named)
            alike.setdefault(place, []).append(choice["num_bytes"])
        most = sorted(alike.items(), key=lambda entry: -sum(entry[1]))
        names = ", ".join(f"{len(sizes)} of {name} {_mb(sum(sizes))}" for name, sizes in most[:6])
        more = f", and {len(most) - 6} more kinds (`as_dict` has them)" if len(most) > 6 else ""
        total = _mb(sum(choice["num_bytes"] for choice in found))
        lines.append(f"    budget: {len(found)} {words}, {total}{cost}: {names}{more}")
    return lines


def _regions(graph: GraphInfo) -> list[str]:
    """Returns the lines about computation that is compiled once, and about what seems to repeat."""
    if not graph.regions:
        why = f"    every layer compiled for its place: {graph.inline}"
        return [why] if graph.is_fused and graph.inline else []
    calls = ", ".join(f"{r['calls']} of {r['nodes']} nodes" for r in graph.regions)
    lines = [f"    {_count(len(graph.regions), 'region')} compiled once, calls: {calls}"]
    lines += [
        f"    compiled for its place: {a['unit'] or 'no unit'}, {a['nodes']} nodes: {a['why']}"
        for a in graph.alone[:MOST_ALONE]
    ]
    more = len(graph.alone) - MOST_ALONE
    return lines + ([f"    and {more} more (`as_dict` has them)"] if more > 0 else [])


def _options(options: list[OptionInfo]) -> str:
    lines = ["Options that were set" if options else "Options that were set: none"]
    for option in options:
        units = f" of {_names(option.units)}" if option.units else ""
        if option.unused:
            lines.append(f"  {option.unused}: changed nothing, although a step has run since")
            continue
        nothing = f"consumed by nothing{f', {option.idle}' if option.idle else ' yet'}"
        lines.append(
            f"  {option.name}={option.value}{units}: {', '.join(option.consumers) or nothing}"
        )
    return "\n".join(lines)


def _and_retained(graphs: Iterable[GraphInfo]) -> str:
    is_any = any(graph.retained for graph in graphs)
    return ", and above the gradients that earlier backwards have kept" if is_any else ""


def _step(e: Explanation) -> str:
    step = e.step
    predicted = [
        "step time "
        + _or(
            _ms(step.predicted_seconds),
            "not known: the plan has no costs (Plan(prefetch='auto') measures them)",
        ),
        "exposed communication " + _or(_ms(step.predicted_exposed), "not known"),
        "peak "
        + _or(
            None
            if step.predicted_peak is None
            else f"{_mb(step.predicted_peak)} above rest{_and_retained(e.graphs)}",
            "not known",
        ),
    ]
    how = f" (median of the last of {_count(step.count, 'step')})"
    measured = [
        "step time "
        + _or(
            None if step.measured_seconds is None else f"{_ms(step.measured_seconds)}{how}",
            "not measured",
        ),
        "peak "
        + _or(
            None if step.measured_peak is None else f"{_mb(step.measured_peak)} above the start",
            "not measured",
        ),
    ]
    lines = ["Step", f"  predicted: {'; '.join(predicted)}", f"  measured:  {'; '.join(measured)}"]
    if step.profiled_seconds is not None and step.profiled_exposed is not None:
        lines.append(
            f"  profiled:  step time {_ms(step.profiled_seconds)}, of which "
            f"{_ms(step.profiled_exposed)} ({_share(step.profiled_exposed, step.profiled_seconds)})"
            " wait for communication"
        )
    if step.routing:
        lines.append(f"  routing:   {step.routing}")
    lines += [f"  ({note})" for note in (*_far_off(step), *step.notes)]
    if step.profiled_seconds is None or step.measured_peak is None:
        lines.append(
            "  (explain(model, profile=p) takes what waits, and the peak, from a "
            "torch.profiler.profile(profile_memory=True) of a step)"
        )
    if any(u.where == EAGER for u in e.units) and e.graphs:
        lines.append("  (predictions are of the graphs alone)")
    return "\n".join(lines)


FAR = 2.0  # times as long, or as short, as was measured


def _far_off(step: Step) -> list[str]:
    if not step.predicted_seconds or not step.measured_seconds:
        return []
    ratio = step.measured_seconds / step.predicted_seconds
    if 1 / FAR <= ratio <= FAR:
        return []
    return [
        f"a step took {ratio:.2g} times what is predicted, which knows neither the optimizer nor "
        "other processes on the same cores: do not plan with these costs"
    ]


def _recompiles(found: list[dict[str, str]]) -> str:
    if not found:
        return "Recompiles: none"
    return "\n".join(
        [
            "Recompiles, of this process",
            *(f"  {entry['function']}: {entry['reason']}" for entry in found),
        ]
    )


def _names(names: Sequence[str]) -> str:
    """Runs of numbered names are shortened: layers.0 to layers.11."""
    parts = []
    for _, group in groupby(
        enumerate(names), lambda pair: (_stem(pair[1])[0], _stem(pair[1])[1] - pair[0])
    ):
        run = [name for _, name in group]
        parts.append(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run))
    return ", ".join(parts)


def _stem(name: str) -> tuple[str, int]:
    head, _, number = name.rpartition(".")
    return (head, int(number)) if number.isdigit() else (name, 0)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _or(text: str | None, otherwise: str) -> str:
    return otherwise if text is None else text


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 1e4 else f"{num_bytes:.0f} bytes"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1e3 * seconds:.1f} ms"
