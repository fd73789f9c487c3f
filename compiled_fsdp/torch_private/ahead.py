"""Private torch: what has to be known of a compilation to run its result without torch's compilers.

Tried on torch 2.13.
"""

from __future__ import annotations

import ast
import ctypes
import os
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.tensor import TensorVariable
from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._sympy.printers import PythonPrinter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import CodeType, ModuleType

    from torch import Tensor
    from torch.fx import Graph, GraphModule

# Guards on how many things a container holds.
OF_ALL = (
    "SEQUENCE_LENGTH",
    "DICT_KEYS_MATCH",
    "DICT_LENGTH",
    "LIST_LENGTH",
    "EMPTY_NN_MODULE_HOOKS_DICT",
)
# A table of a module's hooks, by numbers that each process counts for itself.
HOOKS = re.compile(r"\._(forward|backward)\w*hooks\w*$")
# Guards on the keys of a dict, in order.
OF_KEYS = ("DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK")
# Guards on a key that is, or is not, in a dict; of a set all that it holds is compared.
OF_A_KEY = ("DICT_CONTAINS", "DICT_NOT_CONTAINS")
# Outputs that a forward computes, as opposed to those that share memory with something.
COMPUTED = (OutputType.non_alias, OutputType.unsafe_view_alias)


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Both halves of a graph are compiled at once, and nothing is taken from a cache;
    as often as is asked for.
    """
    often = 1 << 20
    with (
        dynamo_config.patch(recompile_limit=often, accumulated_recompile_limit=often),
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
    ):
        yield


# -- Dynamo: what it has seen, asked while it calls its backend


def guarded() -> list[str]:
    """Everything that Dynamo has looked at, as expressions of `L` (locals of the frame) and `G`
    (its globals); `X.__dict__['name']` also for an attribute that it has looked for in vain, and
    `len(X)` for containers of which it went through all, `list(X)` for dicts among them,
    `key in X` where it has looked for a key, and `X is Y` of one object that it met in two places,
    into which it has looked in the first.
    """
    found = set()
    for guard in InstructionTranslator.current_tx().output.guards:
        if not guard.name:
            continue
        found.add(guard.name)
        missing = getattr(guard.create_fn, "keywords", {}).get("attr")
        if isinstance(missing, str):
            found.add(f"{guard.name}.__dict__[{missing!r}]")
        kind = getattr(guard.create_fn, "func", guard.create_fn).__name__
        if kind == "DUPLICATE_INPUT":
            other: Any = getattr(guard.create_fn, "keywords", {})["source_b"]
            found.add(f"{guard.name} is {other.name}")
        if kind in OF_ALL:
            found.add(f"len({guard.name})")
        if HOOKS.search(guard.name):
            continue
        if kind in OF_A_KEY:
            key = getattr(guard.create_fn, "keywords", {}).get("key")
            found.add(f"{key!r} in {guard.name}" if _is_literal(key) else f"list({guard.name})")
        if kind in OF_KEYS:
            found.add(f"list({guard.name})")
    return sorted(found)


def _is_literal(key: object) -> bool:
    """Whether a value is what its text says."""
    try:
        return bool(ast.literal_eval(repr(key)) == key)
    except (SyntaxError, ValueError):
        return False


def traced_code() -> list[CodeType]:
    """The code that Dynamo has traced."""
    context = TracingContext.try_get()
    return [] if context is None else list(context.traced_code)


def changed_objects() -> list[str]:
    """What the traced code assigns to, tensors apart: objects that were there before, by the
    expressions of `guarded`.
    """
    effects = InstructionTranslator.current_tx().output.side_effects
    return [
        variable.source.name
        for variable in effects._get_modified_vars()
        if variable.source is not None and not isinstance(variable, TensorVariable)
    ]


# -- AOTAutograd: how its halves are called


@dataclass(frozen=True)
class Calling:
    """How the halves of a graph are called; numbers are places among inputs, or among what forward
    returns: changed inputs, outputs, and what it saves for backward.

    changed: inputs whose new values forward returns first.
    written: inputs that it writes to itself, which autograd is to know.
    num_outputs: of the user's.
    unsafe_views: returned values that are views of something that nobody else has.
    constant: returned values that have no gradient.
    tangents: returned values whose gradients backward takes, and the layout of each.
    num_unchecked: of the tensors that are saved, how many, at the end, may be written to before
        backward.
    num_sizes: how many sizes are saved, behind the tensors; backward takes them first.
    is_donated: backward overwrites what forward has saved.
    """

    changed: list[int]
    written: list[int]
    num_outputs: int
    unsafe_views: list[int]
    constant: list[int]
    tangents: list[int]
    layouts: list[list[list[int]]]
    num_unchecked: int
    num_sizes: int
    is_donated: bool


def calling(num_inputs: int) -> tuple[Calling | None, str]:
    """How the halves that AOTAutograd has just made are called; None, and why they cannot be called
    by anybody else.
    """
    context = TracingContext.try_get()
    meta: Any = None if context is None else context.fw_metadata
    if meta is None:
        return None, "AOTAutograd says nothing of how its graph is called"
    why = _why_not(meta, num_inputs)
    if why:
        return None, why
    changed = list(meta.mutated_inp_runtime_indices)
    infos = [meta.input_info[i] for i in changed] + list(meta.output_info)
    tangents = [
        len(changed) + i
        for i, info in enumerate(meta.output_info)
        if getattr(info, "requires_grad_for_backward", info.requires_grad)
    ]
    made = Calling(
        changed=changed,
        written=list(meta.mutated_graph_handled_indices_seen_by_autograd),
        num_outputs=len(meta.output_info),
        unsafe_views=[len(changed) + i for i in meta.unsafe_view_out_indices],
        constant=[i for i, info in enumerate(infos) if not info.requires_grad],
        tangents=tangents,
        layouts=[_layout(meta.subclass_tangent_meta[i]) for i in range(len(tangents))],
        num_unchecked=getattr(meta, "num_tensors_saved_with_no_vc_check", 0) or 0,
        num_sizes=getattr(meta, "num_symints_saved_for_bw", 0) or 0,
        is_donated=bool(meta.bw_donated_idxs) and functorch_config.donated_buffer,
    )
    return made, ""


def _layout(meta: Any) -> list[list[int]]:
    """Size and stride of a tangent; nothing where a contiguous one will do."""
    form = meta.memory_format
    if form is None or form.memory_format is not None:
        return []
    return [list(map(int, form.size)), list(map(int, form.stride))]


def _sizes(form: Any) -> Sequence[int | torch.SymInt]:
    is_laid_out = form is not None and form.memory_format is None
    return (*form.size, *form.stride) if is_laid_out else ()


def _why_not(meta: Any, num_inputs: int) -> str:
    """Why only AOTAutograd can call what it has compiled; "" if it is simple enough."""
    if len(meta.input_info) != num_inputs:
        return "inputs that share memory are written to"
    subclasses = (*meta.subclass_inp_meta, *meta.subclass_fw_graph_out_meta)
    if not all(isinstance(m, PlainTensorMeta) for m in (*subclasses, *meta.subclass_tangent_meta)):
        return "an input or output is a tensor of a class that wraps others (a DTensor)"
    for i, info in enumerate(meta.output_info):
        if info.output_type not in COMPUTED:
            return f"output {i} shares memory with an input or another output; return a copy"
        if not issubclass(info.raw_type, torch.Tensor):
            return f"output {i} is no tensor ({info.raw_type.__name__})"
    for i in meta.mutated_inp_runtime_indices:
        info = meta.input_info[i]
        if info.mutates_metadata or info.mutates_storage_metadata or info.requires_grad:
            return f"input {i} is given another shape or memory, or is written to and trained"
    others = {
        "effect tokens": bool(meta.tokens) or bool(meta.num_backward_tokens),
        "random numbers as inputs": meta.is_rng_op_functionalized
        or bool(getattr(meta, "num_graphsafe_rng_states", 0)),
        "gradients in a layout of sizes that are not known": any(
            isinstance(size, torch.SymInt)
            for m in meta.subclass_tangent_meta
            for size in _sizes(m.memory_format)
        ),
        "opaque objects": bool(getattr(meta, "num_opaque_objects_saved_for_bw", 0)),
        "switching autograd on or off for what comes after": meta.grad_enabled_mutation is not None,
        "writes to trained inputs in backward": bool(
            meta.indices_of_inputs_that_requires_grad_with_mutations_in_bw
        ),
        "views of what is not returned": bool(meta.num_intermediate_bases),
    }
    return ", ".join(name for name, is_there in others.items() if is_there)


def is_keeping_graph() -> bool:
    """Whether the backward that autograd runs was asked to keep its graph for another one."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps


