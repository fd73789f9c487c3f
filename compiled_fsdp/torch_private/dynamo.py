"""Private torch: what Dynamo traces, and how it is kept out. Tried on torch 2.11, 2.13 and 2.15."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo import config
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import RestartAnalysis, TensorifyScalarRestartAnalysis, Unsupported
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import builder
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import CompileContext, TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .selective import unselected
from .spmd import unchecked
from .subgraphs import operator_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.fx import GraphModule

P = ParamSpec("P")
R = TypeVar("R")


def trace_number() -> object:
    """Returns what Dynamo is tracing now, another one for each attempt; None outside. Tried on 2.13
    and 2.15.
    """
    return CompileContext.current_trace_id()


def compilation() -> object:
    """Returns what Dynamo is compiling now, the same object for all attempts; None outside.
    Tried on 2.13.
    """
    return CompileContext.try_get()


def operators_in_trace() -> list[str]:
    """Returns the names of operators (`cond`, say) whose functions Dynamo traces now, the innermost
    first. Tried on 2.11, 2.13 and 2.15.
    """
    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    found = []
    while tracer is not None:
        found.append(operator_name(tracer.source_target))
        tracer = tracer.parent
    return found


def is_cut_off() -> bool:
    """Whether the graph that goes to its backend ends at a graph break, behind which Python goes
    on. Tried on 2.11, 2.13 and 2.15.
    """
    reason = getattr(InstructionTranslator.current_tx().output, "compile_subgraph_reason", None)
    return reason is not None and bool(reason.graph_break)


def is_inference_in_trace() -> bool:
    """Whether what Dynamo traces now will run in inference mode; tracing, it is not in it. Tried on
    2.11, 2.13 and 2.15.
    """
    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    entered = 0
    while tracer is not None:
        for target, by in ((ENTER_INFERENCE, 1), (EXIT_INFERENCE, -1)):
            entered += by * len(tracer.graph.find_nodes(op="call_function", target=target))
        tracer = tracer.parent
    return entered > 0 or torch.is_inference_mode_enabled()


def take_ints_for_constants() -> None:
    """With `dynamic=True`, let Dynamo take ints that a sharded module holds for constants, as those
    of any other module, once for all; without, it makes those of FSDP's alone dynamic when they
    have changed, which is better than another graph for each value. Tried on 2.11, 2.13 and 2.15.
    """
    is_case = getattr(builder, "is_int_specialization_case", None)
    if is_case is None or hasattr(is_case, "__wrapped__"):
        return

    @functools.wraps(is_case)
    def or_of_fsdp(value: Any, source: Any) -> bool:
        if is_case(value, source):
            return True
        if config.assume_static_by_default or config.allow_unspec_int_on_nn_module:
            return False
        return bool(source.guard_source.is_fsdp_module())

    changed: Any = builder
    changed.is_int_specialization_case = or_of_fsdp


def traces_autograd() -> bool:
    """Whether Dynamo traces `backward()` and `autograd.grad` into graphs, a setting that torch 2.11
    has and older ones lack.
    """
    return bool(getattr(torch._dynamo.config, "trace_autograd_ops", False))


# Whether Dynamo can trace a backward to a DTensor. In torch 2.11 that ends in an AssertionError
# without a text. Tried on 2.11, 2.13 and 2.15.
TRACES_TO_DTENSORS = hasattr(torch._dynamo.variables.torch, "_collect_placeholder_nodes")


def tracing_context() -> object:
    """One for each graph that is being compiled, until its halves are; None outside. Tried on
    2.13.
    """
    return TracingContext.try_get()


def donate_nothing() -> None:
    """While a backward is compiled: it writes over nothing that forward has saved, whatever
    AOTAutograd has found, so that it may run again (`retain_graph=True`) although its first run was
    not to keep the graph. Tried on 2.11 and 2.13.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def before_backend(fn: Callable[[GraphModule], None]) -> None:
    """Call `fn` with the graph that Dynamo is tracing, once it is whole and before its backend gets
    it; nothing outside of a trace. Tried on 2.13 and 2.15.
    """
    try:
        functions = InstructionTranslator.current_tx().output.register_finalizer_fns
    except AttributeError:
        return
    if fn not in functions:
        functions.append(fn)


def in_backwards(ask: Callable[[list[Any]], str | list[int] | None]) -> None:
    """When Dynamo traces `loss.backward()`, without arguments, call `ask` with all leaves that may
    get a gradient, as nodes. Tried on 2.13 and 2.15, which has a table of methods; where Dynamo has
    no such place, `ask` is not called.

    `ask` returns one of these:
        None: the call is traced as ever.
        Numbers of leaves: nothing is added to the `.grad` of any leaf. The graph gets a call of
            `torch.autograd.grad` for these, whose result nobody uses.
        A text, why it cannot be traced: it breaks the graph, or is an error with `fullgraph=True`.
    """
    kind: Any = torch._dynamo.variables.TensorVariable
    if not (TRACES_TO_DTENSORS and hasattr(kind, "_collect_backward_inputs")):
        return
    entry = getattr(kind, "tp_methods", {}).get("backward")
    if entry is not None:
        entry.handler = _backward_asking(entry.handler, ask)
    else:
        kind.method_backward = _backward_asking(kind.method_backward, ask)


