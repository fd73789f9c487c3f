"""The eager runtime: the same units where there is no graph, because the user did not compile or Dynamo could not.

A unit is gathered before its forward and freed after it, gathered again before its backward, and its gradients are reduced
after it: one collective each, as in stock FSDP2, with the arithmetic of `collectives.py`. The unsharded parameters are
autograd leaves whose storage is emptied and refilled, so that what autograd saved stays valid.

Private torch used here (tried on 2.13): `torch.utils._pytree`, and the id of the graph that autograd is running.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import collectives as comm
from .ops import KEEP_SLICE
from .spec import ParamSpec
from .torch_private import preserve_version

if TYPE_CHECKING:
    from .unit import FlatParam, ShardedParam, Unit


class Runtime:
    """Gathers, frees and reduces one unit, called by the hooks on its modules.

    is_unsharded: the modules hold full parameters.
    has_run: members of a list unit that ran in this forward; the last of them frees.
    slices: what int reshard keeps between forward and backward, by parameter.
    versions: of the flat buffers when they were gathered; an optimizer step since then makes full parameters stale.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.is_unsharded = False
        self.has_run: set[nn.Module] = set()
        self.slices: dict[ShardedParam, Tensor] = {}
        self.versions: list[int] = []

    # -- forward

    def pre_forward(self, module: nn.Module, tensors: list[Any]) -> list[Any]:
        """Gather; watch the inputs, so that the reduction runs when their gradients are done."""
        is_first = not self.has_run or module in self.has_run
        if is_first:
            self.has_run.clear()
        if self.is_unsharded and not in_backward() and self.versions != self._versions():
            self.reshard()
        self.unshard()
        if in_backward() or not torch.is_grad_enabled() or not is_first:
            return tensors
        return self._watch_inputs(tensors)

    def post_forward(self, module: nn.Module, output: Any) -> None:
        """Free according to the policy; watch the outputs, so that backward gathers before it needs the parameters."""
        if in_backward():  # recomputation by activation checkpointing: backward frees
            return
        self.has_run.add(module)
        if len(self.has_run) == len(self.unit.modules):
            self.has_run.clear()
            self._reshard_after_forward()
        if torch.is_grad_enabled():
            _has_run_forward.add(self)
            for tensor in tree_flatten(output)[0]:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._pre_backward)

    def _watch_inputs(self, tensors: list[Any]) -> list[Any]:
        places = [i for i, t in enumerate(tensors) if isinstance(t, Tensor) and t.requires_grad]
        if not places:
            return tensors
        watched = _Watch.apply(  # type: ignore[no-untyped-call]
            self, *(tensors[i] for i in places)
        )
        tensors = list(tensors)
        for i, tensor in zip(places, watched, strict=True):
            tensors[i] = tensor
        return tensors

    def _reshard_after_forward(self) -> None:
        if self.unit.reshard is False and torch.is_grad_enabled():
            return
        if not isinstance(self.unit.reshard, bool) and torch.is_grad_enabled():
            for flat in self.unit.flats:
                for param in flat.params:
                    spec = self.unit.spec(flat, param)
                    assert param.unsharded is not None
                    self.slices[param] = KEEP_SLICE(param.unsharded.detach(), *spec.args())
        self.reshard()

    # -- backward

    def _pre_backward(self, grad: Tensor) -> Tensor:
        if self not in _in_backward:
            if not _in_backward:
                torch.autograd.Variable._execution_engine.queue_callback(_end_of_backward)
            _in_backward[self] = None
        self.unshard()
        return grad

    def post_backward(self) -> None:
        """Free the parameters and reduce what gradients there are; does nothing when called again."""
        self.slices.clear()
        if self.is_unsharded:
            self.reshard()
        for flat in self.unit.flats:
            self._reduce(flat)

    def _reduce(self, flat: FlatParam) -> None:
        ready: list[tuple[ShardedParam, Tensor, torch.dtype, ParamSpec]] = []
        for param in flat.params:
            full = param.unsharded
            if full is not None and full.grad is not None:
                grad, full.grad = full.grad, None
                ready.append((param, grad, grad.dtype, self.unit.spec(flat, param)))
        if not ready:
            return
        with torch.no_grad():
            grads = [entry[1:] for entry in ready]
            specs = [entry[3] for entry in ready]
            reduced = comm.reduce_bucket(comm.call, grads, flat.data.dtype)
            flat_grad = comm.place_bucket(comm.call, reduced, specs, flat.layout.numel)
        flat.accumulate_grad(flat_grad, [entry[0] for entry in ready])

    # -- parameters

    def unshard(self) -> None:
        """Gather, unless gathered already, and register the full parameters."""
        if self.is_unsharded:
            return
        self._check_not_meta()
        with torch.no_grad():
            if self.slices:
                self._gather(is_slice=True)
            else:
                self._gather(is_slice=False)
        for param in self.unit.params:
            assert param.unsharded is not None
            param.unsharded.requires_grad_(param.sharded.requires_grad)
            param.register(param.unsharded)
        self.is_unsharded = True
        self.versions = self._versions()

    def reshard(self) -> None:
        """Register the sharded parameters and empty the storage of the full ones."""
        if not self.is_unsharded:
            return
        for param in self.unit.params:
            assert param.unsharded is not None
            param.unsharded.untyped_storage().resize_(0)
            param.register(param.sharded)
        self.is_unsharded = False

    def reshard_if_idle(self) -> None:
        """Reshard, unless the backward that is running still needs the full parameters."""
        if self not in _in_backward:
            self.reshard()

    def _versions(self) -> list[int]:
        return [flat.data._version for flat in self.unit.flats]

    def _gather(self, *, is_slice: bool) -> None:
        """One all-gather per compute dtype over all flat buffers, then one copy into each full parameter."""
        buckets: dict[torch.dtype, list[tuple[comm.Source, ParamSpec, ShardedParam]]] = {}
        for flat in self.unit.flats:
            whole = comm.Source(flat.data.detach(), flat.layout.numel, flat.data.dtype)
            for param in flat.params:
                spec, source = self.unit.spec(flat, param), whole
                if is_slice:
                    spec = spec.over_post_group()
                    kept = self.slices[param]
                    source = comm.Source(kept, kept.numel(), kept.dtype)
                buckets.setdefault(spec.dtype, []).append((source, spec, param))
        for members in buckets.values():
            gathered = comm.gather_bucket(comm.call, [(s, p) for s, p, _ in members])
            start = 0
            for _, spec, param in members:
                _fill(param, gathered, start, spec)
                start += spec.shard_numel

    def _check_not_meta(self) -> None:
        meta = [p.fqn for p in self.unit.params if p.sharded.device.type == "meta"]
        if meta:
            raise RuntimeError(
                f"unshard of {self.unit.name}: parameters {meta} are on the meta device and have no values to gather. "
                "Call module.to_empty(device=...) and then reset_parameters(), or load a state dict, before the first use"
            )


