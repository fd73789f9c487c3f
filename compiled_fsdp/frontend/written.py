"""What a trace writes to: the storages of Dynamo's fake tensors that some node changes.

Private torch used here (tried on 2.13 and 2.15): `torch.utils._pytree`.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from compiled_fsdp.ir.graph import op_name
from compiled_fsdp.ir.meta import traced_value
from compiled_fsdp.torch_private.autograd import unwrapped
from compiled_fsdp.torch_private.dtensors import local_tensor
from compiled_fsdp.torch_private.dynamo import GET_DATA, SET_GRAD_ENABLED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.fx import Graph


# `x[0] = y`, and `x += y` of a tensor that is written to.
OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        *("setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow"),
        *("ilshift", "irshift", "iand", "ixor", "ior"),
    )
)


def written_storages(graphs: Iterable[Graph]) -> set[int]:
    """Returns the storages of the fake tensors that some node writes to, through whichever alias.

    A node that writes is known by its name, as torch spells such functions, or by the version of
    what was new in the graph (`embedding(max_norm=...)`): inputs come with versions of their own,
    and fake lists count none.
    """
    found: set[int] = set()
    inputs: set[int] = set()
    for node in (node for graph in graphs for node in graph.nodes):
        value = traced_value(node)
        if node.op == "placeholder":
            inputs.update(storages(value))
        elif isinstance(value, Tensor) and not inputs.issuperset(storages(value)):
            if max(value._version, local_tensor(value)._version) > 0:
                found.update(storages(value))
        for written in written_by(node):
            found.update(storages(traced_value(written)))
    return found


def written_by(node: Node) -> Iterator[Node]:
    """Yields what a node writes to, as its name says."""
    name = op_name(node.target)
    out = node.kwargs.get("out")
    yield from (n for n in tree_leaves(out) if isinstance(n, Node))
    if node.op not in ("call_function", "call_method") or node.target in (
        SET_GRAD_ENABLED,
        GET_DATA,
    ):
        return
    if node.target in OPERATORS or (name.endswith("_") and not name.endswith("__")):
        yield from (n for n in tree_leaves(node.args[:1]) if isinstance(n, Node))
    if name.startswith("_fused_") and name.endswith("_"):
        yield from (n for n in tree_leaves(node.args[1:]) if isinstance(n, Node))


def is_written(node: Node, written: set[int]) -> bool:
    """Whether a node yields tensors in one of these storages."""
    return any(storage in written for storage in storages(traced_value(node)))


def storages(value: object) -> Iterator[int]:
    """Yields the storages of the tensors in a value."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield unwrapped(local_tensor(leaf)).untyped_storage()._cdata
