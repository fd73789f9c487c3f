"""A unit: the parameters of one `fully_shard` call, their flat buffers, and their gradients.

The sharded parameters (DTensors, what the optimizer sees) are views into the flat buffers; a gradient arrives as one flat
buffer too, from a compiled graph or from the eager runtime, and its views become the parameters' `.grad`.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from .layout import FlatLayout, ShardLayout, flat_layout
from .mesh import MeshInfo, averages, reduction, resolve_reshard, twin_group
from .ops import own
from .spec import MEAN, ParamSpec
from .torch_private import make_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

_unit_numbers = itertools.count()

# Originals that were cut -> (unit, sharded parameter). An entry lives as long as something still holds the original.
taken: Any = WeakTensorKeyDictionary()


@dataclass(eq=False, slots=True)
class ShardedParam:
    """One parameter: where it is registered, and its sharded form.

    owners: every (module, name) that holds it; several when tied.
    root, path: a module that the call was given, and the name below it.
    fqn: name relative to the outermost `fully_shard` module known so far.
    sharded: the DTensor parameter; the same object for ever, unless the user replaces it.
    unsharded: the eager runtime's full parameter; None before the first eager use.
    spec: the arguments of its ops under the current settings.
    handle: what a traced read outside an eager forward needs.
    """

    owners: list[tuple[nn.Module, str]]
    root: nn.Module
    path: str
    sharded: nn.Parameter
    layout: ShardLayout
    unsharded: nn.Parameter | None = None
    fqn: str = ""
    spec: ParamSpec = field(init=False)
    handle: Handle = field(init=False)

    def show_handle(self, handle: Handle) -> None:
        """Make `handle` what a traced read finds; compiled code guards on it."""
        for module, name in self.owners:
            module.__dict__.setdefault("_fsdp_handles", {})[name] = handle

    def register(self, param: nn.Parameter) -> None:
        """Make `param` what the owning modules hold."""
        for module, name in self.owners:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = param
            else:  # a module that watches assignments, such as nn.LSTM
                setattr(module, name, param)


@dataclass(eq=False)
class FlatParam:
    """A flat local buffer: the parameters of a unit that share a mesh, a dtype and `requires_grad`.

    marked: offsets of the parameters whose gradients the running backward delivers.
    retained: gradients of earlier backwards that are not reduced yet, by where they stopped ("rows": not reduced at all,
        "partial": over the shard axis only) and offset.
    """

    unit: Unit
    mesh_info: MeshInfo
    layout: FlatLayout
    params: list[ShardedParam]
    data: nn.Parameter
    marked: set[int] = field(default_factory=set)
    retained: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own(self.data, self)
        if self.data.requires_grad:
            self._watch_leaf()

    def _watch_leaf(self) -> None:
        """Weakly: autograd's hooks are out of the garbage collector's sight."""
        me = weakref.ref(self)

        def take(leaf: Tensor) -> None:
            flat = me()
            if flat is not None:
                flat._take_leaf_grad(leaf)

        self.data.register_post_accumulate_grad_hook(take)

    def set_requires_grad(self, value: bool) -> None:
        """Begin or cease to be a leaf that gets a gradient."""
        self.data.requires_grad_(value)
        if value and not self.data._post_accumulate_grad_hooks:
            self._watch_leaf()

    def local_view(self, flat: Tensor, param: ShardedParam) -> Tensor:
        """The parameter's shard inside a buffer of this layout."""
        return param.layout.view(flat, self.mesh_info.shard_rank)

    # -- called by ops

    def mark(self, offsets: Sequence[int]) -> None:
        """See `ops.Owner`."""
        self.marked.update(offsets)
        if self.unit.settings.is_accumulating:  # others may have left gradients that only the end of this backward sees
            self.unit.on_retained()

    def retain(self, grads: Tensor, offsets: Sequence[int], where: str) -> None:
        """See `ops.Owner`."""
        self.unit.on_retained()
        for offset, piece in self._pieces(grads, offsets):
            kept = self.retained.get((where, offset))
            if kept is None:
                self.retained[where, offset] = piece.clone()
            else:
                kept.add_(piece)

    def add_retained(self, grads: Tensor, offsets: Sequence[int], where: str) -> None:
        """See `ops.Owner`."""
        for offset, piece in self._pieces(grads, offsets):
            kept = self.retained.pop((where, offset), None)
            if kept is not None:
                piece.add_(kept)

    def _pieces(self, grads: Tensor, offsets: Sequence[int]) -> Iterable[tuple[int, Tensor]]:
        """The columns of each parameter in a bucket."""
        sizes = {p.layout.offset: p.layout.numel for p in self.params}
        pieces = grads.split([sizes[o] for o in offsets], dim=-1)
        return zip(offsets, pieces, strict=True)

    # -- gradients

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
        if same or not locals_ or any(a.device.type == "meta" for a in locals_):
            return
        fresh = torch.zeros(self.layout.numel, dtype=locals_[0].dtype, device=locals_[0].device)
        with torch.no_grad():
            for param, local in zip(self.params, locals_, strict=True):
                view = self.local_view(fresh, param)
                view.copy_(local)
                param.sharded._local_tensor = view  # type: ignore[attr-defined]  # `.data` would leave it as it is
            if flat.device.type == fresh.device.type:
                flat.data = fresh
                return
        self.unit.forget_handles()
        self.data = nn.Parameter(fresh, requires_grad=flat.requires_grad)  # e.g. from meta: `.data` cannot change the device
        self.__post_init__()


