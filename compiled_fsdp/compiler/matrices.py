"""The way of matrices to their owners and back, as nodes of the graph of a whole step.

    %p = momentum_(%grad, %flat, offsets, step)           # this rank's pieces, owner by owner
    %r = wait(to_owners(%p, numels, owners))
    %o = orthogonalize(%r, %flat, offsets, owners, step)  # whole matrices, at their owners
    %u = wait(from_owners(%o, numels, owners))
    update_matrices_(%u, %flat, offsets, step)

One such way for each flat gradient; `passes/exchange_matrices.py` lets them overlap. Pieces travel
padded, so that all ranks have the same graph, whoever owns what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.schema import (
    FROM_OWNERS,
    MOMENTUM,
    ORTHOGONALIZE,
    TO_OWNERS,
    UPDATE_MATRICES,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch.fx import Node

    from compiled_fsdp.ir.graph import Builder
    from compiled_fsdp.ir.matrices import Matrix
    from compiled_fsdp.ir.spec import ParamSpec

Owned = tuple["ParamSpec", "Matrix"]


def updated_whole(
    run: Builder,
    grad: Node,
    flat: Node,
    owned: Iterable[Owned],
    step: str,
    told: Sequence[Node] = (),
) -> None:
    """Update these parameters of a flat gradient, each at its owner.
    told: what a scaler has found.
    """
    by_dtype: dict[torch.dtype, list[Owned]] = {}
    for spec, matrix in sorted(owned, key=lambda each: (each[1].owner, each[0].offset)):
        by_dtype.setdefault(matrix.dtype, []).append((spec, matrix))
    for dtype, each in by_dtype.items():
        _way(run, grad, flat, each, step, dtype, told)


def _way(
    run: Builder,
    grad: Node,
    flat: Node,
    owned: list[Owned],
    step: str,
    dtype: torch.dtype,
    told: Sequence[Node],
) -> None:
    first = owned[0][0]
    offsets = [spec.offset for spec, _ in owned]
    numels = [spec.shard_numel for spec, _ in owned]
    owners = [matrix.owner for _, matrix in owned]
    flops = [0.0] * first.group_size
    for owner, (_, matrix) in zip(owners, owned, strict=True):
        flops[owner] += matrix.flops
    what = f"{first.unit.split('#')[0]} ({', '.join(spec.fqn for spec, _ in owned)})"
    way = (numels, owners, first.group_size, first.group)
    moved = run(MOMENTUM, grad, flat, offsets, step, sum(numels), dtype, *told)
    if first.group_size > 1:
        moved = run(WAIT, run(TO_OWNERS, moved, *way, what=what))
    moved = run(ORTHOGONALIZE, moved, flat, offsets, owners, step, max(flops))
    if first.group_size > 1:
        moved = run(WAIT, run(FROM_OWNERS, moved, *way, what=what))
    run(UPDATE_MATRICES, moved, flat, offsets, step)
