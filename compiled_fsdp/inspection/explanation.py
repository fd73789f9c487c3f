"""The result of `explain`: records that turn into JSON; their text is in `explanation_text.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .explanation_text import summary_of, text_of


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a unit; `num_bytes` of all ranks together, in the dtype that it is kept in.

    grad_dtype: that of its gradient, where it is another; else "".
    """

    name: str
    shape: list[int]
    dtype: str
    num_bytes: int
    is_frozen: bool
    grad_dtype: str = ""


@dataclass(frozen=True, slots=True)
class Shared:
    """A collective that carries a unit's parameters or gradients: its graph, its number there, and
    the units that share it.
    """

    graph: int
    number: int
    units: list[str]


@dataclass(frozen=True, slots=True)
class UnitInfo:
    """A unit.

    where: "in a graph", "eager", "in a graph and eager", "in a graph, not lowered", "never
        gathered", "not run yet", or "without parameters": `where.py`.
    why: reasons for running outside a graph.
    compute_dtype: of the gathered parameters.
    reshard: "gather", "keep" or "slice", as in `fsdp::unshard`.
    mesh: axes and sizes.
    wire: what travels as codes: how many bytes instead of how many, and how far off values are at
        most.
    """

    name: str
    where: str
    why: list[str]
    params: list[Param]
    num_bytes: int
    compute_dtype: str
    reshard: str
    mesh: str
    groups: list[str]
    gathers: list[Shared]
    reductions: list[Shared]
    wire: list[str]


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """A graph that ran in the last step, or at all, if there was no step.

    gathers, reductions: (units, parameters, bytes) of each all-gather and each reduction that it
        starts, in order.
    retained: units whose gradients it keeps, unreduced, for a later backward.
    regions: computation that was compiled once and is called: the first "unit", "calls", "nodes".
    alone: computation that was compiled for its place: "unit", "nodes", and "why".
    inline: why nothing was compiled once; "" if something was.
    chunks: of blocks whose tokens travel in as many chunks as costs say, the "number", and by
        number the predicted "seconds" of the block, both ways.
    choices: what a memory budget decided on: "what" ("slice", "keep", "save", "offload", or
        "state", by what it would be given up for), "of" which unit or module, its "name" (of state,
        those of its tensors), whether it "is_kept" for backward (state: on the device),
        "num_bytes", and the "seconds" that keeping it saves, None where they are not known.
    """

    kind: str
    num_runs: int
    is_fused: bool
    num_nodes: int
    gathers: list[dict[str, Any]]
    reductions: list[dict[str, Any]]
    peak: int
    peak_at: str
    peak_kinds: dict[str, int]
    predicted: dict[str, float] | None
    retained: list[str]
    regions: list[dict[str, Any]]
    alone: list[dict[str, Any]]
    inline: str
    chunks: list[dict[str, Any]]
    choices: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """An option that the user set, on units or (none) of the plan, and the parts that took a
    decision from it.

    unused: what is to be said if a step has run since, and none did; else "".
    idle: why none has to: what the option is about does not happen in these units; else "".
    """

    name: str
    value: str
    units: list[str]
    consumers: list[str]
    unused: str = ""
    idle: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """A training step, predicted and measured; seconds and bytes, None where it is not known.

    predicted_*: of the graphs of the last step, without the optimizer and without eager units.
    measured_seconds: from one optimizer step to the next, the median of the last ones.
    peak: above what is at rest, and gradients that are kept of earlier backwards (predicted), or
        above what there was when the profile began (measured).
    profiled_*: of one step of the profile, which has a length of its own: profiling costs.
    notes: what keeps that from being a whole, ordinary step.
    routing: of a profile with `record_shapes=True`, where tokens for experts went, if graphs tell
        (`Plan(record_routing=True)`); else "".
    """

    count: int
    predicted_seconds: float | None
    predicted_exposed: float | None
    predicted_peak: int | None
    measured_seconds: float | None
    measured_peak: int | None
    profiled_seconds: float | None
    profiled_exposed: float | None
    notes: list[str]
    routing: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The fate of a sharded model; `str` for people, `as_dict` for JSON."""

    model: str
    world_size: int
    units: list[UnitInfo]
    graphs: list[GraphInfo]
    options: list[OptionInfo]
    step: Step
    recompiles: list[dict[str, str]]

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return asdict(self)

    @classmethod
    def of_dict(cls, values: dict[str, Any]) -> Explanation:
        """From `as_dict`.

        Raises:
            TypeError, KeyError: it is something else.
        """
        units = [
            UnitInfo(
                **{
                    **unit,
                    "params": [Param(**p) for p in unit["params"]],
                    "gathers": [Shared(**s) for s in unit["gathers"]],
                    "reductions": [Shared(**s) for s in unit["reductions"]],
                }
            )
            for unit in values["units"]
        ]
        parsed = {
            "units": units,
            "graphs": [GraphInfo(**g) for g in values["graphs"]],
            "options": [OptionInfo(**o) for o in values["options"]],
            "step": Step(**values["step"]),
        }
        return cls(**{**values, **parsed})

    def unused(self) -> list[OptionInfo]:
        """Options that nothing has consumed."""
        return [option for option in self.options if not option.consumers]

    def __str__(self) -> str:
        return text_of(self)

    def summary(self) -> str:
        """One line."""
        return summary_of(self)
