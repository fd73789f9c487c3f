"""How a joint graph is split: torch's partitioner, told when computing again is cheaper than
memory.

Torch's min-cut partitioner never computes a value again that backward's matmuls read, because there
it must be written out and so is not for nothing (`ban_recompute_materialized_backward`). But what a
pointwise kernel can make from values that are saved anyway (a norm's output from its input,
`silu(gate) * up` from both) costs only its memory traffic, and frees its bytes from forward to
backward. In a GPT of 9 layers that is a third of the activations, for about a hundredth of the
time. What a memory budget has no room for beyond that is taken from what forward saves afterwards
(`recompute.py`).

Private torch used here (tried on 2.11 and 2.13): the min-cut partitioner, its setting, its tag for
nodes that must be in backward, `FakeScriptObject`, and Inductor's `CustomPartitionerFn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._library.fake_class_registry import FakeScriptObject

from compiled_fsdp.ir.descriptors import returned
from compiled_fsdp.ir.graph import find, output
from compiled_fsdp.ir.meta import (
    get_room,
    is_computed_again,
    is_offloaded,
    keep_in_backward,
    keep_on_device,
    note_returned,
    save_after_all,
    was_traced_in_backward,
)
from compiled_fsdp.ir.schema import REDUCE_GRAD, UNSHARD
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.torch_private.sizes import empty_as_one_row, quick_hints
from compiled_fsdp.torch_private.subgraphs import calls_units

from .offload import offload
from .recompute import compute_again
from .stitch import stitch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

    from .whole_step import WholeStep

    Halves = tuple[GraphModule, GraphModule]


def partition(joint: GraphModule, inputs: Any, plan: Plan, **options: Any) -> Halves:
    """Forward and backward of a joint graph; a setting of the user's to recompute even more
    stays.
    """
    kinds = [kind for _, kind in returned(output(joint.graph))]
    halves = min_cut(joint, inputs, plan, **options)
    note_returned(output(halves[0].graph), kinds[: options["num_fwd_outputs"]])
    _give_up(halves, is_computed_again, compute_again, save_after_all)
    _give_up(halves, is_offloaded, offload, keep_on_device)
    return halves


def is_unit(joint: GraphModule) -> bool:
    """Whether this is the graph of a unit that is called several times,
    not the one that calls it.
    """
    return calls_units() and not find(joint.graph, UNSHARD, REDUCE_GRAD)


def min_cut(joint: GraphModule, inputs: Any, plan: Plan, **options: Any) -> Halves:
    """Torch's partitioner, which may compute again whatever costs no more than memory traffic; also
    for the graph of a unit that is called several times.
    """
    bans = functorch_config.ban_recompute_materialized_backward and not plan.recompute
    _leave_in_backward(joint)
    _return_given_meshes(joint, options["num_fwd_outputs"])
    with (
        functorch_config.patch(ban_recompute_materialized_backward=bans),
        quick_hints(),
        empty_as_one_row(),
    ):
        halves: Halves = min_cut_rematerialization_partition(joint, inputs, **options)
    _tensors_first(halves, options["num_fwd_outputs"])
    return halves


def _leave_in_backward(joint: GraphModule) -> None:
    """Say that what backward sends of saved values alone is sent there, once. Keys and values of
    ring attention travel again in backward; torch's partitioner may send them in forward already
    and keep what came, and once more in backward for nobody, by what each rank computes with them,
    so that ranks part.
    """
    for node in joint.graph.nodes:
        is_sent = getattr(node.target, "namespace", "") == "_c10d_functional"
        if is_sent and was_traced_in_backward(node):
            keep_in_backward(node)


def _return_given_meshes(joint: GraphModule, num_outputs: int) -> None:
    """Let forward return, with a DTensor, a mesh that it is given. AOTAutograd looks for it by its
    identity, and each `mesh["tp"]` is another object: where none of the inputs is the very same, it
    finds that of the result's gradient, which only backward is given.
    """
    end = output(joint.graph)
    results: list[Any] = [*end.args[0]]  # type: ignore[misc]
    given = [n for n in joint.graph.find_nodes(op="placeholder") if _is_opaque(n)]
    for i, node in enumerate(results[:num_outputs]):
        if node in given and _is_tangent(node):
            mesh = _real(node)
            equal = (n for n in given if not _is_tangent(n) and _real(n) == mesh)
            results[i] = next(equal, node)
    end.args = (tuple(results),)


def _is_tangent(node: Node) -> bool:
    return "tangents" in str(node.target)


def _real(node: Node) -> Any:
    """The object that an opaque value stands for."""
    return node.meta["val"].real_obj


def _tensors_first(halves: Halves, num_outputs: int) -> None:
    """Let tensors come before meshes of DTensors among what forward saves and backward takes. Where
    backward draws random numbers again (an attention in an activation checkpoint has some), torch
    up to 2.13 puts their states behind the meshes, where AOTAutograd takes them for meshes.
    """
    forward, backward = halves
    outputs = output(forward.graph)
    given: tuple[Node, ...] = outputs.args[0]  # type: ignore[assignment]
    saved = _sorted(given[num_outputs:])
    if saved == [*given[num_outputs:]]:
        return
    outputs.args = ((*given[:num_outputs], *saved),)
    taken = [
        node
        for node in backward.graph.find_nodes(op="placeholder")
        if not any(word in str(node.target) for word in ("tangents", "bwd_seed", "bwd_base_offset"))
    ]
    first = next(node for node in taken if _is_opaque(node))
    for node in taken[taken.index(first) :]:
        if _is_tensor(node):
            first.prepend(node)
    for half in halves:
        half.recompile()


def _sorted(values: Sequence[Node]) -> list[Node]:
    """Tensors behind the first opaque value go before it."""
    first = next((i for i, node in enumerate(values) if _is_opaque(node)), len(values))
    late = [node for node in values[first:] if _is_tensor(node)]
    return [*values[:first], *late, *(node for node in values[first:] if node not in late)]


def _is_opaque(value: Any) -> bool:
    return isinstance(getattr(value, "meta", {}).get("val"), FakeScriptObject)


def _is_tensor(value: Any) -> bool:
    return isinstance(getattr(value, "meta", {}).get("val"), Tensor)


def _give_up(
    halves: Halves,
    is_marked: Callable[[Node], bool],
    give_up: Callable[[Halves, Collection[str]], list[str]],
    keep: Callable[[Node], None],
) -> None:
    """Let backward compute again, or the host have, what is marked; where that cannot be, the mark
    goes, and `explain` will say so.
    """
    nodes = halves[0].graph.nodes
    marked = {node.name: node for node in nodes if is_marked(node)}
    if not marked:
        return
    left, room = give_up(halves, marked), get_room(nodes)
    for name in left:
        keep(marked[name])
    if room is not None:
        for choice in room.choices:
            choice["is_kept"] |= choice["name"] in left


class Partitioner(CustomPartitionerFn):
    """Inductor's hook for splitting: `partition` for graphs with anything of ours, torch's own for
    all others.
    """

    def __call__(self, gm: GraphModule, joint_inputs: Any, **options: Any) -> Halves:
        """Split."""
        split: Callable[..., Halves] = min_cut_rematerialization_partition
        if find(gm.graph, UNSHARD, REDUCE_GRAD):
            return partition(gm, joint_inputs, current_plan(), **options)
        if is_unit(gm):
            return min_cut(gm, joint_inputs, current_plan(), **options)
        return split(gm, joint_inputs, **options)

    def uuid(self) -> Any:
        """Part of the key of every compiled graph; those of ours have the plan in theirs."""
        return f"compiled_fsdp partition {current_plan().recompute}"


class StepPartitioner(Partitioner):
    """The same for a whole step: the halves, stitched together."""

    def __init__(self, step: WholeStep) -> None:
        self.step = step

    def __call__(self, gm: GraphModule, joint_inputs: Any, **options: Any) -> Halves:
        """Split and stitch."""
        if is_unit(gm):
            return super().__call__(gm, joint_inputs, **options)
        halves = super().__call__(gm, joint_inputs, **options)
        return stitch(*halves, options["num_fwd_outputs"], self.step, current_plan(), is_fused=True)

    def uuid(self) -> Any:
        """Part of the key of every compiled graph."""
        return f"{super().uuid()} {self.step}"


def install_partitioner() -> None:
    """Let Inductor use it, unless the user brought a partitioner."""
    if inductor_config.custom_partitioner_fn is None:
        inductor_config.custom_partitioner_fn = Partitioner()