def _local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


@dataclass(frozen=True, slots=True)
class Original:
    """A parameter before it is cut: everything that holds it, its name below one of the call's modules, how it is cut."""

    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    root: nn.Module
    path: str
    dim: int
    mesh_info: MeshInfo


@dataclass(frozen=True, slots=True)
class Handle:
    """What a traced read of one parameter needs: the graph input, and where the op's constants stand in `CONSTANTS`.

    key: "" while an eager forward has the full parameter registered: then that is what is read.
    is_frozen: frozen by now, in a flat buffer that requires a gradient.
    """

    flat: nn.Parameter
    key: str
    is_frozen: bool = False


@dataclass(slots=True)
class Settings:
    """What the setters of `FSDPModule` change; field by field as torch's setters say.

    is_accumulating: `set_requires_gradient_sync(False)` or `set_requires_all_reduce(False)` was used, so that backwards must
        look for what earlier ones have left.
    """

    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    is_accumulating: bool = False
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    divide_factor: float | None = None
    force_sum: bool = False
    all_gather: str = ""
    reduce_scatter: str = ""
    all_reduce_hook: str = ""
    reduce_unused: bool = False
    max_reductions_in_flight: int = 1

    @property
    def sync(self) -> str:
        """How far a gradient goes; see `spec.Reduction`."""
        if not self.requires_gradient_sync:
            return "retain"
        return "reduce" if self.requires_all_reduce else "scatter"


