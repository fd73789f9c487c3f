"""Which messages and collectives carry each unit: a record decided from the plan and its costs
before any rewriting.

- A parameter travels by itself, straight into its place, if copying it out of a shared message
  takes longer than a message.
- A parameter in a shared message is copied out, or read with gaps by the kernels that Inductor
  generates, if copying takes a noticeable part of the graph's time.
- A gradient is reduced by the backend's reduce-scatter, or by an all-to-all whose rows are then
  added locally (accumulating bf16 in fp32, as torch's sum does), whichever takes less time for the
  unit's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import CUSTOM
from compiled_fsdp.ir.graph import value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from compiled_fsdp.ir.spec import ParamSpec

    from .costs import Costs
    from .plan import Plan


# Rows of whole cache lines are read with gaps as fast as without (1.00 to 1.08 of an RMSNorm on a
# CPU); of others, Inductor's loops take elements one by one: 3 times as long for rows of 24
# elements, 5 times for 2.
LINE = 64
WORTH_A_KERNEL = (
    1e-2  # share of a graph's time for which kernels are compiled for every place in a bucket
)


@dataclass(frozen=True, slots=True)
class Choices:
    """own_message: for each group, bytes from which a parameter travels by itself.
    algorithm: for each unit, the reduction; "" leaves it as it is.
    """

    own_message: dict[str, int]
    algorithm: dict[str, str]

    @staticmethod
    def decide(specs: Sequence[ParamSpec], plan: Plan) -> Choices:
        """For all parameters of a graph."""
        units: dict[str, dict[str, ParamSpec]] = {}
        for spec in specs:
            units.setdefault(spec.unit, {})[spec.fqn] = spec
        messages = {spec.group: _own_message(spec, plan) for spec in reversed(specs)}
        return Choices(
            messages,
            {unit: _algorithm(list(members.values()), plan) for unit, members in units.items()},
        )


def _own_message(spec: ParamSpec, plan: Plan) -> int:
    if plan.own_message is not None:
        return plan.own_message
    return spec.own_message if plan.costs is None else break_even(plan.costs, spec.group)


def break_even(costs: Costs, group: str) -> int:
    """Bytes of a parameter for which a copy, which reads and writes them, takes as long as one more
    message.
    """
    copying = costs.overhead  # launching it
    return round(max(costs.link(group).message - copying, 0.0) * costs.bandwidth / 2)


def worth_reading_strided(costs: Costs, copies: Sequence[Node], seconds: float) -> list[Node]:
    """Returns which of these copies out of buckets, which generated kernels could do without, to
    leave out of a graph that takes so long.
    """
    lined = [n for n in copies if _row_bytes(n) % LINE == 0]
    saved = sum(costs.overhead + 2 * value(n).nbytes / costs.bandwidth for n in lined)
    return lined if saved >= WORTH_A_KERNEL * seconds else []


def _row_bytes(copied: Node) -> int:
    """Returns the bytes of the parameter that one rank holds."""
    rows = value(copied)
    return rows[0].numel() * rows.itemsize


def _algorithm(members: Sequence[ParamSpec], plan: Plan) -> str:
    """Returns the algorithm of one unit; buckets hold only what is reduced alike, so all of a unit
    or none of it changes.
    """
    if plan.reductions == "backend" or any(not _may_change(spec) for spec in members):
        return ""
    if plan.reductions is not None:
        return plan.reductions
    return "" if plan.costs is None else faster(plan.costs, members)


def _may_change(spec: ParamSpec) -> bool:
    is_users = spec.reduce_algorithm.startswith(CUSTOM)
    return (
        spec.group_size > 1
        and not is_users
        and spec.reduce_quantized is None
        and not spec.is_checked
        and (spec.reduce_op == "sum" or spec.replicate_size == 1)
    )


def faster(costs: Costs, members: Sequence[ParamSpec]) -> str:
    """The reduction that takes less time for the gradients of these; "" if they were not
    measured.
    """
    spec = members[0]
    link, size = costs.link(spec.reduce_group), spec.group_size
    if not (link.scatter and link.exchange):
        return ""
    nbytes = sum(s.full_bytes(s.reduce_dtype) for s in members)
    sent = nbytes * (size - 1) / size
    adding = costs.overhead + (nbytes + nbytes / size) / costs.bandwidth
    exchanged = link.seconds(sent, link.exchange) + adding
    return "all_to_all" if exchanged < link.seconds(sent, link.scatter) else "reduce_scatter"
