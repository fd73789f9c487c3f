"""Activation checkpoints in the calls of units (`unit_calls.py`): around the whole of a unit, or of
a part of it.

[Note: units under checkpoints]
Dynamo gives what is checkpointed a graph of its own, which AOTAutograd runs where it is called, and
marks: compute again. The subgraph of a unit keeps that call, and is marked and cut once:

    %f = get_attr "wrap_body_3"               %unit = get_attr "fsdp_unit_0"
    %y = checkpoint(%f, %flat3, %x)           %w = unshard(%flat3, "w")
        f: %w = unshard(%flat, "w")  becomes  %y = invoke_subgraph(%unit, "fsdp_unit_0", %x, %w)
           linear(%x, %w)                         unit: checkpoint(%f, %x, %w)

Reads of parameters are moved out (`control_flow.py`): whether backward gathers again is decided for
each parameter, not by the checkpoint. A checkpoint around one unit alone is that unit's call.
"""

from __future__ import annotations

import dis
import enum
import functools
import operator
from itertools import takewhile
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.ir.meta import checkpoint_policy, module_calls
from compiled_fsdp.torch_private.subgraphs import CHECKPOINT, operator_name

from .control_flow import switch_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


# What a policy may know, and nothing changes.
CONSTANT = (
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator),
    *(torch.dtype, torch.device, type, enum.Enum, BuiltinFunctionType, ModuleType),
)


def is_checkpoint(node: Node) -> bool:
    """Whether a node of Dynamo's graph calls what is checkpointed."""
    return operator_name(node.target) == CHECKPOINT


def checkpointed(function: Node) -> GraphModule | None:
    """What a checkpoint calls, of the node that names it; None for any other node."""
    if (
        function.op != "get_attr"
        or not function.users
        or not all(map(is_checkpoint, function.users))
    ):
        return None
    owner: Any = function.graph.owning_module
    body: GraphModule = owner.get_submodule(function.target)
    return body


def computed_in(body: GraphModule) -> Iterator[Node]:
    """Yields what a graph computes, not what it is given or returns."""
    return (node for node in body.graph.nodes if node.op not in ("placeholder", "output"))


def with_checkpointed(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yields nodes, and behind each that names what is checkpointed those that this computes."""
    for node in nodes:
        yield node
        if (body := checkpointed(node)) is not None:
            yield from with_checkpointed(computed_in(body))


def calls_around(node: Node) -> list[tuple[str, str, type]]:
    """The calls of modules that a node is in (`module_calls`). A checkpoint is in those that all
    of what it computes is in; so are what it calls, and what it yields.
    """
    source: Any = node.args[0] if node.args else None
    if node.target is operator.getitem and is_checkpoint(source):
        return calls_around(source)
    body = checkpointed(source if is_checkpoint(node) else node)
    if body is None:
        return list(module_calls(node))
    stacks = [calls_around(each) for each in computed_in(body) if not switch_name(each)]
    if not stacks:
        return list(module_calls(node))
    places = zip(*stacks, strict=False)
    return [calls[0] for calls in takewhile(lambda calls: len(set(calls)) == 1, places)]


def policy_key(body: GraphModule) -> Any:
    """Equal for checkpoints that keep the same (`create_selective_checkpoint_contexts`)."""
    return _key(checkpoint_policy(body), ())


def _key(value: object, inside: tuple[int, ...]) -> Any:
    """Equal for functions that have the same code and know the same, if a policy cannot count in
    what they know: in a dict, a list of numbers, an object, or a variable that they write to.

    inside: ids of the functions that know it.
    """

    def keys(values: Iterable[object]) -> tuple[Any, ...]:
        return tuple(_key(each, (*inside, id(value))) for each in values)

    if id(value) in inside:
        return ("itself", inside.index(id(value)))
    if isinstance(value, functools.partial):
        return ("partial", *keys((value.func, value.args, *sorted(value.keywords.items()))))
    if isinstance(value, FunctionType) and not _writes_outside(value.__code__):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items())
        known = (each for cell in value.__closure__ or () for each in _contents(cell))
        named = (value.__globals__.get(name) for name in _names(value.__code__))
        tables = [each for each in named if isinstance(each, dict | list | set)]
        return ("function", value.__code__, keys(defaults), keys(known), keys(tables))
    if isinstance(value, tuple):
        return ("tuple", *keys(value))
    if isinstance(value, list | set | frozenset) and not any(map(_is_number, value)):
        parts = keys(value)
        return (type(value), parts if isinstance(value, list) else frozenset(parts))
    if value is None or isinstance(value, str | int | float | bool):
        return (type(value), value)
    return ("object", id(value) if isinstance(value, CONSTANT) else object())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of a function, and of those inside it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _names(code: CodeType) -> list[str]:
    return sorted({name for each in _codes(code) for name in each.co_names})


def _writes_outside(code: CodeType) -> bool:
    """Whether a function, or one inside it, assigns to a global variable, or to one that it shares
    with a function around it.
    """
    shared = set(code.co_freevars)
    return any(
        step.opname == "STORE_GLOBAL" or (step.opname == "STORE_DEREF" and step.argval in shared)
        for each in _codes(code)
        for step in dis.get_instructions(each)
    )


def _contents(cell: CellType) -> tuple[object, ...]:
    """What a function knows of one name; nothing if it has no value yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
