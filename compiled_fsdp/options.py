"""Options that the user asked of a unit, and which part of the program took a decision from each.

Setters and `fully_shard` write down what was asked, where it differs from the default. Whatever
reads an option to decide something writes that down too, there: passes in the graph's own record
(`passes/base.py`, `graph_record.py`), the eager runtime and hooks here. An option that was asked
for and that nothing consumed in a whole step has changed nothing: `explain` names it, and raises
with `strict=True`.

Both carry a moment, counted up: a value that was set later than its last consumer ran is not
consumed yet.
"""

from __future__ import annotations

import itertools
import os
import weakref
from dataclasses import dataclass, field
from typing import Any

_moments = itertools.count(1)

# For one graph: (option, unit), the unit "" for the outermost or for the plan -> the parts of the
# program that took a decision from it.
Consumed = dict[tuple[str, str], dict[str, None]]


def note(consumed: Consumed, by: str, option: str, unit: str = "") -> None:
    """Note that a part of the program took a decision from an option, for this unit of a graph."""
    consumed.setdefault((option, unit), {})[by] = None


def is_verifying() -> bool:
    """Returns whether COMPILED_FSDP_VERIFY is set, and not to 0: invariants are checked after every
    pass, not the last alone, eager mode checks the bits of what it gathered, and between a graph
    and its backward those of what it read.
    """
    return os.environ.get("COMPILED_FSDP_VERIFY", "0") not in ("", "0")


def now() -> int:
    """The next moment."""
    return next(_moments)


@dataclass(frozen=True, slots=True)
class Asked:
    """An option's value, as text, and when it was asked for."""

    value: str
    moment: int


@dataclass(eq=False)
class Options:
    """The options of one unit, or of the plan.

    asked: by name: an argument of `fully_shard`, a field of a policy or of `Plan`, or the setter's
        name.
    consumed: by name, the parts that read the option, and when each did so last.
    """

    asked: dict[str, Asked] = field(default_factory=dict)
    consumed: dict[str, dict[str, int]] = field(default_factory=dict)

    def ask(self, name: str, value: object, default: object = None) -> None:
        """Note what was asked for; the default asks for nothing."""
        if value is default or (type(value) is type(default) and value == default):
            self.asked.pop(name, None)
        elif name not in self.asked or self.asked[name].value != text(value):
            self.asked[name] = Asked(text(value), now())

    def consume(self, by: str, *names: str) -> None:
        """A part of the program took a decision from these."""
        for name in names:
            self.consumed.setdefault(name, {})[by] = now()

    def consumers(self, name: str) -> list[str]:
        """The parts that consumed what is asked for now."""
        since = self.asked[name].moment if name in self.asked else 0
        return [by for by, moment in self.consumed.get(name, {}).items() if moment > since]


_by_number: weakref.WeakValueDictionary[str, Options] = weakref.WeakValueDictionary()


def of_unit(key: str) -> Options | None:
    """The options of the unit that graphs call this ("name#number"); None if it is gone."""
    return _by_number.get(key.rpartition("#")[2])


def remember(number: int, options: Options) -> None:
    """Let `of_unit` find a unit's options."""
    _by_number[str(number)] = options


def text(value: Any) -> str:
    """A value, shortly."""
    if isinstance(value, set | frozenset):
        return f"{len(value)} parameters"
    if isinstance(value, list | tuple) and not all(
        isinstance(entry, str | int | float) for entry in value
    ):
        return f"[{', '.join(map(text, value))}]"
    name = getattr(value, "__name__", None)
    whole = name if isinstance(name, str) else repr(value)
    return whole if len(whole) <= 100 and "\n" not in whole else type(value).__name__
