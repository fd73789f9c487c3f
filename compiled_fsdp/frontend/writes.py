"""Writes to parameters inside a traced forward: what is read after one sees it, as in eager mode.

[Note: writes in a trace]
Dynamo's graph is a list of Python calls on tensors that may share memory, so a write is seen
through every alias of what it writes to. Two things in a trace are one object in Python and two in
the graph. Each read of a parameter is an `unshard` of its own; and a sharded parameter that a
forward iterates over is a graph input beside the flat buffer of which it is a view. Before the
graph goes to its backend, whichever that is, `settle_writes` makes one of them where something is
written:

    %a = unshard(%flat, "w")                      %a = unshard(%flat, "w")
    %clamp_ = clamp_(%a, -1, 1)                   %clamp_ = clamp_(%a, -1, 1)
    %b = unshard(%flat, "w")           becomes    %y = linear(%x, %a)
    %y = linear(%x, %b)

    %w: DTensor = placeholder                     %shard: DTensor = shard_of(%flat, "shard0")
    %mul_ = mul_(%w, 0.9)                         %mul_ = mul_(%shard, 0.9)
    %a = unshard(%flat, "w")           becomes    %a = unshard(%flat, "w")

AOTAutograd then makes the graph functional as it does with any other. A write to a full parameter
lasts as long as that is there: until the unit is resharded, as in torch's FSDP2; that is announced.
A write to a sharded parameter stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from compiled_fsdp.eager.full_params import say_they_are_lost
from compiled_fsdp.eager.resident import shown
from compiled_fsdp.ir.keys import Keys
from compiled_fsdp.ir.meta import real_input, traced_as, traced_value
from compiled_fsdp.ir.schema import UNSHARD, param_spec
from compiled_fsdp.torch_private.dtensors import spec_of, with_spec
from compiled_fsdp.torch_private.dynamo import (
    ENTER_INFERENCE,
    EXIT_INFERENCE,
    SET_GRAD_ENABLED,
    before_backend,
    is_cut_off,
)
from compiled_fsdp.units.reads import extended_as, spell_out
from compiled_fsdp.units.registered import sharded_behind
from compiled_fsdp.units.traced_extension import EXTENSIONS
from compiled_fsdp.wire.ops import before_traced_reads

from .control_flow import hoist_reads
from .equal_units import outline_units
from .traced_grads import refuse_no_gradients
from .write_checks import (
    announce_before_backward,
    check_inputs,
    check_not_differentiated,
    check_not_hidden,
    check_not_hooked,
    check_not_of_wrappers,
    refuse,
    say_what_leaves,
)
from .written import is_written, storages, written_by, written_storages

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.fx import Graph, Node

    from compiled_fsdp.units.layout import ShardLayout


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sharded parameter lies in its flat buffer, and how it is placed."""

    layout: ShardLayout
    rank: int
    spec: DTensorSpec


_places: Keys[Place] = Keys("shard")


def shard_of(flat: Tensor, key: str) -> DTensor:
    """A sharded parameter as a view of its flat buffer; without a gradient, since what is written
    to is not differentiated.
    """
    place = _places[key]
    return with_spec(place.layout.view(flat.detach(), place.rank), place.spec)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def watch_writes() -> None:
    """While a unit's forward is traced: look for writes in graphs that gather nothing, too
    (`resident.py`).
    """
    before_backend(settle_writes)


def settle_writes(gm: GraphModule) -> None:
    """See the note above.

    A write that the graph cannot show to what comes after it, named by its parameter, is a graph
    break: an error with `fullgraph=True`, else the frame runs eagerly.
    """
    spell_out(gm)
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    check_not_hooked(graphs)
    hoist_reads(gm)
    check_inputs(gm.graph)
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    written = written_storages(graphs)
    if is_cut_off():
        say_what_leaves(gm.graph)
    if not written:
        outline_units(gm, written, writes_parameters=False)
        return
    for graph in graphs:
        _share_reads(graph, graphs, written)
    _write_to_flats(gm.graph, written)
    _write_without_autograd(gm.graph)
    check_not_hidden(graphs, written)
    say_they_are_lost(_written_residents(gm.graph, written))
    announce_before_backward(gm.graph, written)
    reads = gm.graph.find_nodes(op="call_function", target=UNSHARD)
    parameters = [n for read in reads for n in (read, read.args[0])]
    outline_units(gm, written, writes_parameters=any(is_written(n, written) for n in parameters))


def _written_residents(graph: Graph, written: set[int]) -> list[str]:
    """Full parameters that are inputs of the graph and are dropped before the next step, by
    name.
    """
    names = shown()
    inputs = [node for node in graph.find_nodes(op="placeholder") if id(real_input(node)) in names]
    return [names[id(real_input(node))] for node in inputs if is_written(node, written)]


