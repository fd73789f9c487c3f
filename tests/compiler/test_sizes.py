"""Torch's guesses for sizes that only data decides, made sooner: the same guesses."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compiled_fsdp.torch_private import sizes

if not hasattr(symbolic_shapes, "optimization_hint"):
    pytest.skip("this torch guesses otherwise", allow_module_level=True)

from torch.fx.experimental.symbolic_shapes import optimization_hint


def test_the_same_hints() -> None:
    """Of sums, products, quotients and bounds,
    with symbols that are known to be equal to others.
    """
    env = ShapeEnv()
    a, b, c, d, e = (env.create_unbacked_symint() for _ in range(5))
    for each in (a, b, c, d):
        torch._check(each >= 0)
    torch._check(b <= 9)
    torch._check(c >= 10_000)
    torch._check(a + b == 30)
    torch._check(d == 7)
    many = [env.create_unbacked_symint() for _ in range(64)]
    asked = [
        a, b, c, d, e, a + b, 7 * a + 7 * b, 2 * (a + b) + c, a * b - 10, c // 3 % 5, 5 // e,
        (a + c) * d, sum(many), 7168 * sum(many), sum(many) // 7 + b, torch.sym_max(a, b * 5), 12,
    ]  # fmt: skip

    def hints() -> list[int]:
        return [optimization_hint(size, f) for size in asked for f in (None, 4096, 1)]

    expected = hints()
    with sizes.quick_hints():
        is_ours = symbolic_shapes._optimization_hint_base.__module__ == sizes.__name__
        assert is_ours == sizes.IS_SLOW
        assert hints() == expected
        assert hints() == expected  # known by now
    assert len({*expected}) > 15, expected


@pytest.mark.skipif(not sizes.IS_SLOW, reason="this torch puts guesses in at once")
def test_equalities_of_other_layers_are_not_tried() -> None:
    """Counted: of layers whose tokens add up to what is known, each hint tries the equalities of
    its own, those of what these make of it, and no others.
    """
    env = ShapeEnv()
    layers = [[env.create_unbacked_symint() for _ in range(4)] for _ in range(6)]
    for i, (a, b, c, d) in enumerate(layers):
        torch._check(a + b == 100 * (i + 1))
        torch._check(a * c == 7 * d + b)
    asked = [f(*layer) for layer in layers for f in (sum_of, times)]
    asked.append(sum_of(*layers[0]) + sum_of(*layers[1]))
    expected = [optimization_hint(size, 4096) for size in asked]
    assert len({*expected}) > 6, expected
    tried: list[int] = []
    original = sizes._applicable

    def counted(expr: Any, equalities: Any) -> Any:
        found = original(expr, equalities)
        tried.append(len(found))
        assert len(equalities) >= 12, equalities
        return found

    with mock.patch.object(sizes, "_applicable", counted), sizes.quick_hints():
        assert [optimization_hint(size, 4096) for size in asked] == expected
    assert {*tried[:-1]} == {2}, tried
    assert tried[-1] == 4, tried


def sum_of(a: Any, b: Any, c: Any, d: Any) -> Any:
    return a + b + d


def times(a: Any, b: Any, c: Any, d: Any) -> Any:
    return (b + 7 * d) * d // 5 + c