OPEN = Handle(nn.Parameter(torch.empty(0)), "")


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
        self.settings = Settings()
        self.is_auto_reshard = reshard is None
        self.reshard: bool | int = False if reshard is None else reshard
        self.number = next(_unit_numbers)
        self.name = type(modules[0]).__name__
        # Called before a compiled backward writes `.grad`: an eager forward may have left full parameters registered.
        self.on_gradients: Callable[[], None] = _nothing
        # Called when a backward leaves gradients unreduced, so that its end looks after them.
        self.on_retained: Callable[[], None] = _nothing
        self.post_meshes: dict[MeshInfo, DeviceMesh] = {}
        self.reduce_groups: dict[MeshInfo, str] = {}
        if not isinstance(self.reshard, bool):
            for info in dict.fromkeys(o.mesh_info for o in originals):
                size = resolve_reshard(self.reshard, info.shard_size)
                if size is not None and not isinstance(size, bool):
                    self.post_meshes[info] = info.post_forward_mesh(size)
        self._handles: dict[object, tuple[ParamSpec, Handle]] = {}
        self.is_outermost = True
        self.flats = [self._make_flat(group) for group in _classes(originals)]
        self.adopt({module: "" for module in modules}, is_nested=False)

    @property
    def params(self) -> Iterable[ShardedParam]:
        """Every parameter, class by class."""
        return (param for flat in self.flats for param in flat.params)

    def own_modules(self) -> Iterable[nn.Module]:
        """The modules of the call and those that hold its parameters."""
        return dict.fromkeys((*self.modules, *(module for param in self.params for module, _ in param.owners)))

    def _make_flat(self, group: list[Original]) -> FlatParam:
        info = group[0].mesh_info
        first = group[0].parameter
        layout = flat_layout([o.parameter.shape for o in group], info.shard_size, [o.dim for o in group])
        buffer = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
        params = []
        for entry, place in zip(group, layout.shards, strict=True):
            original = entry.parameter
            view = place.view(buffer, info.shard_rank)
            with torch.no_grad():
                view.copy_(place.cut(original, info.shard_rank))
            dtensor = make_dtensor(view, original, info.mesh, info.placements(place.dim))
            sharded = nn.Parameter(dtensor, requires_grad=original.requires_grad)
            params.append(ShardedParam(entry.owners, entry.root, entry.path, sharded, place))
            params[-1].register(sharded)
            taken[original] = self, params[-1]
        data = nn.Parameter(buffer, requires_grad=first.requires_grad)
        return FlatParam(self, info, layout, params, data)

    def adopt(self, paths: dict[nn.Module, str], *, is_nested: bool) -> None:
        """Take names from the outermost sharded module, whose descendants are at `paths`.

        A unit inside another drops its parameters after forward unless told otherwise; the outermost keeps them.
        """
        own = [path for module in self.modules if (path := paths.get(module))]
        self.name = ", ".join(own) or type(self.modules[0]).__name__
        for param in self.params:
            above = paths.get(param.root, "")
            param.fqn = f"{above}.{param.path}" if above else param.path
        self.is_outermost = not is_nested
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

    def take_over(self) -> None:
        """Follow what the user did to the sharded parameters: replaced, moved, cast."""
        self.adopt_replaced()
        for flat in self.flats:
            flat.refresh()
        self.publish()

    def set_reshard(self, value: bool) -> None:
        """Choose whether the parameters are dropped after forward."""
        self.reshard, self.is_auto_reshard = value, False
        self.post_meshes.clear()
        self.publish()

    def _spec(self, flat: FlatParam, param: ShardedParam) -> ParamSpec:
        """The op arguments of one parameter under the current settings."""
        info, policy, settings = flat.mesh_info, self.mp_policy, self.settings
        original = param.sharded.dtype
        compute = policy.param_dtype if original.is_floating_point else None
        dtype = compute or original
        how = reduction(info, policy.reduce_dtype or dtype, settings.divide_factor, is_sum=settings.force_sum)
        is_mean = averages(how.dtype, settings.divide_factor, is_sum=settings.force_sum)
        if is_mean and settings.reduce_scatter:  # users' communications are asked for what stock asks them for
            how = replace(how, op="avg", post_divide=1.0)
        post = self.post_meshes.get(info)
        kind = "slice" if post else "gather" if self.reshard else "keep"
        return ParamSpec(
            offset=param.layout.offset,
            shape=param.layout.shape,
            dim=param.layout.dim,
            dtype=dtype,
            group_size=info.shard_size,
            group=info.shard_group.group_name,
            gather_algorithm=settings.all_gather,
            reduce_group=self.reduce_groups.get(info, info.shard_group.group_name),
            reshard=kind,
            post_size=post.size(1) if post else 1,
            post_group=post.get_group(1).group_name if post else "",
            reduce_dtype=how.dtype,
            reduce_op=how.op,
            reduce_algorithm=settings.reduce_scatter or how.algorithm,
            pre_divide=how.pre_divide,
            post_divide=how.post_divide,
            replicate_size=how.replicate_size,
            replicate_group=how.replicate_group,
            sync="reduce" if settings.sync == "scatter" and info.replicate_size == 1 else settings.sync,
            is_accumulating=settings.is_accumulating,
            hook=settings.all_reduce_hook and (MEAN if is_mean else "") + settings.all_reduce_hook,
            unit=f"{self.name}#{self.number}",
            fqn=param.fqn,
        )

    def publish(self) -> None:
        """Give the owning modules the constants that a traced read turns into an op; compiled code guards on them.

        Handles are kept: coming back to settings that were used before finds the code that was compiled for them.
        """
        state = (astuple(self.settings), self.reshard, self.name, tuple(self.reduce_groups.values()))
        for flat in self.flats:
            for param in flat.params:
                is_frozen = flat.data.requires_grad and not param.sharded.requires_grad
                key = (state, id(flat.data), param.layout.offset, param.fqn, param.sharded.dtype, is_frozen)
                if key not in self._handles:
                    spec = self._spec(flat, param)
                    self._handles[key] = spec, Handle(flat.data, spec.as_constants(), is_frozen)
                param.spec, param.handle = self._handles[key]
                param.show_handle(param.handle)

    def drop_gradients(self) -> None:
        """Forget gradients that are not reduced yet."""
        for flat in self.flats:
            flat.retained.clear()
            flat.marked.clear()
            for param in flat.params:
                if param.unsharded is not None:
                    param.unsharded.grad = None

    def separate_reduce_groups(self, enable: bool) -> None:
        """Reduce over groups of their own, or over those that gather; collective."""
        self.reduce_groups = (
            {flat.mesh_info: twin_group(flat.mesh_info.shard_group) for flat in self.flats} if enable else {}
        )
        self.publish()

    def forget_handles(self) -> None:
        """They hold a flat buffer that is replaced."""
        self._handles.clear()

    def follow_requires_grad(self) -> None:
        """Take over what the user froze or unfroze since the last call."""
        has_changed = False
        for flat in self.flats:
            wanted = [p.sharded.requires_grad for p in flat.params]
            if any(wanted) != flat.data.requires_grad:
                flat.set_requires_grad(any(wanted))
                has_changed = True
            elif flat.data.requires_grad:
                frozen = [p.handle.is_frozen for p in flat.params]
                has_changed = has_changed or frozen != [not w for w in wanted]
        if has_changed:
            self.publish()


originals: dict[type, type] = {}  # generated class -> what it was made of


def original_class(module: nn.Module) -> type:
    """The class that the module had before it was sharded."""
    return originals.get(type(module), type(module))


def _nothing() -> None:
    """What to do where there is no eager runtime."""


def _classes(originals: Sequence[Original]) -> list[list[Original]]:
    """Split by (mesh, dtype, requires_grad), in order of first appearance."""
    groups: dict[tuple[MeshInfo, torch.dtype, bool], list[Original]] = {}
    for entry in originals:
        key = (entry.mesh_info, entry.parameter.dtype, entry.parameter.requires_grad)
        groups.setdefault(key, []).append(entry)
    return list(groups.values())
