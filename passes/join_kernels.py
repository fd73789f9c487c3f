"""Compute on that side of a communication on which kernels read what others there read too.

Before:

    %grad_y = mul(%grad, %act)
    %rows = sum(mul(%grad_y, %x))
    %r = reduce_scatter(%rows)
    %g = div(wait(%r), world)
    mark_grads_(%g, %flat, offsets)
    %grad_x = mul(%grad_y, %w)

After:

    %grad_y = mul(%grad, %act)
    %rows = sum(mul(%grad_y, %x))
    %grad_x = mul(%grad_y, %w)
    %r = reduce_scatter(%rows)
    %g = div(wait(%r), world)
    mark_grads_(%g, %flat, offsets)

Both sides may be calls of regions, between which Inductor fuses nothing: `%grad_y` was written, and
read again. The reduction starts later, by the time that the kernel needs to compute `%grad_x` too.

The other way, a product that nothing needs soon, the gradient of a weight, is computed behind the
wait for a gather that follows it, if its factors are computed from what is read again behind that
wait. The gather then has that product less to hide behind.

What unpacks several values (`getitem`) is put where they are computed, whatever side it was on.

Requires: the graph in its final order.
Ensures: generated kernels read and write less (`ir/traffic.py`), and no more bytes are alive at the
communication, whose order is what it was. A kernel that computes more may need more memory while it
runs, as it would without regions.
Leaves alone: graphs without regions, but for what unpacks values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.fusion import readers
from compiled_fsdp.ir.graph import aliases, is_matmul, move_before, move_behind, unpack_at_once
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.repeats import find_repeats
from compiled_fsdp.ir.spans import Span
from compiled_fsdp.ir.storage import is_read_from, num_bytes, storage_of, written_by
from compiled_fsdp.ir.traffic import is_cheap, left_behind, saved_by_moving

from .base import context_of

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def join_kernels(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    if plan.regions == "off" or context_of(gm).inline:
        return gm
    unpack_at_once(gm.graph)
    repeats = find_repeats(gm.graph)
    computing = [s for s in repeats.spans if any(get_tag(n) is None for n in s.nodes)]
    if not repeats.groups or not computing:
        return gm
    for span in repeats.spans:
        if span.num_moved < len(span.nodes):
            move_before(span.nodes[: span.num_moved], span.nodes[span.num_moved])
        move_behind(span.left_out, span.nodes[-1])
    here = computing[0]
    for there in computing[1:]:
        between = _between(here, there)
        early = _computed_early(here, there, between)
        move_before(early, here.nodes[-1].next)
        here = Span([*here.nodes, *early])
        gone = set(early)
        rest = [node for node in there.nodes if node not in gone]
        if rest:
            late = _computed_late(here, Span(rest), between)
            _put_late(late, rest)
            here = Span(sorted([*late, *rest]))
    return gm


def _between(here: Span, there: Span) -> list[Node]:
    """What stands between two spans."""
    found: list[Node] = []
    node = here.nodes[-1].next
    while node is not there.nodes[0]:
        found.append(node)
        node = node.next
    return found


def _computed_early(here: Span, there: Span, between: list[Node]) -> list[Node]:
    """Returns the cheap nodes of a span that are better computed in the one before, of whose cheap
    values they are.
    """
    end, written = here.nodes[-1], _written(between)
    possible: dict[Node, None] = {}
    moved: set[Node] = set()
    for node in there.nodes:
        read = node.all_input_nodes
        is_possible = all(n in possible or not end < n for n in read)
        if is_possible and _is_movable(node) and written.isdisjoint(map(storage_of, read)):
            possible[node] = None
            roots = {storage_of(n) for n in read}
            if roots & moved or any(r in here.inside and is_cheap(r) for r in roots):
                moved.add(node)
    for node in reversed(possible):
        if not moved.isdisjoint(node.users):
            moved.add(node)
    is_better = (
        bool(moved)
        and saved_by_moving(moved, there.inside, here.inside) > 0
        and left_behind(here.inside | moved) <= left_behind(here.inside)
    )
    return [node for node in possible if node in moved] if is_better else []


def _computed_late(here: Span, there: Span, between: list[Node]) -> list[Node]:
    """Returns the products of a span, with what they alone read, that are better computed behind
    the wait for a gather that stands between it and the next.
    """
    if not any(map(_awaits_gather, between)):
        return []
    written = _written(between)
    late: set[Node] = set()
    for product in reversed(here.nodes):
        if not is_matmul(product) or any(
            reader in here.inside or reader in between for reader in readers(product)
        ):
            continue
        moved = {each for each in aliases(product) if each in here.inside}
        for node in reversed(here.nodes):
            is_read = not moved.isdisjoint(node.users)
            if is_read and _is_movable(node) and (moved | there.inside).issuperset(node.users):
                moved.add(node)
        sources = {storage_of(n) for node in moved for n in node.all_input_nodes} - moved
        kept = {source for source in sources if not is_read_from(there.nodes[0], source)}
        if (
            sum(map(num_bytes, kept)) <= left_behind(moved)
            and sources.isdisjoint(written)
            and saved_by_moving(moved, here.inside - late, there.inside | late) > 0
        ):
            late |= moved
    return [node for node in here.nodes if node in late]


def _put_late(late: list[Node], there: list[Node]) -> None:
    """Put nodes into a span behind its first product, since all that follows may be one kernel with
    their factors; before the span, what it reads up to there.
    """
    first = next(filter(is_matmul, there), None)
    end = there[0] if first is None else first.next
    moved = sorted({each for node in late for each in aliases(node) if each < end})
    front: set[Node] = set()
    for node in reversed(moved):
        if first is None or any(u in front or (u not in moved and u < end) for u in node.users):
            front.add(node)
    move_before([node for node in moved if node in front], there[0])
    for node in reversed(moved):
        if first is not None and node not in front:
            first.append(node)


def _awaits_gather(node: Node) -> bool:
    tag = get_tag(node)
    return node.target is WAIT and tag is not None and tag.kind == "gather"


def _is_movable(node: Node) -> bool:
    """Whether a node is cheap, and belongs to no communication."""
    return is_cheap(node) and get_tag(node) is None


def _written(nodes: list[Node]) -> set[Node]:
    """The values that nodes write to."""
    return {storage_of(n) for node in nodes for n in written_by(node)}
