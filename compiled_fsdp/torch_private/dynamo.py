"""Private torch: what Dynamo traces, how it is kept out, what it has compiled. Tried on torch 2.11,
2.13 and 2.15.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, get_eval_frame_callback
from torch._dynamo import config, convert_frame, eval_frame
from torch._dynamo.eval_frame import OptimizedModule, skip_code
from torch._dynamo.exc import (
    BackendCompilerFailed,
    RestartAnalysis,
    TensorifyScalarRestartAnalysis,
    Unsupported,
    UserError,
)
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import guard_failures, orig_code_map
from torch._dynamo.variables import builder
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import CompileContext, TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from .subgraphs import operator_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from traceback import FrameSummary
    from types import CodeType

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


ENTER_INFERENCE: Any = torch.autograd.grad_mode._enter_inference_mode


EXIT_INFERENCE: Any = torch.autograd.grad_mode._exit_inference_mode


GET_DATA: Any = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]


def untraced(fn: Callable[P, R]) -> Callable[P, R]:
    """Keep Dynamo out of this function and of all that it calls, typed."""
    disabled: Callable[P, R] = torch._dynamo.disable(fn)
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


def compiled_again(compiled: Any, fn: Callable[..., Any]) -> Any:
    """Another function, compiled as the one that `torch.compile` made `compiled` of; tried on 2.11,
    2.13 and 2.15.
    """
    held = dict(zip(compiled.__code__.co_freevars, compiled.__closure__, strict=True))
    return held["self"].cell_contents(fn)


def is_resumed(code: CodeType) -> bool:
    """Whether a frame is what is left of another behind a graph break. Tried on 2.13 and 2.15."""
    return code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)


def num_compiled(code: Any) -> int:
    """How often Dynamo has compiled a frame of this code object."""
    return len(_debug_get_cache_entry_list(code))


_compiling: list[CodeType] = []


def code_in_trace() -> CodeType | None:
    """The code object of the frame that Dynamo compiles, or has compiled last."""
    return _compiling[-1] if _compiling else None


def codes_under_way() -> list[CodeType]:
    """The code objects of all frames above, innermost first; those that Dynamo has compiled as they
    were written.
    """
    frame, found = sys._getframe(1), []
    while frame is not None:
        found.append(orig_code_map.get(frame.f_code) or frame.f_code)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def is_call_of_compiled() -> bool:
    """Whether what is under way was called by something compiled, be its frames traced or not:
    the wrapper that `torch.compile` returns is on the stack. Tried on 2.11, 2.13 and 2.15.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename == eval_frame.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# By identity, as what `limits.py` counts.
_for_good: WeakIdKeyDictionary = WeakIdKeyDictionary()


_given_up: dict[str, Unsupported] = {}  # by the name of the code of a frame


def keep_why_given_up() -> None:
    """From now on, keep why Dynamo gives up a frame: it logs that, but counts it as no graph break.
    Tried on 2.11, 2.13 and 2.15.
    """
    log: Any = InstructionTranslator.log_graph_break

    @functools.wraps(log)
    def logged(self: Any, *args: Any, **kwargs: Any) -> Any:
        error = kwargs.get("exc")
        if "Skipping the function" in kwargs.get("reason", "") and isinstance(error, Unsupported):
            _given_up[self.f_code.co_name] = error
        return log(self, *args, **kwargs)

    InstructionTranslator.log_graph_break = logged  # type: ignore[method-assign]


def why_given_up(names: Iterable[str]) -> tuple[str, list[FrameSummary]] | None:
    """Why Dynamo has given up the last frame of one of these names of code, and where it was then;
    None if that is not known.
    """
    found = [_given_up[name] for name in names if name in _given_up]
    return (str(found[-1]), list(found[-1].real_stack)) if found else None


def modes_that_keep_it_out() -> list[str]:
    """The names of modes that are on, and in which Dynamo compiles nothing: such as count or log
    operations. Tried on 2.11, 2.13 and 2.15.
    """
    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]


keep_why_given_up()


