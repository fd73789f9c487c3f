"""Torch's guesses for sizes that only data decides, made sooner: the same guesses."""

from __future__ import annotations

import torch
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv, optimization_hint

from compiled_fsdp.torch_private import sizes


def test_the_same_hints() -> None:
    """Of sums, products, quotients and bounds, with symbols that are known to be equal to others."""
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
