"""`mark_offloaded`: what the budget has no room for is marked, and where the graph is split, it is
on the host from forward to backward.
"""

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from compiled_fsdp.passes.mark_offloaded import mark_offloaded
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit
from torch.fx import GraphModule

from compiled_fsdp.compiler.offload import offload
from compiled_fsdp.ir.collectives import ALL_REDUCE, WAIT
from compiled_fsdp.ir.graph import Builder, output
from compiled_fsdp.ir.meta import is_offloaded
from compiled_fsdp.passes import mark_offloaded as module
from compiled_fsdp.planning.offload import movable
from compiled_fsdp.planning.recompute import Saved
from compiled_fsdp.wire import copies


@pytest.fixture
def device() -> Iterator[None]:
    """The CPU has memory beside the host's."""
    with mock.patch.object(copies, "is_apart", return_value=True):
        yield


def joint() -> GraphModule:
    hand = Hand()
    x, w, v, u = (hand.input(name, 4, 4) for name in "xwvu")
    dy = hand.input("tangents_1", 4, 4)
    a = hand(aten.mm.default, x, w)
    y = hand(aten.mm.default, hand(aten.silu.default, a), v)
    dh = hand(aten.mm.default, dy, u)
    return hand.returns(y, hand(aten.silu_backward.default, dh, a))


def halves(kind: str = "") -> tuple[GraphModule, GraphModule]:
    """A forward that saves what it computes, and its input, for a backward.

    kind: "views": two of them, and not what they are views of; "transposed": a view of another
    order; "reduced": what is awaited from other ranks.
    """
    hand = Hand()
    x = hand.input("primals_1", 4, 4)
    a = hand(aten.tanh.default, x)
    values = [a]
    if kind == "views":
        values = [hand(aten.slice.Tensor, a, 0, 0, 2), hand(aten.slice.Tensor, a, 0, 2, 4)]
    elif kind == "transposed":
        values = [hand(aten.t.default, a)]
    elif kind == "reduced":
        values = [hand(WAIT, hand(ALL_REDUCE, a, "sum", "shard"))]
    forward = hand.returns(hand(aten.sin.default, values[0]), x, *values)
    hand = Hand()
    saved = [hand.input(n.name, *n.meta["val"].shape) for n in (x, *values)]
    dy = hand.input("tangents_1", *saved[1].meta["val"].shape)
    read = [hand(aten.mul.Tensor, dy, value) for value in saved[1:]]
    return forward, hand.returns(*read, hand(aten.neg.default, saved[0]))


def candidates(forward: GraphModule, backward: GraphModule) -> list[str]:
    return [each.name for each in movable(Saved.of(forward.graph, backward.graph))]


