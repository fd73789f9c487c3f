"""`FullyShardedDataParallel`: stock FSDP1's wrapper on this project's runtime and compiler.

[Note: what is stock's]
The wrapper subclasses stock's class, so that `isinstance`, torch's own checkpointing and trainers
know it, and takes over what concerns parameters at rest: argument checks, process groups, the
layout of flat parameters, state dicts, optimizer state, names. Forward and backward are this
project's: an instance is a unit, run by the same eager runtime as `fully_shard`'s and traced to the
same ops, so that `torch.compile(FullyShardedDataParallel(model))` is one graph.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from compiled_fsdp.compiler.inductor import install_passes
from compiled_fsdp.eager.containers import map_tensors
from compiled_fsdp.eager.tree import in_backward
from compiled_fsdp.frontend.called import Called
from compiled_fsdp.frontend.classes import swap_class
from compiled_fsdp.frontend.fallback import AGREED
from compiled_fsdp.frontend.first_call import check_optimizers
from compiled_fsdp.frontend.state import State, adopt_nested, enter_state
from compiled_fsdp.frontend.writes import watch_writes
from compiled_fsdp.torch_private.dynamo import never_traced_alone, untraced
from compiled_fsdp.torch_private.modules import cast_floating
from compiled_fsdp.units.reads import begin_forward, end_forward
from compiled_fsdp.units.registered import Watched
from compiled_fsdp.wire.absence import note_raised

from . import stock
from .at_rest import AtRest, rest
from .construct import check_arguments, flatten, settle_groups, wrap_children
from .stock import StockFSDP, TrainingState
from .unit import RESHARDED, FlatUnit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from compiled_fsdp.eager.runtime import Runtime


class FullyShardedDataParallel(Called, AtRest):
    """Shard `module`'s parameters over ranks; the arguments, names and errors of torch's own class.

    Under `torch.compile` the whole wrapped model is one graph in each direction; without it the
    same units run eagerly.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        options = {  # what children that a policy wraps are given too
            "process_group": process_group,
            "sharding_strategy": sharding_strategy,
            "cpu_offload": cpu_offload,
            "backward_prefetch": backward_prefetch,
            "mixed_precision": mixed_precision,
            "param_init_fn": param_init_fn,
            "device_id": device_id,
            "sync_module_states": sync_module_states,
            "forward_prefetch": forward_prefetch,
            "limit_all_gathers": limit_all_gathers,
            "use_orig_params": use_orig_params,
            "device_mesh": device_mesh,
        }
        check_arguments(module, options)
        nn.Module.__init__(self)
        settle_groups(self, module, auto_wrap_policy, options, ignored_modules, ignored_states)
        if auto_wrap_policy is not None:
            wrap_children(self, module, auto_wrap_policy, options, FullyShardedDataParallel)
        originals = flatten(self, module, options)
        stock.init_state_dict_state(self)
        self.register_state_dict_pre_hook(_rest_first)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_rest_first)  # type: ignore[no-untyped-call]
        stock.register_state_dict_hooks(self)
        self._zero_scalar = None
        _attach(self, originals)

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper does not have are the wrapped module's."""
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if name == "_fsdp_wrapped_module":
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "FullyShardedDataParallel: copy.deepcopy of a wrapped module, as AveragedModel makes "
            "one, is not supported: it shares a flat parameter and process groups. Copy the module "
            "before it is wrapped, or build and wrap another one and load this one's state_dict"
        )

    # -- forward

    def _fsdp_before_call(self, *, is_compiled: bool, is_traced: bool = False) -> None:
        """What stock does before forward, and what the core does."""
        with torch.inference_mode(mode=False):  # makes memory that later calls write to
            stock.lazy_init(self, self)
        state: State = self._fsdp_state
        if self._is_root and not in_backward():
            state.runtime.tree.recover()
            instances: Any = self._all_fsdp_states
            for instance in instances:
                instance.training_state = TrainingState.IDLE
                if instance._fsdp_state.unit.before_forward():
                    instance._fsdp_state.runtime.reshard()
                _settle_inputs(instance)
            _settle_buffers(self)
        state.before_call(is_compiled=is_compiled, is_traced=is_traced)

    def _fsdp_before_trace(self) -> None:
        self._fsdp_before_call(is_compiled=False, is_traced=True)
        instances = self.fsdp_modules(self) if self._is_root else []
        keepers = [instance._handle for instance in instances if instance._handle is not None]
        self.__dict__["_fsdp_watched"] = [
            p for keeper in keepers for p in (keeper.flat_param._params or [keeper.flat_param])
        ]

    def _fsdp_runtime(self) -> Runtime:
        runtime: Runtime = self._fsdp_state.runtime
        return runtime

    def _fsdp_after_call(self) -> None:
        self._fsdp_state.end_call()
        if self._is_root and not in_backward():
            instances: Any = self._all_fsdp_states
            for instance in instances:
                instance._fsdp_state.unit.after_forward()

    def _fsdp_after_error(self, error: BaseException) -> None:
        self._fsdp_runtime().end_failed_forward()
        if in_backward() or len(self._fsdp_runtime().under_way) > 1:
            return
        self.training_state = TrainingState.IDLE  # where stock's stays, and refuses a checkpoint
        self._fsdp_state.unit.hide()
        if self._is_root:
            note_raised(error)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gather, run the wrapped module, free."""
        if self._fsdp_moves_to is not None:
            args, kwargs = map_tensors(
                lambda tensor: tensor.to(self._fsdp_moves_to), (args, kwargs)
            )
        if self._fsdp_casts_to is not None:
            args, kwargs = cast_floating((args, kwargs), self._fsdp_casts_to)
        if torch.compiler.is_dynamo_compiling():
            if self._fsdp_state.unit.runs_eagerly:
                torch._dynamo.graph_break(msg=AGREED)
            begin_forward(self._fsdp_unit_key)
            watch_writes()
            output = self._fsdp_wrapped_module(*args, **kwargs)
            end_forward(self._fsdp_unit_key, stays=self._fsdp_stays and torch.is_grad_enabled())
            return output
        args, kwargs = self._fsdp_enter(args, kwargs)
        return self._fsdp_leave(self._fsdp_wrapped_module(*args, **kwargs))

    @untraced
    def _fsdp_enter(self, args: Any, kwargs: Any) -> Any:
        state: State = self._fsdp_state
        if not in_backward():
            self.training_state = TrainingState.FORWARD_BACKWARD
            self._exec_order_data.record_pre_forward(self._handle, self.training)
        state.note_eager()
        return state.runtime.pre_forward(self, (args, kwargs))

    @untraced
    def _fsdp_leave(self, output: Any) -> Any:
        output = self._fsdp_state.runtime.post_forward(self, output)
        if not in_backward():
            self._exec_order_data.record_post_forward(self._handle)
            self.training_state = TrainingState.IDLE
        return output

    # -- settings

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them; the first backward outside reduces the
        sum.
        """
        with super().no_sync():
            units = [instance._fsdp_state.unit for instance in self.fsdp_modules(self)]
            before = [(unit, unit.settings.requires_gradient_sync) for unit in units]
            for unit in units:
                unit.sync_gradients(False)
            try:
                yield
            finally:
                for unit, value in before:
                    unit.sync_gradients(value)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce with `hook(state, gradient, shard)`, or `hook(state, gradient)` under NO_SHARD,
        instead of a mean.
        """
        super().register_comm_hook(state, hook)
        for instance in self.fsdp_modules(self):
            instance._fsdp_state.unit.publish()


never_traced_alone(FullyShardedDataParallel.forward)


def _end_of_backward(wrapper: Any) -> None:
    """The root's order of execution begins anew."""
    if wrapper._is_root:
        wrapper._exec_order_data.next_iter()


