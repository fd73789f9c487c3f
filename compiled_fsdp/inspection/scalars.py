"""The numbers of an `Explanation`, by name, as loggers take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .where import BOTH, EAGER, UNLOWERED

if TYPE_CHECKING:
    from .explanation import Explanation, GraphInfo

OUTSIDE = (EAGER, BOTH, UNLOWERED)


def scalars(explanation: Explanation) -> dict[str, float]:
    """Numbers to log beside the loss, of the last step; what is not known is left out.

    fsdp/step_seconds: from one optimizer step to the next, the median of the last ones.
    fsdp/exposed_seconds, fsdp/exposed_share: of a profiled step, if there was a profile, and what
        part of it waits for communication; else as predicted, if the plan has costs.
    fsdp/peak_bytes: above what is at rest, measured if there was a profile of memory, else
        predicted.
    fsdp/gathered_bytes, fsdp/reduced_bytes: of the full parameters and gradients, as they travel.
    fsdp/units_not_in_a_graph, fsdp/recompiles: counts.
    """
    step = explanation.step
    exposed, whole = step.profiled_exposed, step.profiled_seconds
    if exposed is None:
        exposed, whole = step.predicted_exposed, step.predicted_seconds
    peak = step.predicted_peak if step.measured_peak is None else step.measured_peak
    known = {
        "step_seconds": step.measured_seconds,
        "exposed_seconds": exposed,
        "exposed_share": exposed / whole if exposed is not None and whole else None,
        "peak_bytes": peak,
        "gathered_bytes": sum(_bytes(graph, "gathers") for graph in explanation.graphs),
        "reduced_bytes": sum(_bytes(graph, "reductions") for graph in explanation.graphs),
        "units_not_in_a_graph": sum(unit.where in OUTSIDE for unit in explanation.units),
        "recompiles": len(explanation.recompiles),
    }
    return {f"fsdp/{name}": float(value) for name, value in known.items() if value is not None}


def _bytes(graph: GraphInfo, what: str) -> int:
    return sum(int(entry["num_bytes"]) for entry in getattr(graph, what))
