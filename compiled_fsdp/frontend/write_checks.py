"""What a trace may not do with parameters, and what of it is not seen where a user may expect it.

A write that the graph cannot show to what comes after it is refused: a graph break, or an error
with `fullgraph=True`. One that others may see otherwise than in eager mode is announced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch.fx import Node

from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.ir.meta import real_input, traced_value
from compiled_fsdp.ir.schema import UNSHARD, param_spec
from compiled_fsdp.torch_private.dtensors import local_tensor
from compiled_fsdp.torch_private.dynamo import GET_DATA, REGISTER_HOOK, give_up_graph
from compiled_fsdp.units.registered import UNITS, sharded_behind

from .written import is_written, storages

if TYPE_CHECKING:
    from torch.fx import Graph


def say_what_leaves(graph: Graph) -> None:
    """Say so where Python gets hold of a full parameter at a graph break: it is not what Python
    would have read there, since that of a unit whose forward does not run rests sharded.
    """
    reads: dict[int, str] = {}
    for node in graph.find_nodes(op="call_function", target=UNSHARD):
        reads.update(dict.fromkeys(storages(traced_value(node)), param_spec(node).fqn))
    end = graph.output_node()
    held = [
        reads[storage]
        for node in dict.fromkeys(end.all_input_nodes if reads else ())
        for storage in storages(traced_value(node))
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


def check_not_hooked(graphs: list[Graph]) -> None:
    """Refuse backward hooks on parameters: a graph reads a parameter anew wherever it is used, and
    in every step, so that what is registered on one read would see no gradient of the others.
    """
    hooked = [
        node.args[0]
        for graph in graphs
        for node in (graph.find_nodes(op="call_function", target=REGISTER_HOOK))
        if isinstance(node.args[0], Node)
    ]
    reads: dict[int, str] = {}
    for graph in graphs if hooked else ():
        for node in graph.find_nodes(op="call_function", target=UNSHARD):
            reads.update(dict.fromkeys(storages(traced_value(node)), param_spec(node).fqn))
    for node in hooked:
        fqn = next((reads[s] for s in storages(traced_value(node)) if s in reads), None)
        if fqn is not None:
            refuse(
                f"torch.compile of a forward that registers a hook on parameter {fqn}: a graph has "
                "no full parameter that would keep it. It runs eagerly, and so does the unit as "
                "long as the hook is there. Call register_post_accumulate_grad_hook on the sharded "
                "parameter, outside of forward: that hook gets it with its reduced gradient"
            )


def check_inputs(graph: Graph) -> None:
    """Check that no full parameter is an input that was gathered outside of the graph, and not for
    it: nothing would reduce its gradient. No graph break, since the frame's parts would be graphs.

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


def announce_before_backward(graph: Graph, written: set[int]) -> None:
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
        if is_differentiated and is_written(node, written)
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


def check_not_of_wrappers(inputs: list[Node], written: set[int]) -> None:
    """Refuse writes to FSDP1's sharded parameters: they are parts of a flat parameter, padded where
    ranks end, and no graph shows a write to them to what is gathered.
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
        if not isinstance(value, Tensor) or not is_written(node, written):
            continue
        names = shards.get(local_tensor(value).untyped_storage()._cdata)
        if names is not None:
            refuse(
                "torch.compile of a forward that writes in place to sharded parameters of a "
                f"FullyShardedDataParallel instance (of {shortened(names)}): a graph cannot show "
                "that to what it gathers. It runs eagerly. Write outside of forward, in a function "
                "decorated with torch.compiler.disable, or use fully_shard"
            )


def check_not_differentiated(node: Node, buffer: Node, modes: dict[Node, bool], fqn: str) -> None:
    """Refuse a write to a sharded parameter that this graph trains: it can have one value there,
    since backward gathers it again.

    node: the parameter, an input like its flat `buffer`.
    modes: whether autograd records each node.
    """
    if not traced_value(buffer).requires_grad:
        return
    users = [
        u for u in node.users if modes[u] and u.target is not GET_DATA and u.target != "detach"
    ]
    # Others are new here, and in no mode.
    users += [u for u in buffer.users if u.target is UNSHARD and modes[u]]
    if users:
        refuse(
            f"torch.compile of a forward that writes to the sharded parameter {fqn} in place and "
            "also trains its unit: backward, which gathers the unit again, would find other "
            "values than forward. Write to it outside of forward (after optimizer.step(), say), "
            "in a function decorated with torch.compiler.disable, or freeze it with "
            "requires_grad_(False) if it is not trained"
        )


def check_not_hidden(graphs: list[Graph], written: set[int]) -> None:
    """Refuse writes to tensors that `state_dict()` gave: they lie in a flat buffer, but in storages
    of their own, so that the graph takes them for others.
    """
    reads = [
        node for graph in graphs for node in graph.find_nodes(op="call_function", target=UNSHARD)
    ]
    flats = {node.args[0]: param_spec(node).fqn for node in reads}
    for node in graphs[0].find_nodes(op="placeholder"):
        value = real_input(node)
        if not isinstance(value, Tensor) or not is_written(node, written):
            continue
        hidden = [fqn for buffer, fqn in flats.items() if _is_apart_in(value, real_input(buffer))]
        if hidden:
            refuse(
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


def refuse(text: str) -> NoReturn:
    """Say why, once, and let Dynamo run the frame as it is; with `fullgraph=True` it raises."""
    text = f"compiled_fsdp: {text}"
    warn_once(text)
    give_up_graph(text)
