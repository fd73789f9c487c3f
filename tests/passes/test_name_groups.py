"""`name_groups`: a user's collectives are over groups that are called the same on all ranks."""

from compiled_fsdp.passes.base import Context
from compiled_fsdp.passes.name_groups import name_groups
from kit.passes_harness import PLAN, GraphTest, Hand
from torch.fx import GraphModule

from compiled_fsdp.ir.collectives import ALL_GATHER, ALL_REDUCE, WAIT
from compiled_fsdp.ir.meta import set_context


def known_as(gm: GraphModule, **names: str) -> GraphModule:
    """With these names for groups."""
    set_context(gm, Context(common_name=lambda group: names.get(group, group)))
    return gm


def row_parallel() -> GraphModule:
    """Partial sums added up over a group, and gathered over another."""
    hand = Hand()
    gathered = hand(WAIT, hand(ALL_GATHER, hand.input("x", 3, 4), 2, "7"))
    return hand.returns(hand(WAIT, hand(ALL_REDUCE, gathered, "sum", "5")))


class TestNameGroups(GraphTest):
    def test_graph(self):
        gm = name_groups(known_as(row_parallel(), **{"7": "cp_2of8", "5": "tp_4of8"}), PLAN)
        self.assertGraph(
            gm,
            """\
%x: f32[3,4]
%all_gather_into_tensor_default: f32[6,4] = all_gather_into_tensor(%x, 2, 'cp_2of8')
%wait_tensor_default: f32[6,4] = wait_tensor(%all_gather_into_tensor_default)
%all_reduce_default: f32[6,4] = all_reduce(%wait_tensor_default, 'sum', 'tp_4of8')
%wait_tensor_default_1: f32[6,4] = wait_tensor(%all_reduce_default)
return [%wait_tensor_default_1]""",
        )

    def test_near_miss(self):
        """Groups of one name; an operation with a name that some group has; no context."""
        self.assertUnchanged(name_groups, known_as(row_parallel()))
        self.assertUnchanged(name_groups, known_as(row_parallel(), sum="tp", avg="dp"))
        self.assertUnchanged(name_groups, row_parallel())
