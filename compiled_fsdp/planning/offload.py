"""Which saved activations could be in host memory from forward to backward, when they are copied
there and back, and what of that is not hidden.

A candidate is a storage that forward saves for backward and nobody else holds. Its copy to the host
begins where it is computed, beside what reads it, and its memory is free once it is copied and read
for the last time; it is copied back so that it is there where backward reads it first. Copies of
one direction follow each other: to the host in the order of forward, back in the order of backward.
`awaited` and `begun` say when each is under way; the planner prices by them,
and `hide_copies` places the nodes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import torch

from compiled_fsdp.ir.expected import hint
from compiled_fsdp.ir.fusion import BECOME_WRITES
from compiled_fsdp.ir.graph import aliases, is_moved, is_way_back
from compiled_fsdp.ir.meta import module_of
from compiled_fsdp.ir.origins import num_bytes_of
from compiled_fsdp.ir.schema import RELOAD, traits_of
from compiled_fsdp.torch_private.subgraphs import operator_name
from compiled_fsdp.wire import copies

from .recompute import LEAST_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Graph, Node

    from .costs import Costs
    from .recompute import Saved

QUEUED = 2  # copies to the host that are under way when an earlier one is awaited
# Copies to the device that begin before the next is read; tried in turn.
AHEAD = (2, 3, 4, 6, 8, 12, 16)
WORTH = 1e-3  # of the time for which backward waits, that less memory is worth
aten, c10d = torch.ops.aten, torch.ops._c10d_functional
# Whose result Inductor may write over an input that nothing reads later. It does not know that a
# copy which is under way does.
WRITTEN_OVER = BECOME_WRITES.union(
    (
        aten.slice_scatter.default,
        aten.select_scatter.default,
        aten.diagonal_scatter.default,
        c10d.all_reduce.default,
        c10d.all_reduce_coalesced.default,
    )
)
# The same, of operators: kernels and custom ops of the user's that write to what they are given.
WRITERS = ("triton_kernel_wrapper_functional", "auto_functionalized", "auto_functionalized_v2")


@dataclass(frozen=True, slots=True)
class Movable:
    """A saved storage that could be on the host.

    name: of the forward node that allocates it.
    module: in whose forward; "" if torch does not say.
    num_bytes: of the storage.
    values: the saved values that lie in it, by name.
    """

    name: str
    module: str
    num_bytes: int
    values: tuple[str, ...]


def movable(saved: Saved) -> tuple[Movable, ...]:
    """All that could be on the host, in the order of forward; what is smaller than the largest by
    far is not worth it.
    """
    found = [root for root in saved.origins if not why_not_moved(saved, root)]
    sizes = {root: num_bytes_of(root.meta["val"]) for root in found}
    large = max(sizes.values(), default=0) / LEAST_SHARE
    return tuple(
        Movable(root.name, module_of(root), sizes[root], tuple(n.name for n in saved.origins[root]))
        for root in sorted(found, key=saved.place.__getitem__)
        if sizes[root] >= large
    )


def why_not_moved(saved: Saved, root: Node) -> str:
    """Returns why a saved storage has to stay on the device; "" if it may be on the host."""
    val = root.meta.get("val")
    if root.op != "call_function" or not isinstance(val, torch.Tensor):
        return "is an input of the graph, or no tensor"
    if not copies.is_planned_apart(val.device):
        return "is in host memory"
    if traits_of(root.target).lowers_to == "gather":
        return "is a parameter"
    if saved.is_held(root):
        return "is returned to the user, who holds it"
    if saved.is_written(root):
        return "is written to by forward"
    if _may_be_written_over(root):
        return "is written over by what forward makes of it, where its memory is used again"
    if _has_unknown_size(val):
        return "has a size that only data decides"
    source = source_of_copy(saved, root)
    if source is None:
        return "is saved in parts that backward cannot make of the whole"
    return "" if _is_dense(source.meta["val"]) else "has gaps"


def _may_be_written_over(root: Node) -> bool:
    """Whether something made of a storage may come to lie in it; copies of it too, which Inductor
    leaves out where it can.
    """
    found = aliases(root)
    for node in found:
        copied = [user for user in node.users if user.target is aten.clone.default]
        found += [alias for copy in copied for alias in aliases(copy)]
    users = {user for node in found for user in node.users}
    return any(
        user.target in WRITTEN_OVER or operator_name(user.target) in WRITERS for user in users
    )


def source_of_copy(saved: Saved, root: Node) -> Node | None:
    """What is copied of a storage: the value that allocates it, of which backward can make all that
    is saved; or the only saved value, if it is all of it (the wait of a collective); else None.
    """
    values = saved.origins[root]
    is_awaited = not traits_of(root.target).starts
    if values == [root] or (is_awaited and saved.are_views(root) and saved.is_base(root)):
        return root
    whole = [v for v in values if _own_bytes(v) == num_bytes_of(root.meta["val"])]
    return values[0] if len(values) == len(whole) == 1 else None


def _own_bytes(node: Node) -> int:
    val: Tensor = node.meta["val"]
    return hint(val.numel()) * val.itemsize


def _has_unknown_size(val: Tensor) -> bool:
    return any(isinstance(n, torch.SymInt) and n.node.hint is None for n in val.shape)


def _is_dense(val: Tensor) -> bool:
    """Whether its elements lie without gaps or overlaps;
    by sizes as they are now, without guards.
    """
    if val.layout is not torch.strided:
        return False
    expected = 1
    pairs = sorted((hint(stride), hint(size)) for size, stride in zip(val.shape, val.stride()))  # noqa: B905
    for stride, size in pairs:
        if size > 1 and stride != expected:
            return False
        expected *= max(1, size)
    return True


# -- time


class Trip(NamedTuple):
    """A copy, in seconds from the beginning: when it may begin, or has to be there, and how long it
    takes.
    """

    at: float
    seconds: float


def clock(graph: Graph, costs: Costs) -> list[float]:
    """When each node begins, if nothing has to be waited for; the end comes last. Copies of
    activations take no time of the device's.
    """
    return [0.0, *accumulate(0.0 if _is_copy(n) else costs.compute(n) for n in graph.nodes)]


def _is_copy(node: Node) -> bool:
    return is_moved(node) or is_way_back(node)


def outward(trips: Sequence[Trip]) -> list[float]:
    """When each copy to the host is done: one after another,
    in the order in which they may begin.
    """
    now, done = 0.0, [0.0] * len(trips)
    for i in sorted(range(len(trips)), key=lambda i: trips[i].at):
        now = done[i] = max(now, trips[i].at) + trips[i].seconds
    return done


def awaited(trips: Sequence[Trip], turn: float | None) -> list[float]:
    """When each copy to the host is awaited, on the clock of what is computed: when it is done.

    Where copies take longer than forward, which ends with the last of them, it stands still anyway:
    better early, before it computes more that waits for its copy, than at the end. So each copy is
    awaited when the second one behind it could begin, while that makes nothing later.

    turn: as in `exposed`; None: nothing is awaited early.
    """
    done = outward(trips)
    left = max(done, default=0.0) - (inf if turn is None else turn)
    if left <= 0.0:
        return done
    order = sorted(range(len(trips)), key=lambda i: trips[i].at)
    early, ends = list(done), [0.0] * len(trips)
    free = late = 0.0
    for number, i in enumerate(order):
        now = trips[i].at + late
        free = ends[i] = max(free, now) + trips[i].seconds
        if number >= QUEUED:
            other = order[number - QUEUED]
            stands = max(0.0, ends[other] - now)
            if late + stands <= left:
                late += stands
                early[other] = min(done[other], trips[i].at)
    return early if free <= max(done) else done


def homeward(trips: Sequence[Trip]) -> list[float]:
    """When each copy to the device has to begin:
    as late as it is there in time, before the next.
    """
    following, begins = inf, [0.0] * len(trips)
    for i in sorted(range(len(trips)), key=lambda i: -trips[i].at):
        following = begins[i] = min(following, trips[i].at) - trips[i].seconds
    return begins


def begun(trips: Sequence[Trip], turn: float | None) -> list[float]:
    """When each copy to the device begins, on the clock of what is computed: as `homeward`.

    Where copies take longer than backward, which waits for them anyway, none begins before an
    earlier one has been read: only so many copies ahead of that as make nothing later.

    turn: as in `exposed`; None: all as `homeward`.
    """
    begins = homeward(trips)
    if turn is None or min(begins, default=turn) >= turn:
        return begins
    order = sorted(range(len(trips)), key=lambda i: trips[i].at)
    longest = _late(trips, begins, order, turn) * (1 + WORTH)
    for ahead in AHEAD:
        later = list(begins)
        for i, before in zip(order[ahead:], order, strict=False):
            later[i] = max(begins[i], trips[before].at)
        if _late(trips, later, order, turn) <= longest:
            return later
    return begins


def _late(
    trips: Sequence[Trip], begins: Sequence[float], order: Sequence[int], turn: float
) -> float:
    """How long what is computed waits for copies that begin then, in this order."""
    late = free = 0.0
    waiting = deque(order)
    ends = dict[int, float]()
    for i in order:
        while waiting and begins[waiting[0]] <= trips[i].at:
            other = waiting.popleft()
            now = max(begins[other], turn) + late
            free = ends[other] = max(free, now) + trips[other].seconds
        late += max(0.0, ends[i] - trips[i].at - late)
    return late


def exposed(outs: Sequence[Trip], homes: Sequence[Trip], turn: float | None) -> float:
    """Seconds by which copies make a step longer: the same tensors' ways out and home.

    turn: when forward ends, which awaits what is on its way, and before which nothing comes back;
        None in the graph of a whole step, where each may not come back before it is there.
    """
    done, begins = outward(outs), homeward(homes)
    if turn is None:
        return max((out - home for out, home in zip(done, begins, strict=True)), default=0.0)
    late = max(done, default=0.0) - turn, turn - min(begins, default=inf)
    return sum(max(0.0, each) for each in late)


# -- memory


def host_bytes(graph: Graph) -> int:
    """The most bytes of activations that are on the host at once while a graph runs."""
    nodes: list[Node] = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    for node in nodes:
        if is_moved(node):
            first = position[node] if node.op == "call_function" else 0
            change[first] += _own_bytes(node)
            change[max(position[n] for n in _readers(node)) + 1] -= _own_bytes(node)
    return max(accumulate(change))


def _readers(node: Node) -> list[Node]:
    """Everything that needs a value on the host; a copy does until it is awaited."""
    users = [user for alias in aliases(node) for user in alias.users]
    waits = [wait for user in users if user.target is RELOAD for wait in user.users]
    return [node, *users, *waits]
