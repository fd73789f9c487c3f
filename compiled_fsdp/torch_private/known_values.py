"""Private torch: fake values that Inductor would compute again. Tried on torch 2.11, 2.13 and 2.15;
until 2.11 what updates them holds a graph, from then on its module.
"""

from __future__ import annotations

import functools
import weakref
from operator import is_
from typing import Any

from torch.fx import Graph, GraphModule

# Who is to update the values of a graph.
_updaters: weakref.WeakKeyDictionary[GraphModule, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def watch_values() -> None:
    """Let Inductor update the values of a graph only if a node of it has changed since they were
    right, once for all.

    Behind the passes of others it computes the value of each node that is new, and looks through
    the arguments of all, twice for each graph. Ours have given each of their nodes its value.
    """
    from torch._inductor.fx_utils import FakeTensorUpdater  # more than a second

    updater: Any = FakeTensorUpdater
    made, update = updater.__init__, updater.incremental_update
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def init(self: Any, of: GraphModule | Graph, *args: Any, **options: Any) -> None:
        made(self, of, *args, **options)
        gm: Any = of if isinstance(of, GraphModule) else of.owning_module
        self.fsdp_of = gm
        self.fsdp_known = _read(gm)
        _updaters[gm] = weakref.ref(self)

    @functools.wraps(update)
    def update_if_changed(self: Any) -> int:
        now = _read(self.fsdp_of)
        if len(now) == len(self.fsdp_known) and all(map(is_, now, self.fsdp_known)):
            return 0
        number: int = update(self)
        self.fsdp_known = _read(self.fsdp_of)
        return number

    updater.__init__ = init
    updater.incremental_update = update_if_changed


def update_values(gm: GraphModule) -> None:
    """Before passes of ours in Inductor: let the values of nodes that passes of torch's have
    changed be right, as they would be later.
    """
    if (updater := _updater_of(gm)) is not None:
        updater.incremental_update()


def note_values(gm: GraphModule) -> None:
    """After passes of ours: all nodes have the values that they should have."""
    if (updater := _updater_of(gm)) is not None:
        updater.fsdp_known = _read(gm)


def _updater_of(gm: GraphModule) -> Any:
    found = _updaters.get(gm)
    return None if found is None else found()


def _read(gm: GraphModule) -> list[object]:
    """What values depend on, and they themselves. Tuples and dicts of arguments are replaced, not
    changed, so that identity says it all.
    """
    graphs = [each.graph for each in gm.modules() if isinstance(each, GraphModule)]
    return [
        each
        for graph in graphs
        for n in graph.nodes
        for each in (n, n.target, n.args, n.kwargs, n.meta.get("val"))
    ]
