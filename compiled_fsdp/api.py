"""`fully_shard`: check the arguments, cut the parameters, and make the module trace to `fsdp::` ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from .inductor import install_passes
from .mesh import resolve_mesh, resolve_reshard
from .module import FSDPModule, State, get_state, shard_classes
from .torch_private import is_compiled
from .unit import Original, Unit, taken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

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
    dp_mesh_dims: Any = ...,
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
    dp_mesh_dims: Any = ...,
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
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard the parameters of `module` over the ranks of `mesh`, in place; same arguments as torch's `fully_shard`.

    Call it bottom-up. The parameters of one call form a unit: gathered, freed and reduced together. Under `torch.compile`
    every gather, cast, reduction and free is a node of one graph; without it the same unit runs on an eager runtime.

    Args:
        module: the module, or a list of modules that form one unit; changed in place and returned.
        mesh: 1D (shard) or 2D (replicate, shard; needs `mesh_dim_names`); default: 1D over all ranks.
        reshard_after_forward: True drops the unsharded parameters after forward and gathers them again in backward;
            False keeps them; an int (a factor of the shard size) keeps a slice on groups of that size; None means True,
            but False for the outermost unit.
        mp_policy: dtypes of compute, gradient reduction and outputs; torch's own class.
        offload_policy, shard_placement_fn, dp_mesh_dims: not there yet.
        ignored_params: left alone: not moved, cut, gathered or reduced.

    Raises:
        ValueError: an argument out of its range, a scalar parameter, a container without `forward`.
        AssertionError: the module was sharded before, or a 2D mesh has no names (as torch raises).
        NotImplementedError: an argument that is not supported yet, or a non-contiguous parameter.
    """
    _check_supported(shard_placement_fn, offload_policy, dp_mesh_dims)
    modules = _check_modules(module)
    info = resolve_mesh(mesh)
    reshard = resolve_reshard(reshard_after_forward, info.shard_size)
    managed = _managed_modules(modules)
    params = _managed_params(managed, modules, ignored_params or set())
    _move_to_device(managed, [o.parameter for o in params], info.device)
    unit = Unit(modules, params, info, mp_policy, reshard)
    state = State(unit)
    shard_classes(modules, managed, unit, state)
    _adopt_nested(modules)
    install_passes()
    return module


def _check_supported(placement_fn: object, offload: object, dims: object) -> None:
    pairs = (
        ("shard_placement_fn", placement_fn, placement_fn is not None),
        ("offload_policy", offload, type(offload) is not OffloadPolicy),
        ("dp_mesh_dims", dims, dims is not None),
    )
    for name, value, is_asked in pairs:
        if is_asked:
            raise NotImplementedError(
                f"fully_shard: {name}={value!r} is not supported yet. Leave it out, or use "
                "torch.distributed.fsdp.fully_shard for this model"
            )


def _check_modules(module: Any) -> tuple[nn.Module, ...]:
    given = list(module) if isinstance(module, list | tuple) else [module]
    if not given:
        raise IndexError("fully_shard: got an empty list of modules; a unit needs at least one")
    for entry in given:
        if not isinstance(entry, nn.Module):
            raise TypeError(f"fully_shard: expects nn.Module, got {type(entry).__name__}: {entry!r}")
        if is_compiled(entry):
            raise NotImplementedError(
                "fully_shard: got the result of torch.compile; sharding a compiled module is "
                "not supported yet. Shard first, then compile: torch.compile(fully_shard(model))"
            )
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if is_container and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"fully_shard: {type(module).__name__} has no forward, so nothing would gather its parameters. "
            "Shard its members, or pass them as a list"
        )
    below = {id(m) for entry in given for m in entry.modules() if m is not entry}
    roots = tuple(entry for entry in given if id(entry) not in below)
    again = [m for i, m in enumerate(roots) if get_state(m) or m in roots[:i]]
    if again:
        raise AssertionError(
            f"fully_shard: {type(again[0]).__name__} is sharded already; a module can be given to fully_shard once"
        )
    return roots


def _managed_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of this unit: depth first, children before their parent, nested units left out (as stock orders)."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        seen.add(id(module))
        for child in module.children():
            if id(child) not in seen and get_state(child) is None:
                visit(child)
        found[id(module)] = module

    for root in roots:
        if id(root) not in seen:
            visit(root)
    return list(found.values())


def _managed_params(managed: Sequence[nn.Module], roots: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[Original]:
    """Each parameter once, with everything that holds it and its name under the first root that has it."""
    skip = {id(p) for p in ignored}
    found: dict[int, nn.Parameter] = {}
    for module in managed:
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in skip:
                found.setdefault(id(parameter), parameter)
    _check_not_taken(found.values(), roots)
    originals: dict[int, Original] = {}
    for root in roots:
        for above, module in root.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) not in found:
                    continue
                path = f"{above}.{name}" if above else name
                _check_param(path, parameter)
                entry = originals.setdefault(id(parameter), Original(parameter, [], root, path))
                entry.owners.append((module, name))
    return [originals[key] for key in found]


def _check_not_taken(params: Iterable[nn.Parameter], roots: Sequence[nn.Module]) -> None:
    """A parameter that an earlier call cut is still held here: cutting it again would silently untie it."""
    for parameter in params:
        owner = taken.get(parameter)
        if owner is not None:
            names = [path for root in roots for path, p in root.named_parameters() if p is parameter]
            raise ValueError(
                f"fully_shard: parameter {' = '.join(names)} is shared with {owner}, which an earlier call sharded. A shared "
                "parameter must be in one unit: pass both modules in one call, fully_shard([a, b])"
            )


def _check_param(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"fully_shard: parameter {name} is a DTensor with placements {parameter.placements} already; combining with "
            "tensor parallelism is not supported yet. Shard before, or use torch.distributed.fsdp.fully_shard"
        )
    if parameter.dim() == 0:
        raise ValueError(
            f"fully_shard: parameter {name} is a scalar and cannot be cut on dim 0. Change {name} to a 1D tensor with "
            "numel equal to 1, or name it in ignored_params"
        )
    if not parameter.is_contiguous():
        raise NotImplementedError(
            f"fully_shard: parameter {name} is not contiguous ({parameter.shape=} {parameter.stride()=}). "
            "Call .contiguous() on it before sharding"
        )


def _move_to_device(managed: Sequence[nn.Module], params: Sequence[nn.Parameter], device: torch.device) -> None:
    buffers = [b for module in managed for b in module._buffers.values() if b is not None]
    for tensor in (*params, *buffers):
        if tensor.device != device and tensor.device.type != "meta":
            tensor.data = tensor.to(device)


def _adopt_nested(roots: Sequence[nn.Module]) -> None:
    """This call is the outermost so far: units below are named from here and no longer count as outermost."""
    if len(roots) > 1:
        return
    paths = {module: path for path, module in roots[0].named_modules()}
    states = (get_state(module) for module in paths if module is not roots[0])
    for state in {id(s): s for s in states if s is not None}.values():
        state.unit.adopt(paths, is_nested=True)


def _state_of(module: nn.Module) -> State | None:
    """The state that `fully_shard` attached to a module, or None."""
    return get_state(module)


fully_shard.state = _state_of  # type: ignore[attr-defined]
