"""Sum up what travels, before it is sent and when it has arrived, for ranks to compare.

Before:

    %g = all_gather(%flat)
    %v = wait(%g)
    %w = view(%v, shape)

After, where the plan says `check="checksums"`:

    %s = checksum([%flat], 1, messages, sizes)
    %g = all_gather(%flat)
    %v = wait(%g)
    %r = checksum([%v], N, messages, sizes)
    compare_(%s, %r, [], [%flat], [1], "all-gather", "forward", names)
    %w = view(%v, shape)

Likewise around an all-to-all whose rows are added up where they arrive, and behind an all-reduce
over replicas, whose result is the same on each. What is gathered in another form than it rests in
(cast, or as codes) is summed up as it rests too; slices that forward has kept rest in no buffer.
`compare_` notes the sums; they are compared at the end of backward (`eager/verdict.py`), of a whole
step by a node (`await_verdict`).

Requires: the final order of collectives, and no buffer freed yet.
Ensures: each collective of a checked parameter that can be checked is summed up on both sides.
Leaves alone: parameters whose settings do not ask for it; communications over one rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compiled_fsdp.ir import checksums
from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import CAT, Builder, is_step, phase_of, value
from compiled_fsdp.ir.regions import Region, find_regions
from compiled_fsdp.ir.schema import ENCODE

from .base import consume

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def add_checksums(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    phase = phase_of(gm.graph)
    for kind in ("gather", "reduce"):
        for region in find_regions(gm.graph, kind):
            if not checksums.is_checked(region.tag.specs):
                continue
            half = phase
            if is_step(gm.graph):
                half = "backward" if kind == "reduce" or region.is_in_backward else "forward"
            for start in region.starts:
                _add(region, start, half)
            for unit in dict.fromkeys(spec.unit for spec in region.tag.specs):
                consume(gm, "check", unit=unit)
    return gm


def _add(region: Region, start: Node, phase: str) -> None:
    """The sums around one collective."""
    kind = checksums.kind_of(start.target)
    wait = next((user for user in start.users if user.target is WAIT), None)
    if not kind or wait is None:
        return
    specs = region.tag.specs
    around = checksums.Around(kind, specs, phase)
    pieces = start.args[0] if isinstance(start.args[0], list | tuple) else [start.args[0]]
    widths = [value(piece).shape[-1] for piece in pieces]  # type: ignore[arg-type]
    around.before(Builder(start, start), pieces, widths)
    rests: list[Node] = []
    flats: list[tuple[Node, int]] = []
    if kind == checksums.GATHERED and not checksums.is_of_slices(specs):
        sources = _sources(region, start)
        distinct = list(dict.fromkeys(sources))
        flats = [(flat, sources.count(flat)) for flat in distinct]
        if not _is_sent_as_it_rests(region, start):
            sized = [(flat, value(flat).numel()) for flat in distinct]
            places = [distinct.index(flat) for flat in sources]
            rests = around.at_rest(Builder(start.next, start), sized, places)
    around.after(Builder(wait.next, wait), wait, rests, flats)


def _sources(region: Region, start: Node) -> list[Node]:
    """Of each parameter, in order, its flat buffer."""
    specs = region.tag.specs
    found: list[Node] = []
    for flat, taken in _pieces(start.args[0], {*region.nodes}):
        while taken > 0 and len(found) < len(specs):
            taken -= specs[len(found)].shard_numel
            found.append(flat)
    return found


def _pieces(node: Any, inside: set[Node]) -> list[tuple[Node, int]]:
    """What was put side by side to make a value: flat buffers, and the elements of each piece."""
    if node in inside and node.target in (CAT, ENCODE):
        return [piece for each in node.args[0] for piece in _pieces(each, inside)]
    flat = node
    while flat in inside:
        if flat.target in (CAT, ENCODE):  # its result was only viewed
            return _pieces(flat, inside)
        flat = flat.args[0]
    return [(flat, value(node).numel())]


def _is_sent_as_it_rests(region: Region, start: Node) -> bool:
    """Whether nothing was cast or coded on the way to the collective."""
    return all(
        value(flat).dtype == value(start.args[0]).dtype  # type: ignore[arg-type]
        for flat in region.sources
    )
