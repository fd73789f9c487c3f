"""The memory model: what it counts on graphs written by hand, and its peak beside the measured
one.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from compiled_fsdp.passes.base import run_pipeline
from compiled_fsdp.passes.pipeline import HALF
from gpt import GPT, GPTConfig
from kit.graphs import captured, uncached
from kit.harness import SLOW
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit
from measure import peak_tensor_bytes
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import MixedPrecisionPolicy, fully_shard
from compiled_fsdp.compiler import backend, inductor
from compiled_fsdp.ir.collectives import ALL_GATHER, WAIT
from compiled_fsdp.ir.schema import FREE
from compiled_fsdp.planning.lifetimes import BUCKET, GATHERED, IN_FLIGHT, Lifetimes
from compiled_fsdp.planning.memory import profile, profile_of, profile_step
from compiled_fsdp.planning.plan import Plan

if TYPE_CHECKING:
    from kit.pool import Pool
    from torch.fx import Graph, GraphModule

FLOAT = 4


def elements(gm: GraphModule, is_fused: bool = False) -> list[int]:
    """Fp32 elements alive while each node runs."""
    return [n // FLOAT for n in Lifetimes(gm.graph, is_fused).curve().during]


class TestLifetimes(GraphTest):
    def test_chain(self):
        """The input is the caller's; each result lives until its reader is done, what is returned
        for ever.
        """
        hand = Hand()
        x = hand.input("x", 8)
        y = hand.compute(hand.compute(hand.compute(x)))
        self.assertEqual(elements(hand.returns(y)), [0, 8, 16, 16, 8])
        after = Lifetimes(hand.graph).curve().after
        self.assertEqual([n // FLOAT for n in after], [0, 8, 8, 8, 8])

    def test_unused(self):
        hand = Hand()
        hand.compute(hand.input("x", 8))
        y = hand.compute(hand.input("y", 2))
        self.assertEqual(elements(hand.returns(y)), [0, 8, 0, 2, 2])

    def test_views_keep_the_storage(self):
        """The last reader is one of a view of a view, and no view allocates; a copy in the same
        place does.
        """
        for op, arguments, expected in (
            (aten.view.default, ([4, 2],), [0, 8, 8, 8, 10, 2]),
            (aten._unsafe_view.default, ([4, 2],), [0, 8, 8, 8, 10, 2]),
            (aten.reshape.default, ([4, 2],), [0, 8, 8, 8, 10, 2]),
            (aten.clone.default, (), [0, 8, 16, 8, 12, 4]),
        ):
            hand = Hand()
            y = hand.compute(hand.input("x", 2, 4))
            row = hand(aten.select.int, hand(op, y, *arguments), 0, 0)
            self.assertEqual(elements(hand.returns(hand.compute(row))), expected, op)

    def test_reshape_that_copies(self):
        """Of a transposed value; the schema is the same as that of one that does not."""
        hand = Hand()
        y = hand.compute(hand.input("x", 2, 4))
        z = hand(aten.reshape.default, hand(aten.t.default, y), [8])
        self.assertEqual(elements(hand.returns(z)), [0, 8, 8, 16, 8])

    def test_in_place(self):
        hand = Hand()
        y = hand.compute(hand.input("x", 8))
        z = hand(aten.add_.Tensor, y, y)
        hand(aten.mul_.Tensor, y, 2.0)
        self.assertEqual(elements(hand.returns(z)), [0, 8, 8, 8, 8])

    def test_several_results(self):
        """Views out of a list keep the whole; results with storages of their own end one by one."""
        hand = Hand()
        y = hand.compute(hand.input("x", 8))
        part = hand(operator.getitem, hand(aten.split.Tensor, y, 2), 3)
        self.assertEqual(elements(hand.returns(hand.compute(part))), [0, 8, 8, 8, 10, 2])
        hand = Hand()
        pair = hand(aten.var_mean.correction, hand.input("x", 8, 4), [1])
        mean = hand(operator.getitem, pair, 1)
        self.assertEqual(elements(hand.returns(hand.compute(mean))), [0, 16, 16, 16, 8])

    def test_collective_under_way(self):
        """Its input lives until the wait, though nothing else reads it; waiting allocates
        nothing.
        """
        hand = Hand()
        shard = hand.compute(hand.input("x", 4))
        gathered = hand(ALL_GATHER, shard, 2, "shard")
        hand.compute(hand.input("y", 1))
        waited = hand(WAIT, gathered)
        hand(FREE, waited)
        gm = hand.returns(hand.compute(hand.input("z", 1)))
        self.assertEqual(elements(gm), [0, 4, 12, 12, 13, 12, 8, 0, 1, 1])
        kinds = [alive.kind for alive in profile(gm.graph).alive]
        self.assertEqual(kinds, [IN_FLIGHT, IN_FLIGHT, "temporary"])

    def test_free_ends_a_life(self):
        """A later free keeps the buffer longer than its last reader does."""
        for is_late, expected in ((False, [0, 8, 8, 9, 9, 2, 1]), (True, [0, 8, 8, 9, 10, 9, 1])):
            hand = Hand()
            waited = hand(WAIT, hand(ALL_GATHER, hand.input("x", 4), 2, "shard"))
            total = hand(aten.sum.default, waited)
            if is_late:
                y = hand.compute(total)
                hand(FREE, waited)
            else:
                hand(FREE, waited)
                y = hand.compute(total)
            self.assertEqual(elements(hand.returns(y)), expected)

    def test_what_rests_on_the_host(self):
        """Neither the shard there nor the gradient counts, but their copies on the device do."""
        hand = Hand()
        (spec,) = unit("u", {"w": (4, 2)}, device="cuda", post_divide=1.0)
        flat = hand.input("flat", 4)
        full = hand.unshard(flat, spec)
        gm = hand.returns(hand.reduce_grad(hand.compute(full), flat, spec))
        run_pipeline(gm, PLAN, [entry for entry in HALF if entry.name in ("lower", "copy_aside")])
        alive = dict(zip([n.name for n in gm.graph.nodes], elements(gm), strict=True))
        self.assertEqual(alive["flat"], 0)
        self.assertEqual(alive["start_copy_default"], 4)  # this rank's shard
        self.assertEqual(alive["all_gather_into_tensor_default"], 4 + 8)
        self.assertEqual(alive["neg_default"], 8 + 8)
        self.assertEqual(alive["start_copy_default_1"], 4)  # the reduced gradient, until copied
        self.assertEqual(alive["output"], 0)

    def test_another_order(self):
        """A start moved up costs its bytes on the way; the same curve as of a graph in that
        order.
        """
        hand = Hand()
        x = hand.input("x", 4)
        y = hand.compute(hand.compute(x))
        start = hand(ALL_GATHER, x, 2, "shard")
        z = hand.add(hand(aten.slice.Tensor, hand(WAIT, start), 0, 0, 4), y)
        gm = hand.returns(z)
        lifetimes = Lifetimes(gm.graph)
        self.assertEqual(elements(gm), [0, 4, 8, 12, 12, 12, 16, 4])
        order = [n for n in gm.graph.nodes if n is not start]
        order.insert(1, start)
        moved = lifetimes.curve(order)
        self.assertEqual([n // FLOAT for n in moved.during], [0, 8, 12, 16, 12, 12, 16, 4])
        self.assertEqual([s.node for s in lifetimes.touched[start]], [start])
        self.assertEqual(profile_of(lifetimes, order).peak, moved.peak)
        next(iter(gm.graph.nodes)).append(start)
        self.assertEqual(Lifetimes(gm.graph).curve(), moved)


class TestHalves(GraphTest):
    def halves(self, takes: int = 8) -> tuple[Graph, Graph]:
        """Forward returns a loss and saves two views of one storage; backward reads one after the
        other.
        """
        hand = Hand()
        x = hand.input("primals_1", 8)
        y = hand.compute(x)
        one, two = hand(aten.slice.Tensor, y, 0, 0, 4), hand(aten.slice.Tensor, y, 0, 4, 8)
        forward = hand.returns(hand(aten.sum.default, y), x, one, two).graph
        back = Hand()
        back.mode = hand.mode
        for name, source in (("primals_1", x), ("one", one), ("two", two)):
            back.input(name, takes).meta["val"] = source.meta["val"]
        kept, first, second = list(back.graph.nodes)[:3]
        tangent = back.input("tangents_1")
        grad = back.add(back.compute(first), tangent)
        grad = back.add(grad, second)
        backward = back.returns(
            back.add(back.compute(grad), back(aten.slice.Tensor, kept, 0, 0, 4))
        ).graph
        return forward, backward

    def test_saved_by_forward(self):
        """One storage of eight, alive until its second view is read; the primal is the caller's,
        the loss the user's.
        """
        forward, backward = self.halves()
        self.assertEqual(
            [n // FLOAT for n in profile(backward).curve.during],
            [9, 9, 9, 9, 13, 17, 16, 8, 4, 8, 4],
        )
        step = profile_step(forward, backward)
        self.assertEqual(
            [n // FLOAT for n in step.backward.curve.during],
            [10, 10, 10, 10, 14, 18, 17, 9, 5, 9, 5],
        )
        self.assertEqual(step.peak, 18 * FLOAT)
        kinds = {alive.owner: alive.kind for alive in step.backward.alive}
        self.assertEqual(kinds["neg_default"], "temporary")
        self.assertEqual(profile(forward).alive[0].kind, "activation saved for backward")
        self.assertEqual(kinds["sum_default"], "output")

    def test_halves_of_two_graphs(self):
        forward, _ = self.halves()
        hand = Hand()
        hand.input("other", 3)
        hand.input("tangents_1", 1)
        with self.assertRaisesRegex(
            ValueError, r"backward takes \['%other'\], and forward returns last \['%slice"
        ):
            profile_step(forward, hand.returns().graph)

    def test_parameters_kept_from_one_bucket(self):
        """They share its storage until backward has read the last one, though its inputs look like
        two storages.
        """
        hand = Hand()
        x, flat = hand.input("primals_1", 4, 4), hand.input("primals_2", 16)
        specs = unit("u", {"v": (4, 4), "w": (4, 4)}, reshard="keep", own_message=0)
        v, w = (hand.unshard(flat, spec) for spec in specs)
        forward = run_pipeline(
            hand.returns(hand(aten.mm.default, hand(aten.mm.default, x, v), w), v, w), PLAN, HALF
        ).graph
        back = Hand()
        a, b, dy = back.input("v", 4, 4), back.input("w", 4, 4), back.input("tangents_1", 4, 4)
        dx = back(aten.mm.default, back(aten.mm.default, dy, b), a)
        backward = back.returns(dx).graph
        y = 16  # which the user holds; so is the tangent, as large
        before, after = (
            profile(backward).curve.during,
            profile_step(forward, backward).backward.curve.during,
        )
        self.assertEqual([n // FLOAT for n in before], [48, 48, 48, 64, 48, 16])
        self.assertEqual([n // FLOAT - y for n in after], [48, 48, 48, 64, 64, 16])

    def test_what_the_step_gathers_ahead_and_backward_leaves_in_flight(self):
        """Two gathers are there when forward begins, while they fit; gradients on their way outlive
        backward.
        """
        hand = Hand()
        x = hand.input("x", 4, 4)
        for name in ("a", "b"):
            (spec,) = unit(name, {"w": (4, 4)}, overlap="step")
            x = hand(aten.mm.default, x, hand.unshard(hand.input(f"flat_{name}", 8), spec))
        graph = run_pipeline(hand.returns(x), Plan(prefetch=0, bucket_bytes=0), HALF).graph
        for room, first in ((32, 32), (31, 16), (0, 0)):
            with mock.patch("compiled_fsdp.planning.lifetimes.MAX_AHEAD_BYTES", room * FLOAT):
                self.assertEqual(profile(graph).curve.during[0] // FLOAT, first)
        hand = Hand()
        (spec,) = unit("a", {"w": (4, 4)}, overlap="step")
        grad = hand.compute(hand.input("tangents_1", 4, 4))
        graph = run_pipeline(
            hand.returns(hand.reduce_grad(grad, hand.input("primals_1", 8), spec)), PLAN, HALF
        ).graph
        self.assertEqual(
            Lifetimes(graph).curve().after[-1] // FLOAT, 16 + 8
        )  # what is sent, and what arrives


class TestFused(GraphTest):
    def test_chain(self):
        """Pointwise values that a kernel nearby reads have no buffer; what a matmul reads, or what
        is read after one, has.
        """
        hand = Hand()
        x = hand.input("x", 4, 4)
        a = hand.compute(hand.compute(hand.compute(x)))
        b = hand(aten.mm.default, a, a)
        self.assertEqual(elements(hand.returns(b), is_fused=True), [0, 0, 0, 16, 32, 16])
        hand = Hand()
        x = hand.input("x", 4, 4)
        a = hand.compute(x)
        b = hand(aten.mm.default, x, x)
        self.assertEqual(elements(hand.returns(hand.add(a, b)), is_fused=True), [0, 16, 32, 32, 16])

    def test_copies_out_of_a_bucket(self):
        """They are calls, not part of the kernel that reads them: the bucket ends with the last
        copy.
        """
        specs = unit("u", {"a": (4,), "b": (4,)})
        hand = Hand()
        x, flat = hand.input("x", 4), hand.input("flat", 4)
        a, b = hand.unshard(flat, specs[0]), hand.unshard(flat, specs[1])
        y = hand.add(hand.add(hand.compute(x), b), a)
        gm = run_pipeline(hand.returns(y), PLAN, HALF)
        lifetimes = Lifetimes(gm.graph, is_fused=True)
        (bucket,) = (s for s in lifetimes.storages if s.kind == BUCKET)
        (freed,) = (n for n in gm.graph.nodes if n.target is FREE)
        position = {n: i for i, n in enumerate(gm.graph.nodes)}
        self.assertEqual(bucket.span(position)[1], position[freed])

    def test_inputs_live_until_the_kernel_reads_them(self):
        hand = Hand()
        x = hand.input("x", 4, 4)
        a = hand(aten.mm.default, x, x)
        b = hand.compute(a)
        c = hand(aten.sum.default, b)
        self.assertEqual(elements(hand.returns(c), is_fused=True), [0, 16, 16, 17, 1])

    def test_softmax_on_a_device(self):
        """Largest value and sum at once, as Inductor writes it for a device: a kernel that it
        generates.
        """
        from torch._inductor.inductor_prims import prepare_softmax_online

        hand = Hand()
        x = hand.input("x", 4, 4)
        a = hand(aten.mm.default, x, x)
        b = hand.compute(a)
        both = hand(prepare_softmax_online, b, 1)
        largest = hand(operator.getitem, both, 0)
        c = hand(aten.sub.Tensor, b, largest)
        d = hand(aten.sum.default, c)
        lives = elements(hand.returns(d, a), is_fused=True)
        self.assertEqual(max(lives), 16 + 4 + 4)  # neither `b` nor `c` is in memory

    def test_written_over(self):
        """A kernel's result takes the place of an input of its size; not while that is read
        later.
        """
        hand = Hand()
        x = hand.input("x", 4, 4)
        a = hand(aten.mm.default, x, x)
        self.assertEqual(elements(hand.returns(hand.compute(a)), is_fused=True), [0, 16, 16, 16])
        hand = Hand()
        x = hand.input("x", 4, 4)
        a = hand(aten.mm.default, x, x)
        self.assertEqual(elements(hand.returns(hand.compute(a), a), is_fused=True), [0, 16, 32, 32])


class TestProfile(GraphTest):
    def test_a_gather_that_is_not_lowered_yet_is_named(self):
        (w,) = unit("u", {"w": (4, 2)})
        hand = Hand()
        gm = hand.returns(hand.compute(hand.unshard(hand.input("flat", 4), w)))
        owners = {s.owner: s.kind for s in Lifetimes(gm.graph).storages}
        self.assertEqual(owners["w"], "gathered parameter")

    def test_text(self):
        """Who has the memory at the peak, by kind, with parameters by name."""
        specs = unit("layers.0#3", {"w": (200, 200), "v": (200, 200)})
        hand = Hand()
        x, flat = hand.input("x", 200, 200), hand.input("flat", 40_000)
        y = hand(
            aten.mm.default,
            hand(aten.mm.default, x, hand.unshard(flat, specs[0])),
            hand.unshard(flat, specs[1]),
        )
        graph = run_pipeline(hand.returns(y), PLAN, HALF).graph
        self.assertExpectedInline(
            str(profile(graph)),
            """\
