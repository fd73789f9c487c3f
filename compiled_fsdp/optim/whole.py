"""`update_whole`: the door for any optimizer that needs whole matrices of a sharded model."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.torch_private.dtensors import local_tensor, make_dtensor

from .cut import Cut, cut_of
from .owners import BUCKET_BYTES, Item
from .pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def update_whole(
    items: Sequence[Tensor | Sequence[Tensor]],
    update: Callable[..., Tensor | Sequence[Tensor]],
    *,
    num_results: int = 1,
    work: Sequence[float] | None = None,
    names: Sequence[str] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Update tensors of a sharded model as if they were whole: each item is gathered at one rank of
    its shard group, updated there, and comes back in shards.

        for number, (direction,) in update_whole([p.grad for p in params], orthogonalize):
            params[number].add_(direction, alpha=-lr)

    Every rank calls it with the same items, and iterates to the end. Owners are balanced by `work`;
    items travel in buckets, so that the next ones travel while one is updated, and results are
    yielded bucket by bucket, as they arrive. Where all work of a group is less than the latency of
    an exchange, every rank updates all of it. With HSDP, each replica does all.

    An item's owner depends on shapes, order, work and the number of ranks. State that is to outlive
    a change of these, in a checkpoint say, belongs into the items as a sharded tensor, and comes
    back by `num_results`; `docs/optimizers.md` has Shampoo as an example.

    Args:
        items: for each, a tensor or several that are to be whole at the same rank. DTensors that
            one mesh axis cuts by `Shard`, all of an item the same one, or plain tensors, which
            every rank updates by itself.
        update: called as `update(number, *tensors)` with an item's whole tensors, at its owner
            alone: it must not communicate. Returns the results, whole: a tensor, or several.
        num_results: how many of an item's tensors come back updated: the first ones, in their
            shapes and dtypes.
        work: how long each update takes beside the others, in floating-point operations. None: as
            long as a product of each tensor with itself.
        names: of the items, for errors; None: by number.
        bucket_bytes: items up to so many bytes travel together.

    Yields:
        The number of an item, and its results: DTensors placed as its tensors are, or plain
        tensors.

    Raises:
        NotImplementedError: a tensor is cut over several mesh axes, or otherwise than by `Shard`.
        TypeError: `update` returns other shapes or dtypes.
        ValueError: arguments do not fit each other, or an item's tensors lie on different ranks.
        DivergenceError: the ranks of a group have different items.
    """
    tensors = [[item] if isinstance(item, Tensor) else list(item) for item in items]
    names = [f"item {number}" for number in range(len(tensors))] if names is None else names
    for what, given in (("work", work), ("names", names)):
        if given is not None and len(given) != len(tensors):
            raise ValueError(
                f"update_whole: {len(tensors)} items, and {what} has {len(given)}. Give "
                "one for each"
            )
    described = [
        _item(each, names[number], num_results, None if work is None else work[number])
        for number, each in enumerate(tensors)
    ]
    pipeline = Pipeline(described, "update_whole", bucket_bytes, current_plan().costs)
    return _updated(pipeline, tensors, update)


def _item(tensors: Sequence[Tensor], name: str, num_results: int, work: float | None) -> Item:
    """What all ranks know of an item.

    Raises:
        NotImplementedError, ValueError: as `update_whole` says.
    """
    if not 1 <= num_results <= len(tensors):
        raise ValueError(
            f"update_whole: num_results={num_results}, and {name} has {len(tensors)} "
            "tensors. At least one comes back, and no more than are given"
        )
    cuts = tuple(cut_of(tensor, name, "update_whole") for tensor in tensors)
    if len(groups := {cut.group for cut in cuts}) > 1:
        raise ValueError(
            f"update_whole: the tensors of {name} are cut over different ranks "
            f"(groups {sorted(groups)}; '' for a tensor that is not cut). Place all as the "
            "first one is"
        )
    effort = sum(map(_square, cuts)) if work is None else work
    return Item(name, cuts, effort, num_results)


def _updated(
    pipeline: Pipeline, tensors: list[list[Tensor]], update: Callable[..., Any]
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    def prepare(number: int) -> list[Tensor]:
        return [local_tensor(tensor) for tensor in tensors[number]]

    def call(number: int, *wholes: Tensor) -> Sequence[Tensor]:
        results: Tensor | Sequence[Tensor] = update(number, *wholes)
        return [results] if isinstance(results, Tensor) else results

    for number, pieces in pipeline.run(prepare, call):
        yield (
            number,
            tuple(
                make_dtensor(piece, tensor) if isinstance(tensor, DTensor) else piece
                for piece, tensor in zip(pieces, tensors[number], strict=False)
            ),
        )


def _square(cut: Cut) -> float:
    """Floating-point operations of a matrix times itself, over its shorter side."""
    return 2.0 * prod(cut.shape) * min(cut.shape, default=1)
