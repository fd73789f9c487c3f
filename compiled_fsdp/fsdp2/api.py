"""`fully_shard`: check the arguments, cut the parameters, and make the module trace to `fsdp::`
ops.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from compiled_fsdp.compiler.inductor import install_passes
from compiled_fsdp.frontend.arguments import check_sharding
from compiled_fsdp.frontend.first_call import check_optimizers
from compiled_fsdp.frontend.state import State, adopt_nested, get_state
from compiled_fsdp.frontend.stepped import ignore
from compiled_fsdp.torch_private.compiled import uncompiled
from compiled_fsdp.torch_private.dtensors import local_tensor
from compiled_fsdp.torch_private.modules import is_replicated, plain_name
from compiled_fsdp.units.cutting import sharded_as
from compiled_fsdp.units.extension import has_extension
from compiled_fsdp.units.hooks import say_lost
from compiled_fsdp.units.mesh import resolve_mesh, resolve_placement, resolve_reshard
from compiled_fsdp.units.offload import Offload, can_pin
from compiled_fsdp.units.param import Original
from compiled_fsdp.units.precision import ask_override, asked_grad_dtype
from compiled_fsdp.units.registered import Registered, sharded_behind
from compiled_fsdp.units.tensor_parallel import place
from compiled_fsdp.units.typed import typed
from compiled_fsdp.units.unit import Unit

from .fsdp_module import FSDPModule
from .module import shard_classes, share_params
from .order import check_order

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import DataParallelMeshDims

    from compiled_fsdp.units.mesh import MeshInfo
    from compiled_fsdp.units.param import ShardedParam

_NO_OFFLOAD = OffloadPolicy()
_FULL_PRECISION = MixedPrecisionPolicy()


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = _FULL_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of `module` over the ranks of `mesh`, in place; same arguments as
    torch's `fully_shard`.

    Call it bottom-up. The parameters of one call form a unit: gathered, freed and reduced together.
    Under `torch.compile` every gather, cast, reduction and free is a node of one graph; without it
    the same unit runs on an eager runtime.

    Args:
        module: the module, or a list of modules that form one unit; changed in place and returned.
        mesh: 1D (shard) or 2D (replicate, shard; needs `mesh_dim_names`); default: 1D over all
            ranks. Parameters that are DTensors already (tensor parallelism) need a part of the mesh
            that theirs is a part of.
        reshard_after_forward: True drops the unsharded parameters after forward and gathers them
            again in backward; False keeps them; an int (a factor of the shard size) keeps a slice
            on groups of that size; None means True, but False for the outermost unit.
        mp_policy: dtypes of compute, gradient reduction and outputs; torch's own class. Without
            `reduce_dtype`, gradients are reduced as the installed torch does it: in the parameters'
            own dtype since torch 2.15, in `param_dtype` before. Where `grad_dtype` of a parameter
            was set, they are reduced and kept in that, as since torch 2.15.
        shard_placement_fn: for each parameter None (dim 0), a `Shard` of another dim (which must
            divide evenly), or torch's `ShardPlacementResult` with a mesh of its own.
        offload_policy: `CPUOffloadPolicy()` keeps sharded parameters, gradients and so optimizer
            states in host memory (pinned, unless `pin_memory=False`), and computes on the mesh's
            device; on a CPU mesh it changes nothing.
        dp_mesh_dims: `mesh` has other axes too (tensor parallelism), the parameters are DTensors on
            it, and these of its dims are the data-parallel ones; torch's own
            `DataParallelMeshDims`.
        ignored_params: left alone: not moved, cut, gathered or reduced.

    A parameter that an earlier call sharded already (tied weights) stays in that call's unit: it is
    gathered once for both, and its gradients are added before they are reduced.

    Raises:
        TypeError: an argument of another type.
        ValueError: an argument out of its range, a scalar parameter, a container without `forward`.
        AssertionError: the module was sharded before, or a 2D mesh has no names (as torch raises).
        NotImplementedError: an argument that is not supported yet, or a non-contiguous parameter.
    """
    modules = _check_modules(module)
    check_sharding(mesh, shard_placement_fn, mp_policy, offload_policy, ignored_params)
    info = resolve_mesh(mesh, dp_mesh_dims)
    offload = _resolve_offload(info, offload_policy)
    reshard = _resolve_reshard(reshard_after_forward, info)
    managed = _managed_modules(modules)
    check_order(modules, managed, ignored_params or set())
    params = _managed_params(
        managed, modules, ignored_params or set(), shard_placement_fn, info, mp_policy
    )
    _check_reshard(reshard, params)
    shared = _shared_params(managed, ignored_params or set())
    ignore(ignored_params or set())
    _move_to_device(managed, [o.parameter for o in params], info.device)
    say_lost([o.path for o in params], [o.parameter for o in params])
    unit = Unit(tuple(uncompiled(m) for m in modules), params, info, mp_policy, reshard, offload)
    asked = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "shard_placement_fn": shard_placement_fn,
        "ignored_params": ignored_params or None,
        "dp_mesh_dims": dp_mesh_dims,
    }
    _note_options(
        unit,
        asked,
        mp_policy,
        offload_policy,
        {id(p) for module in modules for p in module.parameters()},
    )
    state = State(unit)
    shard_classes(modules, _to_mark(managed, ignored_params), unit, state)
    share_params(shared, state)
    if len(modules) == 1:
        adopt_nested(modules[0])
    _tie_to_inner(modules, unit)
    install_passes()
    check_optimizers()
    return module


