"""Private torch APIs that are neither collectives nor compiler hooks, in one place. Tried on torch 2.13 and 2.15."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import torch
import torch._logging._internal
import torch.distributed as dist
import torch.distributed.fsdp
from torch._C._autograd import _enable_record_function, _profiler_enabled
from torch._C._distributed_c10d import PrefixStore, _register_work
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, get_eval_frame_callback
from torch._C._profiler import _ExtraFields_Allocation
from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import OptimizedModule, skip_code
from torch._dynamo.exc import Unsupported
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import guard_failures, orig_code_map
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import CompileContext, TracingContext
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed._composable.contract import _get_registry
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.distributed.utils import _apply_to_tensors
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta
    from types import CodeType

    from torch import Tensor
    from torch.distributed.tensor import Placement
    from torch.fx import Graph, GraphModule

P = ParamSpec("P")
R = TypeVar("R")


# Since torch 2.15; before, there is nothing that a handle could be taken for.
StockGradientReductionHandle: type = getattr(torch.distributed.fsdp, "GradientReductionHandle", object)


def without_code() -> AbstractContextManager[None]:
    """Graph modules that torch makes in this context get code when they are called, not before; tried on 2.11 and 2.13."""
    return _use_lazy_graph_module(True)


def graph_module_without_code(root: torch.nn.Module, graph: Graph) -> GraphModule:
    """A graph module that gets code when it is called, not before."""
    with without_code():
        return _make_graph_module(root, graph)


def reduces_in_grad_dtype() -> bool:
    """Whether stock reduces in a gradient's own dtype where `reduce_dtype` is None: since torch 2.15; before, as it computes."""
    return hasattr(FSDPParam, "unsharded_grad_dtype")


def forgets_gradients() -> bool:
    """Whether stock's `reset_iter_state` drops also gradients that are reduced: since torch 2.15, with what else is new there."""
    return hasattr(torch.distributed.fsdp.FSDPModule, "finalize_backward")


def backward_number() -> int:
    """The number of the backward that autograd runs, another one for each; -1 outside."""
    return torch._C._current_graph_task_id()


def accumulates(leaf: Tensor) -> bool:
    """Whether the backward that autograd runs adds to `.grad` of this leaf, as far as the graph leads to it.

    One that was asked for other gradients does not: `autograd.grad`, or `backward(inputs=...)`. True outside any backward.
    """
    if backward_number() == -1:
        return True
    if not leaf.requires_grad:
        return False
    node = get_gradient_edge(leaf).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # what torch raises for a leaf that `autograd.grad` was asked for: it is returned, not added
        return False


