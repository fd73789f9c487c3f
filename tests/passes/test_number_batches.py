"""`number_batches`: communications say for which micro-batch they are,
and sums go from the first to the last.
"""

from __future__ import annotations

from typing import Any

import torch
from compiled_fsdp.passes.base import Context
from compiled_fsdp.passes.number_batches import number_batches
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.meta import set_context
from compiled_fsdp.passes import number_batches as module


def joint(
    *dtypes: torch.dtype,
    batches: int = 2,
    once: bool = False,
    with_other: bool = False,
    **changes: Any,
) -> GraphModule:
    """Two micro-batches that read a weight, each of this dtype in backward."""
    hand = Hand()
    flat = hand.input("flat", 2)
    (spec,) = unit("u", {"w": (4,)}, **changes)
    inputs = [hand.input(f"x{i}", 4) for i in range(2)]
    ones = [
        hand.input(f"tangents_{i + 1}", 4, dtype=dtype)
        for i, dtype in enumerate(dtypes or [torch.float32] * 2)
    ]
    losses = [hand(aten.dot.default, x, hand.unshard(flat, spec)) for x in inputs]
    grads = [hand.reduce_grad(one, flat, spec) for one in reversed(ones)]
    total = hand.add(*grads)
    if with_other:
        total = hand.add(total, hand.compute(flat))
    gm = hand.returns(*losses, total)
    set_context(gm, Context(batches=batches, reduces_once=once))
    return gm


def numbered(gm: GraphModule) -> GraphModule:
    return number_batches(gm, PLAN)


class TestNumberBatches(GraphTest):
    def test_docstring(self):
        gm = joint()
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", numbered(gm))

    def test_once(self):
        """Gradients are added up in the dtype of their reduction, first to last."""
        self.assertDocumented(module, "Once", numbered(joint(once=True)))
        gm = numbered(joint(torch.bfloat16, torch.bfloat16, once=True))
        self.assertGraph(
            gm,
            """\
%flat: f32[2]
%x0: f32[4]
%x1: f32[4]
%tangents_1: bf16[4]
%tangents_2: bf16[4]
%unshard_default: f32[4] = unshard(%flat, 'w', reshard=gather)
%dot_default: f32[] = dot(%x0, %unshard_default)
%unshard_default_1: f32[4] = unshard(%flat, 'w', reshard=gather, batch=1)
%dot_default_1: f32[] = dot(%x1, %unshard_default_1)
%convert_element_type_default: f32[4] = convert_element_type(%tangents_1, f32)
%convert_element_type_default_1: f32[4] = convert_element_type(%tangents_2, f32)
%add_tensor_1: f32[4] = add(%convert_element_type_default, %convert_element_type_default_1)
%reduce_grad_default_2: f32[2] = reduce_grad(%add_tensor_1, %flat, 'w', reshard=gather)
return [%dot_default, %dot_default_1, %reduce_grad_default_2]""",
        )

    def test_kept(self):
        """A parameter that stays is gathered once for all."""
        gm = numbered(joint(reshard="keep"))
        self.assertGraph(
            gm,
            """\
%flat: f32[2]
%x0: f32[4]
%x1: f32[4]
%tangents_1: f32[4]
%tangents_2: f32[4]
%unshard_default: f32[4] = unshard(%flat, 'w', reshard=keep)
%dot_default: f32[] = dot(%x0, %unshard_default)
%unshard_default_1: f32[4] = unshard(%flat, 'w', reshard=keep)
%dot_default_1: f32[] = dot(%x1, %unshard_default_1)
%reduce_grad_default_3: f32[2] = reduce_grad(%tangents_2, %flat, 'w', reshard=keep, batch=1)
%reduce_grad_default_2: f32[2] = reduce_grad(%tangents_1, %flat, 'w', reshard=keep)
%add_tensor_1: f32[2] = add(%reduce_grad_default_2, %reduce_grad_default_3, alpha=1)
return [%dot_default, %dot_default_1, %add_tensor_1]""",
        )

    def test_of_no_unit(self):
        """A parameter that no unit has; one micro-batch that uses it twice is added up first."""

        def graph(order: tuple[int, ...]) -> GraphModule:
            hand = Hand()
            own = hand.input("w", 4)
            inputs = [hand.input(f"x{i}", 4) for i in range(2)]
            ones = [hand.input(f"tangents_{i + 1}") for i in range(2)]
            losses = [hand(aten.dot.default, x, own) for x in inputs]
            grads = [hand(aten.mul.Tensor, inputs[i], ones[i]) for i in order]
            total = grads[0]
            for grad in grads[1:]:
                total = hand.add(total, grad)
            gm = hand.returns(*losses, total)
            set_context(gm, Context(batches=2))
            return gm

        gm = graph((1, 0))
        self.assertDocumented(module, "Of a parameter", gm)
        self.assertDocumented(module, "then", numbered(gm))
        self.assertGraph(
            numbered(graph((1, 1, 0, 0))),
            """\
%w: f32[4]
%x0: f32[4]
%x1: f32[4]
%tangents_1: f32[]
%tangents_2: f32[]
%dot_default: f32[] = dot(%x0, %w)
%dot_default_1: f32[] = dot(%x1, %w)
%mul_tensor: f32[4] = mul(%x1, %tangents_2)
%mul_tensor_1: f32[4] = mul(%x1, %tangents_2)
%mul_tensor_2: f32[4] = mul(%x0, %tangents_1)
%mul_tensor_3: f32[4] = mul(%x0, %tangents_1)
%add_tensor: f32[4] = add(%mul_tensor, %mul_tensor_1)
%add_tensor_3: f32[4] = add(%mul_tensor_2, %mul_tensor_3)
%add_tensor_4: f32[4] = add(%add_tensor_3, %add_tensor, alpha=1)
return [%dot_default, %dot_default_1, %add_tensor_4]""",
        )

    def test_leaves_alone(self):
        """One micro-batch of several losses; a sum with another term."""
        self.assertUnchanged(number_batches, joint(batches=1))
        gm = joint(torch.float32, torch.float32, with_other=True, reshard="keep")
        self.assertUnchanged(number_batches, gm)
