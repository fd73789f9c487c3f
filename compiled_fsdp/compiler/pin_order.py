"""Keep the planned order through Inductor's scheduler.

Inductor knows no time: `reorder_for_peak_memory` moves an early all-gather back to its wait, and
horizontal fusion copies all parameters out of a bucket at once. Both undo the plan. So before
fusion, in graphs of ours only, every kernel that is not generated (collectives, waits, matmuls,
attention) is made to follow the one before it in the graph, and every copy into or out of a bucket
to follow the last of them. The dependencies are fake: they order, and keep no buffer alive.

In the graph of a whole step it would also fuse the last layers' forward with what their backward
computes from the same values: read once, but of the largest activations two more at the peak. So
kernels of backward follow the last product of the forward before them; in a graph of backward, the
last that is computed again. And they follow what reads the same behind that product: the gradient
of the logits is written over them, behind the loss.

Inductor also knows no sends and receives of ours: it writes the next value into a buffer that
nothing reads any more, be it still on its way to other ranks. So the wait of a collective counts as
a reader of what the collective reads: until then the buffer is neither reused nor freed. What no
wait in the graph follows (left in flight) is never reused.

Where a kernel copies several values side by side (a `cat` on a GPU that is not fused with what
makes them), Inductor has put them into one node by then, of which torch's `compute_ancestors` knows
the name alone, not those of its operations. So ancestors are computed here.

From torch 2.15 on, Inductor ends its scheduling by moving collectives up and waits down
(`simple_overlap`), past generated kernels that no dependency of ours orders. What the plan has
started late, to hold less at once, would be started early. So nodes of a graph of ours stay where
they are; other people's graphs are moved as ever, and the setting itself is theirs.

Private torch used here (tried on 2.11, 2.13, 2.14 and 2.15): the scheduler's
`_pre_fusion_custom_pass`, `WeakDep(is_fake=True)`, `StarDep`, `NodeUser`, `add_fake_dep`,
`ancestors`, `min_order`, `topological_sort_schedule`, `V.graph.never_reuse_buffers`; on 2.15
`torch._inductor.comms.simple_overlap`, which the scheduler finds in its module.
`tests/numerics/test_inductor.py` compares the generated code with the plan and would notice a
change.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import TYPE_CHECKING, Any

from torch._inductor import comms
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.scheduler import ExternKernelSchedulerNode, FusedSchedulerNode, NodeUser
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from compiled_fsdp.ir import meta
from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.schema import TRAITS

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode
    from torch.fx import Node

# What reads its inputs for longer than it runs.
ASYNCHRONOUS = tuple(
    op for op, traits in TRAITS.items() if traits.starts or traits.awaits == "unit"
)


def pin_order(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """Add the ordering dependencies; the list itself is returned as it came."""
    _keep_inputs(nodes)
    ours = [node for node in nodes if _is_ours(node)]
    if not ours:
        return nodes
    pinned = set(ours)
    anchor: BaseSchedulerNode | None = None
    for node in _in_order(nodes):
        is_anchor = isinstance(node, ExternKernelSchedulerNode) or node.is_template()
        if anchor is not None and (is_anchor or node in pinned):
            _follow(node, anchor)
        if is_anchor:
            anchor = node
    _keep_backward_behind(nodes)
    _note_ancestors(nodes)
    return nodes


def keep_simple_overlap_out() -> None:
    """Let `simple_overlap`, where torch has it, leave graphs of ours as they are; once."""
    found: Any = comms
    reorder = getattr(found, "simple_overlap", None)
    if reorder is None or hasattr(reorder, "__wrapped__"):
        return

    @functools.wraps(reorder)
    def reorder_others(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        is_ours = any(_is_ours(part) for node in nodes for part in node.get_nodes())
        ordered: list[BaseSchedulerNode] = nodes if is_ours else reorder(nodes)
        return ordered

    found.simple_overlap = reorder_others


def _keep_inputs(nodes: list[BaseSchedulerNode]) -> None:
    """Let the wait of each collective read what the collective reads; of tensor parallelism's own
    too, which belong to no unit.
    """
    under_way: dict[str, list[str]] = {}  # for each result not awaited yet: what is read for it
    for node in nodes:
        target = getattr(node.node, "op_overload", None)
        reads = [dep.name for dep in node.read_writes.reads if not _only_orders(dep)]
        if target in ASYNCHRONOUS:
            under_way.update(dict.fromkeys(node.get_buffer_names(), reads))
        elif target is WAIT:
            for name in {name for result in reads for name in under_way.pop(result, ())}:
                node.add_fake_dep(StarDep(name))
                if name in node.scheduler.name_to_buf:
                    node.scheduler.name_to_buf[name].users.append(NodeUser(node))
        else:  # a result on its way under another name
            for sent in [under_way.pop(result) for result in reads if result in under_way]:
                under_way.update(dict.fromkeys(node.get_buffer_names(), sent))
    V.graph.never_reuse_buffers.update(name for reads in under_way.values() for name in reads)


def _only_orders(dep: Any) -> bool:
    """Whether nothing is read: of an order that mutations need. Taken for a read, it kept what a
    first unit had gathered, in a whole step, until the first reduction was through.
    """
    return isinstance(dep, WeakDep) and dep.is_fake


def _keep_backward_behind(nodes: list[BaseSchedulerNode]) -> None:
    """Let no generated kernel of backward run before the last product of forward, or of what is
    computed again, that comes before it in the graph; nor before kernels behind that product which
    read what it reads, so that it can write over it.
    """
    product: BaseSchedulerNode | None = None
    in_backward = False
    readers: dict[str, list[BaseSchedulerNode]] = {}  # of forward, behind the product
    for node in _in_order(nodes):
        of_backward = any(map(meta.was_traced_in_backward, _origins(node)))
        in_backward = in_backward or of_backward
        reads = {dep.name for dep in node.read_writes.reads if not _only_orders(dep)}
        if not isinstance(node, ExternKernelSchedulerNode) and not node.is_template():
            if in_backward and product is not None:
                behind = dict.fromkeys(reader for name in reads for reader in readers.get(name, ()))
                for earlier in (product, *behind):
                    _follow(node, earlier)
            elif product is not None:
                for name in reads:
                    readers.setdefault(name, []).append(node)
        elif not of_backward and _is_computed(node):
            product = node
            readers.clear()


def _is_computed(node: BaseSchedulerNode) -> bool:
    """Whether it is not communication, or one of our copies around it, or their result."""
    target = getattr(node.node, "op_overload", None)
    is_of_torch = target is None or target.namespace == "aten"
    return is_of_torch and any(meta.get_tag(origin) is None for origin in _origins(node))


def _is_ours(node: BaseSchedulerNode) -> bool:
    return any(meta.get_tag(origin) is not None for origin in _origins(node))


def _origins(node: BaseSchedulerNode) -> list[Node]:
    """Returns the nodes that it computes. In the graph of a region, Inductor also counts what the
    region is called with as an origin of every kernel: these are of another graph.
    """
    made = [part.node for part in node.get_nodes() if part.node is not None]
    origins = dict.fromkeys(origin for each in made for origin in each.get_origins())
    return [origin for origin in origins if origin.graph is V.graph.graph]


def _in_order(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """As the graph was lowered; with nodes of several operations, which were lowered at several
    places, as the scheduler has sorted them, each behind what it reads.
    """
    return [*nodes] if any(map(_is_group, nodes)) else sorted(nodes, key=_number)


def _is_group(node: BaseSchedulerNode) -> bool:
    return isinstance(node, FusedSchedulerNode)


def _note_ancestors(nodes: list[BaseSchedulerNode]) -> None:
    """What `compute_ancestors` notes, for nodes of several operations too, and for their parts."""
    known: dict[str, OrderedSet[str]] = {}
    # As it was, where each is behind what it reads and has to follow.
    ordered = nodes[0].scheduler.topological_sort_schedule(nodes)
    for place, node in enumerate(ordered):
        own, ancestors = node.get_operation_names(), OrderedSet[str]()
        for dep in node.unmet_dependencies:
            name = node.scheduler.name_to_buf[dep.name].defining_op_name()
            if name not in own:
                ancestors.add(name)
                ancestors |= known[name]
        known.update(dict.fromkeys(own, ancestors))
        for part in (node, *node.get_nodes()):
            part.ancestors, part.min_order, part.max_order = ancestors, place, place
    nodes[:] = ordered


def _number(node: BaseSchedulerNode) -> int:
    """Position in the order in which the graph was lowered: operations are named op0, op1, ..."""
    match = re.search(r"\d+", node.get_name())
    return int(match.group()) if match else 0


def _follow(node: BaseSchedulerNode, earlier: BaseSchedulerNode) -> None:
    if node.ancestors & earlier.get_operation_names():
        return  # a second dependency on what it reads would keep it from writing over that
    # Nothing mutates; naming the earlier buffer makes the scheduler find no write to compare, and
    # leave the edge alone.
    for buffer in earlier.get_buffer_names():
        dep = WeakDep(buffer, mutating_buf=buffer, is_fake=True)
        if _is_group(node):  # which torch adds none to
            node.unmet_dependencies.add(dep)
        else:
            node.add_fake_dep(dep)
    names = functools.partial(_accessed, node)
    node.used_buffer_names = names  # type: ignore[method-assign]


def _accessed(node: BaseSchedulerNode) -> OrderedSet[str]:
    """The buffers that a node reads or writes, as `used_buffer_names`, and none that it only
    follows: Inductor tries to fuse any two kernels that share one, 64 pairs for each, at a
    millisecond.
    """
    accesses = itertools.chain(node.read_writes.reads, node.read_writes.writes)
    return OrderedSet(dep.name for dep in accesses if not _only_orders(dep))
