"""Modules inside of units that are moved or cast by themselves (`model.head.bfloat16()`).

The parameters lie elsewhere then, where an optimizer finds them and no gather does, silently with
torch's FSDP2. So the next call of the unit brings them back into its buffers, or says why not.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from compiled_fsdp.units.registered import Registered

if TYPE_CHECKING:
    from collections.abc import Callable

    from compiled_fsdp.eager.runtime import Runtime


def noting(original: Any) -> Callable[..., Any]:
    """The `_apply` of a class whose modules own sharded parameters: that of `to`, `to_empty` and
    the like, which units are told of.
    """

    @functools.wraps(original._apply)
    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original._apply(self, *args, **kwargs)
        table = self._parameters
        if isinstance(table, Registered):
            for unit, _ in table.owners.values():
                unit.was_moved = True
        return result

    return _apply


def follow_moved(runtime: Runtime) -> None:
    """Before a unit is called or gathered: as behind `to` of the whole unit.

    Raises:
        NotImplementedError, TypeError: as `Unit.take_over`.
    """
    if runtime.unit.was_moved:
        runtime.drop_pending()
        runtime.reshard()
        runtime.unit.take_over()
