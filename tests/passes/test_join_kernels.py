"""`join_kernels`: what reads the same values is computed on one side of a communication."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import pytest
import torch
from compiled_fsdp.passes.base import Context
from compiled_fsdp.passes.join_kernels import join_kernels
from compiled_fsdp.passes.lower import lower
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit

from compiled_fsdp.ir import repeats
from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import set_context
from compiled_fsdp.ir.repeats import find_repeats
from compiled_fsdp.passes import join_kernels as module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

OUTLINES = Context(is_fused=True, inline="")
WIDTH = 4


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything is worth a call."""
    monkeypatch.setattr(repeats, "LEAST_NODES", 1)
    monkeypatch.setattr(repeats, "LEAST_TIMES", 1)
    return


def joined(gm: GraphModule, plan: Plan = PLAN) -> GraphModule:
    set_context(gm, OUTLINES)
    result = join_kernels(gm, plan)
    set_context(gm, None)
    result.graph.lint()
    return result


def reduction(after: Callable[[Hand, Node], Node], *, between: bool = False) -> GraphModule:
    """The gradient of a scale is reduced; `after` computes with what it was computed of.

    between: behind the reduction something is written to that `after` reads.
    """
    hand = Hand()
    grad, act, x = (hand.input(name, WIDTH, WIDTH) for name in ("grad", "act", "x"))
    flat = hand.input("flat", WIDTH // 2)
    (spec,) = unit("u", {"scale": (WIDTH,)})
    grad_y = hand(aten.mul.Tensor, grad, act)
    rows = hand(aten.sum.dim_IntList, hand(aten.mul.Tensor, grad_y, x), [0])
    reduced = hand.reduce_grad(rows, flat, spec)
    if between:
        hand(aten.copy_.default, act, x)
    return lower(hand.returns(after(hand, grad_y), reduced), PLAN)


def product(
    *,
    is_read_again: bool = True,
    is_read_at_once: bool = False,
    is_reduced: bool = False,
    is_wide: bool = False,
    is_gathered: bool = True,
) -> GraphModule:
    """The gradient of a weight, and a gather whose parameter is multiplied with.

    is_read_again: what is behind the wait reads `gate` too.
    is_read_at_once: what is before it reads the product.
    is_reduced: its reduction starts before the gather, and behind something that ends the span.
    is_wide: one of the values that it is computed from takes twice its bytes, and is read last.
    is_gathered: the other parameter is an input, and something else ends the span.
    """
    hand = Hand()
    grad, gate, up = (hand.input(name, WIDTH, WIDTH) for name in ("grad", "gate", "up"))
    flat = hand.input("flat", WIDTH * WIDTH // 2)
    (spec,) = unit("u", {"w": (WIDTH, WIDTH)})
    if is_wide:
        wide = hand.input("wide", WIDTH, WIDTH, dtype=torch.float64)
        up = hand(torch.ops.prims.convert_element_type.default, wide, torch.float32)
    hidden = hand(aten.mul.Tensor, hand(aten.sigmoid.default, gate), up)
    grad_w = hand(aten.mm.default, grad, hidden)
    if is_read_at_once:
        grad_w = hand.compute(grad_w)
    if is_reduced:
        hand(aten.copy_.default, hand.input("buffer", WIDTH, WIDTH), grad)
        (other,) = unit("v", {"v": (WIDTH, WIDTH)}, reduce_dtype=torch.float64)
        grad_w = hand.reduce_grad(grad_w, hand.input("flat_v", WIDTH * WIDTH // 2), other)
    if is_gathered:
        full = hand.unshard(flat, spec)
    else:
        full = hand.input("full", WIDTH, WIDTH)
        hand(aten.copy_.default, hand.input("state", WIDTH, WIDTH), grad)
    grad_x = hand(aten.mm.default, grad, full)
    if is_read_again:
        grad_x = hand(aten.mul.Tensor, grad_x, hand(aten.sigmoid.default, gate))
    other = hand(aten.mm.default, gate, grad if is_wide else up)  # they stay in memory
    return lower(hand.returns(grad_w, grad_x, other), PLAN)


class TestJoinKernels(GraphTest):
    def test_docstring(self):
        hand = Hand()
        grad, act, x, w = (hand.input(name, WIDTH, WIDTH) for name in ("grad", "act", "x", "w"))
        flat = hand.input("flat", WIDTH // 2)
        (spec,) = unit("u", {"scale": (WIDTH,)})
        grad_y = hand(aten.mul.Tensor, grad, act)
        rows = hand(aten.sum.dim_IntList, hand(aten.mul.Tensor, grad_y, x), [0])
        reduced = hand.reduce_grad(rows, flat, spec)
        gm = lower(hand.returns(hand(aten.mul.Tensor, grad_y, w), reduced), PLAN)
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", joined(gm))

    def test_a_product_goes_behind_the_wait(self):
        """With what only it reads; the product that needs the parameter comes after it, which
        Inductor may change.
        """
        self.assertGraph(
            joined(product()),
            """\
%grad: f32[4,4]
%gate: f32[4,4]
%up: f32[4,4]
%flat: f32[8]
%all_gather_into_tensor_default: f32[16] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
%wait_tensor_default: f32[16] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[4,4] = view(%wait_tensor_default, [4, 4])  # u: gather
%mm_default_1: f32[4,4] = mm(%grad, %view_default)
%sigmoid_default: f32[4,4] = sigmoid(%gate)
%mul_tensor: f32[4,4] = mul(%sigmoid_default, %up)
%mm_default: f32[4,4] = mm(%grad, %mul_tensor)
%sigmoid_default_1: f32[4,4] = sigmoid(%gate)
%mul_tensor_1: f32[4,4] = mul(%mm_default_1, %sigmoid_default_1)
%mm_default_2: f32[4,4] = mm(%gate, %up)
return [%mm_default, %mul_tensor_1, %mm_default_2]""",
        )

    def test_nothing_behind_the_wait_reads_it_again(self):
        self.assertUnchanged(joined, product(is_read_again=False))

    def test_a_product_that_is_read_at_once(self):
        self.assertUnchanged(joined, product(is_read_at_once=True))

    def test_what_would_live_on_in_its_place(self):
        self.assertUnchanged(joined, product(is_wide=True))

    def test_no_gather_is_awaited(self):
        self.assertUnchanged(joined, product(is_gathered=False))

    def test_a_product_whose_reduction_starts_before_the_wait(self):
        self.assertUnchanged(joined, product(is_reduced=True))

    def test_what_is_wider_stays(self):
        """It would be alive during the reduction in the place of what it is computed of."""

        def widened(hand: Hand, grad: Node) -> Node:
            return hand(torch.ops.prims.convert_element_type.default, grad, torch.float64)

        self.assertUnchanged(joined, reduction(widened))

    def test_what_is_written_to_is_read_before_it_or_behind_it(self):
        """As it was."""

        def computed(hand: Hand, grad: Node) -> Node:
            (act,) = (n for n in grad.all_input_nodes if n.name == "act")
            return hand(aten.mul.Tensor, grad, act)

        self.assertUnchanged(joined, reduction(computed, between=True))
        gm = joined(reduction(computed))
        (wait,) = find(gm.graph, WAIT)
        assert [n for n in find(gm.graph, aten.mul.Tensor) if wait < n] == []

    def test_what_saves_nothing_stays(self):
        """Its value would be written and read in the place of what it is computed of."""

        def computed(hand: Hand, grad: Node) -> Node:
            (act,) = (n for n in grad.all_input_nodes if n.name == "act")
            return hand(aten.mul.Tensor, hand.compute(grad), act)

        self.assertUnchanged(joined, reduction(computed, between=True))

    def test_a_product_stays_where_it_is(self):
        """It is no kernel that could be joined with others."""
        self.assertUnchanged(
            joined, reduction(lambda hand, grad: hand(aten.mm.default, grad, grad))
        )

    def test_off(self):
        gm = product()
        self.assertUnchanged(join_kernels, gm)


def test_several_values_are_unpacked_where_they_are_computed() -> None:
    """Behind a gather, they would be read from a call that cannot yield them together."""
    hand = Hand()
    x, flat = hand.input("x", WIDTH, WIDTH), hand.input("flat", WIDTH * WIDTH // 2)
    (spec,) = unit("u", {"w": (WIDTH, WIDTH)})
    best = hand(aten.topk.default, hand.compute(x), 2)
    y = hand(aten.mm.default, x, hand.unshard(flat, spec))
    values, places = (hand(operator.getitem, best, i) for i in range(2))
    gm = joined(lower(hand.returns(y, hand.compute(values), hand.compute(places)), PLAN))
    assert [best.next, best.next.next] == [values, places]
    first, *_ = find_repeats(gm.graph).spans
    assert first.nodes[-1] is places
    assert first.is_callable
