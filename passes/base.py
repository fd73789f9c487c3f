"""Passes: what one is, which properties they rely on and provide, and how a list of them runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import is_
from typing import TYPE_CHECKING, Protocol

from compiled_fsdp.ir.meta import get_context, set_captured, set_context
from compiled_fsdp.options import note
from compiled_fsdp.verification.meaning import Captured

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.fx import Graph, GraphModule

    from compiled_fsdp.options import Consumed
    from compiled_fsdp.planning.plan import Plan


class Stage(Enum):
    """Which graph a pass sees: the joint one before it is split, or one of its halves."""

    JOINT = "joint"
    HALF = "half"


class Property(Enum):
    """Properties of a graph that hold once a pass has run."""

    GRADS_KEPT = "autograd rounds no gradient that is to stay wide"
    NUMBERED = "of several micro-batches, each communication says for which it is"
    DEDUPED = "each parameter is unsharded once"
    JOINED = "the gradients of a flat parameter's views are put together once"
    CHOSEN = "how each unit is gathered and reduced is chosen"
    DECIDED = "what backward gets from forward is decided"
    MARKED = "what backward computes again for the budget is marked"
    MARKED_AWAY = "what is on the host from forward to backward is marked"
    STATES_MARKED = "what the optimizer remembers on the host is marked"
    HEADS_NOTED = "which outputs lead to which parameters is noted"
    READ_AT_ONCE = "the host reads the numbers of a tensor at once"
    GROUPS_NAMED = "groups are called what they are called on every rank"
    LOWERED = "only functional collectives are left of the fsdp ops"
    GATHERS_BUCKETED = "one all-gather a unit"
    REDUCES_BUCKETED = "one reduction a unit"
    EXCHANGES_APART = "the user's all-to-alls share no group with ours"
    EXCHANGES_OVERLAPPED = "tokens travel while what does not need them is computed"
    PEAK_FLATTENED = "at the peak, what lets go of most is computed first"
    PREFETCHED = "all-gathers start ahead of their use"
    GIVEN_WAY = "gathers start where no tokens are about to travel"
    DELAYED = "reductions are awaited late"
    LEFT = "the last reductions are awaited by who reads the gradients"
    STEPPED = "the optimizer steps what backward has reduced"
    UPDATED = "the optimizer updates each unit as soon as its gradient is there"
    STRIDED = "what kernels can read in their bucket is copied only where that is cheaper"
    SUMMED_UP = "what travels is summed up on both sides"
    JUDGED = "of a whole step, ranks compare their sums before anything is updated"
    EXCHANGED = "matrices travel to their owners and back while others are orthogonalized"
    ROUTING_NOTED = "tokens for each expert are noted for profiles"
    FREED = "every gathered buffer has a visible end"
    AHEAD = "the first all-gathers may be under way already"
    NEXT = "the first all-gathers of the next step start behind the updates"
    ASIDE = "copies between host and device are started early and awaited late"
    HIDDEN = "activations are copied to the host and back beside computation"
    STATES_FETCHED = "optimizer state on the host is fetched for its update"
    SUMMARIZED = "what became of the graph is written down"
    HEADS_WATCHED = "forward says which parameters only some outputs lead to"
    COMPARED = "ranks compare their collectives before they first run"
    FREES_DROPPED = "the compiler ends the life of buffers"
    COPIES_CALLED = "copies out of buckets are calls"
    BUCKETS_CALLED = "copies into buckets, and divisions behind reductions, are calls"
    OVER_GLOO = "gloo gathers by sends and receives"
    NAMED = "our collectives say what they carry"
    KERNELS_JOINED = "what reads the same is computed on one side of a communication"
    INLINED = "regions compute cheap values again instead of reading them"
    OUTLINED = "computation that repeats is compiled once"
    VERIFIED = "the invariants hold"


class Executor(Enum):
    """Who runs the graph in the end."""

    PLAIN = "our own backend, node by node"
    INDUCTOR = "kernels that Inductor generates"


@dataclass(frozen=True, slots=True)
class Context:
    """The compilation that a pass is part of, as far as it may know it, beside graph and plan.

    is_fused: whether a compiler that fuses kernels runs the graph, see `Executor`.
    is_ours: whether the graph has anything of ours.
    is_trial: whether the graph is measured and thrown away.
    inline: why what runs the graph compiles every layer for its place, and calls no subgraphs; ""
        if it may call them.
    batches: micro-batches whose forwards and backwards are in the graph, that of a whole step.
    reduces_once: whether their gradients are added up before they are reduced.
    common_name: what all ranks call a group, which has a name of its own on each.
    is_gloo: whether a group, by name, communicates tensors of a device by gloo.
    record: what makes the text about a finished graph that travels with it.
    consumed: the options that the passes have consumed so far, and for which units.
    running: the pass that runs.
    """

    is_fused: bool = False
    is_ours: bool = True
    is_trial: bool = False
    inline: str = "runs node by node"
    batches: int = 1
    reduces_once: bool = False
    common_name: Callable[[str], str] = lambda group: group
    is_gloo: Callable[[str, torch.device], bool] = lambda group, device: False
    record: Callable[[GraphModule], str] = lambda gm: ""
    consumed: Consumed = field(default_factory=dict)
    running: Pass | None = None

    @property
    def executor(self) -> Executor:
        """Who runs the graph."""
        return Executor.INDUCTOR if self.is_fused else Executor.PLAIN


def context_of(gm: GraphModule) -> Context:
    """The context of the running pipeline; the default one for a pass that is called by hand."""
    return get_context(gm) or Context()


def consume(gm: GraphModule, *options: str, unit: str = "") -> None:
    """Note that the running pass took a decision from these options of its entry in the pipeline,
    or from all of them, for this unit; a pass that is called by hand notes nothing.

    Raises:
        ValueError: its entry does not have the option.
    """
    context = context_of(gm)
    if context.running is None:
        return
    for option in options or context.running.consumes:
        if option not in context.running.consumes:
            raise ValueError(
                f"{context.running.name}: consumed {option}, which its entry in the pipeline does "
                f"not have: it has {list(context.running.consumes)}. Add it to `consumes`"
            )
        note(context.consumed, context.running.name, option, unit)


class PassFunction(Protocol):
    """The signature of every pass."""

    __name__: str

    def __call__(self, gm: GraphModule, plan: Plan) -> GraphModule | None:
        """Rewrite `gm` in place and return it; None where it was only read."""
        ...


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass in the pipeline: the function, the graph it is for, and what it needs and gives; a
    user's own gives nothing that others could require.

    only: the executor that it is for; None: both.
    is_for_all: whether graphs without anything of ours go through it too.
    is_tried: whether trials, which compare schedules, need it.
    consumes: the user's options that it may take a decision from; for which graph and which units
        it did, it says by `consume`.
    """

    function: PassFunction
    stage: Stage
    requires: tuple[Property, ...]
    provides: Property | None
    only: Executor | None = None
    is_for_all: bool = False
    is_tried: bool = True
    consumes: tuple[str, ...] = ()

    def runs_in(self, context: Context) -> bool:
        """Whether it is for such a graph."""
        return (
            self.only in (None, context.executor)
            and (context.is_ours or self.is_for_all)
            and (self.is_tried or not context.is_trial)
        )

    @property
    def name(self) -> str:
        """The function's name, which is the file's, the dump's and the test's."""
        return self.function.__name__


