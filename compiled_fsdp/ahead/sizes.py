"""Sizes of arguments that are not known when a model is compiled: dims of the example for which
`torch._dynamo.mark_dynamic(tensor, dim, min=..., max=...)` was called.

In the description of an argument such a size stands as a text, "s77 (2 to 64)": the same text is
the same size. What the compilers have assumed of these sizes besides is kept as Python expressions
of their names, and holds in each call, or the call is refused.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from compiled_fsdp.torch_private.ahead import Sizes

CONTIGUOUS = "contiguous"  # the stride of an argument of which a size is not known
ALLOWED = (
    ast.Expression,
    ast.Compare,
    ast.cmpop,
    ast.BoolOp,
    ast.boolop,
    ast.BinOp,
    ast.operator,
    ast.UnaryOp,
    ast.unaryop,
    ast.Constant,
    ast.Name,
    ast.expr_context,
)


def in_words(sizes: Sizes) -> dict[str, str]:
    """Each symbol with its range."""
    return {
        name: f"{name} ({low} or more)" if high is None else f"{name} ({low} to {high})"
        for name, (low, high) in sizes.ranges.items()
    }


def described(
    leaf: dict[str, Any], tensor: Tensor, shape: Sequence[int | str], words: dict[str, str]
) -> dict[str, Any]:
    """The description of an argument, with symbols in the place of sizes that are not known.

    Raises:
        NotImplementedError: it is not contiguous.
    """
    if all(isinstance(size, int) for size in shape):
        return leaf
    if not tensor.is_contiguous():
        raise NotImplementedError(
            f"precompile: an argument of shape {tuple(tensor.shape)} has a size that is not known, "
            f"and strides {tensor.stride()}; should be contiguous. Pass example.contiguous()"
        )
    return {
        **leaf,
        "shape": [words[size] if isinstance(size, str) else size for size in shape],
        "stride": CONTIGUOUS,
    }


def bound(
    wanted: dict[str, Any], now: dict[str, Any], tensor: Any, sizes: dict[str, int]
) -> dict[str, Any]:
    """The description of an argument as `wanted` has it, where its sizes may be what they are; each
    symbol's size is put into `sizes`.
    """
    shape = wanted.get("shape", [])
    if wanted.get("stride") != CONTIGUOUS or len(now.get("shape", [])) != len(shape):
        return now
    now = {**now, "shape": list(now["shape"])}
    for i, (words, size) in enumerate(zip(shape, now["shape"], strict=True)):
        if isinstance(words, str) and _fits(words, size, sizes):
            now["shape"][i] = words
    if tensor.is_contiguous():
        now["stride"] = CONTIGUOUS
    return now


def _fits(words: str, size: int, sizes: dict[str, int]) -> bool:
    name, _, limits = words.rstrip(")").partition(" (")
    low, _, high = limits.replace(" or more", "").partition(" to ")
    is_inside = int(low) <= size and (not high or size <= int(high))
    return is_inside and sizes.setdefault(name, size) == size


def checker(guards: Sequence[str]) -> Callable[[dict[str, int]], list[str]]:
    """A function of the sizes by name: the guards that do not hold.

    Raises:
        ValueError: a guard is more than arithmetic and comparisons.
    """
    compiled = []
    for guard in guards:
        tree = ast.parse(guard, mode="eval")
        if not all(isinstance(node, ALLOWED) for node in ast.walk(tree)):
            raise ValueError(
                f"a guard of a precompiled model is {guard!r}; should be a comparison of sizes"
            )
        compiled.append((guard, compile(tree, "<guard>", "eval")))
    nothing: dict[str, Any] = {"__builtins__": {}}
    # Checked above.
    return lambda sizes: [g for g, code in compiled if not eval(code, nothing, dict(sizes))]
