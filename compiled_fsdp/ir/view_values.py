"""Values of views, when passes have put other nodes in the place of what they are views of."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch.fx import Node
from torch.fx.node import map_arg

from compiled_fsdp.torch_private.fakes import is_plain, storage_key

from . import fakes
from .graph import is_view

if TYPE_CHECKING:
    from torch.fx import Graph


def follow_views(graph: Graph) -> bool:
    """Let the value of each view lie in the storage of what it is a view of now. Returns whether
    that could be done: not with more than plain fake tensors.
    """
    for node in graph.nodes:
        base = node.args[0] if node.args else None
        if not isinstance(base, Node) or not is_view(node):
            continue
        of: Any = base.meta.get("val")
        if node.target is operator.getitem:
            node.meta["val"] = of[node.args[1]]
            continue
        values = _tensors(node.meta.get("val"))
        if not all(map(is_plain, (of, *values))):
            return False
        if any(storage_key(each) != storage_key(of) for each in values):
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = fakes.run(node.target, args, kwargs)
    return True


def _tensors(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
