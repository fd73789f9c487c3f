"""Operations of heavy kernels that torch has no formula for: as many as of the products that they
are made of.
"""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from compiled_fsdp.command.steps import _number
from compiled_fsdp.ir.flops import formula_of, formulas
from compiled_fsdp.ir.graph import is_matmul
from compiled_fsdp.planning.costs import Costs, Link, flops

grouped = torch.ops.aten._grouped_mm
ENDS = [2, 2, 6]  # of three groups, one of them empty
A, B = torch.randn(6, 4), torch.randn(3, 4, 5)


def parts() -> list[slice]:
    return [slice(a, b) for a, b in zip([0, *ENDS], ENDS, strict=False)]


CASES = {  # what is given, and the products of each group
    "rows": (A, B, lambda: [A[p] @ b for p, b in zip(parts(), B, strict=True)]),
    "columns": (
        B.mT,
        A.mT,
        lambda: [b.T @ A.T[:, p] for p, b in zip(parts(), B, strict=True)],
    ),
    "sum": (A.T, A, lambda: [A[p].T @ A[p] for p in parts()]),
    "all": (B.mT, B, lambda: [b.T @ b for b in B]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_grouped_product_counts_as_its_products(case: str) -> None:
    a, b, products = CASES[case]
    with FlopCounterMode(display=False) as counter:
        products()
    formula = formula_of(grouped)
    assert formula is not None
    assert formula(a, b) == counter.get_total_flops()
    assert _number(formula, [[*a.shape], [*b.shape], [len(ENDS)]]) == formula(a, b)  # of a profile


def test_its_node_is_priced_by_them() -> None:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    ends = graph.placeholder("ends")
    product = graph.call_function(grouped.default, (a, b, ends))
    a.meta["val"], b.meta["val"] = A, B
    ends.meta["val"], product.meta["val"] = torch.tensor(ENDS), torch.empty(6, 5)
    assert is_matmul(product)
    assert flops(product) == 2 * 6 * 4 * 5
    costs = Costs(100.0, 1e9, 1e-6, (("", Link(0.0, 1e9)),))
    assert costs.compute(product) == pytest.approx(2.4, rel=1e-3)


def test_torchs_go_first() -> None:
    for packet, formula in flop_registry.items():
        assert formula_of(packet) is formula is formulas()[packet]
    assert formula_of(torch.ops.aten.add) is None
