"""Sizes that only data decides, in what a graph calls several times.

The tokens that come to a rank are another symbol in each layer, or a sum of as many symbols as
there are ranks. A subgraph that all layers call has one symbol in its place. `Names` finds what
needs one: every dimension of an input, or input that is a size, that is no number and no function
of others. All other sizes must be functions of these. What a program with dynamic shapes is called
with is another matter: torch knows more of such sizes than of new ones, and has compiled for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]
import torch

from compiled_fsdp.torch_private.sizes import (
    asserted_number,
    bounds_of,
    expression,
    is_unknown,
    new_size,
    with_sizes,
)

from .expected import hint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Names:
    """The unknown sizes among some tensors and numbers as `n0`, `n1`, ..., single symbols before
    what is computed of several: equal inputs of two layers have equal names, whatever their
    symbols.

    A size that the program asserts to be a number is that number.
    """

    def __init__(self, inputs: Iterable[Any]) -> None:
        self.sizes: dict[sympy.Symbol, torch.SymInt] = {}  # what each name stands for
        self._pairs: list[tuple[Any, Any]] = []  # an expression, and what to write for it
        self._known: dict[Any, Any] = {}
        given = [v.shape if isinstance(v, torch.Tensor) else [v] for v in inputs]
        sizes = [s for each in given for s in each if isinstance(s, torch.SymInt) and is_unknown(s)]
        for size in sorted(sizes, key=lambda size: not expression(size).is_Symbol):
            self._name(size)

    def _name(self, size: Any) -> None:
        expr = expression(size)
        if isinstance(expr, int) or self._renamed(expr) is not None:
            return
        written = asserted_number(size)
        if written is None:
            written = sympy.Symbol(f"n{len(self.sizes)}", integer=True, nonnegative=True)
            self.sizes[written] = size
        self._pairs.append((expr, written))
        self._known.clear()

    @property
    def are_needed(self) -> bool:
        """Whether any input has such a size."""
        return bool(self._pairs)

    @property
    def bounds(self) -> tuple[Any, ...]:
        """What is known of each size: between which it is."""
        return tuple(map(bounds_of, self.sizes.values()))

    def of(self, size: Any) -> Any:
        """A size in these names; None if it is no function of theirs."""
        expr = expression(size)
        return expr if isinstance(expr, int) else self._renamed(expr)

    def _renamed(self, expr: Any) -> Any:
        if expr not in self._known:
            self._known[expr] = self._without_symbols(expr)
        return self._known[expr]

    def _without_symbols(self, expr: Any) -> Any:
        for old, new in self._pairs:
            if expr == old:
                return int(new) if isinstance(new, int) else new
            expr = _replaced(expr, old, new)
        is_number = isinstance(expr, int) or expr.is_Integer
        if is_number:
            return int(expr)
        return expr if expr.free_symbols <= self.sizes.keys() else None

    def fresh(self) -> Mapping[Any, torch.SymInt]:
        """A new symbol for each name, of which as much is expected as of what it stands for."""
        return {name: new_size(size, hint(size)) for name, size in self.sizes.items()}

    def inside(self, value: Any, fresh: Mapping[Any, torch.SymInt]) -> Any:
        """A tensor or a size, or several, as they are where names stand for new symbols."""
        if isinstance(value, list | tuple):
            return type(value)(self.inside(each, fresh) for each in value)
        if isinstance(value, torch.SymInt):
            return _filled(self.of(value), fresh)
        if not isinstance(value, torch.Tensor):
            return value
        if all(type(size) is int for size in (*value.shape, *value.stride())):
            return value
        places = (value.shape, value.stride())
        shape, stride = ([_filled(self.of(s), fresh) for s in sizes] for sizes in places)
        return with_sizes(value, shape, stride)


def _replaced(expr: Any, old: Any, new: Any) -> Any:
    """An expression with another in the place of a symbol, or of a sum that all its symbols come
    from.
    """
    if not old.free_symbols & expr.free_symbols:
        return expr
    if old.is_Symbol:
        return expr.xreplace({old: new})
    pivots = (s for s in old.free_symbols if old.is_Add and s in old.args)
    pivot = min(pivots, key=str, default=None)
    if pivot is None:
        return expr
    return sympy.expand(expr.xreplace({pivot: new - (old - pivot)}))


def _filled(expr: Any, fresh: Mapping[Any, torch.SymInt]) -> Any:
    """The size that an expression in names is with new symbols."""
    if isinstance(expr, int):
        return expr
    env = next(iter(fresh.values())).node.shape_env
    named = {name: size.node.expr for name, size in fresh.items()}
    return env.create_symintnode(expr.xreplace(named), hint=None)