def _note_options(
    unit: Unit,
    asked: dict[str, Any],
    mp_policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    params: set[int],
) -> None:
    """Note what this call was asked for, and what of it has had its effect by now."""
    for name, value in asked.items():
        unit.options.ask(name, value)
    for field in fields(mp_policy):
        unit.options.ask(f"mp_policy.{field.name}", getattr(mp_policy, field.name), field.default)
    if isinstance(offload, CPUOffloadPolicy):
        unit.options.ask("offload_policy", offload)
        if unit.offload is not None and not unit.offload.device:
            unit.options.consume(
                "fully_shard: parameters are on the CPU as it is", "offload_policy"
            )
    unit.options.consume(
        "fully_shard", "shard_placement_fn", "dp_mesh_dims", "mp_policy.param_dtype_override_fn"
    )
    if any(id(p) in params for p in asked["ignored_params"] or ()):
        unit.options.consume("fully_shard", "ignored_params")


def _resolve_reshard(value: bool | int | None, info: MeshInfo) -> bool | int | None:
    if not info.is_sharding:  # there is nothing to drop
        return False
    if info.spmd is not None and isinstance(value, int) and not isinstance(value, bool):
        raise NotImplementedError(
            f"fully_shard: reshard_after_forward={value} as an int is not supported with "
            "dp_mesh_dims. Pass True or False"
        )
    return resolve_reshard(value, info.shard_size)


def _check_reshard(reshard: bool | int | None, params: Sequence[Original]) -> None:
    if not isinstance(reshard, int) or isinstance(reshard, bool):
        return
    for entry in params:
        if isinstance(entry.parameter, DTensor) or entry.is_apart:
            why = (
                "is a DTensor already"
                if isinstance(entry.parameter, DTensor)
                else "has an all-gather extension"
            )
            raise NotImplementedError(
                f"fully_shard: reshard_after_forward={reshard} as an int is not supported for "
                f"parameter {entry.path}, which {why}. Pass True or False"
            )


def _resolve_offload(info: MeshInfo, offload: OffloadPolicy) -> Offload | None:
    if not isinstance(offload, CPUOffloadPolicy):
        return None
    if offload.pin_memory and not can_pin():
        raise RuntimeError(
            f"fully_shard: offload_policy={offload!r} asks for pinned memory, which needs an "
            "accelerator. Pass CPUOffloadPolicy(pin_memory=False)"
        )
    return Offload.beside(info.device, pins=offload.pin_memory)


def _check_modules(module: Any) -> tuple[nn.Module, ...]:
    given = list(module) if isinstance(module, list | tuple) else [module]
    if not given:
        raise IndexError("fully_shard: got an empty list of modules; a unit needs at least one")
    for entry in given:
        if not isinstance(entry, nn.Module):
            raise TypeError(
                f"fully_shard: expects nn.Module, got {type(entry).__name__}: {entry!r}"
            )
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if is_container and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"fully_shard: {type(module).__name__} has no forward, so nothing would gather its "
            "parameters. Shard its members, or pass them as a list"
        )
    below = {id(m) for entry in given for m in entry.modules() if m is not entry}
    roots = tuple(entry for entry in given if id(entry) not in below)
    again = [m for i, m in enumerate(roots) if get_state(uncompiled(m)) or m in roots[:i]]
    if again:
        raise AssertionError(
            f"fully_shard: {type(again[0]).__name__} is sharded already; a module can be given to "
            "fully_shard once"
        )
    return roots


