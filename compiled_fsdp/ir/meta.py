"""The only owner of keys in `node.meta`, "val" and torch's own keys aside.

`CommTag` lives from `lower` to the end of one run of the pipeline; nothing of ours has to survive
AOTAutograd, because the ops that do are self-describing. The recompute tags are torch's, read by
its partitioners (tried on 2.13).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import CheckpointPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.fx import GraphModule, Node

    from compiled_fsdp.options import Consumed

    from .spec import ParamSpec

_KEY = "fsdp"
_CONSUMED, _RECORD, _SYMBOLS = "fsdp_consumed", "fsdp_record", "fsdp_symbols"
_HEADS, _CONTEXT = "fsdp_heads", "fsdp_context"
_RETURNED, _ROOM, _AGAIN = "fsdp_returned", "fsdp_room", "fsdp_again"
_OFFLOADED, _HOSTED = "fsdp_offloaded", "fsdp_hosted"
_RECOMPUTE, _REGION = "recompute", "ac_graph_id"
# Larger than any region of activation checkpointing: a user in a region with a larger id would turn
# a tag into a save.
_OUR_REGION = 1_000_000


@dataclass(frozen=True, slots=True)
class CommTag:
    """Which communication a lowered node belongs to.

    kind: "gather" or "reduce".
    region: a number per communication, unique in the graph.
    specs: the parameters it carries, in the order of the buffer.
    """

    kind: str
    region: int
    specs: tuple[ParamSpec, ...]

    @property
    def unit(self) -> str:
        """The unit whose parameters these are, or the first and the last of those that share the
        communication.
        """
        units = list(dict.fromkeys(spec.unit for spec in self.specs))
        return units[0] if len(units) == 1 else f"{units[0].split('#')[0]} to {units[-1]}"


def set_tag(node: Node, tag: CommTag) -> None:
    """Say what a node belongs to."""
    node.meta[_KEY] = tag


def get_tag(node: Node) -> CommTag | None:
    """Returns what a node belongs to; None for the user's computation."""
    tag: CommTag | None = node.meta.get(_KEY)
    return tag


def set_captured(gm: GraphModule, captured: object) -> None:
    """Keep what a graph was when the pipeline got it; None when the pipeline is done."""
    if captured is None:
        gm.meta.pop(_KEY, None)
    else:
        gm.meta[_KEY] = captured


def get_captured(gm: GraphModule) -> Any:
    """Returns what the graph was when the pipeline got it (`meaning.Captured`); None outside a run
    of the pipeline.
    """
    return gm.meta.get(_KEY)


def set_context(gm: GraphModule, context: object) -> None:
    """Let passes find the context of the pipeline that runs; None when it is done."""
    if context is None:
        gm.meta.pop(_CONTEXT, None)
    else:
        gm.meta[_CONTEXT] = context


def get_context(gm: GraphModule) -> Any:
    """Returns what `set_context` said (`passes.base.Context`); None outside of the pipeline."""
    return gm.meta.get(_CONTEXT)


def set_consumed(nodes: Iterable[Node], consumed: Consumed) -> None:
    """Let the nodes of a joint graph, which end up in its halves, say which options were consumed
    before it was split.
    """
    for node in nodes:
        node.meta[_CONSUMED] = consumed


def get_consumed(nodes: Iterable[Node]) -> Consumed:
    """Returns what `set_consumed` said; {} if nothing."""
    return next((node.meta[_CONSUMED] for node in nodes if _CONSUMED in node.meta), {})


def set_room(gm: GraphModule, room: object) -> None:
    """Keep with a joint graph what was decided about the memory of its step (`room.Room`)."""
    gm.meta[_ROOM] = room


def take_room(gm: GraphModule) -> Any:
    """What was decided about the memory of a joint graph's step; None if nothing."""
    return gm.meta.pop(_ROOM, None)


def get_room(nodes: Iterable[Node]) -> Any:
    """Returns what `note_room` said; None if nothing."""
    return next((node.meta[_ROOM] for node in nodes if _ROOM in node.meta), None)


def note_room(nodes: Iterable[Node], room: object) -> None:
    """Let the nodes of a joint graph, which end up in its halves, say what was decided about the
    memory of their step.
    """
    for node in nodes:
        node.meta[_ROOM] = room


# How many outputs have gradients; and by offset, which of them lead to a parameter, where not all
# do.
Heads = tuple[int, dict[int, list[int]]]


def set_heads(node: Node, heads: Heads) -> None:
    """Say of a flat buffer which outputs lead to its parameters; its node in each half of the graph
    says so too.
    """
    node.meta[_HEADS] = heads


def get_heads(node: Node) -> Heads | None:
    """Returns what `set_heads` said; None if all outputs lead to all."""
    heads: Heads | None = node.meta.get(_HEADS)
    return heads


def forget_heads(node: Node) -> None:
    """Let all outputs lead to all: the caller uses every one."""
    node.meta.pop(_HEADS, None)


