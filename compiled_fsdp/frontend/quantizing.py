"""What the plan says of codes on the wire reaches the units: new ones, and others when their model
is called next.

A plan is for graphs, but codes change numbers, so what runs eagerly uses them too; and graphs that
were compiled before are compiled again.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from compiled_fsdp.errors import warn_once
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.units.quantizing import refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from compiled_fsdp.units.unit import Unit


def follow(unit: Unit) -> None:
    """Let a unit do as the plan says."""
    plan, settings = current_plan(), unit.settings
    asked = plan.gather_quantized, plan.reduce_quantized, plan.exact
    if asked == (settings.gather_quantized, settings.reduce_quantized, settings.exact):
        return
    settings.gather_quantized, settings.reduce_quantized, settings.exact = asked
    unit.publish()
    for name in ("gather_quantized", "reduce_quantized"):
        codes = [getattr(param.spec, name) for param in unit.params]
        unit.options.ask(name, next(filter(None, codes), None))


def check_supported(unit: Unit) -> None:
    """Before a unit is called: it does as the plan says.

    Raises:
        NotImplementedError: it cannot; the text says why.
    """
    follow(unit)
    if text := refusal(unit):
        raise NotImplementedError(text)


def check_names(units: Iterable[Unit]) -> None:
    """Announce names of `Plan.exact` that no parameter of a model has."""
    patterns = current_plan().exact
    names = [param.fqn for unit in units for param in unit.params]
    missing = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if missing:
        warn_once(
            f"compiled_fsdp: Plan(exact={patterns!r}): no parameter of the model matches {missing}. "
            f"Names are those of named_parameters(), such as {names[0]!r}; * stands for anything"
        )
