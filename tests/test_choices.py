"""What is chosen from costs, by hand: messages, reductions, and parts."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from compiled_fsdp.passes.choose_collectives import reduced_by
from passes_harness import Hand, numel, unit
from test_planner import chain, costs

from compiled_fsdp import budget
from compiled_fsdp.choices import Choices, break_even, faster
from compiled_fsdp.costs import Costs, Link
from compiled_fsdp.plan import Plan
from compiled_fsdp.spec import OWN_MESSAGE
from compiled_fsdp.splitting import fit_split


def machine(message: float = 0.0, scatter: float = 0.0, exchange: float = 0.0, bandwidth: float = 1e6) -> Costs:
    return Costs(1e9, bandwidth, 0.0, (("shard", Link(1e-3, 1e6, message, scatter, exchange)),))


class TestMessages:
    def test_a_copy_reads_and_writes(self):
        assert break_even(machine(message=1.0), "shard") == 500_000

    def test_a_free_message(self):
        assert break_even(machine(), "shard") == 0

    @pytest.mark.parametrize(("plan", "expected"), [(Plan(), OWN_MESSAGE), (Plan(own_message=7), 7)])
    def test_as_set(self, plan, expected):
        assert Choices.decide(unit("a", {"w": (4, 2)}), plan).own_message == {"shard": expected}

    def test_without_costs_as_it_is(self):
        assert Choices.decide(unit("a", {"w": (4, 2)}), Plan(own_message=None)).own_message == {"shard": OWN_MESSAGE}


class TestReductions:
    @pytest.mark.parametrize(
        ("scatter", "exchange", "expected"),
        [(1e6, 2e6, "all_to_all"), (1e6, 1.01e6, "reduce_scatter"), (2e6, 1e6, "reduce_scatter"), (0.0, 0.0, "")],
        ids=["faster by more than adding", "adding takes longer", "slower", "not measured"],
    )
    def test_faster(self, scatter, exchange, expected):
        assert faster(machine(scatter=scatter, exchange=exchange, bandwidth=1e7), unit("a", {"w": (100, 100)})) == expected

    def test_a_unit_changes_as_a_whole(self):
        """One of its gradients is reduced by a user's own algorithm: buckets would fall apart."""
        specs = [*unit("a", {"w": (4, 2)}), *unit("a", {"b": (4,)}, reduce_algorithm="custom:0")]
        assert Choices.decide(specs, Plan(reductions="all_to_all")).algorithm == {"a": ""}

    def test_a_mean_becomes_a_sum_and_a_division(self):
        (spec,) = unit("a", {"w": (4, 2)}, reduce_op="avg", post_divide=1.0)
        changed = reduced_by(spec, "all_to_all")
        assert (changed.reduce_op, changed.post_divide, changed.reduce_algorithm) == ("sum", 2.0, "all_to_all")
        assert reduced_by(spec, "") == reduced_by(spec, "reduce_scatter") == spec

    def test_the_mean_over_replicas_stays(self):
        specs = unit("a", {"w": (4, 2)}, reduce_op="avg", replicate_size=2, replicate_group="replicate")
        assert Choices.decide(specs, Plan(reductions="all_to_all")).algorithm == {"a": ""}


class TestParts:
    def units(self, latency: float) -> tuple[object, Plan]:
        """One unit of two parameters, and matmuls with each: the second half of the gather can be hidden by the first ones."""
        hand = Hand()
        specs = unit("a", {"v": (64, 64), "w": (64, 64)})
        flat = hand.input("flat", numel(specs))
        x = hand.input("x", 64, 64)
        for spec in specs:
            w = hand.unshard(flat, spec)
            for _ in range(4):
                x = hand(torch.ops.aten.mm.default, x, w)
        nbytes = 64 * 64 * 4 / 2
        link = Link(latency, nbytes)  # a second for each parameter
        plan = Plan(None, None, None, 0, None, costs=Costs(2 * 64**3 / 0.5, 1e12, 0.0, (("shard", link),)))
        return hand.returns(x), plan

    def test_computing_begins_with_the_first(self):
        gm, plan = self.units(latency=0.0)
        assert fit_split(gm, plan).split_bytes == 64 * 64 * 4

    def test_not_where_starting_costs_more(self):
        gm, plan = self.units(latency=5.0)
        assert fit_split(gm, plan).split_bytes == 0

    def test_the_graph_is_not_changed(self):
        gm, plan = self.units(latency=0.0)
        before = [n.name for n in gm.graph.nodes]
        fit_split(gm, plan)
        assert [n.name for n in gm.graph.nodes] == before

    @pytest.mark.parametrize("plan", [Plan(), Plan(split_bytes=None), Plan(split_bytes=3, costs=costs(1.0, 1.0))])
    def test_set_or_without_costs(self, plan):
        assert fit_split(chain(1), plan) is plan


@pytest.mark.parametrize(
    ("room", "kept", "sliced"),
    [(0, "", ""), (70, "", "v"), (150, "", "vw"), (250, "v", "vw"), (400, "vwx", "vw"), (349, "vw", "vw")],
)
def test_a_budget_buys_slices_then_parameters(monkeypatch, room, kept, sliced):
    """A slice costs 50 bytes, a kept parameter 100; `v` and `w` have a smaller mesh, and `v` is used last."""
    hand = Hand()
    sizes = {"x": {}, "w": {"reshard": "slice", "post_size": 2}, "v": {"reshard": "slice", "post_size": 2}}
    dy = hand.input("tangents_1", 4, 4)
    for name, changes in sizes.items():
        (spec,) = unit("u", {name: (4, 4)}, **changes)
        dy = hand.add(dy, hand.unshard(hand.input(f"flat_{name}", 8), spec))
    gm = hand.returns(dy)

    def peak(gm, plan, *, is_fused):
        return 50 * (2 - len(plan.dropped)) + 100 * len(plan.kept)

    monkeypatch.setattr(budget, "_peak", peak)
    plan = budget.fit_budget(gm, Plan(memory_budget=room), is_fused=False)
    assert [fqn for _, fqn in plan.kept] == [n for n in "vwx" if n in kept]
    assert [fqn for _, fqn in plan.dropped] == [n for n in "vw" if n not in sliced]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_most_that_fits_in_few_trials(share):
    """Peaks that grow by less than what is kept, in jumps, after a beginning that costs nothing; as many as trying all finds."""
    rng = random.Random(0)
    for _ in range(50):
        sizes = [rng.choice([1, 8, 8, 32]) for _ in range(rng.randint(1, 300))]
        free = rng.randint(0, len(sizes))
        peaks = [100, *accumulate((0 if n < free else rng.choice([0, size]) for n, size in enumerate(sizes)), initial=100)][
            1:
        ]
        budget_ = 100 + rng.random() * share * (peaks[-1] - 100)
        tried: list[int] = []
        found = budget._most(lambda n, peaks=peaks, tried=tried: tried.append(n) or peaks[n], budget_, sizes)
        assert found == max(n for n, value in enumerate(peaks) if value <= budget_)
        assert len(set(tried)) <= 3 * len(sizes).bit_length() + 2


@pytest.mark.parametrize("name", ["split_bytes", "own_message"])
@pytest.mark.parametrize("size", [-1, 1.5, True])
def test_bad_sizes(name, size):
    with pytest.raises(ValueError, match=f"Plan: {name}={size!r}; should be a number of bytes, at least 0, or None"):
        Plan(**{name: size})


def test_bad_reductions():
    with pytest.raises(ValueError, match="Plan: reductions='ring'; should be one of"):
        Plan(reductions="ring")
