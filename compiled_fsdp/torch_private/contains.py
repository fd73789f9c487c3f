"""Private torch: `value in container` in a trace.

Tried on torch 2.11, 2.13, 2.14 and 2.15; from 2.14 on torch looks at every item itself.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

from torch._dynamo import utils
from torch._dynamo.variables import ConstantVariable, lists
from torch._dynamo.variables.builder import SourcelessBuilder
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

if TYPE_CHECKING:
    from collections.abc import Iterable

KINDS = (int, float, tuple, list)  # of values of which symbols may be a part


def look_at_every_item() -> None:
    """Let Dynamo compare a number with those of a list that are arguments, once for all.

    A list of numbers that differ from call to call (`forward(x, layers=[0, 3])`) has symbols for
    them from the second call on. Until 2.13 `3 in layers` passes over what is no constant, and is
    False, without a word, sharded or not, with any backend. Here it is True or False, guarded, as a
    branch on it would have it; of sizes that only data decides it is what torch makes of it.
    """
    contains: Any = lists.iter_contains  # type: ignore[attr-defined]
    if hasattr(contains, "__wrapped__"):
        return

    @functools.wraps(contains)
    def compared(items: Iterable[Any], search: Any, tx: Any, *args: Any, **options: Any) -> Any:
        items = list(items)
        found = _guarded(contains(items, search, tx, *args, **options))
        if not (found.is_python_constant() and search.is_python_constant()):
            return found
        value = search.as_python_constant()
        if found.as_python_constant() or not isinstance(value, KINDS):
            return found
        if isinstance(value, bool):
            search = ConstantVariable.create(int(value))
        for item in items:
            if isinstance(item, SymNodeVariable | BaseListVariable):
                found = _either(tx, _equal(tx, item, search), found)
        return found

    changed: Any = (utils, lists)
    for module in changed:
        module.iter_contains = compared


def _equal(tx: Any, item: Any, search: Any) -> Any:
    if item.is_python_constant():
        return ConstantVariable.create(False)  # torch has compared it
    return _guarded(_call(tx, operator.eq, item, search))


def _either(tx: Any, check: Any, found: Any) -> Any:
    for one, other in ((check, found), (found, check)):
        if one.is_python_constant():
            return one if one.as_python_constant() else other
    return _call(tx, operator.or_, check, found)


def _guarded(check: Any) -> Any:
    """A comparison of numbers that are known now as what it is now, with a guard."""
    if isinstance(check, SymNodeVariable) and not free_unbacked_symbols(check.sym_num):
        return ConstantVariable.create(bool(check.evaluate_expr()))
    return check


def _call(tx: Any, function: Any, *args: Any) -> Any:
    return SourcelessBuilder.create(tx, function).call_function(tx, [*args], {})
