"""What a pass is, which properties passes hand to each other, and how a list of them runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from compiled_fsdp.ir.meta import begin_pass, set_captured
from compiled_fsdp.verification.meaning import Captured

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


class Stage(Enum):
    """Which graph a pass sees: the joint one before it is split, or one of its halves."""

    JOINT = "joint"
    HALF = "half"


class Property(Enum):
    """What holds of a graph once a pass has run."""

    DEDUPED = "each parameter is unsharded once"
    JOINED = "the gradients of a flat parameter's views are put together once"
    CHOSEN = "how each unit is gathered and reduced is chosen"
    DECIDED = "what backward gets from forward is decided"
    LOWERED = "only functional collectives are left of the fsdp ops"
    GATHERS_BUCKETED = "one all-gather a unit"
    REDUCES_BUCKETED = "one reduction a unit"
    PREFETCHED = "all-gathers start ahead of their use"
    DELAYED = "reductions are awaited late"
    LEFT = "the last reductions are awaited by who reads the gradients"
    STEPPED = "the optimizer steps what backward has reduced"
    STRIDED = "what kernels can read in their bucket is copied only where that is cheaper"
    FREED = "every gathered buffer has a visible end"
    VERIFIED = "the invariants hold"
    AHEAD = "the first all-gathers may be under way already"


class PassFunction(Protocol):
    """The signature of every pass."""

    __name__: str

    def __call__(self, gm: GraphModule, plan: Plan) -> GraphModule:
        """Rewrite `gm` in place and return it."""
        ...


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass in the pipeline: the function, the graph it is for, and what it needs and gives."""

    function: PassFunction
    stage: Stage
    requires: tuple[Property, ...]
    provides: Property

    @property
    def name(self) -> str:
        """The function's name, which is the file's, the dump's and the test's."""
        return self.function.__name__


def check_order(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """The passes as given, if each finds what it requires.

    Raises:
        ValueError: a pass stands before one whose property it requires.
    """
    held: list[Property] = []
    for entry in passes:
        missing = [p.name for p in entry.requires if p not in held]
        if missing:
            raise ValueError(
                f"pipeline: {entry.name} requires {missing}, but the passes before it provide only "
                f"{[p.name for p in held]}. Move it after the pass that provides them"
            )
        held.append(entry.provides)
    return tuple(passes)


def run_pipeline(
    gm: GraphModule,
    plan: Plan,
    passes: Sequence[Pass],
    after_pass: Callable[[GraphModule, Pass], None] | None = None,
    *,
    is_trial: bool = False,
) -> GraphModule:
    """Run `passes` in order; lint after each, then call `after_pass` (dumps, verification in
    tests).

    What the graph was before the first pass is kept with it meanwhile, for `verify`. Which options
    the passes have consumed is left with it: see `meta.take_consumed`. A trial, whose graph is
    measured and thrown away, is neither linted nor compiled, and has nothing to be verified by.
    """
    is_half = any(entry.stage is Stage.HALF for entry in passes)
    set_captured(gm, Captured(gm.graph) if is_half and not is_trial else None)
    for entry in passes:
        begin_pass(gm, entry.name)
        gm = entry.function(gm, plan)
        if not is_trial:
            gm.graph.lint()
        if after_pass is not None:
            after_pass(gm, entry)
    set_captured(gm, None)
    if not is_trial:
        gm.recompile()
    return gm