forward: peak 0.64 MB above rest at %mm_default, node 10 of 18
     0.32 MB  bucket buffer: layers.0 0.32 MB
     0.16 MB  gathered parameter: w 0.16 MB
     0.16 MB  temporary: mm_default 0.16 MB""",
        )
        self.assertEqual({a.owner for a in profile(graph).alive if a.kind == GATHERED}, {"w"})


# -- beside what is measured

CASES: dict[str, dict[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "sliced": {"reshard_after_forward": 2},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "tied": {},
    "checkpoint": {},
    "logits": {},
}


class Checkpointed(torch.nn.Module):
    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False)


@pytest.mark.parametrize("case", [case for case in CASES if case != "sliced"])
def test_peak_without_inductor(two: Pool, case: str) -> None:
    two.run(check_peak, "compiled_fsdp_eager", case, 0.05)


def test_peak_under_inductor(two: Pool) -> None:
    """With casts beside everything that the plain case has."""
    two.run(check_peak, "compiled_fsdp", "bf16", 0.1, timeout=SLOW)


def test_peak_with_a_smaller_mesh(four: Pool) -> None:
    four.run(check_peak, "compiled_fsdp_eager", "sliced", 0.05)


def check_peak(name: str, case: str, tolerance: float) -> None:
    """Worker function: the peak of a step as predicted and as measured."""
    options = CASES[case]
    model = GPT(GPTConfig(num_layers=2, width=128, num_heads=2, hidden=384))
    if case == "tied":
        model.head.weight = model.embedding.weight
    if case == "checkpoint":
        model.layers = torch.nn.ModuleList(map(Checkpointed, model.layers))
    for block in (*model.layers, [model.norm, model.head]) if case != "tied" else model.layers:
        fully_shard(block, **options)
    call = torch.compile(fully_shard(model, **options), backend=name, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randint(0, 256, (2, 96))

    def step() -> None:
        if case == "logits":
            torch.nn.functional.cross_entropy(
                call(tokens).flatten(0, 1), tokens.flatten()
            ).backward()
        else:
            call(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    predicted = predict(step, is_fused=name == "compiled_fsdp")
    # The least of some: profiles miss a release by a thread of gloo's.
    measured = min(peak_tensor_bytes(step).above_rest for _ in range(3))
    assert abs(predicted / measured - 1) < tolerance, (
        f"{case}: predicted {predicted}, measured {measured}"
    )


def predict(step: Any, is_fused: bool) -> int:
    """The peak of the two graphs that the first step compiles."""
    with (
        captured(inductor if is_fused else backend) as found,
        uncached(),
    ):
        step()
    return profile_step(*found, is_fused).peak
