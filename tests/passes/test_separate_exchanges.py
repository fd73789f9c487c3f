"""`separate_exchanges`: the user's all-to-alls share no group with gathers and reductions."""

from dataclasses import replace

from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.separate_exchanges import separate_exchanges
from compiled_fsdp.passes.verify import check
from kit.passes_harness import PLAN, GraphTest, Hand, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.collectives import ALL_REDUCE, WAIT, group_of, own_group
from compiled_fsdp.ir.graph import starts
from compiled_fsdp.ir.meta import set_captured
from compiled_fsdp.ir.schema import EXCHANGE
from compiled_fsdp.passes import separate_exchanges as module
from compiled_fsdp.planning.costs import Costs, Link
from compiled_fsdp.planning.plan import Plan
from compiled_fsdp.verification.invariant import GraphInvariantError
from compiled_fsdp.verification.meaning import Captured

SHARED = replace(PLAN, exchange_group="shared")


def routed(group: str = "shard", *, gathers: bool = True) -> GraphModule:
    """A weight, and tokens that travel over `group`."""
    hand = Hand()
    flat, x = hand.input("flat", 4), hand.input("x", 4, 2)
    (w,) = unit("u", {"w": (4, 2)})
    results = [hand.compute(hand.unshard(flat, w))] if gathers else []
    tokens = hand(WAIT, hand(EXCHANGE, x, [2, 2], [2, 2], group))
    gm = hand.returns(*results, tokens, hand(WAIT, hand(ALL_REDUCE, x, "sum", "shard")))
    set_captured(gm, Captured(gm.graph))
    return lower(gm, PLAN)


class TestSeparateExchanges(GraphTest):
    def test_graph(self):
        gm = separate_exchanges(routed(), PLAN)
        check(gm, PLAN, "separate_exchanges")  # the same meaning
        self.assertGraph(
            gm,
            """\
%flat: f32[4]
%x: f32[4,2]
%all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
%wait_tensor_default_2: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[4,2] = view(%wait_tensor_default_2, [4, 2])  # u: gather
%neg_default: f32[4,2] = neg(%view_default)
%all_to_all_single_default: f32[4,2] = all_to_all_single(%x, [2, 2], [2, 2], 'shard_exchanges')
%wait_tensor_default: f32[4,2] = wait_tensor(%all_to_all_single_default)
%all_reduce_default: f32[4,2] = all_reduce(%x, 'sum', 'shard')
%wait_tensor_default_1: f32[4,2] = wait_tensor(%all_reduce_default)
return [%neg_default, %wait_tensor_default, %wait_tensor_default_1]""",
        )

    def test_near_miss(self):
        """Another group; nothing of ours in the graph; the user wants them where they are."""
        self.assertUnchanged(separate_exchanges, routed("ep"))
        self.assertUnchanged(separate_exchanges, routed(gathers=False))
        self.assertUnchanged(separate_exchanges, routed(), SHARED)

    def test_only_all_to_alls_of_the_users(self):
        """Anything else over a second group is another program;
        it costs what the first one does.
        """
        gm = separate_exchanges(routed(), PLAN)
        reduced = starts(gm.graph)[-1]
        reduced.args = (*reduced.args[:-1], own_group("shard"))
        with self.assertRaisesRegex(GraphInvariantError, "with the same effects"):
            check(gm, PLAN, "somebody")
        costs = Costs(1.0, 1.0, 1.0, (("other", Link(1.0, 1.0)), ("shard", Link(2.0, 2.0))))
        self.assertEqual(costs.link(group_of(starts(gm.graph)[1])).latency, 2.0)

    def test_docstring(self):
        self.assertIn("0_exchanges", module.__doc__ or "")
        with self.assertRaisesRegex(ValueError, "exchange_group='none'; should be one of"):
            Plan(exchange_group="none")