def compile_for_good(code: CodeType, tell: Callable[[int, str], None]) -> None:
    """Compile a function of this code object however often Dynamo's limits are reached, with
    `fullgraph=True` too; `tell` is called then, with how often that was, and the last reason. Tried
    on 2.13.
    """
    method = weakref.WeakMethod(tell)
    _for_good[code] = lambda times, why: (found := method()) and found(times, why)


def before_compiling(may_go_on: Callable[[CodeType, bool, bool], bool]) -> None:
    """From now on, ask before each compilation of a frame: with its code object, whether it is the
    first of what Dynamo keeps for that, and whether it is beyond one of Dynamo's limits. Such a one
    goes on where the answer is True, and is given up otherwise.

    With `fullgraph=True`, and under `fail_on_recompile_limit_hit`, Dynamo raises as ever. Tried on
    2.13 and 2.15.
    """
    module: Any = convert_frame
    exceeds = module.exceeds_recompile_limit

    def asked(cache_size: Any, compile_id: Any) -> tuple[bool, str]:
        exceeded, limit = exceeds(cache_size, compile_id)
        compiling = sys._getframe(1).f_locals
        _compiling[:] = [compiling["code"]]
        if (tell := _for_good.get(compiling["code"])) is not None:
            if exceeded:
                tell(cache_size.num_cache_entries, last_recompile(compiling["code"]))
            return False, ""
        if compiling["one_graph"] or torch._dynamo.config.fail_on_recompile_limit_hit:
            return exceeded, limit
        goes_on = may_go_on(compiling["code"], cache_size.num_cache_entries == 0, exceeded)
        return (False, "") if goes_on else (exceeded, limit)

    module.exceeds_recompile_limit = asked


def last_recompile(code: Any) -> str:
    """The last guard that failed and made Dynamo compile this code object again."""
    reasons = guard_failures.get(code) or ["unknown"]
    return " ".join(str(reasons[-1]).splitlines()[0].split())


def is_dynamo_faking(tensor: Tensor) -> bool:
    """Whether Dynamo runs something on fake tensors to see what comes out: AOTAutograd, which comes
    next, has a proxy mode on.
    """
    return isinstance(tensor, FakeTensor) and get_proxy_mode() is None


def is_compiled(module: object) -> bool:
    """Whether this is what `torch.compile(module)` returns, not a module of the user's."""
    return isinstance(module, OptimizedModule)


def uncompiled(module: Any) -> Any:
    """The user's module inside what `torch.compile(module)` returns, or the module itself."""
    return module._orig_mod if is_compiled(module) else module


# Whether `self.__dict__[name]` in a trace is what the dict holds. Up to torch 2.12 Dynamo answers
# with the attribute of that name, and comes back to the property that asks. Tried on 2.11, 2.13 and
# 2.15.
READS_DICTS = hasattr(UserDefinedObjectVariable, "get_dict_vt")


def rebind_compiled(module: Any) -> None:
    """Let an `OptimizedModule` compile the `__call__` of the class that its module has now."""
    module._initialize()


def recompiles() -> list[tuple[str, str]]:
    """Every guard that failed and made Dynamo compile again: the function, and why; since the last
    `torch._dynamo.reset`.
    """
    found: dict[tuple[str, str], None] = {}
    for code, reasons in guard_failures.items():
        for reason in reasons:
            found[f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})", str(reason)] = None
    return list(found)


def error_of_backend(error: BaseException) -> BaseException | None:
    """What a backend has raised, inside of what Dynamo makes of it; None of another error. Tried on
    2.13.
    """
    return error.inner_exception if isinstance(error, BackendCompilerFailed) else None


def why_no_graph(error: BaseException) -> str:
    """Why Dynamo could not make one graph of a function, with `fullgraph=True`, and in which line;
    "" of another error. Tried on 2.13.
    """
    if not isinstance(error, Unsupported | UserError):
        return ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["unknown"]
    more = "Developer debug context:" if lines[0] == "Observed exception" else "Explanation:"
    text = " ".join([lines[0], *(line.removeprefix(more) for line in lines if more in line)])
    stack = getattr(error, "real_stack", None)
    where = f"{stack[-1].filename}:{stack[-1].lineno}, {stack[-1].line}" if stack else ""
    return f"{text.rstrip('.')} ({where})" if where else text.rstrip(".")