# -- sizes that are not known (`torch._dynamo.mark_dynamic`)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a graph's inputs that are not known, each a symbol, and what is assumed of them.

    names: of each input that is a tensor, its shape, with symbols by name; of one that is a size,
        its symbol.
    ranges: by symbol, the smallest and the largest; None: no largest.
    guards: what else holds, as Python.
    """

    names: list[list[int | str] | str]
    ranges: dict[str, tuple[int, int | None]]
    guards: list[str]


def sizes_of(inputs: Sequence[Any]) -> Callable[[], Sizes | None]:
    """A function that says, once all is compiled, what became of the sizes of a graph's inputs;
    None: they are all known.

    Raises:
        NotImplementedError: it is said of something that is no size of an input.
    """
    context = TracingContext.try_get()
    env: Any = None if context is None or context.fake_mode is None else context.fake_mode.shape_env

    def found() -> Sizes | None:
        names = [str(v) if isinstance(v, torch.SymInt) else _shape(v) for v in inputs]
        symbols = {s for name in names for s in ([name] if isinstance(name, str) else name)}
        known = {str(symbol): symbol for symbol in env.var_to_range} if env is not None else {}
        used = sorted(s for s in symbols if isinstance(s, str))
        unknown = [s for s in used if s not in known or not s.startswith("s")]
        if unknown:
            raise NotImplementedError(
                f"precompile: an input has the size {unknown[0]}; should be a number, or the size "
                "of a dim that torch._dynamo.mark_dynamic was called for"
            )
        if not used:
            return None
        ranges = {s: env.var_to_range[known[s]] for s in used}
        assumed = [env.replace(guard.expr) for guard in env.guards]
        guards = [PythonPrinter().doprint(expr) for expr in assumed]
        others = {str(s) for expr in assumed for s in expr.free_symbols} - {*used}
        if others:
            raise NotImplementedError(
                f"precompile: the sizes {', '.join(sorted(others))}, which depend on data, are "
                f"compared with those of arguments ({'; '.join(guards)}), which nobody can check "
                "before the call. Leave torch._dynamo.mark_dynamic out, or compile it with "
                "torch.compile"
            )
        return Sizes(
            names,
            {
                s: (int(r.lower), None if is_endless(r.upper) else int(r.upper))
                for s, r in ranges.items()
            },
            list(dict.fromkeys(guard for guard in guards if guard != "True")),
        )

    return found


def is_endless(bound: Any) -> bool:
    """Whether a range has no end there."""
    return (
        not getattr(bound, "is_Integer", False) or int(bound) >= torch.iinfo(torch.int64).max // 2
    )


def _shape(value: Any) -> list[int | str]:
    shape = value.shape if isinstance(value, torch.Tensor) else ()
    return [str(size) if isinstance(size, torch.SymInt) else int(size) for size in shape]


def shape_of_example(value: Tensor) -> list[int]:
    """The shape that a traced value has for the example."""
    return [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]


# -- code


def inductor_source(compiled: Any) -> tuple[str, dict[str, Tensor]]:
    """The Python code that Inductor has generated for a graph, and the constants that it reads.

    Raises:
        NotImplementedError: it needs more than that to run.
    """
    if type(compiled).__name__ != "CompiledFxGraph" or not compiled.source_code:
        raise NotImplementedError(f"what Inductor made is a {type(compiled).__name__}, not code")
    needs = {
        "frozen parameters": compiled.frozen_param_names,
        "TorchBind objects": compiled.torchbind_constants,
        "values of opaque types": getattr(compiled, "opaque_value_type_classes", {}),
        "inputs that are moved to aligned memory": compiled.inputs_to_check,
    }
    found = [name for name, values in needs.items() if values]
    if found:
        raise NotImplementedError(f"the code that Inductor made needs {', '.join(found)}")
    return compiled.source_code, dict(compiled.constants or {})


def graph_source(gm: GraphModule) -> tuple[str, set[str]]:
    """A graph as Python code, a function of the list of its inputs, which it empties; and the names
    that the code takes from outside.
    """
    code = gm.graph.python_code("self")
    return code.src, set(code.globals)


def graph_text(gm: GraphModule) -> str:
    """All that a graph computes, to be compared: its code, and the values of its constants."""
    lines = [graph_source(gm)[0]]
    for name in attributes(gm.graph):
        value: Any = gm
        for part in name.split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            with unset_fake_temporarily():
                value = value.dtype, value.tolist()
        lines.append(f"{name} = {value}")
    return "\n".join(lines)


def attributes(graph: Graph) -> list[str]:
    """The attributes of its module that a graph reads."""
    return [str(node.target) for node in graph.nodes if node.op == "get_attr"]


def kept(tensor: Tensor) -> tuple[bytes, list[int]]:
    """The elements of a constant in order, and the stride of a copy without gaps;
    also while tensors are made fake.
    """
    with unset_fake_temporarily():
        dense = tensor.detach().clone()
        plain = dense.contiguous()
        content = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""
    return content, list(dense.stride())


def compiled_kernel(*args: Any, **options: Any) -> Callable[..., Any]:
    """Compile a C++ kernel as Inductor does."""
    from torch._inductor.async_compile import AsyncCompile

    made: Any = AsyncCompile().cpp_pybinding(*args, **options)
    kernel: Callable[..., Any] = made.result() if hasattr(made, "result") else made
    return kernel


def library_of(kernel: Any) -> str:
    """The file of the shared library that such a kernel is in."""
    return str(kernel.__self__.__file__)


def loaded_kernel(name: str, path: str) -> Callable[..., Any]:
    """The kernel in a shared library that Inductor has compiled, under a name of its own."""
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    )
    spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
    assert spec is not None
    module: ModuleType = module_from_spec(spec)
    sys.modules[name] = module
    assert spec.loader is not None
    spec.loader.exec_module(module)
    kernel: Callable[..., Any] = module.kernel
    return kernel
