"""Private torch: what it takes sizes for that only data decides. Tried on torch 2.13 and 2.15."""

from __future__ import annotations

import functools
import math
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
import torch._functorch.partitioners as partitioners
import torch._inductor.config as inductor_config
import torch.fx.experimental.symbolic_shapes as symbolic
from torch import Tensor
from torch.utils._sympy.symbol import SymT, symbol_is_type

try:
    from torch.fx.experimental import _size_hinting as hinting
except ImportError:  # not in every version that is supported
    hinting = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.fx import Node

# What is replaced; 2.15 puts values in at once.
IS_SLOW = (
    hasattr(hinting, "_sub_unbacked_exprs")
    and hasattr(hinting, "_get_unbacked_replacements")
    and hasattr(symbolic, "_optimization_hint_base")
    and not hasattr(hinting, "_hint_bounds_from_runtime_asserts")
)


@contextmanager
def quick_hints() -> Iterator[None]:
    """Inside, torch's hints of sizes are what they were, sooner: for code that adds no symbols.

    The tokens that come from 64 ranks are a sum of 64 symbols. Torch 2.13 takes a fifth of a second
    to put its guesses into such a sum one after another, for each value of such a size; here all go
    in at once (`xreplace`, as in 2.15), and an expression is looked at once. Nor is every equality
    that the program asserts, some for each layer, tried on the sums of every layer.
    """
    if not IS_SLOW:
        yield
        return
    hint_of, substituted = hinting._optimization_hint_base, hinting._sub_unbacked_exprs
    equalities_of = hinting._get_unbacked_replacements
    known: dict[tuple[Any, ...], int] = {}

    def hint(
        env: Any, expr: Any, precomputed_replacements: Any, fallback: int | None = None
    ) -> int:
        def put_in(env: Any, expr: Any) -> Any:
            applicable = _applicable(expr, equalities_of(env))
            with mock.patch.object(hinting, "_get_unbacked_replacements", return_value=applicable):
                expr = substituted(env, expr)
            return _put_in(env, expr, fallback)

        key = (env, expr, type(expr), fallback)
        if key not in known:
            with mock.patch.object(hinting, "_sub_unbacked_exprs", put_in):
                known[key] = hint_of(env, expr, precomputed_replacements, fallback=fallback)
        return known[key]

    with mock.patch.object(symbolic, "_optimization_hint_base", hint):
        yield


def fuse_hinted_sizes() -> None:
    """Let Inductor fuse kernels that share data of a size that only data decides, where it was told
    what to take such a size for (`ShapeEnv.var_to_hint_override`); once.

    What kernels share is what they are fused for. Torch 2.11 takes all data with such a size for
    nothing, so that no two kernels behind a router are fused; later ones ask for the hint. Tried on
    2.11.
    """
    from torch._inductor.graph import GraphLowering  # more than a second: only if it compiles
    from torch._inductor.sizevars import SizeVarAllocator

    made: Any = GraphLowering.get_dep_size_hint
    if hasattr(SizeVarAllocator, "all_unbacked_explicitly_hinted") or hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def get(self: Any, dep: Any, count_bytes: bool = True) -> int:
        key, hints = (dep, count_bytes), self.sizevars.var_to_hint_override
        if key not in self.dep_size_hint_cache and made(self, dep, count_bytes) == 0:
            with suppress(KeyError):  # a dependency on what the graph has not
                unknown = symbolic.free_unbacked_symbols(dep.get_numel())
                if unknown and unknown <= hints.keys():
                    hint = dep.numbytes_hint() if count_bytes else dep.numel_hint()
                    self.dep_size_hint_cache[key] = hint
        return int(made(self, dep, count_bytes))

    changed: Any = GraphLowering
    changed.get_dep_size_hint = get


@contextmanager
def empty_as_one_row() -> Iterator[None]:
    """Inside, torch's partitioner takes a tensor without elements for one with one row.

    Saving it costs nothing, so that it would never be computed again; a rank that has rows computes
    it again, and gathers what for. Whatever else ranks have, costs grow with their rows alike.
    Tried on 2.11, 2.13 and 2.15; where torch has no such function, nothing is changed.
    """
    size_of = getattr(partitioners, "_size_of", None)
    if size_of is None:
        yield
        return

    def size(node: Node, *others: Any) -> int:
        value, found = node.meta.get("val"), int(size_of(node, *others))
        values = value if isinstance(value, list | tuple) else [value]
        tensors = [v for v in values if isinstance(v, Tensor)]
        return found or sum(_at_least_one(v) * v.element_size() for v in tensors)

    with mock.patch.object(partitioners, "_size_of", size):
        yield


