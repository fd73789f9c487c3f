"""The all-gathers of a unit in eager mode: how they are started, and copied out of.

One for each (compute dtype, group), with the arithmetic of `transfers.py`, and one for each group
of what brings an all-gather of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir import transfers
from compiled_fsdp.ir.checksums import Watched, is_checked, is_of_slices
from compiled_fsdp.ir.quantized import gathers_bytes
from compiled_fsdp.torch_private.autograd import allocate, preserve_version
from compiled_fsdp.units.extension import Extension, buckets, gather_extensions
from compiled_fsdp.units.precision import policy_of
from compiled_fsdp.wire import launch
from compiled_fsdp.wire.deferred import Deferred

from .tree import WHO, in_backward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from compiled_fsdp.ir.spec import ParamSpec
    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.units.unit import Unit
    from compiled_fsdp.wire.deferred import Value as Recorded

    # Under way: what runs each, what it yields, and whom that is for.
    Gathers = list[tuple[Deferred, Recorded, list[tuple[ShardedParam, ParamSpec]]]]
    ExtensionGathers = list[tuple[Deferred, Recorded, list[tuple[Extension, list[Tensor]]]]]


def start_gathers(unit: Unit, slices: Mapping[ShardedParam, Tensor]) -> Gathers:
    """Start one all-gather for each (compute dtype, group) over all flat buffers.

    slices: what int reshard keeps of parameters, which are gathered from these.
    """
    messages: dict[object, list[tuple[transfers.Source, ParamSpec, ShardedParam]]] = {}
    for flat in unit.flats:
        whole = transfers.Source(flat.data.detach(), flat.layout.numel, flat.data.dtype)
        for param in flat.params:
            if param.extends:
                continue
            spec, source = param.spec, whole
            if param in slices:
                spec = spec.over_post_group()
                kept = slices[param]
                source = transfers.Source(kept, kept.numel(), kept.dtype)
            messages.setdefault((spec.dtype, spec.group), []).append((source, spec, param))
    gathers: Gathers = []
    for members in messages.values():
        names = ", ".join(param.fqn for _, _, param in members)
        options = dict.fromkeys(o for _, spec, _ in members for o in comm.gather_options(spec))
        unit.options.consume(WHO, *options)
        run = Deferred(f"all-gather of {unit.name} ({names})", members[0][1].group)
        watched = _watched(unit, run, [(spec, param) for _, spec, param in members])
        gathered = transfers.gather_bucket(watched, [(source, spec) for source, spec, _ in members])
        run.advance()
        gathers.append((run, gathered, [(param, spec) for _, spec, param in members]))
    return gathers


def _watched(
    unit: Unit, run: Deferred, members: Sequence[tuple[ParamSpec, ShardedParam]]
) -> Deferred | Watched:
    """What runs a gather: with checksums around it, if the unit is checked."""
    specs = [spec for spec, _ in members]
    if not is_checked(specs):
        return run
    unit.options.consume(WHO, "check")
    flats = [f for f in unit.flats if any(param in f.params for _, param in members)]
    sources = [n for _, param in members for n, f in enumerate(flats) if param in f.params]
    is_cast = gathers_bytes(specs) or any(f.data.dtype != specs[0].dtype for f in flats)
    phase = "backward" if in_backward() else "forward"
    if is_of_slices(specs):
        return Watched(run, specs, phase)
    sized = [(f.data, f.layout.numel) for f in flats]
    return Watched(run, specs, phase, sized, sources, is_cast=is_cast)


def extension_gathers(unit: Unit, extensions: dict[ShardedParam, Extension]) -> ExtensionGathers:
    """Record one all-gather for each group, of what the subclasses contribute; to advance it is to
    start it.

    extensions: of the unit's parameters; those that are new are added.
    """
    for flat in unit.flats:
        for param in flat.params:
            if param.extends and param not in extensions:
                own = policy_of(unit.mp_policy, param.compute)
                extensions[param] = Extension(param, flat.mesh_info.shard_mesh, own)
    gathers: ExtensionGathers = []
    for members in buckets(extensions.values()):
        names = ", ".join(extension.param.fqn for extension, _ in members)
        unit.options.consume(WHO, *comm.gather_options(members[0][0].param.spec))
        run = Deferred(f"all-gather of {unit.name} ({names})", members[0][0].param.spec.group)
        gathers.append((run, gather_extensions(run, members), members))
    return gathers


def fill(
    param: ShardedParam, gathered: Tensor, bucket: transfers.GatheredBucket, place: int
) -> None:
    """Copy one parameter out of a gathered bucket, into the storage that autograd may hold views
    of.
    """
    spec = bucket.specs[place]
    if param.is_shard_whole:
        # The first time, or it has moved.
        if param.unsharded is None or param.gathered.data_ptr() != param.local.data_ptr():
            # With its version: autograd sees an optimizer's step before backward.
            param.set_gathered(param.local.detach())
        return
    if (
        param.unsharded is None
        or param.is_borrowed
        or param.unsharded.dtype != spec.dtype
        or param.gathered.is_inference()  # `.data = x` under inference_mode; nobody may fill it
    ):
        padded = gathered.new_empty(spec.padded_shape, dtype=spec.dtype)
        full = padded.narrow(spec.dim, 0, spec.shape[spec.dim])
        param.set_gathered(full)
    full = param.gathered
    columns = bucket.columns(launch.call, gathered, place)
    with preserve_version(full):
        allocate(full, columns.numel() * columns.element_size())
        padded = full.as_strided(spec.padded_shape, full.stride())
        apart = padded.view(*spec.shape[: spec.dim], spec.group_size, *spec.shard_shape[spec.dim :])
        apart.movedim(spec.dim, 0).copy_(columns.view(spec.group_size, *spec.shard_shape))
