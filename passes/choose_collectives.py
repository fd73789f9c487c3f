"""Choose how each unit's parameters are gathered and reduced: in how many messages, and by which
collective.

The choice is written into the ops, where every later pass reads it.

Before, with costs by which a further message takes as long as copying 1 MB, and an all-to-all is
faster than a reduce-scatter:

    %w = unshard(%flat, "w", own_message=2**18)
    %g = reduce_grad(%d, %flat, "w", "reduce_scatter", "avg", post_divide=1)

After:

    %w = unshard(%flat, "w", own_message=10**6)
    %g = reduce_grad(%d, %flat, "w", "all_to_all", "sum", post_divide=N)

Requires: a joint graph in which each parameter is unsharded once.
Ensures: `own_message` and `reduce_algorithm` are as the plan says, or for None as costs say
    (`choices.py`), alike in a unit.
Leaves alone: a reduction of the user's own; the mean over HSDP's replicas that the backend
    computes; everything where the plan leaves the choice to the backend, and where it asks for
    costs and has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.schema import (
    KEEP_SLICE,
    REDUCE_GRAD,
    UNSHARD,
    UNSHARD_SLICE,
    param_spec,
    set_param_spec,
)
from compiled_fsdp.ir.spec import ParamSpec
from compiled_fsdp.planning.choices import Choices

from .base import consume

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def choose_collectives(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    nodes = find(gm.graph, UNSHARD, UNSHARD_SLICE, KEEP_SLICE, REDUCE_GRAD)
    specs = {node: param_spec(node) for node in nodes}
    if nodes:
        consume(gm)
    choices = Choices.decide(list(specs.values()), plan)
    for node, spec in specs.items():
        chosen = replace(spec, own_message=choices.own_message[spec.group])
        if node.target is REDUCE_GRAD:
            chosen = reduced_by(chosen, choices.algorithm[spec.unit])
        if chosen != spec:
            set_param_spec(node, chosen)
    return gm


def reduced_by(spec: ParamSpec, algorithm: str) -> ParamSpec:
    """The spec with another reduction; what averages itself becomes a sum and a division."""
    if algorithm in ("", spec.reduce_algorithm):
        return spec
    if spec.reduce_op == "avg" and algorithm == "all_to_all":
        factor = spec.post_divide * spec.group_size
        return replace(spec, reduce_algorithm=algorithm, reduce_op="sum", post_divide=factor)
    return replace(spec, reduce_algorithm=algorithm)
