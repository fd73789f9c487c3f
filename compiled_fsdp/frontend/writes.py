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

Private torch used here (tried on 2.13 and 2.15): `torch.utils._pytree`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from compiled_fsdp.eager.full_params import say_they_are_lost
from compiled_fsdp.eager.resident import shown
from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.ir.keys import Keys
from compiled_fsdp.ir.meta import real_input, traced_as, traced_value
from compiled_fsdp.ir.schema import UNSHARD, param_spec
from compiled_fsdp.torch_private.autograd import unwrapped
from compiled_fsdp.torch_private.dtensors import local_tensor, spec_of, with_spec
from compiled_fsdp.torch_private.dynamo import (
    ENTER_INFERENCE,
    EXIT_INFERENCE,
    GET_DATA,
    SET_GRAD_ENABLED,
    before_backend,
    give_up_graph,
    is_cut_off,
)
from compiled_fsdp.units.reads import extended_as, spell_out
from compiled_fsdp.units.registered import UNITS, sharded_behind
from compiled_fsdp.units.traced_extension import EXTENSIONS
from compiled_fsdp.wire.ops import before_traced_reads

from .control_flow import hoist_reads
from .equal_units import outline_units
from .traced_grads import refuse_no_gradients

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.fx import Graph

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
    hoist_reads(gm)
    _check_inputs(gm.graph)
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    written = _written_storages(graphs)
    if is_cut_off():
        _say_what_leaves(gm.graph)
    if not written:
        outline_units(gm, writes_parameters=False)
        return
    for graph in graphs:
        _share_reads(graph, graphs, written)
    _write_to_flats(gm.graph, graphs, written)
    _write_without_autograd(gm.graph)
    _check_not_hidden(graphs, written)
    say_they_are_lost(_written_residents(gm.graph, written))
    _announce_before_backward(gm.graph, written)
    reads = gm.graph.find_nodes(op="call_function", target=UNSHARD)
    parameters = [n for read in reads for n in (read, read.args[0])]
    outline_units(gm, writes_parameters=any(_is_written(n, written) for n in parameters))


def _say_what_leaves(graph: Graph) -> None:
    """A full parameter of which Python gets hold at a graph break is not what Python would have
    read there: the one of a unit whose forward does not run rests sharded.
    """
    reads: dict[int, str] = {}
    for node in graph.find_nodes(op="call_function", target=UNSHARD):
        reads.update(dict.fromkeys(_storages(traced_value(node)), param_spec(node).fqn))
    end = graph.output_node()
    held = [
        reads[storage]
        for node in dict.fromkeys(end.all_input_nodes if reads else ())
        for storage in _storages(traced_value(node))
        if storage in reads
    ]
    if held:
        warn_once(
            f"compiled_fsdp: parameter {shortened(held, 1)} is read in a graph that ends at a "
            "graph break, and handed to the code behind it. There it is a gathered copy, not the "
            "parameter: what is written to it is lost. Write outside of forward, or let the "
            "function that writes read the parameter from its module",
            about="parameters that leave graphs",
        )


def _check_inputs(graph: Graph) -> None:
    """Full parameters that were gathered outside of the graph, and not for it, have no place in it:
    nothing would reduce their gradients. No graph break, since the frame's parts would be graphs.

    Raises:
        RuntimeError: one is an input.
    """
    gathered = {
        id(param.unsharded): param.fqn
        for unit in list(UNITS)
        if not unit.is_resident
        for param in unit.params
        if param.unsharded is not None and param.unsharded.requires_grad and not param.is_open()
    }
    for node in graph.find_nodes(op="placeholder") if gathered else ():
        fqn = gathered.get(id(real_input(node)))
        if fqn is not None:
            raise RuntimeError(
                f"compiled_fsdp: the full parameter {fqn}, which unshard() has gathered, is an "
                "input of a graph, which would not reduce its gradient: it was read as "
                "module._parameters[name], or is held by other code. Read it as module.name"
            )


def _written_residents(graph: Graph, written: set[int]) -> list[str]:
    """Full parameters that are inputs of the graph and are dropped before the next step, by
    name.
    """
    names = shown()
    inputs = [node for node in graph.find_nodes(op="placeholder") if id(real_input(node)) in names]
    return [names[id(real_input(node))] for node in inputs if _is_written(node, written)]


