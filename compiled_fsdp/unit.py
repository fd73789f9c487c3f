"""A unit: the parameters of one `fully_shard` call, their flat buffers, and their gradients.

The sharded parameters (DTensors, what the optimizer sees) are views into the flat buffers; a gradient arrives as one flat
buffer too, from a compiled graph or from the eager runtime, and its views become the parameters' `.grad`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from .layout import FlatLayout, ShardLayout, flat_layout
from .mesh import MeshInfo, default_reduction
from .ops import grad_listeners
from .spec import ParamSpec
from .torch_private import make_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

_unit_numbers = itertools.count()

# Originals that were cut -> where they were. An entry lives as long as something still holds the original.
taken: Any = WeakTensorKeyDictionary()


@dataclass(eq=False, slots=True)
class ShardedParam:
    """One parameter: where it is registered, and its sharded form.

    owners: every (module, name) that holds it; several when tied.
    root, path: a module that the call was given, and the name below it.
    fqn: name relative to the outermost `fully_shard` module known so far.
    sharded: the DTensor parameter; the same object for ever, unless the user replaces it.
    unsharded: the eager runtime's full parameter; None before the first eager use.
    """

    owners: list[tuple[nn.Module, str]]
    root: nn.Module
    path: str
    sharded: nn.Parameter
    layout: ShardLayout
    unsharded: nn.Parameter | None = None
    fqn: str = ""

    def register(self, param: nn.Parameter) -> None:
        """Make `param` what the owning modules hold."""
        for module, name in self.owners:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = param
            else:  # a module that watches assignments, such as nn.LSTM
                setattr(module, name, param)


@dataclass(eq=False)
class FlatParam:
    """A flat local buffer: the parameters of a unit that share a dtype and `requires_grad`."""

    unit: Unit
    layout: FlatLayout
    params: list[ShardedParam]
    data: nn.Parameter
    marked: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        grad_listeners[self.data] = self.marked.update
        if self.data.requires_grad:
            self.data.register_post_accumulate_grad_hook(self._take_leaf_grad)

    def local_view(self, flat: Tensor, param: ShardedParam) -> Tensor:
        """The parameter's shard inside a buffer of this layout."""
        return param.layout.view(flat, self.unit.mesh_info.shard_rank)

    def _take_leaf_grad(self, leaf: Tensor) -> None:
        """A compiled backward has delivered: hand its gradient on, and leave none on the leaf."""
        grad, leaf.grad = leaf.grad, None
        self.unit.on_gradients()
        marked = set(self.marked)
        self.marked.clear()
        if grad is not None:
            self.accumulate_grad(grad, [p for p in self.params if p.layout.offset in marked])

    def accumulate_grad(self, flat_grad: Tensor, params: Sequence[ShardedParam]) -> None:
        """Add a reduced flat gradient to `.grad` of `params`; where there is none yet, `.grad` becomes a view of it."""
        params = [p for p in params if p.sharded.requires_grad]
        fresh = [p for p in params if p.sharded.grad is None]
        with torch.no_grad():
            buffer = None if fresh else self._gradient_buffer(params)
            if buffer is not None:
                buffer.add_(flat_grad)
            else:
                for param in params:
                    self._accumulate_one(param, self.local_view(flat_grad, param))
        for param in params:
            for hook in list((param.sharded._post_accumulate_grad_hooks or {}).values()):
                hook(param.sharded)

    def _accumulate_one(self, param: ShardedParam, view: Tensor) -> None:
        if param.sharded.grad is None:
            param.sharded.grad = make_dtensor(view, param.sharded)
        else:
            _local(param.sharded.grad).add_(view)

    def _gradient_buffer(self, params: Sequence[ShardedParam]) -> Tensor | None:
        """The one buffer that all gradients are still views of, if they are: then one addition does for all."""
        if len(params) != len(self.params):
            return None
        grads = [_local(p.sharded.grad) for p in params]
        starts = {g.storage_offset() - p.layout.offset for g, p in zip(grads, params, strict=True)}
        storages = {(g.untyped_storage()._cdata, g.dtype) for g in grads}
        if len(starts) > 1 or len(storages) > 1:
            return None
        (start,) = starts
        if grads[0].untyped_storage().nbytes() < (start + self.layout.numel) * grads[0].itemsize:
            return None
        return grads[0].as_strided((self.layout.numel,), (1,), start)

    def refresh(self) -> None:
        """Bring parameters whose local tensor was replaced (`to`, `to_empty`, assign) back into the flat buffer."""
        flat = self.data
        locals_ = [_local(p.sharded) for p in self.params]
        same = all(a.untyped_storage()._cdata == flat.untyped_storage()._cdata for a in locals_)
        if same or not locals_:
            return
        first = locals_[0]
        fresh = torch.zeros(self.layout.numel, dtype=first.dtype, device=first.device)
        if fresh.device.type == "meta":
            return
        with torch.no_grad():
            for param, local in zip(self.params, locals_, strict=True):
                view = self.local_view(fresh, param)
                view.copy_(local)
                param.sharded._local_tensor = view  # type: ignore[attr-defined]  # `.data` would leave it as it is
            if flat.device.type == fresh.device.type:
                flat.data = fresh
                return
        self.data = nn.Parameter(fresh, requires_grad=flat.requires_grad)  # e.g. from meta: `.data` cannot change the device
        self.__post_init__()