def _at_least_one(value: Tensor) -> int:
    """Elements of a tensor, were each empty dimension of size one."""
    sizes = (n if isinstance(n, int) else n.node.hint for n in value.shape)
    return math.prod(n or 1 for n in sizes)


def _applicable(expr: Any, equalities: dict[Any, Any]) -> dict[Any, Any]:
    """Those that may change an expression, in their order: it has all symbols of what they replace,
    or will have when others have been applied.
    """
    symbols, left, found = set(expr.free_symbols), dict(equalities), set()
    while more := [old for old in left if old.free_symbols <= symbols]:
        found.update(more)
        symbols.update(*(left.pop(old).free_symbols for old in more))
    return {old: new for old, new in equalities.items() if old in found}


def _put_in(env: Any, expr: Any, fallback: int | None) -> Any:
    """An expression with torch's guesses in the place of its symbols: the fallback, within the
    symbol's bounds.
    """
    guess = inductor_config.unbacked_symint_fallback if fallback is None else fallback
    guesses = {}
    for symbol in expr.free_symbols:
        bounds, guesses[symbol] = env.var_to_range.get(symbol), guess
        if bounds is not None and isinstance(bounds.lower, int | sympy.Integer):
            guesses[symbol] = max(guesses[symbol], int(bounds.lower))
        if bounds is not None and isinstance(bounds.upper, int | sympy.Integer):
            guesses[symbol] = min(guesses[symbol], int(bounds.upper))
    try:
        return sympy.sympify(expr.xreplace(guesses))
    except ZeroDivisionError:  # torch has an answer of its own
        return expr


def symbols_of(nodes: Iterable[Node]) -> set[Any]:
    """The symbols in the sizes of these nodes' values; tried on torch 2.13."""
    found: set[Any] = set()
    for node in nodes:
        found |= symbolic.free_symbols(node.meta.get("val"))
    return found


def expression(size: Any) -> Any:
    """A size as a number, or as an expression of symbols."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr) if expr.is_Integer else expr


def asserted_number(size: Any) -> int | None:
    """The number that the program asserts a size to be, at run time; None if it says nothing."""
    expr, env = size.node.expr, size.node.shape_env
    for symbol in expr.free_symbols:
        for asserted in env.deferred_runtime_asserts.get(symbol, ()):
            if isinstance(asserted.expr, sympy.Eq) and expr in asserted.expr.args:
                (other,) = (each for each in asserted.expr.args if each != expr)
                if other.is_Integer:
                    return int(other)
    return None


def is_unknown(size: torch.SymInt) -> bool:
    """Whether data alone decides a size, and no symbol in it is one that torch has a value of."""
    symbols = size.node.expr.free_symbols
    return bool(symbols) and all(symbol_is_type(symbol, SymT.UNBACKED_INT) for symbol in symbols)


def bounds_of(size: Any) -> Any:
    """Between which numbers a size is known to be."""
    return size.node.shape_env.bound_sympy(size.node.expr)


def new_size(like: Any, hint: int) -> Any:
    """A new symbol for a size like another, that only data decides, within the same bounds; torch
    is told to take it for `hint`. Tried on 2.11, 2.13 and 2.15.
    """
    env = like.node.shape_env
    with env.ignore_fresh_unbacked_symbols():
        size = env.create_unbacked_symint()
    bounds = bounds_of(like)
    lower = max(int(bounds.lower), 0) if bounds.lower.is_Integer else 0
    upper = int(bounds.upper) if bounds.upper.is_Integer and bounds.upper > 2 else None
    symbolic._constrain_range_for_size(size, min=lower, max=upper)
    if hint > 0:
        env.var_to_hint_override[size.node.expr] = hint
    return size


def with_sizes(value: Tensor, shape: Sequence[Any], stride: Sequence[Any]) -> Tensor:
    """A fake tensor like another, of other sizes, in a storage of its own."""
    mode: Any = value.fake_mode  # type: ignore[attr-defined]
    with mode:
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
