"""A block's tokens in chunks, so that one travels to its experts while another computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.fx.traceback import annotate

from compiled_fsdp.ir.meta import BLOCK
from compiled_fsdp.planning.chunks import AUTO, next_block, number_of

if TYPE_CHECKING:
    from collections.abc import Callable


T = TypeVar("T", Tensor, tuple[Tensor, ...])


def in_chunks(fn: Callable[..., T], num_chunks: int | str, *rows: Tensor) -> T:
    """Call `fn` on each of `num_chunks` pieces of `rows`, and put the results together again.

    For the part of a mixture of experts that sends tokens away and gets them back: `fn` routes,
    dispatches, computes and combines, for tokens of its own alone. In a graph, pieces are then
    scheduled against each other (`Plan(overlap_exchanges=True)`): while the all-to-all of one is
    under way, experts compute another. Without a graph they run one after another.

    What `fn` computes for a row must not depend on other rows. Then outputs are those of
    `fn(*rows)`, up to the rounding of matmuls of another size; gradients of parameters are the sum
    over chunks, so that they are rounded elsewhere. What depends on all rows (the balance loss,
    counts of tokens, a capacity) belongs outside, or is by chunk.

    Args:
        fn: takes a piece [n_i, ...] of each of `rows`, some of which may be empty, and returns a
            tensor [n_i, ...], or a tuple of such.
        num_chunks: pieces, at least 1; they differ by at most a row. With 1, `fn(*rows)`. "auto":
            1, 2 or 4, in a graph, as is predicted to take the least time by the plan's costs
            (`Plan(costs=...)`, or measured for a plan that leaves something to them), the same on
            all ranks; 1 where nothing is known of costs, with a warning, and outside of graphs.
        rows: tensors [n, ...] with as many rows.

    Returns:
        What `fn` returns, for all n rows.

    Raises:
        ValueError: there is no such number of chunks, or `rows` have different numbers of rows.
        TypeError: `fn` returned something else than tensors with a row for each of its own.
    """
    is_auto = isinstance(num_chunks, str) and num_chunks == AUTO
    if not is_auto and (
        isinstance(num_chunks, bool) or not isinstance(num_chunks, int) or num_chunks < 1
    ):
        raise ValueError(
            f"in_chunks: num_chunks={num_chunks!r}; should be a number of pieces, at least 1, or "
            "'auto' (from costs)"
        )
    shapes = [tuple(tensor.shape) for tensor in rows]
    if not rows or any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(
            f"in_chunks: the tensors to cut have shapes {shapes}; give at least one, all with the "
            "same number of rows (dim 0)"
        )
    if not isinstance(num_chunks, str):
        return _pieces(fn, num_chunks, rows)
    block = _next_block()
    if block < 0:
        return fn(*rows)
    with annotate({BLOCK: block}):
        return _pieces(fn, _number_of(block), rows)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _next_block() -> int:
    return next_block()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _number_of(block: int) -> int:
    return number_of(block)


def _pieces(fn: Callable[..., T], num_chunks: int, rows: tuple[Tensor, ...]) -> T:
    if num_chunks == 1:
        return fn(*rows)
    pieces = zip(*(tensor.tensor_split(num_chunks) for tensor in rows), strict=True)
    found = [_results(fn(*piece), piece[0].shape[0]) for piece in pieces]
    joined = tuple(torch.cat(column) for column in zip(*found, strict=True))
    whole: Any = joined if found[0].__class__ is tuple else joined[0]
    return whole  # type: ignore[no-any-return]


def _results(found: Any, num_rows: Any) -> tuple[Tensor, ...] | list[Tensor]:
    """What `fn` returned for a piece: a tuple, or a single tensor as a list."""
    results = found if isinstance(found, tuple) else [found]
    for result in results:
        if not isinstance(result, Tensor) or not result.dim() or result.shape[0] != num_rows:
            shown = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise TypeError(
                f"in_chunks: fn returned {shown} for a piece of {num_rows} rows; it should return "
                "a tensor with as many rows, or a tuple of such. Compute what depends on all rows "
                "outside of it"
            )
    return results