def _managed_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of this unit: depth first, children before their parent, nested units left out
    (as stock orders).
    """
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        if is_replicated(module):
            return
        seen.add(id(module))
        for child in module.children():
            if id(child) not in seen and get_state(uncompiled(child)) is None:
                visit(child)
        found[id(module)] = module

    for root in roots:
        if id(root) not in seen:
            visit(root)
    return list(found.values())


def _to_mark(managed: list[nn.Module], ignored: set[nn.Parameter] | None) -> list[nn.Module]:
    """Those that others may take for managed: without modules that hold, themselves and below, only
    what is ignored.
    """
    if ignored is None:
        return managed

    def holds(module: nn.Module) -> bool:
        return any(p not in ignored for p in module.parameters()) or any(
            True for _ in module.buffers()
        )

    return [module for module in managed if holds(module)]


def _shared_params(
    managed: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> list[tuple[Unit, ShardedParam, nn.Module, str]]:
    """Parameters of these modules that an earlier call cut: their unit, and where else they are
    held.
    """
    found = []
    skip = {id(p) for p in ignored}
    for module in managed:
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in skip:
                found += [(*cut, module, name) for cut in [_cut_before(parameter)] if cut]
    return found


def _cut_before(parameter: nn.Parameter) -> tuple[Unit, ShardedParam] | None:
    """The unit and the sharded parameter, if an earlier call has cut this one, or made it."""
    if parameter in sharded_as:
        known: tuple[Unit, ShardedParam] = sharded_as[parameter]
        return known
    return sharded_behind(parameter) if isinstance(parameter, DTensor) else None


def _tie_to_inner(modules: Sequence[nn.Module], unit: Unit) -> None:
    """Let modules of inner units hold parameters of this one that stand in the place of their own:
    they were tied between the two calls.
    """
    tables = [m._parameters for root in modules for m in root.modules()]
    for table in tables:
        for name in list(table.replaced) if isinstance(table, Registered) else ():
            value = dict.get(table, name)
            cut = sharded_as.get(value) if isinstance(value, nn.Parameter) else None
            if cut is not None and cut[0] is unit:
                table[name] = cut[1].sharded


def _managed_params(
    managed: Sequence[nn.Module],
    roots: Sequence[nn.Module],
    ignored: set[nn.Parameter],
    placement_fn: Callable[[nn.Parameter], Any] | None,
    info: MeshInfo,
    policy: MixedPrecisionPolicy,
) -> list[Original]:
    """Each parameter once, with everything that holds it, its name under the first root that has
    it, and how it is cut.
    """
    skip, among = {id(p) for p in ignored}, {id(m) for m in managed}
    found: dict[int, nn.Parameter] = {}
    for module in managed:
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in skip and not _cut_before(parameter):
                found.setdefault(id(parameter), parameter)
    _check_no_scalars(roots, found)
    originals: dict[int, Original] = {}
    for root in roots:
        for above, module in root.named_modules():
            for name, parameter in _held_here(module, among):
                if id(parameter) not in found:
                    continue
                path = plain_name(f"{above}.{name}" if above else name)
                if id(parameter) not in originals:
                    _check_param(path, parameter, info.device)
                    dim, own = 0, info
                    if placement_fn:
                        dim, own = resolve_placement(
                            placement_fn(parameter), path, local_tensor(parameter), info
                        )
                    told = typed(parameter, path, own)
                    whole = told.placed(parameter) if told else parameter
                    mesh, placements = place(whole, path, dim, own)
                    originals[id(parameter)] = Original(
                        parameter,
                        [],
                        uncompiled(root),
                        path,
                        dim,
                        own,
                        (mesh, placements),
                        ask_override(policy, parameter, path),
                        asked_grad_dtype(parameter, path),
                        told,
                    )
                originals[id(parameter)].owners.append((module, name))
    return [originals[key] for key in found]


def _held_here(module: nn.Module, managed: set[int]) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a module by name, without names under which an inner unit has registered
    one, whatever stands there now.
    """
    table = module._parameters
    inner: Collection[str] = ()
    if isinstance(table, Registered) and id(module) not in managed:
        inner = table.owners
    return [(name, p) for name, p in table.items() if p is not None and name not in inner]


def _check_no_scalars(roots: Sequence[nn.Module], managed: dict[int, nn.Parameter]) -> None:
    for root in roots:
        for path, parameter in root.named_parameters():
            if id(parameter) in managed and parameter.dim() == 0:
                raise ValueError(
                    f"fully_shard: parameter {plain_name(path)} is a scalar and cannot be cut. "
                    "Change it to a 1D tensor with numel equal to 1, or name it in ignored_params"
                )


def _check_param(name: str, parameter: nn.Parameter, device: torch.device) -> None:
    if (
        isinstance(parameter, DTensor)
        and parameter.device != device
        and parameter.device.type != "meta"
    ):
        is_other = parameter.device_mesh.device_type != device.type
        raise (ValueError if is_other else AssertionError)(
            f"fully_shard: parameter {name} is a DTensor on {parameter.device} and a mesh of "
            f"{parameter.device_mesh.device_type}; it should be on {device}, where the mesh passed "
            "to fully_shard is. Distribute it there"
        )
    has_extension(type(local_tensor(parameter)), name)
    if not (parameter.is_contiguous() and local_tensor(parameter).is_contiguous()):
        raise NotImplementedError(
            f"fully_shard: parameter {name} is not contiguous ({parameter.shape=} "
            f"{parameter.stride()=}). Call .contiguous() on it before sharding"
        )


def _move_to_device(
    managed: Sequence[nn.Module], params: Sequence[nn.Parameter], device: torch.device
) -> None:
    buffers = [b for module in managed for b in module._buffers.values() if b is not None]
    for tensor in (*params, *buffers):
        if tensor.device != device and tensor.device.type != "meta":
            tensor.data = tensor.to(device)


def _state_of(module: nn.Module) -> State | None:
    """The state that `fully_shard` attached to a module, or None."""
    return get_state(module)


fully_shard.state = _state_of  # type: ignore[attr-defined]
