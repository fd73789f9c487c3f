"""`inline_pointwise`: cheap values are computed again in the region that reads them, if that takes
no more memory, and if all its equals do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
from compiled_fsdp.passes.base import Context
from compiled_fsdp.passes.inline_pointwise import inline_pointwise
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.outline import outline
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit

from compiled_fsdp.ir import repeats
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import set_context
from compiled_fsdp.ir.subgraphs import INVOKE
from compiled_fsdp.passes import inline_pointwise as module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

OUTLINES = Context(is_fused=True, inline="")
WIDTH = 4


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two nodes are worth a call."""
    monkeypatch.setattr(repeats, "LEAST_NODES", 2)
    return


def inlined(gm: GraphModule, plan: Plan = PLAN) -> GraphModule:
    set_context(gm, OUTLINES)
    result = inline_pointwise(gm, plan)
    set_context(gm, None)
    result.graph.lint()
    return result


class Layers:
    """Backwards of layers that multiply by `act(gate)`, each with a gather in the middle: what
    stands between two gathers is the same but behind the last.
    """

    def __init__(self, count: int = 5) -> None:
        self.hand = hand = Hand()
        self.inputs = {
            name: [hand.input(f"{name}{i}", WIDTH, WIDTH) for i in range(count)]
            for name in ("gate", "up")
        }
        self.flats = [hand.input(f"flat{i}", WIDTH * WIDTH // 2) for i in range(count)]
        self.grad = hand.input("grad", WIDTH, WIDTH)
        self.count = count

    def act(self, i: int) -> Node:
        return self.hand(aten.sigmoid.default, self.inputs["gate"][i])

    def also_read(self, i: int, node: Node) -> list[Node]:
        return []

    def finish(self) -> None:
        """Behind all layers."""

    def made(self) -> GraphModule:
        hand, results, grad = self.hand, [], self.grad
        for i in range(self.count):
            act = self.act(i)
            hidden = hand(aten.mul.Tensor, act, self.inputs["up"][i])
            results.append(hand(aten.mm.default, grad, hidden))
            (spec,) = unit(f"layers.{i}", {"w": (WIDTH, WIDTH)})
            grad = hand(aten.mm.default, grad, hand.unshard(self.flats[i], spec))
            grad = hand(aten.mul.Tensor, grad, act)
            results += self.also_read(i, act)
        self.finish()
        return lower(hand.returns(grad, *results), PLAN)


def num_inlined(gm: GraphModule, op: object = aten.sigmoid.default) -> int:
    before = len(find(gm.graph, op))
    return len(find(inlined(gm).graph, op)) - before


class TestInlinePointwise(GraphTest):
    def test_docstring(self):
        hand = Hand()
        gate, up, grad = (hand.input(name, WIDTH, WIDTH) for name in ("gate", "up", "grad"))
        flat = hand.input("flat", WIDTH * WIDTH // 2)
        act = hand(aten.sigmoid.default, gate)
        grad_w = hand(aten.mm.default, grad, hand(aten.mul.Tensor, act, up))
        (spec,) = unit("u", {"w": (WIDTH, WIDTH)})
        grad_hidden = hand(aten.mm.default, grad, hand.unshard(flat, spec))
        gm = lower(hand.returns(grad_w, hand(aten.mul.Tensor, grad_hidden, act)), PLAN)
        self.assertDocumented(module, "Before", gm)
        with mock.patch.object(repeats, "LEAST_TIMES", 1):
            self.assertDocumented(module, "After", inlined(gm))

    def test_regions_read_less(self):
        """What a layer's second half reads of its first is gone, and the calls are still equal."""
        gm = inlined(Layers().made())
        set_context(gm, OUTLINES)
        outline(gm, PLAN)
        calls = gm.graph.find_nodes(op="call_function", target=INVOKE)
        self.assertGreaterEqual(len(calls), 3)
        between = [n for call in calls for n in call.all_input_nodes if "sigmoid" in n.name]
        self.assertEqual(between, [])

    def test_others_read_it_too(self):
        class Kept(Layers):
            def also_read(self, i: int, node: Node) -> list[Node]:
                return [node]

        self.assertUnchanged(inlined, Kept().made())

    def test_off(self):
        gm = Layers().made()
        self.assertUnchanged(inline_pointwise, gm)

    def test_more_memory(self):
        """A sum of two saved values would keep two alive in the place of one."""

        class Sums(Layers):
            def act(self, i: int) -> Node:
                return self.hand.add(self.inputs["gate"][i], self.inputs["up"][i])

        self.assertUnchanged(inlined, Sums().made())


def test_a_matmul_is_not_cheap() -> None:
    class Multiplied(Layers):
        def act(self, i: int) -> Node:
            return self.hand(aten.mm.default, self.inputs["gate"][i], self.inputs["up"][i])

    assert num_inlined(Multiplied().made(), aten.mm.default) == 0


def test_a_parameter_would_live_on() -> None:
    class OfParameters(Layers):
        def act(self, i: int) -> Node:
            (spec,) = unit(f"acts.{i}", {"a": (WIDTH, WIDTH)})
            flat = self.hand.input(f"of{i}", WIDTH * WIDTH // 2)
            return self.hand(aten.sigmoid.default, self.hand.unshard(flat, spec))

    assert num_inlined(OfParameters().made()) == 0
    assert num_inlined(Layers().made()) == 4


@pytest.mark.parametrize("layers", [range(5), range(1, 2)])
def test_what_is_written_to_is_not_read_later(layers: range) -> None:
    """Of one layer: then all equal ones keep theirs, or they would be two groups."""

    class Written(Layers):
        def finish(self) -> None:
            for i in layers:
                self.hand(aten.copy_.default, self.inputs["gate"][i], self.grad)

    assert num_inlined(Written().made()) == 0


def test_rounded_values() -> None:
    """A cast and what is computed of it: the saved value in 16 bits takes half of the bytes."""

    class Rounded(Layers):
        def act(self, i: int) -> Node:
            hand = self.hand
            half = hand.input(f"half{i}", WIDTH, WIDTH, dtype=torch.bfloat16)
            wide = hand(torch.ops.prims.convert_element_type.default, half, torch.float32)
            return hand(aten.sigmoid.default, wide)

    gm = Rounded().made()
    assert num_inlined(gm) == 4
    assert len(find(gm.graph, torch.ops.prims.convert_element_type.default)) == 9


def test_up_to_what_is_in_memory_anyway() -> None:
    """The wider value of a rounded sum that others read too: computed from the sum, not from the
    three values that are added, which would stay in the place of one.
    """
    convert = torch.ops.prims.convert_element_type.default

    class RoundedSums(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.sums: list[Node] = []

        def act(self, i: int) -> Node:
            hand = self.hand
            one, two, three = (
                hand.input(f"{name}{i}", WIDTH, WIDTH, dtype=torch.bfloat16)
                for name in ("one", "two", "three")
            )
            self.sums.append(hand.add(hand.add(one, two), three))
            return hand(convert, self.sums[i], torch.float32)

        def finish(self) -> None:
            for each in self.sums:
                self.hand(aten.mm.default, each, each)

    assert num_inlined(RoundedSums().made(), convert) == 4
    assert num_inlined(RoundedSums().made(), aten.add.Tensor) == 0


@pytest.mark.parametrize("is_read_later", [False, True])
def test_what_is_gone_by_then_does_not_live_on(is_read_later: bool) -> None:
    """The wider value of a sum that was made in front of all layers, and whose two terms nobody
    reads since: computed from the sum, as they would be in memory all that time.
    """
    convert = torch.ops.prims.convert_element_type.default

    class EarlySums(Layers):
        def __init__(self) -> None:
            super().__init__()
            hand = self.hand
            self.terms = [
                [
                    hand.input(f"{name}{i}", WIDTH, WIDTH, dtype=torch.bfloat16)
                    for name in ("one", "two")
                ]
                for i in range(self.count)
            ]
            self.sums = [hand.add(*terms) for terms in self.terms]
            (spec,) = unit("first", {"w": (WIDTH, WIDTH)})  # what computes sums ends here
            w = hand.unshard(hand.input("flat", WIDTH * WIDTH // 2), spec)
            self.grad = hand(aten.mm.default, self.grad, w)

        def act(self, i: int) -> Node:
            return self.hand(convert, self.sums[i], torch.float32)

        def finish(self) -> None:
            for each in (
                *self.sums,
                *((t for both in self.terms for t in both) if is_read_later else ()),
            ):
                self.hand(aten.mm.default, each, each)

    gm = EarlySums().made()
    assert num_inlined(gm, convert) == 4
    assert len(find(gm.graph, aten.add.Tensor)) == 5 + 4 * is_read_later
