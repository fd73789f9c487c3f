"""`outline`: what repeats between collectives is called; everything else stays where it is."""

from __future__ import annotations

import copy
import operator
import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from compiled_fsdp.passes.base import Context
from compiled_fsdp.passes.bucket_all_gather import bucket_all_gather
from compiled_fsdp.passes.copy_columns import copy_columns
from compiled_fsdp.passes.inline_pointwise import inline_pointwise
from compiled_fsdp.passes.invariants.messages import divided
from compiled_fsdp.passes.join_kernels import join_kernels
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.outline import outline
from compiled_fsdp.passes.verify import check
from kit.passes_harness import PLAN, GraphTest, Hand, aten, fake_ranks, unit
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Interpreter

from compiled_fsdp.ir import repeats
from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import set_captured, set_context
from compiled_fsdp.ir.printer import show
from compiled_fsdp.ir.repeats import LEAST_NODES, LEAST_TIMES, find_repeats
from compiled_fsdp.ir.spans import may_lose_dims, spans
from compiled_fsdp.ir.subgraphs import INVOKE
from compiled_fsdp.passes import join_kernels as joining
from compiled_fsdp.passes import outline as module
from compiled_fsdp.verification.meaning import Captured

if TYPE_CHECKING:
    from collections.abc import Callable

    from compiled_fsdp.passes.base import PassFunction
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

OUTLINES = Context(is_fused=True, inline="")
WIDTH = 4
SIDE = 8  # of parameters whose shards begin where vectors may be read from


def outlined(gm: GraphModule, plan: Plan = PLAN, context: Context = OUTLINES) -> GraphModule:
    set_context(gm, context)
    result = outline(gm, plan)
    set_context(gm, None)
    result.graph.lint()
    result.recompile()
    return result


