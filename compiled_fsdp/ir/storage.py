"""In whose memory values lie: views, casts that change nothing, and what ops write to."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from .expected import hint
from .graph import is_view

aten, prims = torch.ops.aten, torch.ops.prims

# What changes a dtype, if the node that it reads has another.
CASTS = {prims.convert_element_type.default, aten._to_copy.default}


def may_alias(node: Node) -> bool:
    """Whether the result may lie in the storage of what the node reads first: views, and casts that
    change nothing, which compilers leave out.
    """
    if is_view(node):
        return True
    return node.target in CASTS and _dtype(read_first(node)) == _dtype(node)


def storage_of(node: Node) -> Node:
    """Returns the value in whose storage a view lies; any other node is its own."""
    while may_alias(node) and read_first(node) is not node:
        node = read_first(node)
    return node


def written_by(node: Node) -> list[Node]:
    """Returns the arguments that a node writes to; none where it is no op of torch's library."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = node.target._schema.arguments
    given = {**dict(zip((a.name for a in arguments), node.args, strict=False)), **node.kwargs}
    found: list[Node] = []
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            map_arg(given.get(argument.name), found.append)
    return found


def read_first(node: Node) -> Node:
    """Returns the node that is the first argument of another; that other, if its first is none."""
    first = node.args[0] if node.args else None
    return first if isinstance(first, Node) else node


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def is_read_from(begin: Node, value: Node) -> bool:
    """Whether a value is made or read where `begin` stands or behind it: if not, its memory would
    live on from before, in the place of what begins to live there.
    """
    stack, is_before = [value], value < begin
    while stack and is_before:
        for user in stack.pop().users:
            is_before &= user < begin
            if may_alias(user):
                stack.append(user)
    return not is_before


def num_bytes(node: Node) -> int:
    """The size of the tensor that a node yields, as expected where only data decides it; 0 if it
    yields something else.
    """
    value = node.meta.get("val")
    return hint(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0
