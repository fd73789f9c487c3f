"""Cuts parameters for the ranks of a mesh, and lays this rank's parts out in flat buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from compiled_fsdp.torch_private.dtensors import make_dtensor
from compiled_fsdp.torch_private.spmd import unchecked

from .flat import FlatBuffer
from .layout import flat_layout
from .offload import CPU
from .param import ShardedParam, keep_marks
from .registered import registered
from .tensor_parallel import full_of
from .traced_extension import no_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .layout import ShardLayout
    from .param import Original
    from .unit import Unit

# Originals that were cut -> (unit, sharded parameter). An entry lives as long as something still
# holds the original.
sharded_as: Any = WeakTensorKeyDictionary()


def classes_of(originals: Sequence[Original]) -> list[list[Original]]:
    """Returns the parameters of each flat buffer: split by mesh, dtype, `requires_grad`,
    `grad_dtype` and whether they are views at all, in order of first appearance.
    """
    groups: dict[object, list[Original]] = {}
    for entry in originals:
        key = (
            entry.mesh_info,
            entry.parameter.dtype,
            entry.parameter.requires_grad,
            entry.grad_dtype,
            entry.is_apart,
        )
        groups.setdefault(key, []).append(entry)
    return list(groups.values())


@unchecked
def flat_buffer(unit: Unit, group: Sequence[Original]) -> FlatBuffer:
    """Cut parameters of one class (`classes_of`), and register this rank's parts of them, which
    are views of one new buffer.
    """
    info = group[0].mesh_info
    first = group[0].parameter
    layout = flat_layout([o.local.shape for o in group], info.shard_size, [o.dim for o in group])
    is_apart = group[0].is_apart
    rests = first.device if unit.offload is None or first.is_meta else CPU
    if is_apart:
        buffer = no_memory(layout.numel, first.dtype, rests)
    else:
        buffer = unit.zeros(layout.numel, first.dtype, rests)
    params = []
    for entry, place in zip(group, layout.shards, strict=True):
        original = entry.parameter
        whole = entry.whole
        view = _filled(entry, place, info.shard_rank, buffer)
        dtensor = make_dtensor(view, whole, *entry.place)
        sharded = nn.Parameter(dtensor, requires_grad=original.requires_grad)
        keep_marks(original, sharded)
        full = full_of(whole, info, entry.typed)
        params.append(
            ShardedParam(
                entry.owners,
                entry.root,
                entry.path,
                sharded,
                place,
                full,
                compute=entry.compute,
                grad_dtype=entry.grad_dtype,
            )
        )
        params[-1].keep_grad_dtype()
        for module, name in entry.owners:
            registered(module).note_owner(name, unit, params[-1])
        params[-1].register(sharded)
        sharded_as[original] = unit, params[-1]
    data = nn.Parameter(buffer, requires_grad=first.requires_grad)
    return FlatBuffer(unit, info, layout, params, data, is_apart)


def _filled(entry: Original, place: ShardLayout, rank: int, buffer: Tensor) -> Tensor:
    """A rank's part of a parameter, copied to its place in a buffer, or into memory of its own."""
    with torch.no_grad():
        cut = (place.chunk if entry.is_apart else place.cut)(entry.local, rank)
        if entry.is_apart:
            padded = entry.local.new_zeros(place.padded_shape).to(buffer.device)
            view = padded.narrow(place.dim, 0, cut.shape[place.dim])
        else:
            view = place.view(buffer, rank)
        view.copy_(cut)
    return view
