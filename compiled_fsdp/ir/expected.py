"""Sizes that only data decides, as they are on average.

A router decides at run time how many tokens go to each expert; the graph has symbols there that
torch knows no value of. Planning, prices and the predicted peak need one, the same on every rank:
where nothing else is known, all pieces of a split are taken to be equal, and a rank to get as much
as it sends (a router is trained to balance its experts). What the program says goes first:
`mark_unbacked(x, 0, hint_override=n)`; and no more is expected than the bound that it gives
(`torch._check(n <= capacity)`, or `max=` of `mark_unbacked`), by which a size counts that nothing
else is known of, what an opaque dispatch returns, say. Memory is counted by the bound, and by the
mean where there is none.

Private torch used here (tried on 2.13 and 2.15): `SymInt.node`, `ShapeEnv.backed_var_to_val`, which
older ones call `var_to_val`, `ShapeEnv.bound_sympy`, `ShapeEnv.var_to_hint_override`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from .schema import EXCHANGE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.fx import Graph, Node

SPLIT = torch.ops.aten.split_with_sizes.default

UNBOUNDED = 1 << 48  # bytes: a bound that large is none
ANY = (1 << 31) - 1  # rows: likewise, what an int32 holds

_expected: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()  # by symbol, of a ShapeEnv
# What follows from that for expressions: tokens of 64 ranks are a sum of as many symbols, of which
# every price asks. Forgotten with each symbol that something becomes known of.
_means: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()
_most: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()  # likewise, of `at_most`


def hint(size: Any) -> int:
    """A size; of a symbol, what it is now, without a guard that would fix it to that; where only
    the data decides, what is expected of it, or 0.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    known = size.node.hint
    return _mean(size) if known is None else int(known)


def at_most(size: Any) -> int:
    """A size in bytes, for memory: of what only the data decides the bound that the program gives
    it; else as `hint`.
    """
    if not isinstance(size, torch.SymInt) or size.node.hint is not None:
        return hint(size)
    env: Any = size.node.shape_env
    known, expr = _most.setdefault(env, {}), size.node.expr
    if expr not in known:
        bound = _bound(env, expr.xreplace(_backed(env)))
        known[expr] = hint(size) if bound is None else bound
    return known[expr]


def _bound(env: Any, expr: Any) -> int | None:
    upper = env.bound_sympy(expr).upper
    return int(upper) if upper.is_Integer and upper < UNBOUNDED else None


def note_expected(graph: Graph) -> None:
    """Remember what the unknown sizes of a graph are on average, for `hint`."""
    for node in graph.nodes:
        if node.target is SPLIT:
            given = _arguments(node)
            _share(given["self"].meta["val"].shape[given.get("dim", 0)], given["split_sizes"])
        elif node.target is EXCHANGE:
            given = _arguments(node)
            for sizes in (given["input_split_sizes"], given["output_split_sizes"]):
                _share(given["input"].meta["val"].shape[0], sizes)


def _arguments(node: Node) -> dict[str, Any]:
    """What a call was given, by the names of its schema."""
    op: Any = node.target
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _mean(size: torch.SymInt) -> int:
    means = _means.setdefault(size.node.shape_env, {})
    expr = size.node.expr
    if expr not in means:
        means[expr] = _mean_of(size)
    return means[expr]


def _mean_of(size: torch.SymInt) -> int:
    env = size.node.shape_env
    backed = _backed(env)
    values = {
        symbol: backed[symbol] if symbol in backed else _expected_of(env, symbol)
        for symbol in size.node.expr.free_symbols
    }
    try:
        mean = size.node.expr.xreplace(values)
    except ZeroDivisionError:  # a size divided by one that nothing is known of
        return 0
    return max(0, int(mean)) if isinstance(mean, int) or mean.is_Integer else 0


def _expected_of(env: Any, symbol: Any) -> int:
    """Of a symbol that only the data decides."""
    mean, said = _expected.get(env, {}).get(symbol), _said(env).get(symbol)
    if mean is None and said is not None:
        return int(said)
    bound = _bound(env, symbol)
    return min((n for n in (mean, bound) if n is not None and n < ANY), default=0)


def _backed(env: Any) -> dict[Any, Any]:
    values: dict[Any, Any] = (
        env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    )
    return values


def _said(env: Any) -> dict[Any, int]:
    """What torch is to take symbols for: as the program says, and as is noted here."""
    hints: dict[Any, int] = getattr(env, "var_to_hint_override", {})
    return hints


def _share(total: Any, sizes: Iterable[Any]) -> None:
    """Divide what others leave of a total among the sizes that nothing is known of, and tell torch:
    its partitioner weighs what to save by such hints, Inductor fuses kernels by what they share.
    """
    unknown, rest = {}, hint(total)
    for size in sizes:
        value = size.meta["val"] if isinstance(size, torch.fx.Node) else size
        expr = value.node.expr if isinstance(value, torch.SymInt) else None
        is_new = (
            expr is not None
            and expr.is_symbol
            and value.node.hint is None
            and expr not in _expected.get(value.node.shape_env, {})
            and expr not in _said(value.node.shape_env)
        )
        if is_new:
            unknown[expr] = value.node.shape_env
        else:
            rest -= hint(value)
    for symbol, env in unknown.items():
        _means.pop(env, None)
        _most.pop(env, None)
        _expected.setdefault(env, {})[symbol] = max(0, -(-rest // len(unknown)))
        if (mean := _expected_of(env, symbol)) > 0:
            _said(env)[symbol] = mean
