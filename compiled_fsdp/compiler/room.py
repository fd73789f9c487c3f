"""What was decided about the memory of a step, compared with what the graphs need that are compiled
in the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.graph import is_backward
from compiled_fsdp.planning.halves import boundary_of, follows, lifetimes_after, num_saved
from compiled_fsdp.planning.lifetimes import Lifetimes
from compiled_fsdp.planning.memory import profile, profile_of

if TYPE_CHECKING:
    from torch.fx import Graph

    from compiled_fsdp.planning.halves import Boundary
    from compiled_fsdp.planning.memory import MemoryProfile

REASONS = (
    "What trials do not know: the compiler's own passes, passes of yours, and what ranks with "
    "other shapes decide"
)


@dataclass(slots=True)
class Room:
    """What was decided about a step's memory, for the graphs that are compiled: bytes above what is
    at rest.

    budget: what the user allows.
    expected: the peak of the trial that was chosen; more than the budget where nothing fits.
    boundary: what the forward that was compiled leaves to its backward.
    choices: for each tensor that was decided on, dearest first: "what" it is, whose ("of"), its
        "name", whether it "is_kept" for backward, its "num_bytes", and the "seconds" that this
        saves (None where nobody asked).
    """

    budget: float
    expected: int
    boundary: Boundary | None = None
    choices: list[dict[str, Any]] = field(default_factory=list)

    def measured(self, graph: Graph, *, is_fused: bool) -> MemoryProfile:
        """The memory of a graph of the step that is compiled, which is checked."""
        if not is_backward(graph):
            before = Lifetimes(graph, is_fused)
            self.boundary = boundary_of(before, num_saved(graph))
            return self._checked(profile_of(before))
        if self.boundary is None or not follows(graph, self.boundary):
            return profile(graph, is_fused)  # its forward came from a cache
        return self._checked(profile_of(lifetimes_after(graph, self.boundary, is_fused)))

    def _checked(self, memory: MemoryProfile) -> MemoryProfile:
        """Tell where a graph that is compiled needs more than the budget, though the trial did not:
        passes that trials leave out, or the compiler's own, have changed it, or ranks with other
        shapes had a say.
        """
        if memory.peak > max(self.budget, self.expected):
            warn_once(
                f"compiled_fsdp: memory_budget is {megabytes(self.budget)}, and the "
                f"{memory.title} that was compiled needs {megabytes(memory.peak)} above what is "
                f"at rest; in a trial the step needed {megabytes(self.expected)}. {REASONS}. Set "
                "a budget that is smaller by the difference"
            )
        return memory


def in_bytes(budget: float, least: int, greatest: int) -> float:
    """A budget as it is given: bytes, or a share of the way from the peak with nothing kept to the
    one with everything.
    """
    is_share = isinstance(budget, float)
    return least + budget * max(0, greatest - least) if is_share else float(budget)


def megabytes(num_bytes: float) -> str:
    """As told to users."""
    num = num_bytes / 1e6
    return f"{num:.1f} MB" if num >= 10 else f"{num:.3f} MB"
