"""Which ops backward may compute a second time, from the same inputs to the same bits.

It is a list of what may, not of what may not: an op that nobody knows could draw random numbers,
communicate, write, or take another path the second time.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from .collectives import CONVERT
from .fusion import GENERATED, POINTWISE
from .graph import is_view
from .meta import is_saved_by_policy, makes_sizes

if TYPE_CHECKING:
    from torch.fx import Node

aten = torch.ops.aten
NAMESPACES = ("aten", "prims")
MATMULS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._grouped_mm.default,
)
OTHERS = (  # than pointwise ones, views, matmuls, and kernels that Inductor generates
    CONVERT,
    aten._to_copy.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten.stack.default,
    aten.index_select.default,
    aten.native_layer_norm.default,
    aten._fused_rms_norm.default,
)
ALLOWED = frozenset((*MATMULS, *OTHERS, *POINTWISE, *GENERATED))
FORBIDDEN_TAGS = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
)


def why_not_again(node: Node) -> str:
    """Returns why backward may not compute a node a second time; "" if it may.

    It may if the node is a view, a pointwise op, a copy, a norm, a reduction or a matmul of torch's
    own, which is no collective, writes nothing, draws no random numbers, makes no size that only
    data decides, and which no checkpointing policy wants to be saved.
    """
    if node.op != "call_function":
        return "is no op"
    if is_saved_by_policy(node):
        return "is to be saved by a checkpointing policy"
    if node.target is operator.getitem:
        return why_not_again(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return "is no op of torch's own"
    if node.target.namespace not in NAMESPACES:
        return "is no op of torch's own"
    if node.target._schema.is_mutable:
        return "writes to its input"
    if makes_sizes(node) or any(tag in node.target.tags for tag in FORBIDDEN_TAGS):
        return "draws random numbers, or makes sizes that only data decides"
    is_pointwise = torch.Tag.pointwise in node.target.tags
    if is_view(node) or is_pointwise or node.target in ALLOWED:
        return ""
    return "is not known to yield the same bits twice"