def _fill(param: ShardedParam, gathered: Tensor, start: int, spec: ParamSpec) -> None:
    """Copy one parameter out of a gathered bucket, into the storage that autograd may hold views of."""
    if param.unsharded is None or param.unsharded.dtype != spec.dtype:
        full = gathered.new_empty(spec.padded_shape)[: spec.shape[0]]
        param.unsharded = nn.Parameter(full, requires_grad=param.sharded.requires_grad)
    full = param.unsharded
    columns = gathered.narrow(1, start, spec.shard_numel)
    with preserve_version(full):
        full.untyped_storage().resize_(columns.numel() * columns.element_size())
        padded = full.as_strided(spec.padded_shape, full.stride())
        padded.view(spec.group_size, -1).copy_(columns)


class _Watch(torch.autograd.Function):
    """Identity whose backward runs once all gradients inside the module are done."""

    @staticmethod
    def forward(ctx: Any, runtime: Runtime, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.runtime = runtime
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.runtime.post_backward()
        return None, *grads


_in_backward: dict[Runtime, None] = {}  # units that the running backward has reached, in order
_has_run_forward: weakref.WeakSet[Runtime] = weakref.WeakSet()  # units to free at its end, reached or not


def _end_of_backward() -> None:
    runtimes = list(_in_backward)
    _in_backward.clear()
    for runtime in runtimes:
        runtime.post_backward()
    for runtime in list(_has_run_forward):
        runtime.reshard()
    _has_run_forward.clear()


def in_backward() -> bool:
    """Whether autograd is running, so that a forward now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def with_tensors(runtime: Runtime, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Run the eager pre-forward on the leaves of a module's arguments."""
    leaves, structure = tree_flatten((args, kwargs))
    new_args, new_kwargs = tree_unflatten(runtime.pre_forward(module, leaves), structure)
    return new_args, new_kwargs
