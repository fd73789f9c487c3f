"""What some ranks have found reaches all that train the same model: those of another mesh
(experts), of other replicas, of other parts of a tensor-parallel parameter.

Each rank knows only the groups that it is in. So what it knows goes over all of these, twice:
within the axes of one mesh once is enough, and so it is where some group has all ranks. The first
time it is tried whether everything has come everywhere.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from compiled_fsdp.wire import agreement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from compiled_fsdp.units.unit import Unit

_tried: set[tuple[int, ...]] = set()


def groups_of(units: Sequence[Unit]) -> list[dist.ProcessGroup]:
    """All groups over which these units, or parts of their parameters, are spread;
    alike in order on every rank.
    """
    found = [group for unit in units for flat in unit.flats for group in flat.mesh_info.axes]
    for param in (p for unit in units for p in unit.params if p.full is not None):
        mesh = param.full.spec.mesh  # type: ignore[union-attr]
        found += [mesh.get_group(axis) for axis in range(mesh.ndim)]
    distinct = {group.group_name: group for group in found if group.size() > 1}
    return list(distinct.values())


def largest(value: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The largest of all ranks' values, element by element, in place."""
    for group in _passes(groups):
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value


def everyones(mine: list[Any], what: str, groups: Sequence[dist.ProcessGroup]) -> list[Any]:
    """The distinct entries of all ranks' lists, each a value of JSON."""
    known = {json.dumps(entry) for entry in mine}
    for group in _passes(groups):
        for text in agreement.everyones(group.group_name, what, json.dumps(sorted(known))):
            known |= set(json.loads(text))
    return [json.loads(entry) for entry in sorted(known)]


def check_reach(
    units: Sequence[Unit], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> None:
    """Check that `largest` and `everyones` reach all ranks; collective, the first time for these
    units.

    Raises:
        NotImplementedError: they do not.
    """
    key = tuple(unit.number for unit in units)
    if len(groups) < 2 or key in _tried:
        return
    reached = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    reached[dist.get_rank()] = 1
    largest(reached, groups)
    further = largest(reached.clone(), groups)
    if bool(largest((further != reached).any().long(), groups).item()):
        raise NotImplementedError(
            f"Plan(check={units[0].settings.check!r}): unit {units[0].name!r} and others are "
            f"sharded over {len(groups)} groups of ranks that do not reach all in two steps, "
            "so some ranks would not hear of what others find. Shard over the axes of one "
            "mesh, or set check=None"
        )
    _tried.add(key)


def _passes(groups: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    return [*groups] if len(groups) < 2 else [*groups, *groups]