def check_order(passes: Sequence[Pass], absent: Sequence[Pass] = ()) -> tuple[Pass, ...]:
    """The passes as given, if each finds what it requires; of `absent`, which the user has left
    out, nobody requires anything.

    Raises:
        ValueError: a pass stands before one whose property it requires.
    """
    held = [entry.provides for entry in absent if entry.provides is not None]
    for entry in passes:
        missing = [p.name for p in entry.requires if p not in held]
        if missing:
            raise ValueError(
                f"pipeline: {entry.name} requires {missing}, but the passes before it provide only "
                f"{[p.name for p in held]}. Move it after the pass that provides them"
            )
        if entry.provides is not None:
            held.append(entry.provides)
    return tuple(passes)


def run_pipeline(
    gm: GraphModule,
    plan: Plan,
    passes: Sequence[Pass],
    after_pass: Callable[[GraphModule, Pass], None] | None = None,
    context: Context | None = None,
) -> GraphModule:
    """Run in order those of `passes` that are for such a graph; lint after each that has changed
    it, then call `after_pass` (dumps, verification in tests).

    What the graph was before the first pass is kept with it meanwhile, for `verify`, and so is the
    context, which has the options that were consumed when the passes have run. A trial, or a graph
    without anything of ours, is neither linted nor compiled, and has nothing to be verified by. Nor
    is a graph compiled that nobody runs as it is: a joint one, and one that Inductor gets, which
    makes code of it itself.

    Raises:
        TypeError: a pass returned something else than the graph module that it was given.
    """
    context = context or Context()
    is_checked = context.is_ours and not context.is_trial
    is_half = any(entry.stage is Stage.HALF for entry in passes)
    set_captured(gm, Captured(gm.graph) if is_half and is_checked else None)
    linted: list[object] = []
    for entry in passes:
        if not entry.runs_in(context):
            continue
        set_context(gm, replace(context, running=entry))
        if (returned := entry.function(gm, plan)) not in (gm, None):
            raise TypeError(
                f"the pass {entry.name} returned {type(returned).__name__}, another object than "
                "the graph module it was given, which would not be run. Rewrite gm.graph in place, "
                "and return gm or nothing"
            )
        if is_checked:
            linted = _linted(gm.graph, linted)
        if after_pass is not None:
            after_pass(gm, entry)
    set_captured(gm, None)
    set_context(gm, None)
    if is_checked and is_half and not context.is_fused:
        gm.recompile()
    return gm


def _linted(graph: Graph, before: list[object]) -> list[object]:
    """Lint a graph, unless all that `Graph.lint` reads of it is what it read `before`, which takes
    a ninth of the time; returns what it reads, [] where it calls modules.
    """
    if graph.find_nodes(op="call_module", sort=False):
        graph.lint()
        return []
    # The tuples and dicts of arguments are replaced, not changed, so that identity says it all.
    now = [
        each for n in graph.nodes for each in (n, n.graph, n.op, n.name, n.target, n.args, n.kwargs)
    ]
    attributes = graph.find_nodes(op="get_attr", sort=False)
    now += [getattr(graph.owning_module, str(n.target), None) for n in attributes]
    if len(now) != len(before) or not all(map(is_, now, before)):
        graph.lint()
    return now
