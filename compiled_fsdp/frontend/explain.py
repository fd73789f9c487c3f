"""`explain`: what became of a sharded model, and which options changed nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.dump.graph_record import GraphRecord
from compiled_fsdp.eager import optimizer_steps
from compiled_fsdp.errors import named
from compiled_fsdp.inspection import measured
from compiled_fsdp.inspection.collect import Ran, collect
from compiled_fsdp.inspection.explanation import Explanation, OptionInfo
from compiled_fsdp.ir.collectives import OF_REDUCTIONS
from compiled_fsdp.planning.plan import options as plan_options
from compiled_fsdp.torch_private.compiled import uncompiled
from compiled_fsdp.units.unit import original_class
from compiled_fsdp.wire.runs import all_runs

from .state import states_below

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from compiled_fsdp.options import Options
    from compiled_fsdp.units.unit import Unit


class UnusedOptionError(RuntimeError):
    """An option was set, a whole step has run, and nothing took a decision from it."""

    def __init__(self, text: str, explanation: Explanation) -> None:
        super().__init__(text)
        self.explanation = explanation


def explain(model: nn.Module, *, profile: Any = None, strict: bool = False) -> Explanation:
    """Say what became of a sharded model: which units are in a graph, what communicates them, what
    it costs, what each option did.

    Print the result, or take its fields; `as_dict()` is for JSON. Works before the first step,
    compiled or not, on any rank, and communicates nothing.

    Args:
        model: what `fully_shard` or `torch.compile` returned, or any module with sharded ones
            inside.
        profile: a finished `torch.profiler.profile` of some steps, from which exposed communication
            is taken, and with `profile_memory=True` the peak.
        strict: raise for options that changed nothing; without, the result says so.

    Raises:
        TypeError: nothing in the model is sharded, or `profile` is no profile.
        UnusedOptionError: with `strict`, where a step has run since an option was set, and nothing
            took a decision from it; `.explanation` has the rest.
    """
    inner = uncompiled(model)
    states = states_below(inner) if isinstance(inner, torch.nn.Module) else []
    if not states:
        raise TypeError(
            f"explain: {named(model)} has no sharded module. Call fully_shard on it first"
        )
    measured.check(profile)
    optimizer_steps.catch_up()
    units = sorted((s.unit for s in states), key=lambda unit: unit.number)
    found = collect(original_class(inner).__name__, units, states[0].runtime.tree, profile)
    runs = [(run, GraphRecord.parse(run.record)) for run in all_runs()]
    used = {option.name for option in found.options if option.consumers}
    judged = [
        option if option.name in used.intersection(OF_ALL) else _judged(option, units, runs)
        for option in found.options
    ]
    found = replace(found, options=judged)
    wrong = [f"  {option.unused}" for option in found.options if option.unused]
    if strict and wrong:
        raise UnusedOptionError(
            "explain: these options were set, a step has run since, and nothing took a decision "
            "from them, so they changed nothing:\n" + "\n".join(wrong) + "\nLeave them out",
            found,
        )
    return found


def _judged(option: OptionInfo, units: Sequence[Unit], runs: list[Ran]) -> OptionInfo:
    """Returns the option with what is to be said if it changed nothing.

    Only where a backward has run since: before, nothing had the chance.
    """
    if option.consumers:
        return option
    asked = [u for u in units if u.name in option.units]
    if asked and option.name in OF_REDUCTIONS:
        asked = [u for u in asked if any(p.sharded.requires_grad for p in u.params)]
        if not asked:
            return replace(option, idle="no parameter there requires a gradient")
    names = [u.name for u in asked if _has_trained(u, u.options, option.name, runs)]
    is_of_plan = not option.units and any(
        _has_trained(u, plan_options, option.name, runs) for u in units
    )
    if not names and not is_of_plan:
        return option
    of = f" of {', '.join(names[:5])}" if names else ""
    return replace(option, unused=f"{option.name}={option.value}{of}{_hint(option.name)}")


def _has_trained(unit: Unit, options: Options, name: str, runs: list[Ran]) -> bool:
    since = options.asked[name].moment
    eager = unit.options.consumed.get("mp_policy.reduce_dtype", {})
    graphs = [
        run.last for run, record in runs if record.kind != "forward" and unit.key in record.units
    ]
    return max([*eager.values(), *graphs], default=0) > since


# Asked for once, of all units: used if one of them has used it.
OF_ALL = ("overlap_optimizer",)
HINTS = {
    "Plan.": "a plan is for graphs: compile the model, before the step and after set_plan",
    "set_requires_all_reduce": "without a replicate axis (HSDP) there is no all-reduce",
    "set_reshard_after_backward": "a graph keeps parameters only with reshard_after_forward=False",
    "set_is_last_backward": "a graph awaits its reductions itself",
    "set_modules_to_": "in a graph, the unit has neither a gather nor a reduction to begin at",
    "ignored_params": "none of them is a parameter of the module",
}


def _hint(name: str) -> str:
    return next((f" ({text})" for start, text in HINTS.items() if name.startswith(start)), "")
