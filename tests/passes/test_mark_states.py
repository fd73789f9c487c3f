"""`mark_states`: the gradients of what the budget has no room for are marked, and the `update_` of a
whole step says so.
"""

from dataclasses import replace

from compiled_fsdp.passes.mark_states import mark_states
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit
from torch.fx import GraphModule

from compiled_fsdp.compiler.stitch import stitch
from compiled_fsdp.compiler.whole_step import WholeStep
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import is_state_hosted
from compiled_fsdp.ir.schema import REDUCE_GRAD
from compiled_fsdp.passes import mark_states as module
from compiled_fsdp.planning.plan import Plan

PLANNED = replace(
    PLAN, memory_budget=0.5, optimizer_state="budget", states_on_host=(("u", "w"), ("v", "w"))
)


def joint() -> GraphModule:
    hand = Hand()
    (spec,) = unit("u", {"w": (4, 4)})
    dy, flat = hand.input("tangents_1", 4, 4), hand.input("flat", 8)
    return hand.returns(hand.reduce_grad(hand.compute(dy), flat, spec))


def marked(gm: GraphModule) -> list[bool]:
    return [is_state_hosted(node) for node in find(gm.graph, REDUCE_GRAD)]


def step(plan: Plan) -> GraphModule:
    """The graph of a step of one parameter."""
    (spec,) = unit("u", {"w": (4,)})
    first, hand = Hand(), Hand()
    flat, x = first.input("primals_1", 2), first.input("primals_2", 4)
    forward = first.returns(first(aten.sum.dim_IntList, x, [0], True), flat, x)
    hand.mode = first.mode
    flat, x, one = hand.input("primals_1", 2), hand.input("x", 4), hand.input("tangents_1", 1)
    backward = hand.returns(hand.reduce_grad(hand(aten.mul.Tensor, x, one), flat, spec))
    mark_states(backward, plan)
    names = ("exp_avg", "exp_avg_sq")
    return stitch(
        forward,
        backward,
        1,
        WholeStep("step0", states=((("u", "w"), names),)),
        plan,
        is_fused=False,
    )[0]


class TestMarkStates(GraphTest):
    def test_docstring(self):
        self.assertDocumented(module, "Before", joint())
        self.assertEqual(marked(mark_states(joint(), PLANNED)), [True])

    def test_near_miss(self):
        """Another parameter of the unit's, which is not the first of its buffer."""
        self.assertUnchanged(mark_states, joint(), PLANNED)
        for named in ((), (("u", "v"),), (("v", "w"),)):
            plan = replace(PLANNED, states_on_host=named)
            self.assertEqual(marked(mark_states(joint(), plan)), [False])

    def test_a_mark_goes_again(self):
        """Trials change their minds."""
        gm = mark_states(joint(), PLANNED)
        self.assertEqual(marked(mark_states(gm, replace(PLANNED, states_on_host=()))), [False])

    def test_step(self):
        """Its `update_` knows how much is remembered, and where that rests."""
        self.assertGraph(
            step(PLANNED),
            """\
%primals_1: f32[2]
%primals_2: f32[4]
%sum_dim_int_list: f32[1] = sum(%primals_2, [0], True)
%full_default: f32[1] = full([1], 1.0, dtype=f32, device=cpu, pin_memory=False)
%mul_tensor: f32[4] = mul(%primals_2, %full_default)
%reduce_grad_default: f32[2] = reduce_grad(%mul_tensor, %primals_1, 'w', reshard=gather)
update_(%reduce_grad_default, %primals_1, [0], 'step0', None, 4, True)
return [%sum_dim_int_list]""",
        )
        self.assertGraph(
            step(PLAN),
            """\
%primals_1: f32[2]
%primals_2: f32[4]
%sum_dim_int_list: f32[1] = sum(%primals_2, [0], True)
%full_default: f32[1] = full([1], 1.0, dtype=f32, device=cpu, pin_memory=False)
%mul_tensor: f32[4] = mul(%primals_2, %full_default)
%reduce_grad_default: f32[2] = reduce_grad(%mul_tensor, %primals_1, 'w', reshard=gather)
update_(%reduce_grad_default, %primals_1, [0], 'step0')
return [%sum_dim_int_list]""",
        )
