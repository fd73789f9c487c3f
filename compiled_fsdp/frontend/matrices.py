"""Parameters that the optimizer of a whole step needs whole (`Muon`): who owns which, and what the
graph calls for them.

As in `Muon.step`, each rank adds its piece of a gradient to its piece of the momentum, the owner
orthogonalizes the whole matrix, and each rank moves its piece of the parameter. What travels in
between, and when, is the graph's (`passes/exchange_matrices.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from compiled_fsdp.ir.matrices import Matrix
from compiled_fsdp.optim.cut import cut_of
from compiled_fsdp.optim.muon import Muon, apply, orthogonalized, work_of
from compiled_fsdp.optim.owners import balance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from compiled_fsdp.units.flat import FlatBuffer
    from compiled_fsdp.units.mesh import MeshInfo
    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.units.unit import Unit

    from .optimizers import Optimizers, Told


class Matrices:
    """All that the optimizers of a whole step update whole.

    take: called with a buffer, its reduced gradient and some of its parameters, and what the
        optimizers are told, before their momentum is updated; returns a function that drops their
        gradients again.
    told: called with what a scaler has found, returns that.
    """

    def __init__(
        self,
        units: list[Unit],
        optimizers: Optimizers,
        take: Callable[[FlatBuffer, Tensor, Sequence[ShardedParam], Told], Callable[[], None]],
        told: Callable[[Tensor | None], Told],
    ) -> None:
        self._units, self._take, self._told, self._optimizers = units, take, told, optimizers
        self._skipped: set[Muon] = set()
        self._muons = [each for each in optimizers.made if isinstance(each, Muon)]
        self._held: dict[int, tuple[Muon, dict[str, Any]]] = {}

    def signature(self) -> tuple[object, ...]:
        """Changes if other matrices are trained, or by another optimizer or group."""
        return tuple(
            (id(p), p.requires_grad, id(group))
            for muon in self._muons
            for group in muon.param_groups
            for p in group["params"]
        )

    def planned(self) -> tuple[Matrix, ...]:
        """Every matrix that is trained, with its owner: decided alike on all ranks, by work.

        Raises:
            NotImplementedError: one is cut over several mesh axes, or rests on another device than
                is computed on.
        """
        self._held = {
            id(p): (muon, group)
            for muon in self._muons
            for group in muon.param_groups
            for p in group["params"]
        }
        if not self._held:
            return ()
        found = [
            (unit, flat, param)
            for unit in self._units
            for flat in unit.flats
            for param in flat.params
            if id(param.sharded) in self._held and param.sharded.requires_grad
        ]
        groups: dict[MeshInfo, list[tuple[Unit, ShardedParam, float]]] = {}
        for unit, flat, param in found:
            cut_of(param.sharded, param.fqn, "compile_step: Muon")
            if flat.data.device != flat.device:
                raise NotImplementedError(
                    f"compile_step: {param.fqn} rests on {flat.data.device}, and is computed with "
                    f"on {flat.device}: matrices of a Muon are not copied between devices in one "
                    "graph yet. Leave the offload out, or write the loop: loss.backward(); "
                    "muon.step()"
                )
            _, group = self._held[id(param.sharded)]
            work = work_of(group, param.sharded)
            groups.setdefault(flat.mesh_info, []).append((unit, param, work))
        matrices: dict[tuple[str, str], Matrix] = {}
        for info, entries in groups.items():
            owners = balance([work for *_, work in entries], info.shard_size)
            for (unit, param, work), owner in zip(entries, owners, strict=True):
                dtype = self._held[id(param.sharded)][0].ns_dtype
                matrices[unit.key, param.fqn] = Matrix(unit.key, param.fqn, owner, dtype, work)
        return tuple(matrices.values())

    # -- called by a graph; see `units.unit.OnMatrices`

    def momentum(
        self,
        flat: FlatBuffer,
        flat_grad: Tensor,
        params: Sequence[ShardedParam],
        pieces: Tensor,
        found_inf: Tensor | None,
    ) -> None:
        """See `OnMatrices`. What is left out for an inf travels as zeros, and is not applied."""
        told = self._told(found_inf)
        made = self._optimizers.made
        self._skipped = {muon for muon in self._muons if told[made.index(muon)] is None}
        drop = self._take(flat, flat_grad, params, told)
        try:
            for param, place in self._places(flat, params, pieces):
                muon, group = self._held[id(param.sharded)]
                if muon not in self._skipped:
                    place.copy_(muon.direction(group, param.sharded))
        finally:
            drop()

    def orthogonalize(self, param: ShardedParam, matrix: Tensor) -> Tensor:
        """See `OnMatrices`."""
        return orthogonalized(self._held[id(param.sharded)][1], matrix)

    def update_matrices(
        self, flat: FlatBuffer, pieces: Tensor, params: Sequence[ShardedParam]
    ) -> None:
        """See `OnMatrices`."""
        for param, place in self._places(flat, params, pieces):
            muon, group = self._held[id(param.sharded)]
            if muon not in self._skipped:
                apply(group, param.sharded, place)

    def _places(
        self, flat: FlatBuffer, params: Sequence[ShardedParam], pieces: Tensor
    ) -> Iterable[tuple[ShardedParam, Tensor]]:
        start = 0
        for param in params:
            place = replace(param.layout, offset=start)
            yield param, place.view(pieces, flat.mesh_info.shard_rank)
            start += place.numel
