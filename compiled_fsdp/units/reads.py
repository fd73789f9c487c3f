"""Reads of sharded parameters in a trace, and which units' forwards are being traced; see
`registered.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.ir.meta import traced_as
from compiled_fsdp.ir.schema import REDUCE_GRAD, UNSHARD
from compiled_fsdp.ir.spec import SPECS
from compiled_fsdp.torch_private.autograd import is_transformed
from compiled_fsdp.torch_private.dynamo import (
    SET_GRAD_ENABLED,
    is_inference_in_trace,
    operators_in_trace,
    trace_number,
    traced_as_it_is,
)
from compiled_fsdp.torch_private.subgraphs import KEEP_GRAPHS, grad_mode_at_start

from .handles import APART
from .tensor_parallel import as_dtensor
from .traced_extension import EXTENSIONS, WHY_EAGER
from .views import view_of_flat

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Graph, GraphModule, Node


@traced_as_it_is
def unshard_as(flat: Tensor, key: str) -> Tensor:
    """An `fsdp::unshard` with the `ParamSpec` of this key: Dynamo guards on a short name, not on
    the text that the op has. Called while it traces, to know what comes of it.
    """
    _note_cast(key)
    full: Tensor = UNSHARD(flat, *SPECS[key].args())
    return full


@traced_as_it_is
def reduce_grad_as(grad: Tensor, flat: Tensor, key: str) -> Tensor:
    """An `fsdp::reduce_grad` with the `ParamSpec` of this key."""
    flat_grad: Tensor = REDUCE_GRAD(grad, flat, *SPECS[key].args())
    return flat_grad


WHY_EXTENSION_THERE = (
    "a parameter with an all-gather extension (fsdp_pre_all_gather) is read inside of a "
    "transformation of torch.func, inference mode, or an operator with functions of its own "
    "(torch.cond)"
)

OP_OF = {unshard_as: UNSHARD, reduce_grad_as: REDUCE_GRAD}


def spell_out(gm: GraphModule) -> None:
    """Let Dynamo's whole graph say the ops with their own arguments: what a backend gets, and what
    compiled code is cached by, needs no table.
    """
    found = [
        node.args[1]
        for node in gm.graph.find_nodes(op="call_function", target=unshard_as)
        if node.args[1] in _outside and all(_is_dead_detach(user) for user in node.users)
    ]
    if found:
        _say_what_is_cast(found)
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            _share_extended(module.graph)
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.op == "call_function" and node.target in OP_OF:
                *tensors, key = node.args
                node.target, node.args = OP_OF[node.target], (*tensors, *SPECS[key].args())


def _share_extended(graph: Graph) -> None:
    """Let a graph make the full parameter of an extension once, however often it is read; with a
    gradient, if a read has one: the first may be under `torch.no_grad()`.
    """
    reads = graph.find_nodes(op="call_function", target=extended_as)
    switches = graph.find_nodes(op="call_function", target=SET_GRAD_ENABLED)
    first: dict[object, Node] = {}
    without_grad: set[Node] = set()
    mode = grad_mode_at_start()
    for node in sorted([*reads, *switches]):
        if node.target is SET_GRAD_ENABLED:
            mode = node.args[0]
            continue
        kept = first.setdefault(node.args[1], node)
        if kept is node:
            without_grad.update(() if mode else (node,))
            continue
        if mode and kept in without_grad:
            without_grad.remove(kept)
            traced_as(kept, node)
            kept.prepend(graph.create_node("call_function", SET_GRAD_ENABLED, (True,)))
            kept.append(graph.create_node("call_function", SET_GRAD_ENABLED, (False,)))
        node.replace_all_uses_with(kept)
        graph.erase_node(node)


def _is_dead_detach(node: Node) -> bool:
    return node.target == "detach" and not node.users


def _say_what_is_cast(keys: list[str]) -> None:
    """Of parameters that a graph has read, none of which it computes with."""
    dtypes = " or ".join(dict.fromkeys(str(SPECS[key].dtype) for key in keys))
    names = list(dict.fromkeys(SPECS[key].fqn for key in keys))
    warn_once(
        "compiled_fsdp: a graph asks parameters of other units for nothing but what they are like "
        f"(their dtype, say): {shortened(names, 3)}. In it they are gathered, in {dtypes} "
        "(mp_policy.param_dtype); outside of a graph they are sharded at that moment, in the dtype "
        "in which they rest, so that a branch on the dtype may take the other side. Ask a "
        "parameter of the module's own unit, or the input",
        about="dtypes of other units",
    )


class Resident(torch.autograd.Function):
    """A full parameter that is there already, as an `unshard` of its flat buffer: the same gradient
    goes to the buffer.
    """

    @staticmethod
    def forward(ctx: Any, full: Tensor, flat: Tensor, key: str) -> Tensor:
        """An alias of what is there. Not a view: autograd lets none that is made here be written
        to.
        """
        ctx.save_for_backward(flat)
        ctx.key = key
        return full.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """To the flat buffer."""
        (flat,) = ctx.saved_tensors
        return None, reduce_grad_as(grad, flat, ctx.key), None


@traced_as_it_is
def extended_as(flat: Tensor, key: str, *inner: Tensor) -> Tensor:
    """The full parameter that an all-gather extension makes of the tensors inside of a shard."""
    extension = EXTENSIONS[key]
    with torch.no_grad():
        full = extension.gather(inner)
    function: Any = Resident
    made: Tensor = function.apply(full, flat, extension.spec.key())
    return made


def traced(module: Any, name: str) -> Any:
    """The full parameter, as an `fsdp::unshard` of its unit's flat buffer; Dynamo traces this
    function.

    Not while an eager forward has it registered. Inside of `torch.vmap` it is gathered although it
    is there: Dynamo's version of a function with a backward of its own has no rule for that. So is
    it in a function of `torch.cond` or its like, out of which reads are moved
    (`frontend/control_flow.py`): of a `Resident` the backward would be inside, where no rank may
    reduce. And in inference mode, where an alias of what is there could not be made when the graph
    is traced again.
    """
    handle = module._fsdp_handles[name]
    if handle.key == APART.key:
        torch._dynamo.graph_break(msg=WHY_EAGER)
        return module._parameters[name]
    if handle.inner:
        if _has_rules_of_its_own():
            torch._dynamo.graph_break(msg=WHY_EXTENSION_THERE)
        full = extended_as(handle.flat, handle.key, *handle.inner)
        return full.detach() if handle.is_frozen else full
    if handle.is_resident and not _has_rules_of_its_own():
        function: Any = Resident
        full = function.apply(module._fsdp_full[name], handle.flat, handle.key)
    else:
        full = unshard_as(handle.flat, handle.key)
    full = view_of_flat(full, handle.view) if handle.view else full
    full = full.detach() if handle.is_frozen else full
    return as_dtensor(full, handle.full) if handle.full else full


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_rules_of_its_own() -> bool:
    """Whether the trace that is being made is inside of one of `torch.func`'s transformations, of
    inference mode, or of an operator that keeps the graph of its function.
    """
    if is_transformed() or is_inference_in_trace():
        return True
    return not KEEP_GRAPHS.isdisjoint(operators_in_trace())


# Units whose forward is being traced, by their numbers, and the trace that they belong to: a trace
# that Dynamo gave up, or began again, leaves nothing behind. Plain Python while tracing: a graph
# need not guard on what follows from its own order.
_in_forward: list[str] = []
_staying: set[str] = set()  # whose forward has ended, and left full parameters
_seen: dict[
    str, tuple[str, str]
] = {}  # by the key of a handle: the first place where parameters() came to it
# Keys of handles of parameters that are gathered in another dtype than they rest in, with the units
# in whose forward they are; and those that this trace has read outside of it.
CAST: dict[str, tuple[str, ...]] = {}
_outside: set[str] = set()
_trace: list[object] = []


def _of_this_trace() -> list[str]:
    if _trace != [trace_number()]:
        _trace[:] = [trace_number()]
        _in_forward.clear()
        _staying.clear()
        _seen.clear()
        _outside.clear()
    return _in_forward


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def begin_forward(unit: str) -> None:
    """A unit's forward begins in the trace that is being made."""
    _of_this_trace().append(unit)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def end_forward(unit: str, *, stays: bool = False) -> None:
    """It has ended; where full parameters stay for backward, they are found until the trace ends,
    or another forward of the unit, without gradients, frees them.
    """
    if unit in _of_this_trace():
        _in_forward.remove(unit)
        (_staying.add if stays else _staying.discard)(unit)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_in_forward(*units: str) -> bool:
    """Whether the trace that is being made is inside the forward of one of these."""
    return _is_full(units)


def _is_full(units: tuple[str, ...]) -> bool:
    running = _of_this_trace()
    return any(unit in running or unit in _staying for unit in units)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_seen_elsewhere(key: str, number: str, name: str) -> bool:
    """Whether this trace has iterated over a parameter under another name, or in another module."""
    _of_this_trace()
    return _seen.setdefault(key, (number, name)) != (number, name)


def _note_cast(key: str) -> None:
    """A parameter is read in the trace that is being made."""
    if key in CAST and not _is_full(CAST[key]):
        _outside.add(key)
