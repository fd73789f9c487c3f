"""Private torch: subgraphs that Inductor lowers once and calls, and those of operators like `cond`.

Tried on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx.experimental.symbolic_shapes as symbolic
from torch._guards import CompileContext, TracingContext
from torch._inductor import config
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Interpreter
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .fakes import alike, look, mode_of, storage_of
from .sizes import expression

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.fx import GraphModule

# Operators that have their functions as graphs of their own up to the end:
# AOTAutograd inlines others.
KEEP_GRAPHS = frozenset({"cond", "while_loop", "scan", "map_impl", "flex_attention"})
# An operator that calls its first argument where it stands, and hands over the rest.
CHECKPOINT = "tag_activation_checkpoint"


def why_inline() -> str:
    """Returns why Inductor is to compile every layer for its place: with CUDA graphs nobody has
    tried calls of subgraphs; "" where it may call them.
    """
    return "not tried with CUDA graphs" if config.triton.cudagraphs else ""


def check_wrapper() -> None:
    """Checks that what Inductor writes can call our ops.

    Raises:
        NotImplementedError: it writes C++, into which it puts text arguments as they stand, without
            escapes, so that no compiler takes those that have quotes and line ends.
    """
    if config.cpp_wrapper:
        raise NotImplementedError(
            "compiled_fsdp: a graph of sharded parameters was to be compiled with "
            "torch._inductor.config.cpp_wrapper=True, whose C++ cannot call our ops: torch writes "
            "their text into it unescaped. Leave cpp_wrapper (TORCHINDUCTOR_CPP_WRAPPER) off"
        )


def prepare_subgraphs() -> None:
    """Let a subgraph's memory and symbols be its own, once for all.

    Before 2.15 a subgraph of a backward takes its inputs for the outer graph's of the same number,
    and may write into those that the outer one was given for good ("donated"). And to the outer
    graph each result is a buffer of its own, also one that lies in an argument or in another
    result: memory of such calls is never used again.

    One that has symbols of its own for its sizes is lowered for these, not for those that it is
    first called with; results of a call are of the sizes that the call says.
    """
    from torch._inductor import graph, ir  # more than a second: only if Inductor compiles
    from torch._inductor.virtualized import V

    made: Any = graph.SubgraphLowering.__init__
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def init(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self.bw_donated_idxs = None

    create = ir.InvokeSubgraph.create

    @functools.wraps(create)
    def then_keep(subgraph: Any, *operands: Any) -> Any:
        graph_of_it: Any = subgraph.graph_module.graph
        given = [node.meta.get("val") for node in graph_of_it.find_nodes(op="placeholder")]
        has_own_symbols = _has_symbols_of(given, V.graph.current_node)
        if subgraph.graph is None and has_own_symbols:
            subgraph.graph = V.graph.make_subgraph(subgraph.graph_module, given, subgraph.name)
            with V.set_graph_handler(subgraph.graph), _said_what_to_do(subgraph.name):
                subgraph.graph.run(*given)
        results: Any = create(subgraph, *operands)
        inside = subgraph.graph
        names = [*inside.graph_inputs, *(each.get_name() for each in inside.graph_outputs)]
        if len({*names}) < len(names):
            buffers = (each for each in operands if not isinstance(each, sympy.Basic))
            V.graph.never_reuse_buffers.update(each.get_name() for each in (*buffers, *results))
        if has_own_symbols:
            for result, value in zip(results, V.graph.current_node.meta["val"], strict=True):
                layout = result.layout
                layout.size = [expression(size) for size in value.shape]
                layout.stride = [expression(size) for size in value.stride()]
        return results

    changed: Any = graph.SubgraphLowering
    changed.__init__ = init
    invoke: Any = ir.InvokeSubgraph
    invoke.create = then_keep


def _has_symbols_of(given: Sequence[Any], call: Any) -> bool:
    """Whether the inputs of a subgraph have symbols of their own, or numbers, where what a call
    gives has symbols.
    """
    outside = symbolic.free_symbols([n.meta["val"] for n in call.args[2:]])
    return bool(outside) and outside.isdisjoint(symbolic.free_symbols(given))


@contextmanager
def _said_what_to_do(name: str) -> Iterator[None]:
    """Inside, what Inductor cannot lower for sizes it knows nothing of ends with words about it."""
    from torch._inductor.exc import LoweringException

    try:
        yield
    except (GuardOnDataDependentSymNode, LoweringException) as error:
        if isinstance(error, LoweringException) and "data-dependent" not in str(error):
            raise
        raise RuntimeError(
            f"compiled_fsdp: compiling {name}, which several layers call, for sizes that only data "
            f"decides: {error}. What a program asserts of such sizes (torch._check) is not known "
            "inside of it; Plan(regions='off') compiles every layer in its place."
        ) from error


def operator_name(target: object) -> str:
    """The name of an operator that is given functions, `cond` say; "" for anything else."""
    return target.name() if isinstance(target, HigherOrderOperator) else ""


class AsItStands(Interpreter):
    """Runs what is under activation checkpointing where it is called: nothing is computed again,
    and a policy of what to keep is not asked.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """As the base's; a checkpoint hands over what stands behind its function."""
        if operator_name(target) == CHECKPOINT:
            return AsItStands(args[0]).run(*args[1:])
        return super().call_function(target, args, kwargs)


def is_plain_fake(value: object) -> bool:
    """Whether this is a fake tensor of known sizes, and no subclass (a DTensor, say)."""
    return type(value) is FakeTensor and not value._has_symbolic_sizes_strides


