"""Parameters as views of one unsharded flat parameter: FSDP1's split rule.

[Note: two split rules]
`fully_shard` cuts each parameter by rows; its padded shards lie back to back in the flat buffer.
FSDP1 puts the whole parameters of a unit back to back, pads, and cuts that one 1-D tensor evenly: a
shard may begin in the middle of a row. To the ops this is a unit of one parameter of shape [numel],
cut on dim 0, so that everything that holds of a parameter holds of it. What is gathered is the flat
parameter itself, and the parameters that a model reads are views of it: no copy.

In a graph each read is a view with a gradient of its own, `flatten_grad`, which puts it at its
place in a flat gradient of zeros. The pass `join_grads` makes one flat gradient of all, which is
reduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.ir.keys import Keys
from compiled_fsdp.ir.schema import FLATTEN_GRAD
from compiled_fsdp.torch_private.autograd import outside_transforms, unwrapped
from compiled_fsdp.torch_private.dynamo import traced_as_it_is

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class View:
    """A parameter's place in an unsharded flat parameter.

    start: its first element.
    order: its dims as they lie in memory, slowest first; (0, 1, ...) if it is contiguous.
    """

    start: int
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        """The view itself, of [numel of the flat parameter]."""
        piece = flat.narrow(0, self.start, self.numel).view([self.shape[dim] for dim in self.order])
        if self.order == tuple(range(len(self.shape))):
            return piece
        return piece.permute([self.order.index(dim) for dim in range(len(self.shape))])


def memory_order(
    shape: tuple[int, ...], stride: tuple[int, ...], *, is_contiguous: bool
) -> tuple[int, ...]:
    """The dims of a dense tensor as they lie in memory, slowest first."""
    dims = range(len(shape))
    return tuple(dims if is_contiguous else sorted(dims, key=lambda dim: -stride[dim]))


_views: Keys[View] = Keys("view")


def key_of_view(view: View) -> str:
    """Returns what a traced read names it by."""
    return _views.key(view)


@traced_as_it_is
def view_of_flat(flat: Tensor, key: str) -> Tensor:
    """A parameter out of a gathered flat parameter, inside a graph: Dynamo takes the call as it is,
    AOTAutograd traces it. Inside of `torch.func`'s transformations a parameter is a constant, so
    that the view is taken outside.
    """
    function: Any = _ViewOfFlat
    with outside_transforms():
        result: Tensor = function.apply(unwrapped(flat), _views[key])
    return result


class _ViewOfFlat(torch.autograd.Function):
    """A view whose gradient says which elements it is of."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, view: View) -> Tensor:
        ctx.view, ctx.numel = view, flat.numel()
        return view.of(flat)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return FLATTEN_GRAD(grad, ctx.view.start, ctx.numel, list(ctx.view.order)), None