def _local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


@dataclass(frozen=True, slots=True)
class Original:
    """A parameter before it is cut: everything that holds it, and its name below one of the call's modules."""

    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    root: nn.Module
    path: str


@dataclass(frozen=True, slots=True)
class Handle:
    """What a traced read of one parameter needs: the graph input, and where the op's constants stand in `CONSTANTS`."""

    flat: nn.Parameter
    key: str


class Unit:
    """The parameters of one `fully_shard` call; they are gathered, freed and reduced together."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        originals: Sequence[Original],
        mesh_info: MeshInfo,
        mp_policy: MixedPrecisionPolicy,
        reshard: bool | int | None,
    ) -> None:
        self.modules = tuple(modules)
        self.mesh_info = mesh_info
        self.mp_policy = mp_policy
        self.is_auto_reshard = reshard is None
        self.reshard: bool | int = False if reshard is None else reshard
        self.number = next(_unit_numbers)
        self.name = type(modules[0]).__name__
        # Called before a compiled backward writes `.grad`: an eager forward may have left full parameters registered.
        self.on_gradients: Callable[[], None] = _nothing
        self.post_mesh: DeviceMesh | None = None
        if not isinstance(self.reshard, bool):
            self.post_mesh = mesh_info.post_forward_mesh(self.reshard)
        self.flats = [self._make_flat(group) for group in _classes(originals)]
        self.adopt({module: "" for module in modules}, is_nested=False)

    @property
    def params(self) -> Iterable[ShardedParam]:
        """Every parameter, class by class."""
        return (param for flat in self.flats for param in flat.params)

    def _make_flat(self, group: list[Original]) -> FlatParam:
        info = self.mesh_info
        first = group[0].parameter
        layout = flat_layout([o.parameter.shape for o in group], info.shard_size)
        buffer = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
        params = []
        for entry, place in zip(group, layout.shards, strict=True):
            original = entry.parameter
            view = place.view(buffer, info.shard_rank)
            start = min(info.shard_rank * place.rows, original.shape[0])
            with torch.no_grad():
                view.copy_(original[start : start + view.shape[0]])
            dtensor = make_dtensor(view, original, info.mesh, info.placements)
            sharded = nn.Parameter(dtensor, requires_grad=original.requires_grad)
            params.append(ShardedParam(entry.owners, entry.root, entry.path, sharded, place))
            params[-1].register(sharded)
            taken[original] = f"{type(entry.owners[0][0]).__name__}.{entry.owners[0][1]}"
        data = nn.Parameter(buffer, requires_grad=first.requires_grad)
        return FlatParam(self, layout, params, data)

    def adopt(self, paths: dict[nn.Module, str], *, is_nested: bool) -> None:
        """Take names from the outermost sharded module, whose descendants are at `paths`.

        A unit inside another drops its parameters after forward unless told otherwise; the outermost keeps them.
        """
        own = [path for module in self.modules if (path := paths.get(module))]
        self.name = ", ".join(own) or type(self.modules[0]).__name__
        for param in self.params:
            above = paths.get(param.root, "")
            param.fqn = f"{above}.{param.path}" if above else param.path
        if self.is_auto_reshard:
            self.reshard = is_nested
        self.publish()

    def adopt_replaced(self) -> None:
        """Take over parameters that were assigned to the modules, as `load_state_dict(assign=True)` does.

        Raises:
            TypeError: a new parameter is not a DTensor with the mesh, placements and shape of the old one.
        """
        has_new = False
        for param in self.params:
            module, name = param.owners[0]
            new = module._parameters[name]
            if new is None or new is param.sharded or new is param.unsharded:
                continue
            old = param.sharded
            if not isinstance(new, DTensor) or (new._spec.mesh, new.placements, new.shape) != (
                old.device_mesh,  # type: ignore[attr-defined]
                old.placements,  # type: ignore[attr-defined]
                old.shape,
            ):
                raise TypeError(
                    f"load_state_dict: parameter {param.fqn} was assigned a {type(new.data).__name__} of shape {tuple(new.shape)}; "
                    f"its unit needs a DTensor placed as {old.placements}, shape {tuple(old.shape)}. "  # type: ignore[attr-defined]
                    "Use distribute_tensor, or torch.distributed.checkpoint.state_dict.set_model_state_dict"
                )
            param.sharded, has_new = new, True
            param.register(new)
        if has_new:
            for flat in self.flats:
                flat.refresh()
            self.publish()

    def set_reshard(self, value: bool) -> None:
        """Choose whether the parameters are dropped after forward."""
        self.reshard, self.is_auto_reshard = value, False
        self.post_mesh = None
        self.publish()

    def spec(self, flat: FlatParam, param: ShardedParam) -> ParamSpec:
        """The op arguments of one parameter under the current settings."""
        info, policy = self.mesh_info, self.mp_policy
        original = param.sharded.dtype
        compute = policy.param_dtype if original.is_floating_point else None
        dtype = compute or original
        how = default_reduction(info, policy.reduce_dtype or dtype)
        group, post = info.shard_group, self.post_mesh
        kind = "slice" if post else "gather" if self.reshard else "keep"
        return ParamSpec(
            offset=param.layout.offset,
            shape=param.layout.shape,
            dtype=dtype,
            group_size=info.shard_size,
            group=group.group_name,
            reshard=kind,
            post_size=post.size(1) if post else 1,
            post_group=post.get_group(1).group_name if post else "",
            reduce_dtype=how.dtype,
            reduce_op=how.op,
            reduce_algorithm=how.algorithm,
            pre_divide=how.pre_divide,
            post_divide=how.post_divide,
            replicate_size=how.replicate_size,
            replicate_group=how.replicate_group,
            unit=f"{self.name}#{self.number}",
            fqn=param.fqn,
        )

    def publish(self) -> None:
        """Give the owning modules the constants that a traced read turns into an op; compiled code guards on them."""
        for flat in self.flats:
            for param in flat.params:
                handle = Handle(flat.data, self.spec(flat, param).as_constants())
                for module, name in param.owners:
                    module.__dict__.setdefault("_fsdp_handles", {})[name] = handle


def _nothing() -> None:
    """What to do where there is no eager runtime."""


def _classes(originals: Sequence[Original]) -> list[list[Original]]:
    """Split by (dtype, requires_grad), in order of first appearance."""
    groups: dict[tuple[torch.dtype, bool], list[Original]] = {}
    for entry in originals:
        key = (entry.parameter.dtype, entry.parameter.requires_grad)
        groups.setdefault(key, []).append(entry)
    return list(groups.values())
