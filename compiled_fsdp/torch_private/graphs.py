"""Private torch: graph modules, and compiled graphs while they run. Tried on torch 2.13 and
2.15.
"""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo import config as repro
from torch._dynamo.repro import after_aot
from torch._functorch._aot_autograd.schemas import OutputType
from torch.fx import Graph, Node
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.immutable_collections import immutable_list
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from torch.fx import GraphModule

# Types of arguments that are no symbols and have none inside, and of lists of arguments.
PLAIN = frozenset(
    (
        *(Node, int, float, bool, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)
LISTS = (tuple, list, immutable_list)
fx_graph: Any = torch.fx.graph  # with the names that it imports
# Whether torch looks for symbols among a node's arguments when it creates it, which takes longer
# than all the rest: 2.13 does.
LOOKS_FOR_SYMBOLS = (
    getattr(fx_graph, "pytree", None) is pytree
    and "tree_iter" in Graph.create_node.__code__.co_names
)


def without_code() -> AbstractContextManager[None]:
    """Graph modules that torch makes in this context get code when they are called, not before;
    tried on 2.11 and 2.13.
    """
    return _use_lazy_graph_module(True)


def graph_module_without_code(root: torch.nn.Module, graph: Graph) -> GraphModule:
    """A graph module that gets code when it is called, not before."""
    with without_code():
        return _make_graph_module(root, graph)


def running_compiled_function() -> Any:
    """The autograd node of the compiled graph whose forward calls us, while it runs; None if none
    is recorded.

    AOTAutograd keeps it in a local variable of a frame above, `ctx`; tried on 2.13 and 2.15.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if "ctx" in frame.f_code.co_varnames:
            node = frame.f_locals.get("ctx")
            if type(node).__name__ == "CompiledFunctionBackward":
                return node
        frame = frame.f_back  # type: ignore[assignment]
    return None


def outputs_of_tangents(node: Any) -> list[int]:
    """For each gradient that a compiled backward graph takes, which of the node's outputs it
    belongs to.

    As AOTAutograd chooses them: of inputs that were changed, of outputs, of what outputs are views
    of.
    """
    made = type(node)._forward_cls
    if hasattr(made, "tangent_outputs"):  # compiled ahead (`ahead/run.py`)
        return list(made.tangent_outputs)
    of = made.metadata
    changed = of.mutated_inp_runtime_indices
    found = [
        i
        for i, k in enumerate(changed)
        if of.input_info[k].mutates_data and of.input_info[k].requires_grad
    ]
    for i, info in enumerate(of.output_info):
        kinds = (
            OutputType.non_alias,
            OutputType.unsafe_view_alias,
            OutputType.custom_function_view,
        )
        requires_grad = getattr(info, "requires_grad_for_backward", info.requires_grad)
        if info.output_type in kinds and issubclass(info.raw_type, torch.Tensor) and requires_grad:
            found.append(len(changed) + i)
    start = len(changed) + of.num_outputs
    return [*found, *range(start, start + of.num_intermediate_bases)]


def keep_uncopied(is_ours: Callable[[Graph], bool]) -> None:
    """Let torch compile such graphs without a copy of each before, once for all.

    The copy is for scripts that show an error again (`torch._dynamo.config.repro_after`), and is
    made also where nobody asks for one.
    """
    found: Any = after_aot
    if hasattr(found.copy, "__wrapped__"):
        return

    def deepcopy(value: Any, memo: Any = None) -> Any:
        if repro.repro_after is None and isinstance(value, Graph) and is_ours(value):
            return value
        return copy.deepcopy(value, memo)

    instead: Any = ModuleType(copy.__name__)
    vars(instead).update(vars(copy), deepcopy=deepcopy, __wrapped__=copy)
    found.copy = instead


def with_quick_nodes() -> bool:
    """Let torch create nodes of graphs in half the time, until `without_quick_nodes`; whether that
    began now.

    What it looks through for symbols, to warn of them, is left out where there can be none. The
    nodes are the same.
    """
    if not LOOKS_FOR_SYMBOLS or fx_graph.pytree is not pytree:
        return False
    quick: Any = ModuleType(pytree.__name__)
    vars(quick).update(vars(pytree), tree_iter=_unlike_plain)
    fx_graph.pytree = quick
    return True


def without_quick_nodes() -> None:
    """Let torch create nodes as it does."""
    fx_graph.pytree = pytree


def _unlike_plain(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterable[Any]:
    """All leaves of a node's arguments; none if they are plain."""
    args, kwargs = arguments
    for each in (*args, *kwargs.values()) if kwargs else args:
        if type(each) not in PLAIN and not (
            type(each) in LISTS and PLAIN.issuperset(map(type, each))
        ):
            return pytree.tree_iter(arguments)
    return ()
