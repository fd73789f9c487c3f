"""Private torch: what Dynamo has compiled, how often it may, and what it has given up. Tried on
torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import (
    BackendCompilerFailed,
    Unsupported,
    UserError,
    observed_exception_map,
)
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import guard_failures, orig_code_map
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from traceback import FrameSummary
    from types import CodeType


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


# By the name of the code of a frame: why, and where. Not the errors, whose frames hold the model.
_given_up: dict[str, tuple[str, list[FrameSummary]]] = {}


def keep_why_given_up() -> None:
    """From now on, keep why Dynamo gives up a frame: it logs that, but counts it as no graph break.
    Tried on 2.11, 2.13 and 2.15.
    """
    log: Any = InstructionTranslator.log_graph_break

    @functools.wraps(log)
    def logged(self: Any, *args: Any, **kwargs: Any) -> Any:
        error = kwargs.get("exc")
        if "Skipping the function" in kwargs.get("reason", "") and isinstance(error, Unsupported):
            _given_up[self.f_code.co_name] = str(error), list(error.real_stack)
        return log(self, *args, **kwargs)

    InstructionTranslator.log_graph_break = logged  # type: ignore[method-assign]


def why_given_up(names: Iterable[str]) -> tuple[str, list[FrameSummary]] | None:
    """Why Dynamo has given up the last frame of one of these names of code, and where it was then;
    None if that is not known.
    """
    found = [_given_up[name] for name in names if name in _given_up]
    return found[-1] if found else None


def modes_that_keep_it_out() -> list[str]:
    """The names of modes that are on, and in which Dynamo compiles nothing: such as count or log
    operations. Tried on 2.11, 2.13 and 2.15.
    """
    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]


def stance() -> str:
    """What `torch.compiler.set_stance` has set. Tried on 2.11, 2.13 and 2.15."""
    return str(eval_frame._stance.stance)


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


def is_compiled(module: object) -> bool:
    """Whether this is what `torch.compile(module)` returns, not a module of the user's."""
    return isinstance(module, OptimizedModule)


def uncompiled(module: Any) -> Any:
    """The user's module inside what `torch.compile(module)` returns, or the module itself."""
    return module._orig_mod if is_compiled(module) else module


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


def raised_in_trace(error: BaseException) -> BaseException | None:
    """What the traced program has raised itself, with `fullgraph=True`: of its class, with its
    arguments if Dynamo knows them as plain values, else with what it knows as a text. None of
    another error, and of a class that is made otherwise. Tried on 2.11, 2.13 and 2.15.
    """
    if not isinstance(error, Unsupported):
        return None
    text = str(error)
    if text.startswith("Data-dependent assertion failed"):
        is_known = "value: ConstantVariable(bool: False)" in text
        return AssertionError(_line_of(error)) if is_known else None
    seen = type(error.__cause__ or error.__context__)
    kinds = [kind for kind, observed in observed_exception_map.items() if observed is seen]
    found = re.search(r"raised exception (.*)", text)
    if not (text.startswith("Observed exception") and kinds and found):
        return None
    try:
        call = ast.parse(found[1], mode="eval").body
        args = [ast.literal_eval(arg) for arg in call.args] if isinstance(call, ast.Call) else []
    except (SyntaxError, ValueError):
        args = [f"{found[1]} ({_line_of(error)})"]
    try:
        return kinds[0](*args)
    except Exception:  # noqa: BLE001  # a class of the user's, whose constructor may raise anything
        return None


def _line_of(error: Unsupported | UserError) -> str:
    """Where Dynamo was, and what stands there; "" if that is not known."""
    stack = getattr(error, "real_stack", None)
    return f"{stack[-1].filename}:{stack[-1].lineno}, {stack[-1].line}" if stack else ""


def why_no_graph(error: BaseException) -> str:
    """Why Dynamo could not make one graph of a function, with `fullgraph=True`, and in which line;
    "" of another error. Tried on 2.13.
    """
    if not isinstance(error, Unsupported | UserError):
        return ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["unknown"]
    more = "Developer debug context:" if lines[0] == "Observed exception" else "Explanation:"
    text = " ".join([lines[0], *(line.removeprefix(more) for line in lines if more in line)])
    where = _line_of(error)
    return f"{text.rstrip('.')} ({where})" if where else text.rstrip(".")