def _announce_before_backward(graph: Graph, written: set[int]) -> None:
    """Say so where a part of a forward writes to a sharded parameter that is trained: graphs that
    ran before may have kept it for their backward, or gather it again then.
    """
    inputs = {node: real_input(node) for node in graph.find_nodes(op="placeholder")}
    is_differentiated = torch.is_grad_enabled() and (
        any(isinstance(value, Tensor) and value.grad_fn is not None for value in inputs.values())
        or bool(graph.find_nodes(op="call_function", target=UNSHARD))
    )
    owners = [
        sharded_behind(value)
        for node, value in inputs.items()
        if is_differentiated and _is_written(node, written)
    ]
    trained = [owner[1].fqn for owner in owners if owner and owner[1].sharded.requires_grad]
    if trained:
        warn_once(
            f"compiled_fsdp: the sharded parameter {shortened(trained, 1)} is written to in a "
            "graph that is part of a forward. The backward of graphs that ran before it finds the "
            "old value where the full parameter was kept and the new one where it is gathered "
            "again; the plan decides which. Write to it after backward, or freeze it if it is not "
            "trained"
        )


def _storages(value: object) -> Iterator[int]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield unwrapped(local_tensor(leaf)).untyped_storage()._cdata


def _written_storages(graphs: Iterable[Graph]) -> set[int]:
    """Returns the storages of the fake tensors that some node writes to, through whichever alias.

    A node that writes is known by its name, as torch spells such functions, or by the version of
    what was new in the graph (`embedding(max_norm=...)`): inputs come with versions of their own,
    and fake lists count none.
    """
    found: set[int] = set()
    inputs: set[int] = set()
    for node in (node for graph in graphs for node in graph.nodes):
        value = traced_value(node)
        if node.op == "placeholder":
            inputs.update(_storages(value))
        elif isinstance(value, Tensor) and not inputs.issuperset(_storages(value)):
            if max(value._version, local_tensor(value)._version) > 0:
                found.update(_storages(value))
        for written in _written_by(node):
            found.update(_storages(traced_value(written)))
    return found


