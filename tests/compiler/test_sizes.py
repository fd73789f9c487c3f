"""Torch's guesses for sizes that only data decides: the same, sooner; and what it fuses by them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compiled_fsdp.ir.expected import note_expected
from compiled_fsdp.torch_private import sizes

optimization_hint: Any = getattr(symbolic_shapes, "optimization_hint", None)
guesses = pytest.mark.skipif(optimization_hint is None, reason="this torch guesses otherwise")


class Noted(CustomGraphPass):
    """As our passes do behind AOTAutograd."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        note_expected(graph)
        sizes.fuse_hinted_sizes()

    def uuid(self) -> str:
        return "noted"


@pytest.mark.parametrize("is_noted", [True, False])
def test_what_reads_the_same_tokens_is_one_kernel(*, is_noted: bool) -> None:
    """Inductor fuses by how much is shared, and took as nothing what it was told no size of."""

    def compute(x: torch.Tensor, counts: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        part, rest = x.split(counts.tolist())
        return [part.sin() @ weight, part.cos() @ weight, rest]

    torch._dynamo.reset()
    metrics.reset()
    x, counts, weight = torch.rand(8, 16), torch.tensor([3, 5]), torch.rand(16, 16)
    passes = Noted() if is_noted else None
    with (
        inductor_config.patch(post_grad_custom_post_pass=passes, force_disable_caches=True),
        torch._dynamo.config.patch(capture_scalar_outputs=True),
    ):
        found = torch.compile(compute, fullgraph=True)(x, counts, weight)
    for each, expected in zip(found, compute(x, counts, weight), strict=True):
        torch.testing.assert_close(each, expected)
    assert metrics.generated_kernel_count == (1 if is_noted else 2)


@guesses
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