@pytest.mark.usefixtures("device")
class TestMarkOffloaded(GraphTest):
    def test_docstring(self):
        self.assertDocumented(module, "Before", joint())
        gm = mark_offloaded(joint(), replace(PLAN, offloaded=("mm_default", "another")))
        self.assertEqual([n.name for n in gm.graph.nodes if is_offloaded(n)], ["mm_default"])

    def test_near_miss(self):
        self.assertUnchanged(mark_offloaded, joint())
        self.assertFalse(any(map(is_offloaded, joint().graph.nodes)))

    def test_split(self):
        """Copied where it is computed, and back where it is read first."""
        forward, backward = halves()
        self.assertEqual(candidates(forward, backward), ["tanh_default"])
        self.assertEqual(offload((forward, backward), ["tanh_default", "another"]), ["another"])
        self.assertGraph(
            forward,
            """\
%primals_1: f32[4,4]
%tanh_default: f32[4,4] = tanh(%primals_1)
%copy_to_default: f32[4,4] = copy_to(%tanh_default, 'host', False)
%sin_default: f32[4,4] = sin(%tanh_default)
return [%sin_default, %primals_1, %copy_to_default]""",
        )
        self.assertGraph(
            backward,
            """\
%primals_1: f32[4,4]
%tanh_default_on_host: f32[4,4]
%tangents_1: f32[4,4]
%copy_to_default: f32[4,4] = copy_to(%tanh_default_on_host, 'cpu', False)
%mul_tensor: f32[4,4] = mul(%tangents_1, %copy_to_default)
%neg_default: f32[4,4] = neg(%primals_1)
return [%mul_tensor, %neg_default]""",
        )

    def test_views_of_one_storage(self):
        """It travels once, as a whole, and backward makes the views."""
        forward, backward = halves("views")
        self.assertEqual(candidates(forward, backward), ["tanh_default"])
        self.assertEqual(offload((forward, backward), ["tanh_default"]), [])
        self.assertGraph(
            forward,
            """\
%primals_1: f32[4,4]
%tanh_default: f32[4,4] = tanh(%primals_1)
%copy_to_default: f32[4,4] = copy_to(%tanh_default, 'host', False)
%slice_tensor: f32[2,4] = slice(%tanh_default, 0, 0, 2)
%sin_default: f32[2,4] = sin(%slice_tensor)
return [%sin_default, %primals_1, %copy_to_default]""",
        )
        self.assertGraph(
            backward,
            """\
%primals_1: f32[4,4]
%tanh_default_on_host: f32[4,4]
%tangents_1: f32[2,4]
%copy_to_default: f32[4,4] = copy_to(%tanh_default_on_host, 'cpu', False)
%slice_tensor: f32[2,4] = slice(%copy_to_default, 0, 0, 2)
%mul_tensor: f32[2,4] = mul(%tangents_1, %slice_tensor)
%slice_tensor_1: f32[2,4] = slice(%copy_to_default, 0, 2, 4)
%mul_tensor_1: f32[2,4] = mul(%tangents_1, %slice_tensor_1)
%neg_default: f32[4,4] = neg(%primals_1)
return [%mul_tensor, %mul_tensor_1, %neg_default]""",
        )

    def test_what_other_ranks_send_is_awaited_first(self):
        forward, backward = halves("reduced")
        (name,) = candidates(forward, backward)
        self.assertEqual(offload((forward, backward), [name]), [])
        (copied,) = (n for n in forward.graph.nodes if "copy_to" in n.name)
        self.assertIs(copied.args[0].target, WAIT)

    def test_what_stays_on_the_device(self):
        """A user's input; what the user gets; what is written to; what has gaps; on a CPU, all."""
        forward, backward = halves("transposed")
        self.assertEqual(candidates(forward, backward), ["tanh_default"])
        end = output(forward.graph)
        end.args = ([end.args[0][2], *end.args[0][1:]],)
        self.assertEqual(candidates(forward, backward), [])
        self.assertEqual(offload((forward, backward), ["tanh_default"]), ["tanh_default"])
        forward, backward = halves()
        x, a = list(forward.graph.nodes)[:2]
        with forward.graph.inserting_after(a):
            written = forward.graph.call_function(aten.copy_.default, (a, x))
        written.meta["val"] = a.meta["val"]
        self.assertEqual(candidates(forward, backward), [])
        forward, backward = halves()
        for gm in (forward, backward):
            node = next(n for n in gm.graph.nodes if n.name == "tanh_default")
            with node.meta["val"].fake_mode:
                node.meta["val"] = torch.empty(8, 4)[::2]
        self.assertEqual(candidates(forward, backward), [])
        with mock.patch.object(copies, "is_apart", return_value=False):
            self.assertEqual(candidates(*halves()), [])

    def test_what_may_be_written_over_stays(self):
        """Inductor does not know that a copy reads it still;
        nor that of a clone, which it leaves out.
        """
        for op, *others in (
            (aten.slice_scatter.default, 0, 0, 2),
            (aten.select_scatter.default, 0, 0),
            (aten.copy.default,),
        ):
            for clones in (False, True):
                forward, backward = halves()
                x, a = list(forward.graph.nodes)[:2]
                rows = {aten.slice_scatter.default: 2, aten.copy.default: 4}.get(op, 1)
                build = Builder(output(forward.graph), a)
                given = build(aten.clone.default, a) if clones else a
                put = build(aten.slice.Tensor, x, 0, 0, rows)
                put = build(aten.squeeze.dim, put, 0) if rows == 1 else put
                build(op, given, put, *others)
                self.assertEqual(candidates(forward, backward), [])
                self.assertEqual(offload((forward, backward), ["tanh_default"]), ["tanh_default"])

    def test_a_parameter_stays(self):
        """It is gathered again instead."""
        hand = Hand()
        (spec,) = unit("u", {"w": (4, 4)}, reshard="keep")
        flat = hand.input("primals_1", 8)
        w = hand.unshard(flat, spec)
        forward = hand.returns(hand(aten.sin.default, w), w)
        hand = Hand()
        saved, dy = hand.input(w.name, 4, 4), hand.input("tangents_1", 4, 4)
        backward = hand.returns(hand(aten.mul.Tensor, dy, saved))
        self.assertEqual(candidates(forward, backward), [])
