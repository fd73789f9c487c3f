"""What an `update_` says of its optimizer's state: how much there is, and where it rests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .graph import argument, find, value
from .schema import STORE_STATE, UPDATE

if TYPE_CHECKING:
    from torch.fx import Graph, Node


def state_bytes(update: Node) -> int:
    """Bytes that an optimizer remembers of what an `update_` updates, and that could be on the
    host; of a parameter that no unit has, 0.
    """
    numel: int = argument(update, "state_numel") or 0
    return numel * value(update.args[1]).itemsize  # type: ignore[arg-type]


def rests_on_device(update: Node) -> bool:
    """Whether the state of an `update_` is on the device all the time."""
    return argument(update, "state") is None


def hosted_updates(graph: Graph) -> list[Node]:
    """The updates whose state is to rest on the host and is not fetched yet."""
    updates = find(graph, UPDATE)
    return [u for u in updates if argument(u, "is_hosted") and rests_on_device(u)]


def hosted_bytes(graph: Graph) -> int:
    """Bytes of optimizer state that rest on the host."""
    updates = find(graph, UPDATE)
    return sum(state_bytes(u) for u in updates if not rests_on_device(u))


def stored(update: Node) -> Node | None:
    """The wait for the way back of the state of an `update_`; None if it has no way back."""
    state = argument(update, "state")
    starts = [user for user in state.users if user.target is STORE_STATE] if state else []
    return next((wait for start in starts for wait in start.users), None)
