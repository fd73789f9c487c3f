"""`name_collectives`: ours say what they carry, torch's stay as they are."""

import torch
from compiled_fsdp.passes.name_collectives import name_collectives
from kit.passes_harness import PLAN, GraphTest, Hand, unit
from torch.fx import GraphModule

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.graph import Builder
from compiled_fsdp.ir.meta import CommTag
from compiled_fsdp.ir.schema import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from compiled_fsdp.passes import name_collectives as module

(W,) = unit("layers.0#3", {"weight": (4, 2)})


def three(*names: str) -> GraphModule:
    """A gather, an exchange and an all-reduce, as ops of ours or of torch's."""
    hand = Hand()
    run = Builder(hand.end, hand.end, CommTag("gather", 0, (W,)))
    shard, rows, row = hand.input("shard", 4), hand.input("rows", 2, 4), hand.input("row", 4)
    if "torch" in names:
        gather = run(comm.WAIT, run(comm.ALL_GATHER, shard, 2, "g"))
        return hand.returns(gather, run(comm.WAIT, run(comm.ALL_REDUCE, row, "sum", "g")))
    return hand.returns(
        run(comm.WAIT, run(ALL_GATHER, shard, [1, 3], 2, "g")),
        run(comm.WAIT, run(ALL_TO_ALL, [rows], 2, "g")),
        run(comm.WAIT, run(ALL_REDUCE, row, "sum", "g")),
    )


class TestNameCollectives(GraphTest):
    def test_docstring(self):
        gm = three()
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", name_collectives(gm, PLAN))

    def test_graph(self):
        self.assertGraph(
            name_collectives(three(), PLAN),
            """\
%shard: f32[4]
%rows: f32[2,4]
%row: f32[4]
%all_gather_default: f32[8] = all_gather(%shard, [1, 3], 2, 'g', what='layers.0 (weight)', phase='forward')  # layers.0: gather
%wait_tensor_default: f32[8] = wait_tensor(%all_gather_default)  # layers.0: gather
%all_to_all_default: f32[2,4] = all_to_all([%rows], 2, 'g', what='layers.0 (weight)', phase='forward')  # layers.0: gather
%wait_tensor_default_1: f32[2,4] = wait_tensor(%all_to_all_default)  # layers.0: gather
%all_reduce_default: f32[4] = all_reduce(%row, 'sum', 'g', what='layers.0 (weight)', phase='forward')  # layers.0: gather
%wait_tensor_default_2: f32[4] = wait_tensor(%all_reduce_default)  # layers.0: gather
return [%wait_tensor_default, %wait_tensor_default_1, %wait_tensor_default_2]""",
        )

    def test_the_models_own_in_backward(self):
        hand = Hand()
        hand.input("tangents_1", 4)
        start = hand(ALL_GATHER, hand.input("x", 4, dtype=torch.float32), [4], 2, "tp")
        name_collectives(hand.returns(hand(comm.WAIT, start)), PLAN)
        self.assertEqual(start.kwargs, {"what": "the model's own", "phase": "backward"})

    def test_near_miss(self):
        self.assertUnchanged(name_collectives, three("torch"))
