"""`note_heads`: which outputs lead to which parameters is noted
where not all do; nothing changes.
"""

from compiled_fsdp.passes.note_heads import note_heads
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit
from torch._functorch._aot_autograd.descriptors import (
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    TangentAOTInput,
)
from torch.fx import GraphModule, Node

from compiled_fsdp.ir.graph import placeholders
from compiled_fsdp.ir.meta import Heads, get_heads, set_descriptor
from compiled_fsdp.passes import note_heads as module

(W,) = unit("u", {"w": (4,)})


def joint(reads: dict[str, str]) -> GraphModule:
    """A product with each flat buffer, in outputs "a", "b" or both."""
    hand = Hand()
    x = hand.input("x", 2)
    flats = {name: hand.input(name, 2) for name in reads}
    tangents = {name: hand.input(f"tangents_{i + 1}", 2) for i, name in enumerate("ab")}
    grads: list[Node] = []
    products = [hand(aten.mul.Tensor, x, flat) for flat in flats.values()]
    for name, flat in flats.items():
        pieces = [hand(aten.mul.Tensor, tangents[output], x) for output in reads[name]]
        grads.append(
            hand.reduce_grad(pieces[0] if len(pieces) == 1 else hand.add(*pieces), flat, W)
        )
    return hand.returns(*products, *grads)


def noted(gm: GraphModule) -> dict[str, Heads]:
    heads = {node.name: get_heads(node) for node in placeholders(gm.graph)}
    return {name: found for name, found in heads.items() if found is not None}


class TestNoteHeads(GraphTest):
    def test_docstring(self):
        gm = joint({"flat0": "a", "flat1": "b"})
        self.assertDocumented(module, "Before", gm)
        self.assertUnchanged(note_heads, gm)
        self.assertEqual(noted(gm), {"flat0": (2, {0: [0]}), "flat1": (2, {0: [1]})})

    def test_near_miss_both_outputs(self):
        gm = joint({"flat0": "ab", "flat1": "b"})
        note_heads(gm, PLAN)
        self.assertEqual(noted(gm), {"flat1": (2, {0: [1]})})

    def test_near_miss_one_output(self):
        hand = Hand()
        flat, tangent = hand.input("flat0", 2), hand.input("tangents_1", 4)
        gm = hand.returns(hand.reduce_grad(tangent, flat, W))
        self.assertUnchanged(note_heads, gm)
        self.assertEqual(noted(gm), {})

    def test_near_miss_parts_of_one_output(self):
        """Values and offsets of a nested tensor."""
        hand = Hand()
        flat, values = hand.input("flat0", 2), hand.input("tangents_1", 4)
        offsets = hand.input("tangents_2", 3)
        output = TangentAOTInput(PlainAOTOutput(0))
        for node, attr in ((values, "_values"), (offsets, "_offsets")):
            set_descriptor(node, SubclassGetAttrAOTInput(output, attr))
        gm = hand.returns(hand.reduce_grad(values, flat, W))
        self.assertUnchanged(note_heads, gm)
        self.assertEqual(noted(gm), {})