def running_compiled_function() -> Any:
    """The autograd node of the compiled graph whose forward calls us, while it runs; None if none is recorded.

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
    """For each gradient that a compiled backward graph takes, which of the node's outputs it belongs to.

    As AOTAutograd chooses them: of inputs that were changed, of outputs, of what outputs are views of.
    """
    of = type(node)._forward_cls.metadata
    changed = of.mutated_inp_runtime_indices
    found = [i for i, k in enumerate(changed) if of.input_info[k].mutates_data and of.input_info[k].requires_grad]
    for i, info in enumerate(of.output_info):
        kinds = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
        requires_grad = getattr(info, "requires_grad_for_backward", info.requires_grad)
        if info.output_type in kinds and issubclass(info.raw_type, torch.Tensor) and requires_grad:
            found.append(len(changed) + i)
    start = len(changed) + of.num_outputs
    return [*found, *range(start, start + of.num_intermediate_bases)]


def run_of(node: Any) -> int:
    """A number for one run of a graph that autograd has recorded."""
    number: int = node._sequence_nr()
    return number


def running_node() -> Any:
    """The node whose backward autograd runs; None outside."""
    return torch._C._current_autograd_node()


def current_run() -> int:
    """`run_of` the node whose backward autograd runs; -1 outside."""
    node = running_node()
    return -1 if node is None else run_of(node)


def trace_number() -> object:
    """What Dynamo is tracing now, another one for each attempt; None outside. Tried on 2.13 and 2.15."""
    return CompileContext.current_trace_id()


def traces_autograd() -> bool:
    """Whether Dynamo traces `backward()` and `autograd.grad` into graphs, a setting that torch 2.11 has and older ones lack."""
    return bool(getattr(torch._dynamo.config, "trace_autograd_ops", False))


# Whether Dynamo can trace a backward to a DTensor. In torch 2.11 that ends in an AssertionError without a text. Tried on 2.11, 2.13
# and 2.15.
TRACES_TO_DTENSORS = hasattr(torch._dynamo.variables.torch, "_collect_placeholder_nodes")


def tracing_context() -> object:
    """One for each graph that is being compiled, until its halves are; None outside. Tried on 2.13."""
    return TracingContext.try_get()


def before_backend(fn: Callable[[GraphModule], None]) -> None:
    """Call `fn` with the graph that Dynamo is tracing, once it is whole and before its backend gets it; nothing outside of a
    trace. Tried on 2.13 and 2.15.
    """
    try:
        functions = InstructionTranslator.current_tx().output.register_finalizer_fns
    except AttributeError:
        return
    if fn not in functions:
        functions.append(fn)


def give_up_graph(text: str) -> NoReturn:
    """From `before_backend`: let Dynamo run the frame as it is, or raise this text with `fullgraph=True`. Tried on 2.13."""
    raise Unsupported(text)


# What Dynamo's graphs call to switch autograd on and off, for inference mode, and for `.data`.
SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled
ENTER_INFERENCE: Any = torch.autograd.grad_mode._enter_inference_mode
EXIT_INFERENCE: Any = torch.autograd.grad_mode._exit_inference_mode
GET_DATA: Any = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]


def make_dtensor(
    local: Tensor,
    like: Tensor,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] = (),
) -> DTensor:
    """A DTensor around `local` with the global shape and stride of `like`, and its mesh unless one is given.

    `DTensor.from_local` is public but records autograd and costs five times as much, which counts for gradients: one per
    parameter and step.
    """
    if mesh is None:
        assert isinstance(like, DTensor)
        spec = like._spec
        if local.dtype != like.dtype:
            meta = TensorMeta(like.shape, like.stride(), local.dtype)
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    else:
        meta = TensorMeta(like.shape, like.stride(), local.dtype)
        spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def starting_at_zero(tensor: DTensor) -> DTensor:
    """Another DTensor around the same local tensor, one that `copy.deepcopy` and `torch.save` take.

    A DTensor says the offset of its local tensor in its storage as its own, and has no storage: where it is not 0, torch takes what
    follows from it for an address. Tried on 2.13 and 2.15.
    """
    local = tensor._local_tensor
    copied = DTensor(local.new_empty(0), tensor._spec, requires_grad=False)
    copied._local_tensor = local
    return copied


def in_own_storage(tensor: DTensor) -> DTensor:
    """Another DTensor in the same memory and with the same version, whose local tensor has a storage of its own and starts it.

    So `copy.deepcopy`, `torch.save`, and Dynamo, which wants to hear the local tensor's offset, take it. Tried on 2.11 and 2.13.
    """
    local = tensor._local_tensor
    start = local.storage_offset() * local.itemsize
    extent = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True)) + 1
    end = start + (extent * local.itemsize if local.numel() else 0)
    part: Any = local.untyped_storage()[start:end]
    placed = DTensor(local.new_empty(0).set_(part, 0, local.shape, local.stride()), tensor._spec, requires_grad=False)
    made: Any = tensor.detach()
    made.data = placed  # all but version and local tensor
    made._local_tensor = placed._local_tensor
    return made  # type: ignore[no-any-return]


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Mesh, placements and global metadata."""
    return tensor._spec


