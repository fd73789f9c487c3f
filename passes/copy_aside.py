"""Copy between host and device aside of the computation: start each copy early, await it late.

Units that rest on the host (CPU offload) are copied to the device before they are gathered, and
their gradients back after they are reduced.

Before:

    %h0 = copy_to(%flat0)
    %w0 = view(wait(all_gather(%h0)), shape0)
    ... compute with %w0 ...
    %h1 = copy_to(%flat1)
    %w1 = view(wait(all_gather(%h1)), shape1)
    ... compute with %w1 ...

After:

    %c0 = start_copy(%flat0)
    %c1 = start_copy(%flat1)
    %w0 = view(wait(all_gather(wait(%c0))), shape0)
    ... compute with %w0 ...
    %w1 = view(wait(all_gather(wait(%c1))), shape1)
    ... compute with %w1 ...

Requires: the final order of collectives.
Ensures: what is gathered n-th is copied from before the wait for what is copied for the gather
    before it, and awaited where it is first read. A gradient is on its way to the host from where
    it is reduced; it is awaited at the end of the graph, with its mark, or where something else
    reads it. Each copy is started and awaited once.
Leaves alone: the place of a copy of a value that is computed later than that wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import Builder, find, move_before, output
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.schema import COPY_TO, MARK_GRADS, START_COPY

from .base import consume

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.ir.meta import CommTag
    from compiled_fsdp.planning.plan import Plan


def copy_aside(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    before: Node | None = None  # the first wait for what is copied for the last gather
    region, wait_of_region = -1, None
    for copy, tag in _copies(gm):
        consume(gm, unit=tag.unit)
        start, wait = _split(copy, tag)
        if tag.kind == "reduce":
            _await_late(wait)
            continue
        if tag.region != region:
            region, before, wait_of_region = tag.region, wait_of_region, wait
        if before is not None:
            _start_early(start, before)
    return gm


def _copies(gm: GraphModule) -> list[tuple[Node, CommTag]]:
    """Returns the copies of communications of ours, in order."""
    tagged = [(node, get_tag(node)) for node in find(gm.graph, COPY_TO)]
    return [(node, tag) for node, tag in tagged if tag is not None]


def _split(copy: Node, tag: CommTag) -> tuple[Node, Node]:
    run = Builder(copy, copy, replace(tag, kind="copy"))
    start = run(START_COPY, *copy.args)
    wait = run(WAIT, start)
    copy.replace_all_uses_with(wait)
    copy.graph.erase_node(copy)
    return start, wait


def _start_early(start: Node, anchor: Node) -> None:
    """Before this wait, with the slice of the flat buffer that it reads, if it reads one."""
    moved = [start]
    source = start.all_input_nodes[0]
    while source.op != "placeholder" and get_tag(source) is not None and anchor < source:
        moved.insert(0, source)
        source = source.all_input_nodes[0]
    if source.op == "placeholder" or source < anchor:
        move_before([node for node in moved if anchor < node], anchor)


def _await_late(wait: Node) -> None:
    """At the end, where only a mark reads it and the graph returns it; else where it is first
    read.
    """
    end = output(wait.graph)
    marks = [user for user in wait.users if user.target is MARK_GRADS]
    others = [user for user in wait.users if user is not end and user not in marks]
    if others:
        move_before([wait], min([*others, *marks]))
    else:
        move_before([wait, *marks], end)
