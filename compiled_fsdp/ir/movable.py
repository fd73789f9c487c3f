"""Which nodes only compute, so that they may stand elsewhere, and which write, so that what reads
may not pass them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .meta import get_tag
from .schema import MARK_GRADS, traits_of

if TYPE_CHECKING:
    from torch.fx import Node

ITEM = torch.ops.aten._local_scalar_dense.default


def can_move(node: Node) -> bool:
    """Whether a node computes and nothing else, the same wherever it stands."""
    if node.op != "call_function":
        return False
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):  # arithmetic of sizes, or one of several results
        return getattr(op, "__module__", "") in ("_operator", "torch", "torch.sym")
    tag = get_tag(node)
    if tag is not None:
        return tag.kind == "gather" and not _communicates(node)
    return (
        op.namespace in ("aten", "prims")
        and not op._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in op.tags
        and (op is ITEM or not node.is_impure())
    )


def writes(node: Node) -> bool:
    """Whether a node writes to what others may read; gradients that are marked nobody reads."""
    op: Any = node.target
    if isinstance(op, torch._ops.HigherOrderOperator):
        return str(op.name()).endswith("_mutation")  # a kernel of Triton, say
    if not isinstance(op, torch._ops.OpOverload) or op is MARK_GRADS:
        return False
    return bool(op._schema.is_mutable)


def _communicates(node: Node) -> bool:
    traits = traits_of(node.target)
    return bool(traits.starts or traits.awaits or traits.effect or traits.lowers_to)