# Of constants, which AOTAutograd keeps as attributes of a graph.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class _Watch(TorchDispatchMode):
    """Looks for ops that may not be in a graph that is called several times."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.why = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            self.why = self.why or f"it draws random numbers ({func})"
        if func in _LIFTS:
            self.why = self.why or f"it makes a tensor of Python's numbers ({func})"
        if func.namespace not in ("aten", "prim", "prims"):
            self.why = self.why or f"it calls {func}, which may do more than compute"
        found = func(*args, **(kwargs or {}))
        if any(isinstance(each, torch.Tensor) and each.is_complex() for each in tree_leaves(found)):
            self.why = self.why or f"it computes with complex numbers ({func})"
        return found


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op that may draw random numbers does: attention without dropout does not."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")
    given = args[at] if at < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(given)


def what_forbids(body: GraphModule, inputs: Sequence[Any]) -> str:
    """Why a graph of Dynamo's may not become the subgraph of an `invoke_subgraph`; "" if it may.

    It is run on fake tensors like these, to see whether it writes to what it is given, whether its
    results share memory, whether it is random, and whether it calls anything but torch's own
    computation. Tried on 2.11, 2.13 and 2.15.
    """
    mode: Any = inputs[0].fake_mode
    watch = _Watch()
    with mode, torch.no_grad():
        given = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in inputs
        ]
        with watch:
            results = AsItStands(body).run(*given)
    written = [i for i, tensor in enumerate(given) if tensor._version > 0]
    if written:
        return f"it writes to what it is given ({inputs[written[0]]})"
    storages = [tensor.untyped_storage()._cdata for tensor in (*given, *results)]
    if len(set(storages)) < len(storages):
        return "a result of it lies in the memory of another, or of what it is given"
    return watch.why


def grad_mode_at_start() -> bool:
    """Whether autograd was on where the graph begins that Dynamo is about to compile; where it
    ends, behind `torch.set_grad_enabled(False)` say, it may be off. Tried on 2.11, 2.13 and 2.15.
    """
    context = TracingContext.try_get()
    state = context.global_context.global_state if context is not None else {}
    return bool(state["grad_enabled"][1]) if "grad_enabled" in state else torch.is_grad_enabled()


_calling: list[object] = []  # the compilation whose graph calls units


def note_units() -> None:
    """The graph that Dynamo is tracing calls units."""
    _calling[:] = [CompileContext.try_get()]
    _remember()


def calls_units() -> bool:
    """Whether the graph that is being compiled calls units, or is the graph of one.
    Tried on 2.11, 2.13 and 2.15.
    """
    context = CompileContext.try_get()
    return context is not None and _calling == [context]


def _remember() -> None:
    """Let `invoke_subgraph` ask once what a subgraph of ours writes to, and what comes of it for
    fake tensors, once for all: torch finds out by tracing and by running it, for every call. Tried
    on 2.13 and 2.15; 2.11 has no place for the answers, and asks every time.
    """
    from torch._higher_order_ops import utils
    from torch._higher_order_ops.invoke_subgraph import InvokeSubgraphHOP, invoke_subgraph

    made: Any = InvokeSubgraphHOP.gen_schema
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def gen_schema(self: Any, subgraph: Any, identifier: Any, *operands: Any) -> Any:
        key = ("schema", identifier)
        return _known(
            key, identifier, lambda: made(self, subgraph, identifier, *operands), subgraph
        )

    changed: Any = InvokeSubgraphHOP
    changed.gen_schema = gen_schema
    fakes: dict[Any, Any] = utils.registered_hop_fake_fns
    run = fakes[invoke_subgraph]

    @functools.wraps(run)
    def run_once(subgraph: Any, identifier: Any, *operands: Any) -> Any:
        looks = tuple(map(look, operands))
        mode = mode_of(operands[0]) if operands else None
        if mode is None or None in looks:
            return run(subgraph, identifier, *operands)
        first: list[Any] = []

        def described() -> Any:
            first[:] = run(subgraph, identifier, *operands)
            found = tuple(None if value is None else look(value) for value in first)
            is_plain = all(
                f is not None for f, v in zip(found, first, strict=True) if v is not None
            )
            owned = [storage_of(v)[0] for v in (*operands, *first) if v is not None]
            return found if is_plain and len(set(owned)) == len(owned) else None

        key = ("result", identifier, looks)
        found = _known(key, identifier, described, subgraph)
        if first:
            return tuple(first)
        if found is None:
            return run(subgraph, identifier, *operands)
        return tuple(None if each is None else alike(mode, each) for each in found)

    fakes[invoke_subgraph] = run_once


def _known(key: tuple[Any, ...], identifier: Any, ask: Callable[[], Any], subgraph: Any) -> Any:
    """What was answered before in this compilation, of a subgraph of ours, which is kept alive."""
    from torch._higher_order_ops.invoke_subgraph import get_invoke_subgraph_cache

    cache = getattr(get_invoke_subgraph_cache(), "functionalize_schema_cache", None)
    if cache is None or "fsdp_unit_" not in str(identifier):
        return ask()
    # Functionalization wraps the same subgraph anew for every call.
    inside = getattr(subgraph, "subgraph", subgraph)
    graph = getattr(inside, "graph", None)
    now = (*key, id(inside), graph and len(graph.nodes), graph and len(graph.output_node().args[0]))
    if now not in cache:
        cache[now] = (ask(), inside)
    return cache[now][0]
