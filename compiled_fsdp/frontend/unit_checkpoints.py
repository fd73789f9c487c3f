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

import functools
import operator
from itertools import takewhile
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule, Node

from compiled_fsdp.ir.meta import checkpoint_policy, module_calls
from compiled_fsdp.torch_private.subgraphs import CHECKPOINT, operator_name

from .control_flow import switch_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


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
    body: GraphModule = function.graph.owning_module.get_submodule(function.target)  # type: ignore
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
    """Equal for functions that have the same code and know the same. Objects are the same only as
    one; dicts never are: a policy may count in one, over all layers.

    inside: ids of the functions that know it.
    """

    def keys(values: Iterable[object]) -> tuple[Any, ...]:
        return tuple(_key(each, (*inside, id(value))) for each in values)

    if id(value) in inside:
        return ("itself", inside.index(id(value)))
    if isinstance(value, functools.partial):
        return ("partial", *keys((value.func, value.args, *sorted(value.keywords.items()))))
    if isinstance(value, FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items())
        known = (each for cell in value.__closure__ or () for each in _contents(cell))
        return ("function", value.__code__, id(value.__globals__), keys(defaults), keys(known))
    if isinstance(value, tuple):
        return ("tuple", *keys(value))
    if value is None or isinstance(value, str | int | float | bool):
        return (type(value), value)
    return ("object", object() if isinstance(value, dict) else id(value))


def _contents(cell: CellType) -> tuple[object, ...]:
    """What a function knows of one name; nothing if it has no value yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