def _backward_asking(
    traced: Callable[..., Any], ask: Callable[[list[Any]], str | list[int] | None]
) -> Callable[..., Any]:
    def method_backward(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = [*tx.output.leaf_var_creation_order, *tx.output.input_source_to_var.values()]
        plain = traces_autograd() and not (args or kwargs)
        leaves = self._collect_backward_inputs(inputs) if plain else []
        answer = ask([leaf.as_proxy().node for leaf in leaves])
        if answer is None:
            return traced(self, tx, *args, **kwargs)
        if isinstance(answer, str):
            raise Unsupported(answer)
        build = torch._dynamo.variables.base.VariableTracker.build
        wanted = build(tx, [leaves[number] for number in answer])
        grad = build(tx, torch.autograd.grad)
        grad.call_function(tx, [self, wanted], {"allow_unused": build(tx, True)})
        return build(tx, None)

    return method_backward


def change_backend(change: Callable[[Any], Any]) -> None:
    """From `before_backend`: let the graph be compiled by what `change` makes of its backend. Tried
    on 2.13 and 2.15.
    """
    output = InstructionTranslator.current_tx().output
    output.compiler_fn = change(output.compiler_fn)


def current_backend() -> Any:
    """What will compile the graph that Dynamo is tracing. Tried on 2.13 and 2.15."""
    return InstructionTranslator.current_tx().output.compiler_fn


def touches_grads() -> bool:
    """Whether the graph that Dynamo is tracing reads, or assigns, `.grad` of some tensor from
    outside. Tried on 2.13 and 2.15.
    """
    output = InstructionTranslator.current_tx().output
    assigned = output.side_effects.store_attr_mutations.values()
    return any("grad" in names for names in assigned) or any(
        getattr(guard.originating_source, "member", "") == "grad" for guard in output.guards
    )


def give_up_graph(text: str) -> NoReturn:
    """From `before_backend`: let Dynamo run the frame as it is, or raise this text with
    `fullgraph=True`. Tried on 2.13.
    """
    raise Unsupported(text)


def trace_again(why: str) -> NoReturn:
    """From a function that Dynamo calls while it traces: begin this trace anew, since what it has
    seen is no longer so. Tried on 2.11, 2.13 and 2.15.
    """
    InstructionTranslator.current_tx().speculation_log.clear()  # it expects the same path again
    raise RestartAnalysis(restart_reason=why)


def trace_again_from_backend(why: str) -> NoReturn:
    """The same from a backend, or a pass inside of it: the one error that torch hands on to Dynamo
    from there, as it is. Tried on 2.13 and 2.15.
    """
    InstructionTranslator.current_tx().speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason=why)


# What Dynamo's graphs call to switch autograd on and off, for inference mode, and for `.data`.
SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled


# What a graph of Dynamo's calls where a tensor from inside of it gets a backward hook; the graph is
# broken there before torch 2.13, which has none. Tried on 2.13.
try:
    from torch._higher_order_ops.register_hook import register_hook_op as _register_hook
except ImportError:  # not in every version that is supported
    _register_hook = "no node calls this"  # type: ignore[assignment]
REGISTER_HOOK: Any = _register_hook


ENTER_INFERENCE: Any = torch.autograd.grad_mode._enter_inference_mode


EXIT_INFERENCE: Any = torch.autograd.grad_mode._exit_inference_mode


GET_DATA: Any = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]


def untraced(fn: Callable[P, R]) -> Callable[P, R]:
    """Keep Dynamo out of this function and of all that it calls, and whoever checks types of
    tensors (`spmd.py`) or keeps results for a selective checkpoint (`selective.py`); typed.
    """
    disabled: Callable[P, R] = torch._dynamo.disable(unchecked(unselected(fn)))
    return disabled


def traced_as_it_is(fn: Callable[P, R]) -> Callable[P, R]:
    """Let Dynamo put calls of this function into its graphs without looking inside, typed;
    AOTAutograd traces through them.
    """
    allowed: Callable[P, R] = torch._dynamo.allow_in_graph(fn)
    return allowed


def never_traced_alone(fn: Callable[..., Any]) -> None:
    """Let Dynamo run this function as it is when it meets it as a frame of its own; when inlined,
    it is traced as ever.
    """
    skip_code(fn.__code__)


def is_refused(module: Any) -> bool:
    """Whether Dynamo traces no call of this module: of a recurrent one, unless it is told to. Tried
    on 2.13, which breaks a graph at it in any frame, and on 2.15, which ends in an internal error
    in a frame of which it is `self`.
    """
    is_recurrent = isinstance(module, torch.nn.RNN | torch.nn.GRU | torch.nn.LSTM)
    return is_recurrent and not torch._dynamo.config.allow_rnn


def never_trace_hooks_alone() -> None:
    """Keep Dynamo from starting a graph inside `nn.Module.__call__`, between a module's hooks and
    its forward.

    It would take the pre-forward hook into a graph and run the forward outside: then nobody has
    gathered. Whole calls are traced as ever; after a graph break in a forward, hooks run as they
    stand and the forward is compiled by itself.
    """
    for constant in torch.nn.Module._call_impl.__code__.co_consts:
        if getattr(constant, "co_name", "") == "inner":
            skip_code(constant)


def is_call_compiled(module: Any) -> bool:
    """Whether a call of this module, made now and outside any graph, is what `torch.compile` or
    `module.compile()` traces.
    """
    callback = get_eval_frame_callback()
    return module._compiled_call_impl is not None or (
        callback is not None and callback is not False
    )


never_traced_alone(is_call_compiled)


def is_dynamo_faking(tensor: Tensor) -> bool:
    """Whether Dynamo runs something on fake tensors to see what comes out: AOTAutograd, which comes
    next, has a proxy mode on.
    """
    return isinstance(tensor, FakeTensor) and get_proxy_mode() is None


# Whether `self.__dict__[name]` in a trace is what the dict holds. Up to torch 2.12 Dynamo answers
# with the attribute of that name, and comes back to the property that asks. Tried on 2.11, 2.13 and
# 2.15.
READS_DICTS = hasattr(UserDefinedObjectVariable, "get_dict_vt")
