"""Private torch: `value in container` in a trace.

Tried on torch 2.11, 2.13, 2.14 and 2.15; from 2.14 on torch does so itself.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

from torch._dynamo import utils
from torch._dynamo.variables import lists
from torch._dynamo.variables.builder import SourcelessBuilder
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import SymNodeVariable

if TYPE_CHECKING:
    from collections.abc import Iterable


KINDS = (int, float, tuple, list)  # of values of which symbols may be a part


def look_at_every_item() -> None:
    """Let Dynamo compare a number with those of a list that are arguments, once for all.

    A list of numbers that differ from call to call (`forward(x, layers=[0, 3])`) has symbols for
    them from the second call on. Until 2.13 `3 in layers` passes over what is no constant, and is
    False, without a word, sharded or not, with any backend.
    """
    contains: Any = vars(lists)["iter_contains"]
    if hasattr(contains, "__wrapped__"):
        return

    @functools.wraps(contains)
    def compared(items: Iterable[Any], search: Any, tx: Any, *args: Any, **options: Any) -> Any:
        items = list(items)
        found = contains(items, search, tx, *args, **options)
        if not (found.is_python_constant() and search.is_python_constant()):
            return found
        if found.as_python_constant() or not isinstance(search.as_python_constant(), KINDS):
            return found

        def call(function: Any, *of: Any) -> Any:
            return SourcelessBuilder.create(tx, function).call_function(tx, [*of], {})

        unknown = [
            item
            for item in items
            if isinstance(item, SymNodeVariable | BaseListVariable)
            and not item.is_python_constant()
        ]
        equal = [call(operator.eq, item, search) for item in unknown]
        return functools.reduce(functools.partial(call, operator.or_), equal, found)

    changed: Any = (utils, lists)
    for module in changed:
        module.iter_contains = compared
