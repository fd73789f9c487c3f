"""Subgraphs under Inductor: what a call hands out is not written over
by the graph that calls it.
"""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING

import pytest
import sympy
import torch
from kit.passes_harness import Hand, aten
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.exc import LoweringException
from torch._inductor.graph import SubgraphLowering
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from compiled_fsdp.ir.meta import keep_strides
from compiled_fsdp.ir.subgraphs import INVOKE
from compiled_fsdp.torch_private.subgraphs import _said_what_to_do, prepare_subgraphs

if TYPE_CHECKING:
    from torch.fx import Node

SIZE = 8


def call_of_a_view() -> tuple[GraphModule, list[torch.Tensor]]:
    """A subgraph yields the first rows of its argument, which the caller reads for the last time in
    the call; a product as large as the argument follows, then one with those rows.
    """
    inner = Hand()
    argument = inner.input("a", SIZE, SIZE)
    rows = inner(aten.slice.Tensor, argument, 0, 0, SIZE // 2)
    sine = inner(aten.sin.default, rows)
    keep_strides(inner.end, [(SIZE, 1), (SIZE, 1)])
    outer = Hand()
    outer.mode = inner.mode
    p, q = outer.input("p", SIZE, SIZE), outer.input("q", SIZE, SIZE // 2)
    x = outer(aten.mm.default, p, p)
    root = torch.nn.Module()
    root.part = GraphModule(torch.nn.Module(), inner.returns(rows, sine).graph)
    with outer.graph.inserting_before(outer.end):
        call = outer.graph.call_function(INVOKE, (outer.graph.get_attr("part"), "part", x))
        results = [outer.graph.call_function(operator.getitem, (call, i)) for i in range(2)]
    call.meta["val"] = tuple(value_of(node) for node in (rows, sine))
    for result, value in zip(results, call.meta["val"], strict=True):
        result.meta["val"] = value
    later = outer(aten.mm.default, q, results[1])
    outer.end.args = ((outer(aten.mm.default, results[0], later),),)
    return GraphModule(root, outer.graph), [value_of(p), value_of(q)]


def value_of(node: Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def test_a_result_in_an_argument_is_not_written_over() -> None:
    prepare_subgraphs()
    gm, inputs = call_of_a_view()
    compiled = compile_fx_inner(gm, inputs)
    p, q = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE // 2)
    (product,) = compiled([p, q])
    rows = (p @ p)[: SIZE // 2]
    torch.testing.assert_close(product, rows @ (q @ rows.sin()))


def test_it_is_done_once() -> None:
    prepare_subgraphs()
    before = SubgraphLowering.__init__
    prepare_subgraphs()
    assert SubgraphLowering.__init__ is before


@pytest.mark.parametrize("wraps", [False, True])
def test_sizes_that_inductor_has_to_know_more_of(*, wraps: bool) -> None:
    """What it says is followed by what to do, also where its lowering has wrapped that."""
    error: Exception = GuardOnDataDependentSymNode(sympy.Symbol("u0") > 3, "data-dependent: u0 > 3")
    if wraps:
        error = LoweringException(error, "aten.view", [], {})
    said = r"compiling fsdp_region_7, .*u0 > 3.*Plan\(regions='off'\)"
    with (
        pytest.raises(RuntimeError, match=re.compile(said, re.DOTALL)),
        _said_what_to_do("fsdp_region_7"),
    ):
        raise error


def test_other_errors_stay() -> None:
    with pytest.raises(LoweringException, match="no kernel"), _said_what_to_do("fsdp_region_7"):
        raise LoweringException(ValueError("no kernel"), "aten.view", [], {})
