"""What the fields of a plan may be, and what is raised where they are something else."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from compiled_fsdp.ir.quantized import LARGEST

if TYPE_CHECKING:
    from .plan import Plan

# The default, and where nothing is known of costs.
DISTANCES = {"prefetch": 2.0, "backward_prefetch": 1.0, "reduces_in_flight": 1.0}
LEAST_BUDGET = 1 << 20  # bytes; an int below is a share that was meant to be a float
# Fields that are bytes, and what else they may be.
SIZES = {
    "bucket_bytes": "'auto' (from costs)",
    "split_bytes": "'auto' (from costs)",
    "own_message": "'auto' (from costs)",
    "reduction_bytes": "None (three times the largest reduction)",
    "host_budget": "None (as many as the memory budget asks for)",
}
BY_BUDGET = "budget"  # of `recompute`, `offload` and `optimizer_state`
REDUCTIONS = ("backend", "reduce_scatter", "all_to_all", None)
COPY_OUT = ("copy", "strided", None)
REGIONS = ("auto", "units", "off")
EXCHANGE_GROUPS = ("own", "shared")
CHECKS = (None, "checksums")


def check(plan: Plan) -> None:
    """Whether a plan's fields can be what they are, each and together.

    Raises:
        ValueError: one cannot, or two cannot go together, by name and value.
    """
    _check_distances(plan)
    _check_sizes(plan)
    _check_choices(plan)
    _check_budget(plan)
    _check_codes(plan)


def _check_distances(plan: Plan) -> None:
    """Distances are numbers, 0 or more."""
    for name in DISTANCES:
        distance = getattr(plan, name)
        if distance is None:
            continue
        if (
            isinstance(distance, bool)
            or not isinstance(distance, int | float)
            or not 0 <= distance < inf
        ):
            raise ValueError(
                f"Plan: {name}={distance!r}; should be a number of units, at least 0, or "
                "'auto' (from costs)"
            )


def _check_sizes(plan: Plan) -> None:
    """Sizes are whole numbers of bytes."""
    for name, by_default in SIZES.items():
        size = getattr(plan, name)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
            raise ValueError(
                f"Plan: {name}={size!r}; should be a number of bytes, at least 0, or {by_default}"
            )


def _check_choices(plan: Plan) -> None:
    """The others are one of a few words, or a bool."""
    if plan.reductions not in REDUCTIONS:
        raise ValueError(
            f"Plan: reductions={plan.reductions!r}; should be one of {REDUCTIONS[:-1]}, or "
            "'auto' for the cheaper by costs"
        )
    if plan.copy_out not in COPY_OUT:
        raise ValueError(
            f"Plan: copy_out={plan.copy_out!r}; should be one of {COPY_OUT[:-1]}, or 'auto' "
            "for the cheaper by costs"
        )
    _check_regions(plan)
    if plan.exchange_group not in EXCHANGE_GROUPS:
        raise ValueError(
            f"Plan: exchange_group={plan.exchange_group!r}; should be one of {EXCHANGE_GROUPS}"
        )
    if plan.check not in CHECKS:
        raise ValueError(f"Plan: check={plan.check!r}; should be one of {CHECKS}")
    if plan.check is not None and plan.reductions == "reduce_scatter":
        raise ValueError(
            f"Plan: reductions='reduce_scatter' with check={plan.check!r}; what is added on its "
            "way cannot be compared with what was sent, so gradients are exchanged and added where "
            "they arrive. Leave out one of the two"
        )
    if not isinstance(plan.recompute, bool) and plan.recompute != BY_BUDGET:
        raise ValueError(
            f"Plan: recompute={plan.recompute!r}; should be True or False, or {BY_BUDGET!r}"
        )
    for name in ("overlap_exchanges", "record_routing"):
        if not isinstance(getattr(plan, name), bool):
            raise ValueError(f"Plan: {name}={getattr(plan, name)!r}; should be True or False")


def _check_regions(plan: Plan) -> None:
    """A word, or the names of classes."""
    regions = plan.regions
    is_named = isinstance(regions, tuple) and all(isinstance(each, str) for each in regions)
    if regions not in REGIONS and not (is_named and regions):
        raise ValueError(
            f"Plan: regions={regions!r}; should be one of {REGIONS}, or a tuple of names of "
            'classes, for example ("Block",)'
        )


def _check_budget(plan: Plan) -> None:
    """A budget is bytes, as an int, or a share, as a float."""
    budget = plan.memory_budget
    if plan.recompute == BY_BUDGET and budget is None:
        raise ValueError(
            f"Plan: recompute={BY_BUDGET!r} with memory_budget=None; a budget decides which "
            "activations are computed again. Set one, in bytes (an int) or as a float from 0.0 "
            "to 1.0"
        )
    _check_offload(plan)
    if plan.shares_units and (plan.recompute == BY_BUDGET or plan.offload is not None):
        raise ValueError(
            f"Plan: regions={plan.regions!r} with recompute={plan.recompute!r}, "
            f"offload={plan.offload!r}; a unit that is compiled once saves the same "
            "activations wherever it is called, so that no budget can choose among them. Leave "
            "out one of the two"
        )
    is_number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if budget is not None and not (
        is_number and (budget >= 0 if isinstance(budget, int) else 0 <= budget <= 1)
    ):
        raise ValueError(
            f"Plan: memory_budget={budget!r}; should be bytes (an int), or a float from 0.0 "
            "(nothing kept for backward) to 1.0"
        )
    if isinstance(budget, int) and budget < LEAST_BUDGET:
        raise ValueError(
            f"Plan: memory_budget={budget!r} is an int, so {budget} bytes above what is at rest, "
            f"and fewer than {LEAST_BUDGET} are no budget. For a share, write a float: 0.0 "
            "(nothing kept for backward) to 1.0"
        )


def _check_offload(plan: Plan) -> None:
    """Activations, and an optimizer's state, are on the host by a budget."""
    if plan.offload not in (None, BY_BUDGET):
        raise ValueError(
            f"Plan: offload={plan.offload!r}; should be None, or {BY_BUDGET!r}, for saved "
            "activations. An optimizer's state rests on the host by "
            f"Plan(optimizer_state={BY_BUDGET!r}) with compile_step; parameters, and their state "
            "with them, by CPUOffloadPolicy (fully_shard) or CPUOffload (FullyShardedDataParallel)"
        )
    if plan.optimizer_state not in (None, BY_BUDGET):
        raise ValueError(
            f"Plan: optimizer_state={plan.optimizer_state!r}; should be None (on the device), or "
            f"{BY_BUDGET!r}, for state that rests on the host as far as memory_budget asks for it. "
            "For all of it, memory_budget=0.0"
        )
    for name, what in (("offload", "activations go"), ("optimizer_state", "optimizer state goes")):
        if getattr(plan, name) is not None and plan.memory_budget is None:
            raise ValueError(
                f"Plan: {name}={BY_BUDGET!r} with memory_budget=None; a budget decides which "
                f"{what} to the host. Set one, in bytes (an int) or as a float from 0.0 to 1.0"
            )
    if plan.host_budget is not None and plan.offload is None and plan.optimizer_state is None:
        raise ValueError(
            f"Plan: host_budget={plan.host_budget!r} with offload=None and optimizer_state=None, "
            f"so that nothing goes to the host. Set one of them to {BY_BUDGET!r}, or leave out "
            "host_budget"
        )


def _check_codes(plan: Plan) -> None:
    """Codes are of one of a few dtypes; names are a tuple of texts."""
    for name in ("gather_quantized", "reduce_quantized"):
        codes = getattr(plan, name)
        if codes is not None and codes not in LARGEST:
            raise ValueError(
                f"Plan: {name}={codes!r}; should be one of {tuple(LARGEST)}, or None (exact)"
            )
    if not isinstance(plan.exact, tuple) or not all(isinstance(name, str) for name in plan.exact):
        raise ValueError(
            f"Plan: exact={plan.exact!r}; should be a tuple of names of parameters, for example "
            '("head.*",)'
        )
    if plan.reduce_quantized is not None and plan.reductions == "reduce_scatter":
        raise ValueError(
            f"Plan: reductions='reduce_scatter' with reduce_quantized={plan.reduce_quantized}; "
            "codes cannot be added on the way, so they are exchanged and added where they arrive. "
            "Leave out one of the two"
        )