def set_record(gm: GraphModule, text: str) -> None:
    """Keep the record of a finished graph until it becomes an argument of the graph's first op."""
    gm.meta[_RECORD] = text


def take_record(gm: GraphModule) -> str:
    """The record of a finished graph; "" if it has none."""
    text: str = gm.meta.pop(_RECORD, "")
    return text


BLOCK = "fsdp_block"  # in what `torch.fx.traceback.annotate` notes, for backward too


def get_block(node: Node) -> int | None:
    """The number of the block that a node was annotated to belong to; None if none."""
    place: int | None = (node.meta.get("custom") or {}).get(BLOCK)
    return place


def set_block(node: Node, place: int) -> None:
    """As `annotate` does, of graphs written by hand."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), BLOCK: place}


def recompute(node: Node) -> None:
    """Compute this again in backward instead of saving it."""
    node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta[_REGION] = _OUR_REGION


def save(node: Node) -> None:
    """Save this for backward if backward needs it."""
    node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE
    node.meta[_REGION] = _OUR_REGION


def is_saved_by_policy(node: Node) -> bool:
    """Whether a checkpointing policy, torch's partitioner or `save` wants this to be saved."""
    wanted = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    return node.meta.get(_RECOMPUTE) in wanted


def is_recomputed_by_policy(node: Node) -> bool:
    """Whether a checkpointing policy, or `recompute`, wants this to be computed again."""
    wanted = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return node.meta.get(_RECOMPUTE) in wanted


def makes_sizes(node: Node) -> bool:
    """Whether a node yields sizes that only data decides."""
    return bool(node.meta.get("unbacked_bindings"))


def compute_again(node: Node) -> None:
    """Let backward compute a saved value of a joint graph again, behind the partitioner's back."""
    node.meta[_AGAIN] = True


def is_computed_again(node: Node) -> bool:
    """Whether `compute_again` said so, of forward's node or of backward's copy."""
    return bool(node.meta.get(_AGAIN))


def save_after_all(node: Node) -> None:
    """Take `compute_again` back."""
    node.meta.pop(_AGAIN, None)


def offload(node: Node) -> None:
    """Let a saved value of a joint graph be in host memory from forward to backward."""
    node.meta[_OFFLOADED] = True


def is_offloaded(node: Node) -> bool:
    """Whether `offload` said so."""
    return bool(node.meta.get(_OFFLOADED))


def keep_on_device(node: Node) -> None:
    """Take `offload` back."""
    node.meta.pop(_OFFLOADED, None)


def host_state(node: Node, is_hosted: bool) -> None:
    """Say of a parameter's gradient whether what the optimizer remembers of its buffer's parameters
    rests on the host.
    """
    if is_hosted:
        node.meta[_HOSTED] = True
    else:
        node.meta.pop(_HOSTED, None)


def is_state_hosted(node: Node) -> bool:
    """Whether `host_state` said so."""
    return bool(node.meta.get(_HOSTED))


def note_again(node: Node) -> None:
    """Say of a node of backward that it is a copy of one of forward's."""
    node.meta[_AGAIN] = node.meta["autograd_backward"] = True  # torch's partitioners say the latter


def keep_in_backward(node: Node) -> None:
    """Keep this node out of the forward graph."""
    node.meta["partitioner_tag"] = "must_be_in_backward"


def was_traced_in_backward(node: Node) -> bool:
    """Whether it is of the backward that was traced, wherever torch's partitioner may put it."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def of_autograd(node: Node) -> tuple[Any, Any, Any, Any]:
    """The number that it shares with what it differentiates, the op that it is a part of, the
    functions of the program that are differentiated, if autograd calls it, and those it is of.
    """
    keys = "seq_nr", "original_aten", "fwd_source_fn_stack", "source_fn_stack"
    return tuple(map(node.meta.get, keys))  # type: ignore[return-value]


# As Dynamo may spell the path of a submodule.
_MODULES = re.compile(r"__dict__\['_modules'\]\['([^']*)'\]")
# What Dynamo calls the outermost module: a local, or what a function has closed over.
_ROOT = re.compile(r"^(L\['\w+'\])?(.*\bcell_contents\b)?")


def get_descriptor(node: Node) -> Any:
    """What torch says that an input of a graph is, or each of its outputs; None if it does not."""
    return node.meta.get("desc")


def set_descriptor(node: Node, descriptor: object) -> None:
    """Say in torch's way what an input of a graph is, or each of its outputs."""
    node.meta["desc"] = descriptor


def note_returned(output: Node, kinds: Sequence[object]) -> None:
    """Keep what the first outputs are: torch forgets it where it splits a graph with random
    numbers.
    """
    output.meta[_RETURNED] = list(kinds)


def noted_returned(output: Node) -> list[object]:
    """Returns what `note_returned` has kept; [] if nothing."""
    kinds: list[object] = output.meta.get(_RETURNED) or []
    return kinds