def with_spec(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around `local`, whose dtype it takes; the rest is as `spec` says."""
    meta = spec.tensor_meta
    assert meta is not None
    if local.dtype != meta.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))
    return DTensor(local, spec, requires_grad=local.requires_grad)


def local_tensor(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, and any other tensor itself; awaited, if a collective is still to deliver it."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride of a contiguous tensor."""
    return tuple(make_contiguous_strides_for(tuple(shape)))


def cuts(placement: Placement, dim: int) -> bool:
    """Whether a placement cuts this dim of the tensor."""
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def cut_inside(dim: int, split_factor: int) -> Placement:
    """The placement of a tensor that is cut on `dim` by a mesh axis, after later axes have cut it into `split_factor` pieces."""
    return _StridedShard(dim, split_factor=split_factor) if split_factor > 1 else Shard(dim)


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the named axes of several parts of one root mesh."""
    mesh: DeviceMesh = DeviceMesh._concatenate(list(meshes))
    return mesh


def flatten(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """One axis of several of a mesh, named after all of them; collective: makes a process group."""
    return mesh[names]._flatten("_".join(names))


def cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor inside nested containers; everything else is the same object (stock's rule)."""

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x if not x.is_floating_point() or x.dtype == dtype else x.to(dtype)

    return _apply_to_tensors(cast, values)


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a graph names."""
    group: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return group


def default_group() -> dist.ProcessGroup:
    """That of all ranks."""
    group: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
    return group


def new_group(ranks: list[int], backend: str) -> dist.ProcessGroup:
    """A process group that its own ranks make together; torch's annotation since 2.15 knows also who is not among them."""
    made: Any = dist.new_group(ranks, use_local_synchronization=True, backend=backend)
    group: dist.ProcessGroup = made
    return group


def group_store(group: dist.ProcessGroup, prefix: str) -> Any:
    """The group's key-value store below a prefix: get, set, check and clone."""
    return PrefixStore(prefix, group.get_group_store())


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long the group's collectives may take; `init_process_group` and `new_group` set it."""
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def register_work(tensor: Tensor, work: Any) -> None:
    """Make `_c10d_functional.wait_tensor(tensor)` wait for `work`."""
    _register_work(tensor, work)


def reduce_op(name: str) -> Any:
    """The `ReduceOp` that functional collectives call by this name."""
    return {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}[name]


def allocate(tensor: Tensor, num_bytes: int) -> None:
    """Give a tensor's storage this size; one that has it stays where it is (`resize_` alone would move it)."""
    storage = tensor.untyped_storage()
    if storage.size() != num_bytes:
        storage.resize_(num_bytes)


def preserve_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Write to `tensor` without autograd taking it for a change of what it saved: the values are the same again."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set what autograd compares with the version of what it saved; tried on 2.11, 2.13 and 2.15."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def without_torch_function() -> AbstractContextManager[None]:
    """Handle tensors of a class with `__torch_function__` without calling it."""
    return torch._C.DisableTorchFunctionSubclass()


def untraced(fn: Callable[P, R]) -> Callable[P, R]:
    """Keep Dynamo out of this function and of all that it calls, typed."""
    disabled: Callable[P, R] = torch._dynamo.disable(fn)
    return disabled


def traced_as_it_is(fn: Callable[P, R]) -> Callable[P, R]:
    """Let Dynamo put calls of this function into its graphs without looking inside, typed; AOTAutograd traces through them."""
    allowed: Callable[P, R] = torch._dynamo.allow_in_graph(fn)
    return allowed


def never_traced_alone(fn: Callable[..., Any]) -> None:
    """Let Dynamo run this function as it is when it meets it as a frame of its own; when inlined, it is traced as ever."""
    skip_code(fn.__code__)


def never_trace_hooks_alone() -> None:
    """Keep Dynamo from starting a graph inside `nn.Module.__call__`, between a module's hooks and its forward.

    It would take the pre-forward hook into a graph and run the forward outside: then nobody has gathered. Whole calls are traced as
    ever; after a graph break in a forward, hooks run as they stand and the forward is compiled by itself.
    """
    for constant in torch.nn.Module._call_impl.__code__.co_consts:
        if getattr(constant, "co_name", "") == "inner":
            skip_code(constant)


def is_call_compiled(module: Any) -> bool:
    """Whether a call of this module, made now and outside any graph, is what `torch.compile` or `module.compile()` traces."""
    callback = get_eval_frame_callback()
    return module._compiled_call_impl is not None or (callback is not None and callback is not False)


never_traced_alone(is_call_compiled)


def compiled_again(compiled: Any, fn: Callable[..., Any]) -> Any:
    """Another function, compiled as the one that `torch.compile` made `compiled` of; tried on 2.11, 2.13 and 2.15."""
    held = dict(zip(compiled.__code__.co_freevars, compiled.__closure__, strict=True))
    return held["self"].cell_contents(fn)


def num_compiled(code: Any) -> int:
    """How often Dynamo has compiled a frame of this code object."""
    return len(_debug_get_cache_entry_list(code))


_compiling: list[CodeType] = []


def code_in_trace() -> CodeType | None:
    """The code object of the frame that Dynamo compiles, or has compiled last."""
    return _compiling[-1] if _compiling else None


def codes_under_way() -> list[CodeType]:
    """The code objects of all frames above, innermost first; those that Dynamo has compiled as they were written."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        found.append(orig_code_map.get(frame.f_code) or frame.f_code)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def before_compiling(may_go_on: Callable[[CodeType, bool, bool], bool]) -> None:
    """From now on, ask before each compilation of a frame: with its code object, whether it is the first of what Dynamo keeps for
    that, and whether it is beyond one of Dynamo's limits. Such a one goes on where the answer is True, and is given up otherwise.

    With `fullgraph=True`, and under `fail_on_recompile_limit_hit`, Dynamo raises as ever. Tried on 2.13 and 2.15.
    """
    module: Any = convert_frame
    exceeds = module.exceeds_recompile_limit

    def asked(cache_size: Any, compile_id: Any) -> tuple[bool, str]:
        exceeded, limit = exceeds(cache_size, compile_id)
        compiling = sys._getframe(1).f_locals
        _compiling[:] = [compiling["code"]]
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
    """Whether Dynamo runs something on fake tensors to see what comes out: AOTAutograd, which comes next, has a proxy mode on."""
    return isinstance(tensor, FakeTensor) and get_proxy_mode() is None


def is_compiled(module: object) -> bool:
    """Whether this is what `torch.compile(module)` returns, not a module of the user's."""
    return isinstance(module, OptimizedModule)


def uncompiled(module: Any) -> Any:
    """The user's module inside what `torch.compile(module)` returns, or the module itself."""
    return module._orig_mod if is_compiled(module) else module


def is_replicated(module: torch.nn.Module) -> bool:
    """Whether torch's composable `replicate` was applied: such modules, and those inside, are not sharded."""
    registry = _get_registry(module)
    return registry is not None and "replicate" in registry


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def plain_name(path: str) -> str:
    """A name without what wrappers add to it."""
    parts = [part for part in path.split(".") if part not in _WRAPPERS]
    return ".".join(parts)


# Whether `self.__dict__[name]` in a trace is what the dict holds. Up to torch 2.12 Dynamo answers with the attribute of that name,
# and comes back to the property that asks. Tried on 2.11, 2.13 and 2.15.
READS_DICTS = hasattr(UserDefinedObjectVariable, "get_dict_vt")


def register_first(module: torch.nn.Module, hook: Callable[..., Any]) -> None:
    """Register a pre-forward hook that runs before those that are there.

    The guards of Dynamo 2.11 count a module's hooks in the order in which they were put into the dict, its traces in the order of
    the `OrderedDict`, which `prepend` changes. Hence the dict is filled again.
    """
    module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    hooks = list(module._forward_pre_hooks.items())
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks.update(hooks)


def rebind_compiled(module: Any) -> None:
    """Let an `OptimizedModule` compile the `__call__` of the class that its module has now."""
    module._initialize()


def register_log(name: str) -> None:
    """Let `torch._logging.set_logs` and `TORCH_LOGS` know a logger by its name."""
    torch._logging._internal.register_log(name, name)


def is_traced() -> bool:
    """Whether torch's structured trace (`TORCH_TRACE`) is written: its handler takes itself away at first use if it is not."""
    handlers = torch._logging._internal.trace_log.handlers
    return any(isinstance(handler, torch._logging._internal.LazyTraceHandler) for handler in handlers)


def trace_artifact(name: str, encoding: str, payload: Callable[[], Any]) -> None:
    """One artifact of torch's structured trace: "string" or "json"; the payload is computed only if there is a trace."""
    if is_traced():
        torch._logging._internal.trace_structured(
            "artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload, expect_trace_id=False
        )


def recompiles() -> list[tuple[str, str]]:
    """Every guard that failed and made Dynamo compile again: the function, and why; since the last `torch._dynamo.reset`."""
    found: dict[tuple[str, str], None] = {}
    for code, reasons in guard_failures.items():
        for reason in reasons:
            found[f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})", str(reason)] = None
    return list(found)


def is_profiling() -> bool:
    """Whether a profiler is on; costs nothing, unlike an empty `record_function`."""
    is_on: bool = _profiler_enabled()
    return is_on


@contextmanager
def unprofiled() -> Iterator[None]:
    """Leave no record in a profile of what is started inside: torch ends the record of a message over gloo when it arrives, and
    crashes if the profile is over by then.
    """
    if not is_profiling():
        yield
        return
    _enable_record_function(False)
    try:
        yield
    finally:
        _enable_record_function(True)


def allocations(profile: Any, device: str) -> list[tuple[int, int, int]]:
    """(time, address, bytes) of every allocation in a finished profile, and, with negative bytes, release."""
    found = []
    stack = list(profile.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation) and fields.device.type == device:
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return found
