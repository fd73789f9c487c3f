"""The plan: the choices of the passes, decided before any rewriting and the same on every rank."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.spec import OWN_MESSAGE
from compiled_fsdp.options import Options
from compiled_fsdp.wire.runs import all_runs

from .costs import Costs
from .plan_fields import DISTANCES, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# Units that gather less than this share collectives, where nothing is known of costs: about what a
# fast link carries in the time that starting a collective takes, and too little to be missed in
# memory.
BUCKET_BYTES = 1 << 20
# From costs, a shared bucket may be on the wire for so many times the latency of its link.
LATENCIES = 8

# "auto": decided from costs; None inside the compiler.
FROM_COSTS = (
    *DISTANCES,
    "bucket_bytes",
    "split_bytes",
    "own_message",
    "reductions",
    "copy_out",
)
AUTO = "auto"
# What a budget chooses for each graph; users set none of it.
DECIDED = ("kept", "dropped", "recomputed", "offloaded", "states_on_host")
FOLLOWED = ("gather_quantized", "reduce_quantized", "exact", "check")  # outside of graphs too


@dataclass(frozen=True, slots=True)
class Plan:
    """How collectives are scheduled: at distances that are set here, or from costs (`planner.py`).

    Distances are in units (buckets); a fraction means that share of a unit's matmuls. "auto" (or
    None): decided from `costs`; with a warning as in `Plan()`, if there are none when a graph is
    compiled, and likewise for all that costs decide. Distances are the default: on the wire that
    was measured they were faster so far, and they need no measurement.

    prefetch: how far ahead of its first use an all-gather starts in forward; 0 starts it where it
        is needed.
    backward_prefetch: the same in backward, where memory is scarcest: 0.5 starts it halfway through
        the unit before.
    reduces_in_flight: for how long a reduction is under way before it is awaited; 0 awaits it at
        once, 0.5 halfway through the next unit's backward, 2 when the second reduction after it is
        about to start.
    bucket_bytes: in a graph, neighbouring units share one all-gather, and one reduction, while
        together they are no larger than this (full parameters, in bytes); 0: every unit
        communicates by itself; "auto": from costs, as much as keeps the link busy for `LATENCIES`
        times its latency.
    split_bytes: in a graph, a unit of more than this (full parameters, in bytes) is gathered, and
        reduced, in parts of about this size, so that computing begins with the first and the last
        one alone stays exposed; 0: never; "auto": from costs, as far as it makes the predicted time
        of a graph shorter (`splitting.py`).
    own_message: in a graph, a parameter of fewer bytes shares a message with its neighbours and is
        copied out; a larger one is gathered straight into its place; "auto": from costs, where
        copying takes as long as a message.
    reductions: "reduce_scatter", "all_to_all" (and a local sum), "backend" (all-to-all on gloo,
        whose reduce-scatter moves twice the bytes, else reduce-scatter);
        "auto": from costs, for each unit the faster.
    copy_out: how parameters that share a message are read under Inductor: "copy": each is copied
        into one piece where it is first needed; "strided": kernels that Inductor generates read it
        in the bucket, and only what other kernels read is copied; "auto": from costs, strided where
        copying takes a hundredth of a graph's time. Strided reads save launches, and cost compile
        time, since every place in a bucket gets a kernel of its own, and time where a rank's rows
        are no whole vectors.
    reduction_bytes: where costs decide when reductions are awaited (`reduces_in_flight="auto"`),
        those under way send together at most so many bytes (full gradients, which stay alive
        meanwhile); 0: one at a time; None: three times the largest.
    recompute: whether backward computes again what pointwise kernels make from values that are
        saved anyway, also where a matmul reads it (`partition.py`); False: as torch's partitioner
        decides; "budget": as True, and under `memory_budget` also other saved activations, matmuls
        among them, as far as they do not fit (`planning/recompute.py`). Activation checkpointing
        comes before it.
    overlap_exchanges: whether what does not need tokens is computed while an all-to-all of the
        user's carries them, where the program says it before or after (`overlap_exchanges.py`),
        and all-gathers start where no tokens are about to travel (`give_way.py`); the numbers are
        the same.
    exchange_group: "own": in a graph, all-to-alls of the user's over a group that parameters are
        gathered or reduced over too run on a second group of the same ranks, which is made when the
        graph first runs, so that tokens do not stand behind a gather; "shared": they run where the
        user says. On NCCL a group has buffers of its own on the device.
    record_routing: whether graphs have an op more for each exchange of counts of tokens, which
        tells profiles how many tokens go to each expert (`note_routing.py`); it reads nothing
        while no profiler is on.
    regions: "auto": under Inductor, computation that repeats between collectives is compiled once
        and called (`outline`), which makes the time to compile grow little with the number of equal
        layers; "units": units that compute the same are also traced, differentiated and cut once
        (`frontend/equal_units.py`), and kept whole: in and out of such a unit all is gathered
        before its call and reduced behind it; a tuple of names of classes, ("Block",): likewise,
        but units of these classes alone; "off": every layer is compiled by itself.
    memory_budget: the peak that a training step may reach above what is at rest (parameters, and
        optimizer state, unless `optimizer_state` counts it): bytes as an int, or a float from 0.0
        (every parameter that may be dropped after forward is) to 1.0 (all are kept for backward).
        None: as `reshard_after_forward` says. With a budget, `reshard_after_forward=True` and None
        mean "may be dropped". With `recompute="budget"` 0.0 also means that all activations are
        computed again that may be.
    offload: "budget": saved activations may be in host memory from forward to backward, as far as
        `memory_budget` has no room for them: in one order with what is gathered and computed again,
        by what their copies leave exposed (`planning/offload.py`). On a CPU, whose memory is the
        host's, nothing is copied. None: all saved activations are on the device.
    optimizer_state: "budget": in the graph of a whole step (`compile_step`), what the optimizer
        remembers of parameters may rest in host memory between updates, a unit's at a time, as far
        as `memory_budget` has no room for it: in one order with the others, by what its copies
        leave exposed (`planning/states.py`). The budget counts the state that is on the device
        then, too. On a CPU nothing is copied. None: all state is on the device, and counts to what
        is at rest.
    host_budget: with either, the bytes of activations and of optimizer state that each rank may
        have in host memory (pinned) at once; None: as many as the memory budget asks for.
    kept: decided from `memory_budget`, one graph at a time: (unit, parameter)
        that backward gets from forward.
    dropped: likewise, parameters with a smaller mesh (`reshard_after_forward` an int) of which not
        even a slice fits.
    recomputed: likewise, storages that forward would save, by the node that allocates them, which
        backward computes again.
    offloaded: likewise, storages that are on the host from forward to backward.
    states_on_host: likewise, (unit, first parameter) of each flat buffer of whose parameters what
        the optimizer remembers rests on the host.
    costs: what computing and communicating cost, the same on every rank; None: measured in the
        first forward, see `calibrate`.
    gather_quantized: `torch.int8` or `torch.float8_e4m3fn`: parameters travel as codes of that
        dtype, with a scale in fp32 for each block of 256 elements of what a rank holds; every rank,
        the owner too, computes with what the codes stand for, in the compute dtype. What the
        optimizer steps stays exact. None: as they are. Exact in any case are parameters with fewer
        than two dims (norms, biases), with less than a block on each rank, or in float64.
    reduce_quantized: likewise what each rank sends of gradients, by all-to-all; what the codes
        stand for is added in fp32, so that each value is coded once. HSDP's all-reduce over the
        replicas is exact.
    exact: names of parameters that travel as they are all the same, gradients too; `*` stands for
        anything: ("head.*",). These three hold for units that run eagerly too, and from the next
        call of a model on, for which it is compiled again.
    check: "checksums": what is gathered, what is exchanged to be reduced, and what rests between
        steps is summed up as integers, and ranks compare the sums once a backward, at its end, or
        in a whole step before its updates; if they differ, what differs is tried again, and
        `ChecksumError` is raised on all ranks: nothing is applied, and gradients are dropped
        (docs/failures.md says what is found). Gradients are reduced by all-to-all and a local sum
        then. Holds for eager units too. None: nothing is summed.
    """

    prefetch: float | None = DISTANCES["prefetch"]
    backward_prefetch: float | None = DISTANCES["backward_prefetch"]
    reduces_in_flight: float | None = DISTANCES["reduces_in_flight"]
    bucket_bytes: int | None = BUCKET_BYTES
    split_bytes: int | None = 0
    own_message: int | None = OWN_MESSAGE
    reductions: str | None = "backend"
    copy_out: str | None = "copy"
    reduction_bytes: int | None = None
    recompute: bool | str = True
    overlap_exchanges: bool = True
    exchange_group: str = "own"
    record_routing: bool = False
    regions: str | tuple[str, ...] = "auto"
    memory_budget: float | None = None
    offload: str | None = None
    optimizer_state: str | None = None
    host_budget: int | None = None
    kept: tuple[tuple[str, str], ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    recomputed: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    states_on_host: tuple[tuple[str, str], ...] = ()
    costs: Costs | None = None
    gather_quantized: torch.dtype | None = None
    reduce_quantized: torch.dtype | None = None
    exact: tuple[str, ...] = ()
    check: str | None = None

    def __post_init__(self) -> None:
        for name in FROM_COSTS:
            if getattr(self, name) == AUTO:
                object.__setattr__(self, name, None)
        check(self)

    def shown(self, name: str) -> Any:
        """A field as users write it: "auto" for what costs decide."""
        value = getattr(self, name)
        return AUTO if value is None and name in FROM_COSTS else value

    def __repr__(self) -> str:
        """As it can be written down."""
        return f"Plan({', '.join(f'{f.name}={self.shown(f.name)!r}' for f in fields(self))})"

    @property
    def undecided(self) -> Plan:
        """Without what was chosen for one graph: the plan as the user has set it."""
        nothing: dict[str, Any] = dict.fromkeys(DECIDED, ())
        return replace(self, **nothing)

    @property
    def is_from_costs(self) -> bool:
        """Whether anything is left to be decided from costs."""
        return any(getattr(self, name) is None for name in FROM_COSTS)

    @property
    def shares_units(self) -> bool:
        """Whether units that compute the same are subgraphs before AOTAutograd traces them."""
        return self.regions == "units" or isinstance(self.regions, tuple)

    def say_missing_costs(self) -> None:
        """Warn once if something should be decided from costs and there are none: then it is as by
        default.
        """
        undecided = [name for name in FROM_COSTS if getattr(self, name) is None]
        if undecided and self.costs is None:
            warn_once(
                f"compiled_fsdp: the plan leaves {', '.join(undecided)} to costs, and no costs are "
                "known: nothing is measured over a fake process group, nor for a plan that is set "
                "after the first forward. So they are as in Plan(), and units are in one part. "
                "Set the plan before the first forward, or give it costs: Plan(costs=...)"
            )

    def executed_by(self, *, is_fused: bool) -> Plan:
        """The plan for an executor that fuses kernels, or one that does not: only generated kernels
        read with gaps.
        """
        costs = None if self.costs is None else self.costs.fused(is_fused)
        return replace(self, costs=costs, copy_out=self.copy_out if is_fused else "copy")

    def distance(self, name: str) -> float | None:
        """The distance of this name; None if costs decide."""
        distance: float | None = getattr(self, name)
        return DISTANCES[name] if distance is None and self.costs is None else distance

    def bucket_limit(self, group: str) -> float:
        """Bytes up to which units share collectives over this group."""
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        if self.costs is None:
            return BUCKET_BYTES
        link = self.costs.link(group)
        return LATENCIES * link.latency * link.bandwidth


_current = _DEFAULT = Plan()
_followers: list[Callable[[], None]] = []
ASKED = (
    *FROM_COSTS,
    "reduction_bytes",
    "recompute",
    "overlap_exchanges",
    "exchange_group",
    "record_routing",
    "regions",
    "memory_budget",
    "offload",
    "optimizer_state",
    "host_budget",
    "costs",
)
# What users set of the plan.
options = Options()


def current_plan() -> Plan:
    """The plan that graphs compiled from now on get."""
    return _current


def set_plan(plan: Plan) -> None:
    """Use `plan` for graphs compiled from now on; call it alike on every rank. Compiled graphs keep
    theirs.
    """
    if not isinstance(plan, Plan):
        raise TypeError(
            f"set_plan: plan is {plan!r}; should be a Plan, for example Plan(prefetch=1)"
        )
    _check_asked(plan, "set_plan")
    if plan != _current and all_runs():
        warn_once(
            "compiled_fsdp: set_plan was called after graphs were compiled, and those keep the "
            "plan that they have: it holds for what is compiled from now on. Set it before the "
            "first forward, or call torch._dynamo.reset() for what runs already",
            about="set_plan after compiling",
        )
    if plan != _current and _num_around:
        warn_once(
            "compiled_fsdp: set_plan was called inside `with planned(...)`, so what it sets holds "
            "until the `with` ends: then the plan is what it was before. Call it outside for a "
            "plan that stays",
            about="set_plan inside planned",
        )
    _ask(plan)


def _check_asked(plan: Plan, who: str) -> None:
    """Users set budgets, not what is chosen by them, which a choice would replace."""
    for name in DECIDED:
        if value := getattr(plan, name):
            raise ValueError(
                f"{who}: {name}={value!r}; it is chosen for each graph from memory_budget, and is "
                "not to be set. Set memory_budget instead; compiled_fsdp.explain(model) says what "
                "was chosen"
            )


def _ask(plan: Plan) -> None:
    use(plan)
    plan = current_plan()
    for name in ASKED:
        options.ask(f"Plan.{name}", plan.shown(name), _DEFAULT.shown(name))


def use(plan: Plan) -> None:
    """Put a plan in the place of the current one, without taking it for what the user set; if
    somebody who follows it raises, the current one stays, for all who follow.
    """
    global _current
    before, _current = _current, replace(plan, **_forced) if _forced else plan
    if any(getattr(before, name) != getattr(_current, name) for name in FOLLOWED):
        try:
            for fn in _followers:
                fn()
        except BaseException:
            _current = before
            with suppress(Exception):  # the first is raised
                for fn in _followers:  # those that have followed go back
                    fn()
            raise


def when_followed_fields_change(fn: Callable[[], None]) -> None:
    """Call `fn` once the plan has other values in fields that hold outside of graphs too."""
    _followers.append(fn)


_forced: dict[str, Any] = {}
_num_around = 0  # `with planned(...)` that undo at their end what is set now


@contextmanager
def forced(**fields: Any) -> Iterator[None]:
    """Inside, these fields of every plan are as they are here, whatever the user sets: for tools
    that try plans on somebody's program.
    """
    before, changed = current_plan(), dict(_forced)
    _forced.update(fields)
    try:
        _ask(before)
        yield
    finally:  # what the user has set meanwhile is gone too
        _forced.clear()
        _forced.update(changed)
        _ask(before)


@contextmanager
def planned(**changes: Any) -> Iterator[Plan]:
    """Change fields of the plan for graphs compiled inside; the backward compiles at the first
    `.backward()`. At the end the plan is what it was, whatever was set inside (which is announced).
    """
    global _num_around
    before = current_plan()
    unknown = [name for name in changes if name not in Plan.__slots__]
    if unknown:
        raise TypeError(f"planned: {unknown} are no fields of Plan; it has {list(Plan.__slots__)}")
    asked = replace(before, **changes)
    _check_asked(asked, "planned")
    _num_around += 1
    try:
        _ask(asked)
        yield current_plan()
    finally:
        _num_around -= 1
        _ask(before)