def _written_by(node: Node) -> Iterator[Node]:
    """Yields what a node writes to, as its name says."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    out = node.kwargs.get("out")
    yield from (n for n in tree_leaves(out) if isinstance(n, Node))
    if node.op not in ("call_function", "call_method") or node.target in (
        SET_GRAD_ENABLED,
        GET_DATA,
    ):
        return
    if name == "setitem" or (name.endswith("_") and not name.endswith("__")):
        yield from (n for n in tree_leaves(node.args[:1]) if isinstance(n, Node))
    if name.startswith("_fused_") and name.endswith("_"):
        yield from (n for n in tree_leaves(node.args[1:]) if isinstance(n, Node))


def _is_written(node: Node, written: set[int]) -> bool:
    return any(storage in written for storage in _storages(traced_value(node)))


def _share_reads(graph: Graph, graphs: list[Graph], written: set[int]) -> None:
    """Let all reads of a full parameter that is written to be one."""
    reads: dict[tuple[object, ...], list[Node]] = {}
    lost = []
    for node in graph.find_nodes(op="call_function", target=UNSHARD):
        reads.setdefault(_key(node), []).append(node)
    for key, nodes in reads.items():
        if not any(_is_written(node, written) for node in nodes):
            continue
        spec = param_spec(nodes[0])
        elsewhere = [
            n
            for g in graphs
            if g is not graph
            for n in g.find_nodes(op="call_function", target=UNSHARD)
        ]
        if any(_key(n)[1:] == key[1:] for n in elsewhere):
            _refuse(
                f"torch.compile of a forward that writes to parameter {spec.fqn} in place: it is "
                "read both inside and outside a region that is captured by itself (activation "
                "checkpointing, torch.cond, ...), and the graph cannot show the write to both. "
                "Write outside the forward, or leave this unit out of the graph with "
                "torch.compiler.disable"
            )
        lost.append(spec.fqn)
        _merge(graph, nodes)
    made = graph.find_nodes(op="call_function", target=extended_as)
    written_keys = [node.args[1] for node in made if _is_written(node, written)]
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


def _write_to_flats(graph: Graph, graphs: list[Graph], written: set[int]) -> None:
    """Let a sharded parameter that is written to be a view of its flat buffer, if the graph gathers
    from that.
    """
    inputs = {id(real_input(node)): node for node in graph.find_nodes(op="placeholder")}
    _check_not_of_wrappers(list(inputs.values()), written)
    last = [*inputs.values()][-1] if inputs else None
    modes = _grad_modes(graph)
    for node in list(inputs.values()):
        owner = sharded_behind(real_input(node)) if _is_written(node, written) else None
        if owner is None:
            continue
        unit, param = owner
        if real_input(node) is not param.sharded:
            continue
        flat = next(flat for flat in unit.flats if param in flat.params)
        buffer = inputs.get(id(flat.data))
        if buffer is None:
            continue
        _check_not_differentiated(node, buffer, modes, param.fqn)
        sharded: Any = param.sharded
        place = Place(param.layout, flat.mesh_info.shard_rank, spec_of(sharded))
        assert last is not None
        with graph.inserting_after(last):
            shard = graph.call_function(shard_of, (buffer, _places.key(place)))
        traced_as(shard, node)
        node.replace_all_uses_with(shard)


def _check_not_of_wrappers(inputs: list[Node], written: set[int]) -> None:
    """FSDP1's sharded parameters are parts of a flat parameter, padded where ranks end: no graph
    shows a write to them to what is gathered.
    """
    shards = {
        flat.data.untyped_storage()._cdata: param.names
        for unit in list(UNITS)
        if unit.is_flat
        for flat in unit.flats
        for param in flat.params
    }
    for node in inputs:
        value = real_input(node)
        if not isinstance(value, Tensor) or not _is_written(node, written):
            continue
        names = shards.get(local_tensor(value).untyped_storage()._cdata)
        if names is not None:
            _refuse(
                "torch.compile of a forward that writes in place to sharded parameters of a "
                f"FullyShardedDataParallel instance (of {shortened(names)}): a graph cannot show "
                "that to what it gathers. It runs eagerly. Write outside of forward, in a function "
                "decorated with torch.compiler.disable, or use fully_shard"
            )


def _write_without_autograd(graph: Graph) -> None:
    """Let writes to a sharded parameter through `.data` or `detach()` be under `no_grad`: of
    others AOTAutograd says that they are differentiated, and gives the parameter a gradient of
    zeros, a plain tensor, where eager mode gives none.
    """
    sharded = {
        storage
        for node in graph.find_nodes(op="placeholder")
        if sharded_behind(real_input(node)) is not None
        for storage in _storages(traced_value(node))
    }
    modes = _grad_modes(graph) if sharded else {}
    for node in [node for node in modes if modes[node]]:
        targets = list(_written_by(node))
        if targets and all(
            not traced_value(target).requires_grad and _is_written(target, sharded)
            for target in targets
        ):
            with graph.inserting_before(node):
                graph.call_function(SET_GRAD_ENABLED, (False,))
            with graph.inserting_after(node):
                graph.call_function(SET_GRAD_ENABLED, (True,))


def _check_not_differentiated(node: Node, buffer: Node, modes: dict[Node, bool], fqn: str) -> None:
    """A parameter that this graph trains has one value in it: backward gathers it again."""
    if not traced_value(buffer).requires_grad:
        return
    users = [
        u for u in node.users if modes[u] and u.target is not GET_DATA and u.target != "detach"
    ]
    users += [
        u for u in buffer.users if u.target is UNSHARD and modes[u]
    ]  # others are new here, and in no mode
    if users:
        _refuse(
            f"torch.compile of a forward that writes to the sharded parameter {fqn} in place and "
            "also trains its unit: backward, which gathers the unit again, would find other "
            "values than forward. Write to it outside of forward (after optimizer.step(), say), "
            "in a function decorated with torch.compiler.disable, or freeze it with "
            "requires_grad_(False) if it is not trained"
        )


def _check_not_hidden(graphs: list[Graph], written: set[int]) -> None:
    """A tensor that `state_dict()` gave lies in a flat buffer, but in a storage of its own: the
    graph takes them for two.
    """
    reads = [
        node for graph in graphs for node in graph.find_nodes(op="call_function", target=UNSHARD)
    ]
    flats = {node.args[0]: param_spec(node).fqn for node in reads}
    for node in graphs[0].find_nodes(op="placeholder"):
        value = real_input(node)
        if not isinstance(value, Tensor) or not _is_written(node, written):
            continue
        hidden = [fqn for buffer, fqn in flats.items() if _is_apart_in(value, real_input(buffer))]
        if hidden:
            _refuse(
                "torch.compile of a function that writes in place to a tensor of state_dict() "
                f"({node.name}) and reads parameters in whose memory it lies ({hidden[0]}): the "
                "graph cannot show the write to the reads. Write to it outside of what is "
                "compiled, or to the module's own parameter"
            )


def _is_apart_in(value: Tensor, buffer: object) -> bool:
    """Whether a tensor lies in the memory of a buffer and not in its storage."""
    local = local_tensor(value)
    if (
        not isinstance(buffer, Tensor)
        or local.untyped_storage()._cdata == buffer.untyped_storage()._cdata
    ):
        return False
    start = buffer.data_ptr()
    return local.numel() > 0 and start <= local.data_ptr() < start + buffer.nbytes


def _refuse(text: str) -> NoReturn:
    text = f"compiled_fsdp: {text}"
    warn_once(text)
    give_up_graph(text)


# Frames that a graph break begins may read parameters without any forward of a unit in their trace,
# and so without `watch_writes`.
before_traced_reads(settle_writes)
before_traced_reads(refuse_no_gradients)