def get_stack_trace(node: Node) -> str:
    """The lines of the program that made a node, the innermost last; "" if torch has not noted
    them.
    """
    trace: str = node.meta.get("stack_trace") or ""
    return trace


def set_symbols(node: Node, shape: list[str]) -> None:
    """Keep the shape of a rebuilt graph's node as it was printed, where its value has the sizes of
    one run.
    """
    node.meta[_SYMBOLS] = shape


def get_symbols(node: Node) -> list[str] | None:
    """The shape as it was printed; None where the value has it."""
    shape: list[str] | None = node.meta.get(_SYMBOLS)
    return shape


def module_of(node: Node) -> str:
    """The path of the module whose forward a node was traced in, or whose backward it belongs to;
    "" if torch does not say.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return _ROOT.sub("", _MODULES.sub(r"\1", path)).lstrip(".")


def take_over(node: Node, original: Node) -> None:
    """Let a copied node have all that was known of the original."""
    node.meta = dict(original.meta)


def copy_into(node: Node, original: Node) -> None:
    """Add what is known of the original to a new node's: quicker than `take_over`, which has torch
    look the node up twice.
    """
    node.meta.update(original.meta)


def rename_sizes(node: Node, renamed: Callable[[Any], Any]) -> None:
    """Let a node yield the same with other symbols for its sizes; what torch noted of its arguments
    has the old ones, and goes.
    """
    node.meta["val"] = renamed(node.meta["val"])
    node.meta.pop("eager_input_vals", None)


def keep_strides(output: Node, strides: list[tuple[int, ...]]) -> None:
    """Let Inductor make each result of a subgraph with these strides, as its callers expect it."""
    output.meta["user_visible_output_idxs"] = list(range(len(strides)))
    output.meta["original_output_strides"] = strides


def see_tensors_only(output: Node) -> None:
    """Let Inductor look at no result that passes have made None: it keeps the places of those that
    users see from before, and on a device follows each of them.
    """
    results: Any = output.args[0]
    if (places := output.meta.get("user_visible_output_idxs")) is not None:
        output.meta["user_visible_output_idxs"] = [i for i in places if results[i] is not None]


def call_library(node: Node) -> None:
    """Let Inductor call the library for this, whatever it could generate. Tried on 2.13: read by
    its lowering; a torch that does not know the key generates as ever.
    """
    node.meta["should_fallback"] = True


def is_called(node: Node) -> bool:
    """Whether `call_library` said so."""
    return bool(node.meta.get("should_fallback"))


def keep_unpadded(node: Node) -> None:
    """Let Inductor make this in one piece, however long its rows are. Tried on 2.11, 2.13, 2.14 and
    2.15.
    """
    node.meta["dislike_padding"] = True


def write_out(node: Node) -> None:
    """Let Inductor write this to memory, where it would compute it again in kernels that read it.
    Tried on 2.11, 2.13 and 2.15.
    """
    node.meta["inductor_realize_to_strides"] = True


def set_seconds(node: Node, seconds: float) -> None:
    """Note what all ranks take a node to cost, see `consensus.py`."""
    node.meta["fsdp_seconds"] = seconds


def get_seconds(node: Node) -> float | None:
    """Returns what `set_seconds` has noted, if anything."""
    seconds: float | None = node.meta.get("fsdp_seconds")
    return seconds


# -- of Dynamo's graphs, before their backend


def traced_value(node: Node) -> Any:
    """The fake tensor, or whatever else, that Dynamo found a node to yield."""
    return node.meta.get("example_value")


def traced_as(node: Node, like: Node) -> None:
    """Give a new node of Dynamo's graph the value of the one whose place it takes."""
    node.meta["example_value"] = like.meta.get("example_value")


def traced_as_value(node: Node, value: object) -> None:
    """Give a new node of Dynamo's graph this value."""
    node.meta["example_value"] = value


def module_calls(node: Node) -> Iterator[tuple[str, str, type]]:
    """Yields the calls of modules in which Dynamo found a node, the outermost first: what tells
    calls apart, the module's path, its class. Tried on 2.11, 2.13 and 2.15.
    """
    stack = node.meta.get("nn_module_stack") or {}
    for key, (path, kind) in stack.items():
        if isinstance(kind, type):
            path = _MODULES.sub(r"\1", path)
            yield key, path.removeprefix("L['self'].").removeprefix("L['self']"), kind


def checkpoint_policy(body: GraphModule) -> object:
    """The `context_fn` of the checkpoint that calls this graph of Dynamo's; None: it keeps nothing.
    Tried on 2.11, 2.13 and 2.15.
    """
    return body.meta.get("_checkpoint_context_fn")


def real_input(node: Node) -> object:
    """The object that an input of Dynamo's graph stood for when it was traced."""
    argument = node.meta.get("grapharg")
    return argument.example if argument is not None else None