def _share_reads(graph: Graph, graphs: list[Graph], written: set[int]) -> None:
    """Let all reads of a full parameter that is written to be one."""
    reads: dict[tuple[object, ...], list[Node]] = {}
    lost = []
    for node in graph.find_nodes(op="call_function", target=UNSHARD):
        reads.setdefault(_key(node), []).append(node)
    for key, nodes in reads.items():
        if not any(is_written(node, written) for node in nodes):
            continue
        spec = param_spec(nodes[0])
        elsewhere = [
            n
            for g in graphs
            if g is not graph
            for n in g.find_nodes(op="call_function", target=UNSHARD)
        ]
        if any(_key(n)[1:] == key[1:] for n in elsewhere):
            refuse(
                f"torch.compile of a forward that writes to parameter {spec.fqn} in place: it is "
                "read both inside and outside a region that is captured by itself (activation "
                "checkpointing, torch.cond, ...), and the graph cannot show the write to both. "
                "Write outside the forward, or leave this unit out of the graph with "
                "torch.compiler.disable"
            )
        lost.append(spec.fqn)
        _merge(graph, nodes)
    made = graph.find_nodes(op="call_function", target=extended_as)
    written_keys = [node.args[1] for node in made if is_written(node, written)]
    lost += [EXTENSIONS[key].param.fqn for key in written_keys]
    say_they_are_lost(lost)


def _key(node: Node) -> tuple[object, ...]:
    return tuple(tuple(a) if isinstance(a, list | tuple) else a for a in node.args)


def _merge(graph: Graph, nodes: list[Node]) -> None:
    """Use the first read in the place of all; it must record autograd if any of them does, and be
    no inference tensor.
    """
    first = nodes[0]
    _leave_modes(graph, first)
    modes = _grad_modes(graph)
    if not modes[first] and any(modes[node] for node in nodes):
        with graph.inserting_before(first):
            graph.call_function(SET_GRAD_ENABLED, (True,))
        with graph.inserting_after(first):
            graph.call_function(SET_GRAD_ENABLED, (False,))
    for node in nodes[1:]:
        node.replace_all_uses_with(first)
        graph.erase_node(node)


def _leave_modes(graph: Graph, node: Node) -> None:
    """Move a read to before the inference mode, and the transformations of `torch.func`, that it is
    in: what is read there is wrapped, and nothing for those outside.
    """
    entered: list[Node] = []
    for earlier in graph.nodes:
        name = getattr(earlier.target, "__name__", "")
        if earlier is node:
            break
        if earlier.target is ENTER_INFERENCE or name.endswith("_increment_nesting"):
            entered.append(earlier)
        elif earlier.target is EXIT_INFERENCE:
            entered.remove(earlier.args[0])
        elif name.endswith("_decrement_nesting"):
            entered.remove(next(n for n in reversed(entered) if n.target is not ENTER_INFERENCE))
    for outermost in entered[:1]:
        outermost.prepend(node)


def _grad_modes(graph: Graph) -> dict[Node, bool]:
    """Whether autograd records each node; a graph begins in the mode in which it was called."""
    mode, found = torch.is_grad_enabled(), {}
    for node in graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            mode = bool(node.args[0])
        found[node] = mode
    return found


def _write_to_flats(graph: Graph, written: set[int]) -> None:
    """Let a sharded parameter that is written to be a view of its flat buffer, if the graph gathers
    from that.
    """
    inputs = {id(real_input(node)): node for node in graph.find_nodes(op="placeholder")}
    check_not_of_wrappers(list(inputs.values()), written)
    last = [*inputs.values()][-1] if inputs else None
    modes = _grad_modes(graph)
    for node in list(inputs.values()):
        owner = sharded_behind(real_input(node)) if is_written(node, written) else None
        if owner is None:
            continue
        unit, param = owner
        if real_input(node) is not param.sharded:
            continue
        flat = next(flat for flat in unit.flats if param in flat.params)
        buffer = inputs.get(id(flat.data))
        if buffer is None:
            continue
        check_not_differentiated(node, buffer, modes, param.fqn)
        sharded: Any = param.sharded
        place = Place(param.layout, flat.mesh_info.shard_rank, spec_of(sharded))
        assert last is not None
        with graph.inserting_after(last):
            shard = graph.call_function(shard_of, (buffer, _places.key(place)))
        traced_as(shard, node)
        node.replace_all_uses_with(shard)


def _write_without_autograd(graph: Graph) -> None:
    """Let writes to a sharded parameter through `.data` or `detach()` be under `no_grad`: of
    others AOTAutograd says that they are differentiated, and gives the parameter a gradient of
    zeros, a plain tensor, where eager mode gives none.
    """
    sharded = {
        storage
        for node in graph.find_nodes(op="placeholder")
        if sharded_behind(real_input(node)) is not None
        for storage in storages(traced_value(node))
    }
    modes = _grad_modes(graph) if sharded else {}
    for node in [node for node in modes if modes[node]]:
        targets = list(written_by(node))
        if targets and all(
            not traced_value(target).requires_grad and is_written(target, sharded)
            for target in targets
        ):
            with graph.inserting_before(node):
                graph.call_function(SET_GRAD_ENABLED, (False,))
            with graph.inserting_after(node):
                graph.call_function(SET_GRAD_ENABLED, (True,))


# Frames that a graph break begins may read parameters without any forward of a unit in their trace,
# and so without `watch_writes`.
before_traced_reads(settle_writes)
before_traced_reads(refuse_no_gradients)
