"""`gather_next`: what the next step takes over is gathered behind the updates of its buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from compiled_fsdp.passes.gather_ahead import gather_ahead
from compiled_fsdp.passes.gather_next import gather_next
from compiled_fsdp.passes.lower import lower
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit

from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.printer import show
from compiled_fsdp.ir.schema import UPDATE
from compiled_fsdp.ir.sequence import sequence
from compiled_fsdp.ir.spec import NEXT
from compiled_fsdp.passes import gather_next as module
from compiled_fsdp.planning.lifetimes import Lifetimes

if TYPE_CHECKING:
    from torch.fx import GraphModule


def step(
    num_gathered: int = 1,
    updated: tuple[int, ...] = (1, 0),
    scaled: bool = False,
    **changes: Any,
) -> GraphModule:
    """A graph that gathers the first of two units, or both, and updates these, in this order."""
    hand = Hand()
    flats = [hand.input(f"flat{i}", 2) for i in range(2)]
    grads = [hand.input(f"g{i}", 2) for i in range(2)]
    factor = hand.input("factor") if scaled else None
    read = []
    for flat in flats[:num_gathered]:
        number = len(read)
        (spec,) = unit(f"u{number}", {f"w{number}": (4,)}, **{"overlap": NEXT, **changes})
        read.append(hand.compute(hand.unshard(flat, spec)))
    for i in updated:
        grad = hand(aten.mul.Tensor, grads[i], factor) if scaled else grads[i]
        hand(UPDATE, grad, flats[i], [0], "step0")
    return gather_ahead(lower(hand.returns(*read), PLAN), PLAN)


def tail(gm: GraphModule) -> str:
    """The updates, and what follows."""
    lines = show(gm.graph).splitlines()
    return "\n".join(line for line in lines if any(w in line for w in ("update", "mul", "_next")))


class TestGatherNext(GraphTest):
    def test_docstring(self):
        gm = step()
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", gather_next(gm, PLAN))

    def test_in_the_order_of_forward(self):
        """What forward gathers first is updated and gathered first; a scaled gradient is scaled for
        its update.
        """
        gm = gather_next(step(2, scaled=True), PLAN)
        gm.graph.lint()
        self.assertExpectedInline(
            tail(gm),
            """\
%mul_tensor_1: f32[2] = mul(%g0, %factor)
update_(%mul_tensor_1, %flat0, [0], 'step0')
gather_next(%flat0, 0, [2], f32, 2, 'shard', [], [])  # u0: next
%mul_tensor: f32[2] = mul(%g1, %factor)
update_(%mul_tensor, %flat1, [0], 'step0')
gather_next(%flat1, 0, [2], f32, 2, 'shard', [], [])  # u1: next""",
        )

    def test_a_frozen_unit(self):
        """One that is not updated, but is gathered first: nothing is gathered before it."""
        gm = gather_next(step(2, updated=(1,)), PLAN)
        self.assertExpectedInline(
            tail(gm),
            """\
update_(%g1, %flat1, [0], 'step0')
gather_next(%flat0, 0, [2], f32, 2, 'shard', [], [])  # u0: next
gather_next(%flat1, 0, [2], f32, 2, 'shard', [], [])  # u1: next""",
        )

    def test_what_it_says_of_itself(self):
        """Ranks compare it, and the memory model has it until the end."""
        gm = step(dtype=torch.bfloat16)
        before = Lifetimes(gm.graph).curve()
        gather_next(gm, PLAN)
        self.assertIn("for the next step: u0 (w0)", sequence(gm.graph)[0])
        after = Lifetimes(gm.graph).curve()
        self.assertEqual(after.after[-1] - before.after[-1], 8)
        at = list(gm.graph.nodes).index(find(gm.graph, UPDATE)[0])
        self.assertEqual(after.during[at] - after.after[at], 8)  # the optimizer's own

    def test_leaves_alone(self):
        """Buffers that nothing updates; units that did not ask for it; a forward."""
        for gm in (step(updated=(1,)), step(overlap=""), step(updated=())):
            self.assertUnchanged(gather_next, gm)