def layers(*nodes: int) -> GraphModule:
    """Layers that multiply with a parameter and compute so many nodes, with a residual."""
    hand = Hand()
    x = hand.input("x", WIDTH, WIDTH)
    flats = [hand.input(f"flat{i}", WIDTH * WIDTH // 2) for i in range(len(nodes))]
    for i, (flat, count) in enumerate(zip(flats, nodes, strict=True)):
        (w,) = unit(f"layers.{i}", {"w": (WIDTH, WIDTH)})
        y = hand(aten.mm.default, x, hand.unshard(flat, w))
        for _ in range(count):
            y = hand.compute(y)
        x = hand.add(x, y)
    return lower(hand.returns(x), PLAN)


def plain_layers() -> GraphModule:
    """Three layers that negate, and multiply with a parameter."""
    hand = Hand()
    y = hand.input("x", WIDTH, WIDTH)
    flats = [hand.input(f"flat{i}", WIDTH * WIDTH // 2) for i in range(3)]
    for i, flat in enumerate(flats):
        (w,) = unit(f"layers.{i}", {"w": (WIDTH, WIDTH)})
        full = hand.unshard(flat, w)
        y = hand(aten.mm.default, hand.compute(y), full)
    return lower(hand.returns(y), PLAN)


class TestOutline(GraphTest):
    def test_docstring(self):
        gm = plain_layers()
        self.assertDocumented(module, "Before", gm)
        with mock.patch.object(repeats, "LEAST_NODES", 2):
            self.assertDocumented(module, "After", outlined(gm))

    def test_graph(self):
        """The layers in the middle are calls of one subgraph; the sum at the end of a layer is made
        where the next one reads it. The first and the last compute something else.
        """
        with mock.patch.object(repeats, "LEAST_NODES", 3):
            gm = outlined(layers(*[1] * 6))
        self.assertGraph(
            gm,
            """\
%x: f32[4,4]
%flat0: f32[8]
%flat1: f32[8]
%flat2: f32[8]
%flat3: f32[8]
%flat4: f32[8]
%flat5: f32[8]
%all_gather_into_tensor_default: f32[16] = all_gather_into_tensor(%flat0, 2, 'shard')  # layers.0: gather
%wait_tensor_default: f32[16] = wait_tensor(%all_gather_into_tensor_default)  # layers.0: gather
%view_default: f32[4,4] = view(%wait_tensor_default, [4, 4])  # layers.0: gather
%mm_default: f32[4,4] = mm(%x, %view_default)
%neg_default: f32[4,4] = neg(%mm_default)
%add_tensor: f32[4,4] = add(%x, %neg_default)
%all_gather_into_tensor_default_1: f32[16] = all_gather_into_tensor(%flat1, 2, 'shard')  # layers.1: gather
%wait_tensor_default_1: f32[16] = wait_tensor(%all_gather_into_tensor_default_1)  # layers.1: gather
%view_default_1: f32[4,4] = view(%wait_tensor_default_1, [4, 4])  # layers.1: gather
%mm_default_1: f32[4,4] = mm(%add_tensor, %view_default_1)
%all_gather_into_tensor_default_2: f32[16] = all_gather_into_tensor(%flat2, 2, 'shard')  # layers.2: gather
%wait_tensor_default_2: f32[16] = wait_tensor(%all_gather_into_tensor_default_2)  # layers.2: gather
%view_default_2: f32[4,4] = view(%wait_tensor_default_2, [4, 4])  # layers.2: gather
%fsdp_region_0 = @fsdp_region_0
%invoke_subgraph: tuple = invoke_subgraph(%fsdp_region_0, 'fsdp_region_0', %mm_default_1, %add_tensor, %view_default_2)
%getitem: f32[4,4] = getitem(%invoke_subgraph, 0)
%getitem_1: f32[4,4] = getitem(%invoke_subgraph, 1)
%all_gather_into_tensor_default_3: f32[16] = all_gather_into_tensor(%flat3, 2, 'shard')  # layers.3: gather
%wait_tensor_default_3: f32[16] = wait_tensor(%all_gather_into_tensor_default_3)  # layers.3: gather
%view_default_3: f32[4,4] = view(%wait_tensor_default_3, [4, 4])  # layers.3: gather
%invoke_subgraph_1: tuple = invoke_subgraph(%fsdp_region_0, 'fsdp_region_0', %getitem_1, %getitem, %view_default_3)
%getitem_2: f32[4,4] = getitem(%invoke_subgraph_1, 0)
%getitem_3: f32[4,4] = getitem(%invoke_subgraph_1, 1)
%all_gather_into_tensor_default_4: f32[16] = all_gather_into_tensor(%flat4, 2, 'shard')  # layers.4: gather
%wait_tensor_default_4: f32[16] = wait_tensor(%all_gather_into_tensor_default_4)  # layers.4: gather
%view_default_4: f32[4,4] = view(%wait_tensor_default_4, [4, 4])  # layers.4: gather
%invoke_subgraph_2: tuple = invoke_subgraph(%fsdp_region_0, 'fsdp_region_0', %getitem_3, %getitem_2, %view_default_4)
%getitem_4: f32[4,4] = getitem(%invoke_subgraph_2, 0)
%getitem_5: f32[4,4] = getitem(%invoke_subgraph_2, 1)
%all_gather_into_tensor_default_5: f32[16] = all_gather_into_tensor(%flat5, 2, 'shard')  # layers.5: gather
%wait_tensor_default_5: f32[16] = wait_tensor(%all_gather_into_tensor_default_5)  # layers.5: gather
%view_default_5: f32[4,4] = view(%wait_tensor_default_5, [4, 4])  # layers.5: gather
%neg_default_4: f32[4,4] = neg(%getitem_5)
%add_tensor_4: f32[4,4] = add(%getitem_4, %neg_default_4)
%mm_default_5: f32[4,4] = mm(%add_tensor_4, %view_default_5)
%neg_default_5: f32[4,4] = neg(%mm_default_5)
%add_tensor_5: f32[4,4] = add(%add_tensor_4, %neg_default_5)
return [%add_tensor_5]""",
        )
        self.assertExpectedInline(
            show(gm.fsdp_region_0.graph),
            """\
%arg0_1: f32[4,4]
%arg1_1: f32[4,4]
%arg2_1: f32[4,4]
%neg_default_1: f32[4,4] = neg(%arg0_1)
%add_tensor_1: f32[4,4] = add(%arg1_1, %neg_default_1)
%mm_default_2: f32[4,4] = mm(%add_tensor_1, %arg2_1)
return [%add_tensor_1, %mm_default_2]""",
        )

    def test_two_layers(self):
        self.assertUnchanged(outlined, layers(LEAST_NODES, LEAST_NODES))

    def test_other_layers(self):
        self.assertUnchanged(outlined, layers(*range(LEAST_NODES, LEAST_NODES + 3)))

    def test_small_layers(self):
        self.assertUnchanged(outlined, layers(*[LEAST_NODES - 3] * 5))

    def test_off(self):
        gm = layers(*[LEAST_NODES] * 5)
        self.assertUnchanged(outlined, gm, replace(PLAN, regions="off"))
        without = partial(outlined, context=Context(is_fused=True))
        self.assertUnchanged(without, gm)

    def test_why_alone(self):
        found = find_repeats(layers(*[LEAST_NODES] * 6, LEAST_NODES + 2, LEAST_NODES).graph)
        self.assertEqual([len(group) for group in found.groups], [5])
        self.assertExpectedInline(
            "\n".join(f"{span.unit}: {found.why_alone(span)}" for span in found.alone),
            """\
layers.0: %mm_default (aten.mm.default) where layers.2 has %neg_default_8 (aten.neg.default)
layers.7: %neg_default_56 (aten.neg.default) where layers.2 has %add_tensor_1 (aten.add.Tensor)""",
        )


def bucketed_layers(*orders: str) -> GraphModule:
    """Layers that multiply with two parameters, copied out of one bucket, in which they lie in this
    order.
    """
    hand = Hand()
    y = hand.input("x", SIDE, SIDE)
    flats = [hand.input(f"flat{i}", SIDE * SIDE) for i in range(len(orders))]
    for i, (flat, order) in enumerate(zip(flats, orders, strict=True)):
        specs = dict(
            zip(order, unit(f"layers.{i}", dict.fromkeys(order, (SIDE, SIDE))), strict=True)
        )
        for name in "ab":
            y = hand(aten.mm.default, hand.compute(y), hand.unshard(flat, specs[name]))
    gm = bucket_all_gather(lower(hand.returns(y), PLAN), PLAN)
    return copy_columns(gm, PLAN)


@pytest.mark.parametrize("orders", [("ab",) * 4, ("ab", "ba", "ab", "ba", "ab", "ba")])
def test_copies_are_made_inside_of_the_bucket(orders: tuple[str, ...]) -> None:
    """Of each region the bucket is what goes in, not a piece for each parameter; where the pieces lie
    elsewhere, the pieces do. What comes out is the same.
    """
    with fake_ranks(2), mock.patch.object(repeats, "LEAST_NODES", 2):
        expected = Captured(bucketed_layers(*orders).graph)
        gm = outlined(bucketed_layers(*orders))
        set_captured(gm, expected)
        calls = gm.graph.find_nodes(op="call_function", target=INVOKE)
        insides = [gm.get_submodule(str(call.args[1])).graph for call in calls]
        if len(set(orders)) == 1:
            waits = [node for call in calls for node in call.args[2:] if node.target is WAIT]
            assert len(waits) == len(calls) == 3
            assert len(find(gm.graph, aten.slice.Tensor)) == 2  # of the first layer
            assert len(find(insides[0], aten.slice.Tensor)) == 2
        else:
            assert len(find(gm.graph, aten.slice.Tensor)) == 2 * len(orders)
        check(gm, PLAN, "outline")


def test_a_constant_goes_in() -> None:
    """Of the graph's module, as `torch.tensor([...])` in a forward is, where each call has its
    own.
    """
    with mock.patch.object(repeats, "LEAST_NODES", 2):
        gm = plain_layers()
        for i, node in enumerate(find(gm.graph, aten.neg.default)):
            values = torch.arange(float(WIDTH)) + i
            gm.register_buffer(f"_tensor_constant{i}", values)
            with gm.graph.inserting_before(node):
                constant = gm.graph.get_attr(f"_tensor_constant{i}")
                constant.meta["val"] = node.meta["val"][0]
                scaled = gm.graph.call_function(aten.mul.Tensor, (node.args[0], constant))
            scaled.meta["val"] = node.meta["val"]
            node.args = (scaled,)
        gm = outlined(gm)
    calls = gm.graph.find_nodes(op="call_function", target=INVOKE)
    given = [[str(n.target) for n in call.args[2:] if n.op == "get_attr"] for call in calls]
    assert given == [[f"_tensor_constant{i}"] for i in range(3)]


def reduced_layers(count: int) -> GraphModule:
    """Layers whose gradients are divided before they are reduced, as FSDP1's and fp16's are."""
    hand = Hand()
    y = hand.input("y", SIDE, SIDE)
    for i in range(count):
        (spec,) = unit(f"layers.{i}", {"w": (SIDE, SIDE)}, pre_divide=2.0, post_divide=1.0)
        y = hand(aten.mm.default, hand.compute(y), y)
        hand.reduce_grad(y, hand.input(f"flat{i}", SIDE * SIDE // 2), spec)
    return lower(hand.returns(y), PLAN)


def test_divisions_inside_of_a_call_are_seen() -> None:
    """By `verify`, of every layer: what a call sends to others was divided in it, or not."""
    with fake_ranks(2), mock.patch.object(repeats, "LEAST_NODES", 2):
        gm = outlined(reduced_layers(4))
        assert len(gm.graph.find_nodes(op="call_function", target=INVOKE)) >= LEAST_TIMES
        (call, *_) = gm.graph.find_nodes(op="call_function", target=INVOKE)
        (division,) = find(gm.get_submodule(str(call.args[1])).graph, aten.div.Tensor)
        assert not list(divided(gm, PLAN))
        division.args = (division.args[0], 4.0)
        found = [words for _, words in divided(gm, PLAN)]
    said = "are divided by (4.0, 1.0), not by (2.0, 1.0)"
    assert [words.endswith(said) for words in found] == [True] * 4, found


def test_what_writes_ends_a_span() -> None:
    """And so do random numbers of torch's generator, and what Inductor makes a write of; not
    scatters, which are pointwise.
    """
    hand = Hand()
    x, token = hand.input("x", 4), hand.input("token", 1)
    a = hand.compute(x)
    hand(aten.add_.Tensor, token, 1)
    b = hand.compute(a)
    c = hand(aten.bernoulli.p, b, 0.5)
    d = hand(aten.copy.default, c, hand.compute(c))
    e = hand(aten.slice_scatter.default, d, hand.compute(d), 0, 0, 4)
    parts = hand(aten.split.Tensor, e, 2)
    gm = hand.returns(hand(operator.getitem, parts, 1))
    found = [[node.name for node in span.nodes] for span in spans(gm.graph)]
    last = ["neg_default_3", "slice_scatter_default", "split_tensor", "getitem"]
    assert found == [["neg_default"], ["neg_default_1"], ["neg_default_2"], last]


def test_nothing_moves_past_a_write_to_what_it_reads() -> None:
    """A value that only the next span reads is computed there, unless what it reads is another by
    then.
    """
    for ending, is_moved in (("token", True), ("value", False), ("view", False)):
        hand = Hand()
        x, token = hand.input("x", 4), hand.input("token", 1)
        value = hand.compute(x)
        view = hand(aten.view.default, value, [2, 2])
        last = hand(aten.sin.default, value)
        hand(aten.add_.Tensor, {"token": token, "value": value, "view": view}[ending], 1)
        gm = hand.returns(hand.compute(last))
        moved = [node.name for span in spans(gm.graph) for node in span.nodes[: span.num_moved]]
        assert moved == (["sin_default"] if is_moved else []), ending


@pytest.mark.parametrize("is_param", [False, True])
def test_what_reads_a_parameter_stays(is_param: bool) -> None:
    """Through a view too: the gathered buffer would live on."""
    hand = Hand()
    x, flat, token = hand.input("x", 4, 4), hand.input("flat", 8), hand.input("token", 1)
    (w,) = unit("u", {"w": (4, 4)})
    y = hand.compute(x)
    read = hand.unshard(flat, w) if is_param else hand.compute(y)
    last = hand.add(y, hand(aten.permute.default, read, [1, 0]))
    hand(aten.add_.Tensor, token, 1)
    gm = lower(hand.returns(hand.compute(last)), PLAN)
    moved = [node for span in spans(gm.graph) for node in span.nodes[: span.num_moved]]
    assert bool(moved) != is_param


DIFFERENCES: dict[str, Callable[[Hand], Any]] = {
    "shape": lambda hand: hand(aten.slice.Tensor, hand.input("y", 8, 4), 0, 0, 3),
    "dtype": lambda hand: hand.input("y", 4, 4, dtype=torch.float64),
    "strides": lambda hand: hand(aten.permute.default, hand.input("y", 4, 4), [1, 0]),
    "alignment": lambda hand: hand(aten.slice.Tensor, hand.input("y", 5, 4), 0, 1, 5),
}


@pytest.mark.parametrize("name", ["none", *DIFFERENCES])
def test_spans_that_differ_are_apart(name: str) -> None:
    """One of three reads a value of another shape, dtype, stride, or place in its storage."""
    hand = Hand()
    token = hand.input("token", 1)
    sources = [hand.input(f"x{i}", 4, 4) for i in range(LEAST_TIMES - 1)]
    sources.append(DIFFERENCES[name](hand) if name in DIFFERENCES else hand.input("y", 4, 4))
    results = []
    for source in sources:
        value = source
        for _ in range(LEAST_NODES):
            value = hand.compute(value)
        hand(aten.add_.Tensor, token, 1)
        results.append(value)
    found = find_repeats(hand.returns(*results).graph)
    assert len(found.groups) == (name == "none")
    if name != "none":
        assert found.why_none == f"nothing occurs {LEAST_TIMES} times"
        assert found.why_alone(found.alone[0]).startswith(f"it occurs {LEAST_TIMES - 1} times")


def is_dense(node: Node) -> bool:
    """Whether no two elements lie in one place, as those of an expanded value do."""
    return 0 not in node.meta["val"].stride()


class Program:
    """A random graph: blocks of one to three kinds, with writes to a token between and inside them.

    A block reads the value before it, a weight of its own, and now and then something that is
    older; it leaves views, parts and transposed values to later blocks and to the output.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hand = Hand()
        self.hand.mode = nullcontext()  # real values are made faster than fake ones
        self.token = self.hand.input("token", 1)
        self.last = self.hand.input("x", WIDTH, WIDTH)
        self.old = [self.last]
        self.read_later: list[Node] = []
        kinds = [self.random.getrandbits(32) for _ in range(self.random.randint(1, 3))]
        weights = [self.hand.input(f"w{i}", WIDTH, WIDTH) for i in range(8)]
        order = self.random.choices(kinds, k=len(weights))
        for kind, weight in zip(order, weights, strict=True):
            self.block(random.Random(kind), weight)
            if self.random.random() < 0.2:
                self.old.append(self.last)
        used = self.random.sample(self.read_later, k=len(self.read_later) // 2)
        self.gm = self.hand.returns(self.last, *used)

    def block(self, choose: random.Random, weight: Node) -> None:
        hand, pool = self.hand, [self.last, weight]
        for _ in range(choose.randint(6, 16)):
            a, b = choose.choice(pool[-5:]), choose.choice(pool)
            made = choose.choice(self.ways())(choose, a, b)
            pool.append(made)
            if choose.random() < 0.1:
                self.read_later.append(made)
            if choose.random() < 0.1:
                self.write(choose.choice(pool[2:] or [self.token]))
        older = self.random.choice(self.old) if choose.random() < 0.3 else pool[0]
        self.last = hand.add(pool[-1], older)
        self.write()

    def write(self, to: Node | None = None) -> None:
        """End a span: by a write to the token, or to a value that is read before and after."""
        target = self.token if to is None or not is_dense(to) else to
        self.hand(aten.add_.Tensor, target, 1)

    def ways(self) -> list[Any]:
        hand, halves = self.hand, WIDTH // 2
        return [
            lambda c, a, b: hand(aten.sin.default, a),
            lambda c, a, b: hand.add(a, b),
            lambda c, a, b: hand(aten.sin.default, hand(aten.mm.default, a, b)),
            lambda c, a, b: hand(aten.permute.default, a, [1, 0]),
            lambda c, a, b: (
                hand(
                    aten.view.default,
                    hand(
                        aten.clone.default,
                        hand(aten.view.default, hand(aten.clone.default, a), [2, -1]),
                    ),
                    [WIDTH, WIDTH],
                )
                if a.meta["val"].is_contiguous()
                else hand(aten.sin.default, a)
            ),
            lambda c, a, b: hand(
                aten.cat.default,
                [hand(operator.getitem, hand(aten.split.Tensor, a, halves), i) for i in (1, 0)],
            ),
            lambda c, a, b: hand.add(a, hand(aten.mean.dim, b, [c.randint(0, 1)], True)),
            lambda c, a, b: hand(
                aten.slice_scatter.default, a, hand(aten.slice.Tensor, b, 0, 0, 2), 0, 2, 4
            ),
            lambda c, a, b: hand(torch.ops.prims.convert_element_type.default, a, torch.float32),
            lambda c, a, b: hand(aten.expand.default, hand(aten.slice.Tensor, a, 0, 0, 1), [4, 4]),
        ]


@pytest.mark.parametrize("before", [(), (inline_pointwise,), (join_kernels, inline_pointwise)])
@pytest.mark.parametrize("start", range(0, 150, 50))
def test_random_graphs_compute_the_same(
    start: int, before: tuple[PassFunction, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with views and older values handed on; a good part of them calls something.

    before: passes that have come before.
    """
    # what may be moved is moved: also behind writes, which end these spans, and if it saves nothing
    monkeypatch.setattr(joining, "_awaits_gather", lambda node: True)
    monkeypatch.setattr(joining, "saved_by_moving", lambda *_: 1)
    monkeypatch.setattr(joining, "left_behind", lambda nodes: 1 << 20)
    num_calls = num_changed = 0
    for seed in range(start, start + 50):
        gm = Program(seed).gm
        generator = torch.Generator().manual_seed(seed)
        inputs = [
            torch.randn(node.meta["val"].shape, generator=generator)
            for node in gm.graph.nodes
            if node.op == "placeholder"
        ]
        expected = Interpreter(gm).run(*copy.deepcopy(inputs))
        names = [node.name for node in gm.graph.nodes]
        set_context(gm, OUTLINES)
        for each in before:
            each(gm, PLAN)
        num_changed += names != [node.name for node in gm.graph.nodes]
        gm = outlined(gm)
        num_calls += len(find(gm.graph, INVOKE))
        for value, other in zip(Interpreter(gm).run(*inputs), expected, strict=True):
            torch.testing.assert_close(value, other, rtol=0, atol=0, msg=f"seed {seed}")
    assert num_calls > 40
    assert (num_changed > 0) == bool(before)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("dims", "keepdim", "may_lose"),
    [
        ([0, 1], True, True),
        ([0, 1], False, False),
        ([0], False, True),
        ([2], True, False),
        ([-1], True, False),
    ],
)
def test_sums_that_inductor_returns_with_less_dims(
    device: str, dims: list[int], keepdim: bool, may_lose: bool
) -> None:
    """On a GPU, sums over rows of more than one dim. A region may have them if they can be viewed
    with one.
    """
    with FakeTensorMode():
        hand = Hand()
        x = hand.input("x", 2, 3, WIDTH)
        found = hand(aten.sum.dim_IntList, x, dims, keepdim)
        given = torch.empty(2, 3, WIDTH, device=device)
        for node, value in ((x, given), (found, given.sum(dims, keepdim))):
            node.meta["val"] = value
    hand.returns(hand(aten.mm.default, *(hand.input(n, WIDTH, WIDTH) for n in "ab")), found)
    (span,) = (each for each in spans(hand.graph) if found in each.nodes)
    assert found in span.outputs
    assert may_lose_dims(found) == (may_lose and device == "cuda")
    with FakeTensorMode():
        for each in span.inputs + span.outputs:
            each.meta["val"] = torch.empty(each.meta["val"].shape, device=device)
        assert span.is_callable
        given = found.meta["val"]
        apart = [2 * stride for stride in given.stride()]
        found.meta["val"] = torch.empty_strided(given.shape, apart, device=device)
    assert span.is_callable != (may_lose and device == "cuda")


def test_such_sums_cross_the_border_of_a_call_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into it and out of it, and have their dims again on the other side: the same numbers, and for
    `verify` the same program.
    """

    def is_sum(node: Node) -> bool:
        return node.target is aten.sum.dim_IntList

    monkeypatch.setattr(module, "may_lose_dims", is_sum)
    monkeypatch.setattr(repeats, "LEAST_NODES", 2)
    hand = Hand()
    x, token = (hand.input(name, WIDTH, WIDTH) for name in ("x", "token"))
    rows = hand(aten.sum.dim_IntList, x, [0], True)  # no layer, so that no call makes it
    for _ in range(4):
        hand(aten.copy_.default, token, x)
        wide = hand(aten.sin.default, hand(aten.mm.default, x, hand.add(x, rows)))
        rows = hand(aten.sum.dim_IntList, wide, [0], True)
        x = hand(aten.mm.default, wide, wide)
    gm = hand.returns(x, rows)
    captured = Captured(gm.graph)
    inputs = [torch.rand(n.meta["val"].shape) for n in gm.graph.find_nodes(op="placeholder")]
    expected = Interpreter(gm).run(*copy.deepcopy(inputs))
    gm = outlined(gm)
    calls = find(gm.graph, INVOKE)
    assert len(calls) >= 3
    assert list(captured.differences(gm.graph)) == []
    for call in calls:
        values = [n.meta["val"] for n in call.args[2:]], call.meta["val"]
        assert not any(value.shape == (1, WIDTH) for each in values for value in each)
        assert [sum(value.shape == (WIDTH,) for value in each) for each in values] == [1, 1]
    for value, other in zip(Interpreter(gm).run(*inputs), expected, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)
