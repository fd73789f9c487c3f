"""The function that a whole step compiles: what it is called with, what it calls, and what its loss
function returns.

Private torch used here (tried on 2.13): `torch.utils._pytree`.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn


def function_of(
    model: nn.Module,
    loss_fn: Callable[..., Tensor | tuple[Any, ...]] | None,
    name: str,
    count: int,
    *,
    is_scaled: bool,
) -> Callable[..., Any]:
    """The function of the step of this name, which Dynamo traces: from a batch, or the arguments of
    each of `count` micro-batches, to their losses, and what else `loss_fn` returns for each.

    is_scaled: it takes the scale of the losses first, and returns the inverse of that first.
    """

    def part(args: Sequence[Any], more: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...] | None]:
        found = model(*args, **more) if loss_fn is None else loss_fn(model, *args, **more)
        loss, others = loss_and_others(found, name)
        return (loss if count == 1 else loss / count), others

    def one(*batch: Any, **more: Any) -> Any:
        loss, others = part(batch, more)
        return (loss,), (others,)

    def several(*batches: tuple[Sequence[Any], dict[str, Any]]) -> Any:
        parts = [part(*batch) for batch in batches]
        return tuple(loss for loss, _ in parts), tuple(others for _, others in parts)

    plain = one if count == 1 else several

    def scaled(scale: Tensor, *batch: Any, **more: Any) -> tuple[Tensor, Any]:
        return scale.double().reciprocal().float(), plain(*batch, **more)

    return scaled if is_scaled else plain


def with_own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function with a code object of its own: Dynamo keeps there what it compiles."""
    made: Any = function
    code = made.__code__.replace(co_name=name)
    return FunctionType(code, made.__globals__, name, made.__defaults__, made.__closure__)


def batches(given: tuple[Any, ...], more: dict[str, Any], count: int) -> tuple[Any, ...]:
    """The arguments of each of `count` micro-batches, by place and by name.

    Raises:
        TypeError: the step was called otherwise than with one list.
        ValueError: of another length.
    """
    found = given[0] if len(given) == 1 and isinstance(given[0], list | tuple) else None
    if more or found is None:
        raise TypeError(
            f"compile_step: a step with accumulate={count} was called with "
            f"{[type(each).__name__ for each in given]} and {sorted(more)}; it takes one list, "
            f"of {count} batches: step([batch_0, ..., batch_{count - 1}])"
        )
    if len(found) != count:
        raise ValueError(
            f"compile_step: accumulate={count}, and {len(found)} batches were given. Give as "
            "many, or compile another step for what is left over at the end of an epoch"
        )
    return tuple(_arguments(each) for each in found)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A micro-batch as arguments by place and by name."""
    if isinstance(batch, dict):
        return (), dict(batch)
    if isinstance(batch, list | tuple):
        return tuple(batch), {}
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    raise TypeError(
        f"compile_step: a micro-batch is a {type(batch).__name__}; should be a tuple or list of "
        "arguments, a dict of arguments by name, or one tensor"
    )


_strange: dict[str, str] = {}  # what the loss function of a step returns, if that cannot be used


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_strange(name: str, kind: str) -> None:
    _strange[name] = kind


def loss_and_others(found: Any, name: str) -> tuple[Tensor, tuple[Any, ...] | None]:
    """Traced: the loss, and what else a loss function returns, for the step of this name: None
    beside a loss alone; of a named tuple, one without the loss (`with_loss`).
    """
    if isinstance(found, torch.Tensor):
        return found, None
    if isinstance(found, tuple) and found and isinstance(found[0], torch.Tensor):
        loss, *others = found
        if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(others)):
            kind: Any = type(found)
            return loss, kind(None, *others) if hasattr(found, "_fields") else tuple(others)
        strange = "in which others than the first require a gradient"
        _note_strange(name, f"a {type(found).__name__} {strange}")
    else:
        _note_strange(name, f"a {type(found).__name__}")
    torch._dynamo.graph_break()
    raise AssertionError  # with fullgraph=True, that was the end


def with_loss(mean: Tensor, others: Sequence[tuple[Any, ...] | None]) -> Any:
    """What a step returns, of the mean of the losses and what else `loss_fn` has returned for each
    micro-batch: what `loss_fn` does, or of several a list of each in its place.
    """
    first: Any = others[0]
    is_named = hasattr(first, "_fields")
    parts = [each[is_named:] for each in others if each is not None]
    if not parts:
        return mean
    found = (mean, *(parts[0] if len(parts) == 1 else map(list, zip(*parts, strict=True))))
    return first._make(found) if is_named else found


def what_is_strange(name: str) -> str:
    """What the loss function of the step of this name has returned, if that cannot be used; asked
    once.
    """
    return _strange.pop(name, "")