def _attach(wrapper: FullyShardedDataParallel, originals: Iterable[nn.Parameter]) -> None:
    """Make the instance a unit of the core."""
    unit = FlatUnit(wrapper, originals)
    state = State(unit)
    unit.on_end_of_backward = partial(_end_of_backward, weakref.proxy(wrapper))
    wrapper.__dict__.update(_fsdp_casts_to=None, _fsdp_moves_to=None)
    wrapper.__dict__.update(
        _fsdp_unit_key=f"#{unit.number}", _fsdp_stays=wrapper.sharding_strategy not in RESHARDED
    )
    names: dict[nn.Module, list[str]] = {}
    for param in unit.params:
        for module, name in param.owners:
            names.setdefault(module, []).append(name)
    for module, owned in names.items():
        swap_class(module, tuple(owned))
        _watch(module, owned)
        module.__dict__["_fsdp_owner"] = state
    if unit.keeper is not None and not unit.keeper._use_orig_params:
        _watch(wrapper.module).flat["_flat_param"] = wrapper._fsdp_unit_key
    enter_state(wrapper, state)
    adopt_nested(wrapper)
    install_passes()
    check_optimizers()


def _watch(module: nn.Module, names: Iterable[str] = ()) -> Watched:
    """The `_parameters` of a module, as what a trace can look into."""
    known = module._parameters
    if not isinstance(known, Watched):
        module.__dict__["_parameters"] = known = Watched(module)
    known.shown.update((name, known[name]) for name in names if name in known)
    return known


def _rest_first(module: Any, *_: object) -> None:
    """Before state is saved or loaded: the modules hold sharded parameters.

    Raises:
        AssertionError: a forward or backward of one of them is running.
    """
    for instance in StockFSDP.fsdp_modules(module):
        if instance.training_state == TrainingState.FORWARD_BACKWARD:
            raise AssertionError(
                f"Expects the handle training to be IDLE but got {instance.training_state}: the "
                f"state of {type(instance.module).__name__} cannot be saved or loaded while its "
                "forward or backward is running"
            )
    rest(module)


def _settle_inputs(instance: Any) -> None:
    """Whether forward is to cast or move its inputs, as plain attributes: compiled code guards on
    them.
    """
    policy, keeper = instance.mixed_precision, instance._handle
    is_full = keeper is not None and keeper._force_full_precision
    casts = policy.cast_forward_inputs and keeper is not None
    if instance._is_root:
        casts |= policy.cast_root_forward_inputs and (
            instance.training or not instance._use_full_prec_in_eval
        )
    is_elsewhere = instance._is_root and instance.compute_device.type != "cpu"
    instance.__dict__["_fsdp_casts_to"] = policy.param_dtype if casts and not is_full else None
    instance.__dict__["_fsdp_moves_to"] = instance.compute_device if is_elsewhere else None


def _settle_buffers(root: Any) -> None:
    """Buffers in full precision where evaluation asks for it, and back in their low one
    afterwards.
    """
    keepers = [instance._handle for instance in root._all_fsdp_states if instance._handle]
    is_full = (
        root._handle._force_full_precision
        if root._handle
        else any(k._force_full_precision for k in keepers)
    )
    if is_full:
        originals = list(root._buffer_name_to_orig_dtype.values())
        stock.cast_buffers(
            list(dict(root.named_buffers()).values()), originals, root.compute_device
        )
        root._needs_buffer_dtype_restore_check = True
    elif getattr(root, "_needs_buffer_dtype_restore_check", False):
        buffers, dtypes = stock.buffers_for_computation(root, root)
        stock.cast_buffers(buffers, dtypes, root.compute_device)
        root._needs_buffer_dtype_restore_check = False
