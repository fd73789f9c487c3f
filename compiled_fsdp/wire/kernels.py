"""How the `fsdp::` ops of `schema.py` get their kernels, and how these reach a unit."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from compiled_fsdp.ir.schema import SCHEMAS, library
from compiled_fsdp.ir.spec import ParamSpec

from . import unused_outputs

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `start + numel` of a flat buffer, gathered in `dtype` over a group, in
    messages of these sizes.

    numels, codes: where bytes travel, the elements of each parameter and the codes that stand for
        them ("": it travels in `dtype`); `sizes` are in bytes then. Else neither.
    """

    start: int
    sizes: tuple[int, ...]
    dtype: torch.dtype
    group_size: int
    group: str
    numels: tuple[int, ...] = ()
    codes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        start: int,
        sizes: Sequence[int],
        dtype: torch.dtype,
        group_size: int,
        group: str,
        numels: Sequence[int],
        codes: Sequence[str],
    ) -> Piece:
        """From the arguments of `gather_ahead` and `gather_next`, which have lists."""
        return cls(start, tuple(sizes), dtype, group_size, group, tuple(numels), tuple(codes))

    @property
    def numel(self) -> int:
        """Elements of this rank's part."""
        return sum(self.numels or self.sizes)


class Owner(unused_outputs.Buffer, Protocol):
    """A flat buffer's unit, as the ops reach it at run time; offsets name its parameters."""

    @property
    def data(self) -> Tensor:
        """The buffer."""

    def is_reached(self) -> bool:
        """Whether the running backward adds to the gradient of the flat buffer; if not, the ops
        below change nothing.
        """

    def mark(self, offsets: Sequence[int]) -> None:
        """Gradients of these are in the flat gradient that this backward delivers."""

    def retain(self, grads: Tensor, offsets: Sequence[int], where: str) -> None:
        """Keep gradients: `where` is "rows" (unreduced, [group_size, n]) or "partial" (over the
        shard axis only, [n]).
        """

    def add_retained(self, grads: Tensor, offsets: Sequence[int], where: str) -> None:
        """Add what was kept of these to `grads`, in place, and forget it."""

    def reduce_later(
        self, started: Tensor, offsets: Sequence[int], codes: Sequence[str], spec: ParamSpec
    ) -> None:
        """A reduction of these under way, with `spec.reduction`: its result is needed when somebody
        reads the gradients. `codes`: those in which each travels, if bytes do.
        """

    def step(self, flat_grad: Tensor, offsets: Sequence[int]) -> None:
        """Reduced gradients of these, in a buffer of the flat buffer's layout: to be used up now,
        or kept for the optimizer.
        """

    def update(
        self,
        flat_grad: Tensor,
        offsets: Sequence[int],
        step: str,
        found_inf: Tensor | None,
        state: Tensor | None,
    ) -> None:
        """Reduced gradients of these, for the optimizer of the whole step of this name; `found_inf`
        is 1 if gradients are scaled and some is inf or NaN; of several optimizers, one for each.
        `state`: what the optimizer remembers of these, if that rests on the host.
        """

    def fetch_state(
        self, offsets: Sequence[int], step: str, numel: int
    ) -> tuple[Tensor, dist.Work | None]:
        """Start to copy from the host what the optimizer of a whole step remembers of these;
        returns the copy, and what awaits it: None if there is nothing yet.
        """

    def store_state(self, state: Tensor, offsets: Sequence[int], step: str) -> dist.Work:
        """Start to copy it back."""

    def momentum(
        self,
        flat_grad: Tensor,
        offsets: Sequence[int],
        step: str,
        numel: int,
        dtype: torch.dtype,
        found_inf: Tensor | None,
    ) -> Tensor:
        """Reduced gradients of these matrices, for the optimizer of a whole step that needs them
        whole; returns this rank's pieces of what is to be orthogonalized, padded: [numel].
        `found_inf` as for `update`.
        """

    def orthogonalize(
        self, received: Tensor, offsets: Sequence[int], owners: Sequence[int], step: str
    ) -> Tensor:
        """The pieces of all ranks [N, n] of those matrices that this rank owns, at the beginning of
        `received`; returns their updates likewise.
        """

    def update_matrices(self, pieces: Tensor, offsets: Sequence[int], step: str) -> None:
        """This rank's pieces of the updates of these matrices, padded: [n]."""

    def norms(self, flat_grad: Tensor, offsets: Sequence[int]) -> Tensor:
        """2-norms [N] of this rank's parts of these gradients, each without its padding."""

    def judge(self, step: str) -> None:
        """The ranks compare what they have summed up in the whole step of this name; it raises if
        something differs.
        """

    def rested(self, sums: Tensor, names: Sequence[str], phase: str) -> tuple[int, ...]:
        """Checksums [P] of what the buffer holds of these, while they are gathered. Returns its
        version.
        """

    def gather(self, shard: Tensor, piece: Piece) -> Tensor:
        """Start to gather a piece, which `shard` holds, or hand over what is under way for it."""

    def gather_ahead(self, piece: Piece) -> None:
        """Start to gather a piece of what the buffer holds now, for `gather` to hand over."""


def set_owner(flat: Tensor, owner: Owner) -> None:
    """Make `owner` the one that ops find by a flat buffer; it is held weakly."""
    flat._fsdp_owner = weakref.ref(owner)  # type: ignore[attr-defined]
    _owners.add(owner)


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def owner_of(flat: Tensor, op: str) -> Owner:
    """The unit of a flat buffer; `op` names who asks, for errors.

    Hooks for saved tensors, as a checkpoint around what is compiled has them, hand backward an
    alias of the whole buffer.
    """
    owner: Owner | None = getattr(flat, "_fsdp_owner", lambda: None)()
    if owner is None:
        owner = next((other for other in _owners if _is_same(flat, other.data)), None)
    if owner is None:
        raise RuntimeError(
            f"fsdp::{op}: no unit owns the flat buffer of shape {tuple(flat.shape)}. The graph "
            "must be given the flat buffer itself, not a copy or a part of it. Hooks for saved "
            "tensors (save_on_cpu) copy it: let them leave out what requires grad and is a leaf"
        )
    return owner


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same memory, all of it."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata and (
        one.storage_offset(),
        one.shape,
        one.dtype,
    ) == (other.storage_offset(), other.shape, other.dtype)


def reached(flat: Tensor, op: str) -> Owner | None:
    """The owner, if this backward was asked for the gradients of its parameters."""
    owner = owner_of(flat, op)
    return owner if owner.is_reached() else None


def kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate what the op of this name does."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        library.impl(name, fn, "CompositeExplicitAutograd")
        return fn

    return decorate


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate what yields the shape of the op's result."""
    decorate: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.library.register_fake(
        f"fsdp::{name}", lib=library
    )
    return decorate


def _nothing(*args: object, **kwargs: object) -> None:
    """Does to fake tensors what an op without a result does: nothing."""


for _schema in SCHEMAS:
    if _schema.endswith("-> ()"):
        fake(_schema.partition("(")[0])(_nothing)
