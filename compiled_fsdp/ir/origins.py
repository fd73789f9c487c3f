"""Where the tensors in a node's value lie: a storage of their own, or that of another node that
they are a view of.

Private torch used here (tried on 2.13): `torch.utils._pytree.tree_leaves`.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from .expected import at_most
from .graph import is_undeclared_alias

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Node

MAY_COPY = (
    torch.ops.aten.reshape.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.flatten.using_ints,
)


def tensors_of(node: Node) -> list[Tensor | None]:
    """Every leaf of a node's value; None for what is no tensor, or one without a storage of its own
    (sparse).
    """
    val = node.meta.get("val")
    leaves = [val] if isinstance(val, torch.Tensor) else tree_leaves(val)
    return [leaf if _has_storage(leaf) else None for leaf in leaves]


def _has_storage(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def key_of(tensor: Tensor) -> int:
    """The same for all tensors of one storage."""
    key: int = tensor.untyped_storage()._cdata
    return key


def num_bytes_of(tensor: Tensor) -> int:
    """Size of the whole storage; of a symbolic one what `at_most` says."""
    size: Any = tensor.untyped_storage().nbytes()
    return at_most(size)


def source_of(node: Node, i: int) -> tuple[Node, int] | None:
    """Which tensor (the j-th of which node) the i-th of this node is a view of; None if it has a
    storage of its own.
    """
    if node.target is operator.getitem:
        parent: Any = node.args[0]
        if "val" not in parent.meta:
            return None
        values = list(parent.meta["val"])
        return parent, i + len(tree_leaves(values[: range(len(values))[node.args[1]]]))  # type: ignore[index]
    if is_undeclared_alias(node):
        return node.all_input_nodes[0], 0
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    place = _aliased(node.target, i)
    source = None if place is None else _given(node, *place)
    if source is None or (
        node.target in MAY_COPY and key_of(node.meta["val"]) != key_of(source.meta["val"])
    ):
        return None
    return source, 0


def unpacked(node: Node) -> Node:
    """Returns what allocates a value: the partitioner's ops around random state have none of their
    own, only what is taken out of them.
    """
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


@cache
def _aliased(op: torch._ops.OpOverload, i: int) -> tuple[int, str] | None:
    """Place and name of the argument that the i-th result of an op may be a view of; the views in a
    list (`split`) have no alias names. Looked up once: torch makes objects of a schema's parts
    whenever they are read.
    """
    returns = op._schema.returns
    alias = returns[i if len(returns) > 1 else 0].alias_info
    if alias is None:
        return None
    for place, argument in enumerate(op._schema.arguments):
        info = argument.alias_info
        if info is not None and (not alias.before_set or info.before_set & alias.before_set):
            return place, argument.name
    return None


def _given(node: Node, place: int, name: str) -> Node | None:
    given = node.args[place] if place < len(node.args) else node.kwargs.get(name)
    return given if isinstance(given, torch.fx.Node) else None
