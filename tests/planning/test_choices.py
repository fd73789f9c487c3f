"""What is chosen from costs, by hand: messages, reductions, and parts."""

from __future__ import annotations

import random
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from compiled_fsdp.passes.base import run_pipeline
from compiled_fsdp.passes.choose_collectives import reduced_by
from compiled_fsdp.passes.pipeline import HALF
from kit.passes_harness import PLAN, Hand, numel, unit
from kit.schedules import chain, costs

from compiled_fsdp.compiler import budget
from compiled_fsdp.compiler.peaks import Candidate, PeakModel, Span, most
from compiled_fsdp.compiler.splitting import fit_split
from compiled_fsdp.compiler.trial import Trial
from compiled_fsdp.ir.spec import OWN_MESSAGE
from compiled_fsdp.planning.choices import Choices, break_even, faster
from compiled_fsdp.planning.costs import Costs, Link
from compiled_fsdp.planning.lifetimes import Lifetimes
from compiled_fsdp.planning.memory import profile_of
from compiled_fsdp.planning.plan import Plan


def machine(
    message: float = 0.0, scatter: float = 0.0, exchange: float = 0.0, bandwidth: float = 1e6
) -> Costs:
    return Costs(1e9, bandwidth, 0.0, (("shard", Link(1e-3, 1e6, message, scatter, exchange)),))


class TestMessages:
    def test_a_copy_reads_and_writes(self):
        assert break_even(machine(message=1.0), "shard") == 500_000

    def test_a_free_message(self):
        assert break_even(machine(), "shard") == 0

    @pytest.mark.parametrize(
        ("plan", "expected"), [(Plan(), OWN_MESSAGE), (Plan(own_message=7), 7)]
    )
    def test_as_set(self, plan, expected):
        assert Choices.decide(unit("a", {"w": (4, 2)}), plan).own_message == {"shard": expected}

    def test_without_costs_as_it_is(self):
        assert Choices.decide(unit("a", {"w": (4, 2)}), Plan(own_message=None)).own_message == {
            "shard": OWN_MESSAGE
        }


class TestReductions:
    @pytest.mark.parametrize(
        ("scatter", "exchange", "expected"),
        [
            (1e6, 2e6, "all_to_all"),
            (1e6, 1.01e6, "reduce_scatter"),
            (2e6, 1e6, "reduce_scatter"),
            (0.0, 0.0, ""),
        ],
        ids=["faster by more than adding", "adding takes longer", "slower", "not measured"],
    )
    def test_faster(self, scatter, exchange, expected):
        assert (
            faster(
                machine(scatter=scatter, exchange=exchange, bandwidth=1e7),
                unit("a", {"w": (100, 100)}),
            )
            == expected
        )

    def test_a_unit_changes_as_a_whole(self):
        """One of its gradients is reduced by a user's own algorithm: buckets would fall apart."""
        specs = [*unit("a", {"w": (4, 2)}), *unit("a", {"b": (4,)}, reduce_algorithm="custom:0")]
        assert Choices.decide(specs, Plan(reductions="all_to_all")).algorithm == {"a": ""}

    def test_a_mean_becomes_a_sum_and_a_division(self):
        (spec,) = unit("a", {"w": (4, 2)}, reduce_op="avg", post_divide=1.0)
        changed = reduced_by(spec, "all_to_all")
        assert (changed.reduce_op, changed.post_divide, changed.reduce_algorithm) == (
            "sum",
            2.0,
            "all_to_all",
        )
        assert reduced_by(spec, "") == reduced_by(spec, "reduce_scatter") == spec

    def test_the_mean_over_replicas_stays(self):
        specs = unit(
            "a", {"w": (4, 2)}, reduce_op="avg", replicate_size=2, replicate_group="replicate"
        )
        assert Choices.decide(specs, Plan(reductions="all_to_all")).algorithm == {"a": ""}


class TestParts:
    def units(self, latency: float) -> tuple[object, Plan]:
        """One unit of two parameters, and matmuls with each: the second half of the gather can be
        hidden by the first ones.
        """
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
        plan = Plan(
            None, None, None, 0, None, costs=Costs(2 * 64**3 / 0.5, 1e12, 0.0, (("shard", link),))
        )
        return hand.returns(x), plan

    def test_computing_begins_with_the_first(self):
        gm, plan = self.units(latency=0.0)
        assert fit_split(gm, plan, is_fused=False).split_bytes == 64 * 64 * 4

    def test_not_where_starting_costs_more(self):
        gm, plan = self.units(latency=5.0)
        assert fit_split(gm, plan, is_fused=False).split_bytes == 0

    def test_the_graph_is_not_changed(self):
        gm, plan = self.units(latency=0.0)
        before = [n.name for n in gm.graph.nodes]
        fit_split(gm, plan, is_fused=False)
        assert [n.name for n in gm.graph.nodes] == before

    @pytest.mark.parametrize(
        "plan", [Plan(), Plan(split_bytes=None), Plan(split_bytes=3, costs=costs(1.0, 1.0))]
    )
    def test_set_or_without_costs(self, plan):
        assert fit_split(chain(1), plan, is_fused=False) is plan


@pytest.mark.parametrize(
    ("room", "kept", "sliced"),
    [
        (0, "", ""),
        (70, "", "v"),
        (150, "", "vw"),
        (250, "v", "vw"),
        (400, "vwx", "vw"),
        (349, "vw", "vw"),
    ],
)
def test_a_budget_buys_slices_then_parameters(monkeypatch, room, kept, sliced):
    """A slice costs 50 bytes, a kept parameter 100; `v` and `w` have a smaller mesh, and `v` is
    used last.
    """
    hand = Hand()
    sizes = {
        "x": {},
        "w": {"reshard": "slice", "post_size": 2},
        "v": {"reshard": "slice", "post_size": 2},
    }
    dy = hand.input("tangents_1", 4, 4)
    for name, changes in sizes.items():
        (spec,) = unit("u", {name: (4, 4)}, **changes)
        dy = hand.add(dy, hand.unshard(hand.input(f"flat_{name}", 8), spec))
    gm = hand.returns(dy)

    def tried(halves, plan, *, is_fused, run, step):
        peak = 50 * (2 - len(plan.dropped)) + 100 * len(plan.kept)
        return SimpleNamespace(peak=peak, num_nodes=10)

    by_num = [0, 50, 100, 200, 300, 400]
    monkeypatch.setattr("compiled_fsdp.planning.plan_fields.LEAST_BUDGET", 0)
    monkeypatch.setattr(budget, "schedule", tried)
    monkeypatch.setattr(
        budget.PeakModel,
        "of",
        lambda trial, candidates: SimpleNamespace(peaks=lambda: by_num),
    )
    plan = budget.fit_budget(gm, Plan(memory_budget=room), is_fused=False)
    assert [fqn for _, fqn in plan.kept] == [n for n in "vwx" if n in kept]
    assert [fqn for _, fqn in plan.dropped] == [n for n in "vw" if n not in sliced]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("error", [0, 40])
def test_the_most_that_fits_in_few_trials(share, error):
    """What is expected is right, or off by more and more; then a trial corrects it, and what is
    returned fits. Keeping takes more, or less.
    """
    rng = random.Random(0)
    calls = []
    for _ in range(100):
        sizes = [rng.choice([0, 1, 8, 8, 32, -4]) for _ in range(rng.randint(1, 300))]
        expected = [1000, *accumulate(sizes, initial=1000)][1:]
        drift = [*accumulate((rng.choice([0, error]) / 40 for _ in sizes), initial=0)]
        peaks = [round(e + d) for e, d in zip(expected, drift, strict=True)]
        room = 1000 + rng.random() * share * max(0, peaks[-1] - 1000)
        tried: list[int] = []

        def peak(n, peaks=peaks, tried=tried):
            tried.append(n)
            return peaks[n]

        found, its_peak = most(peak, expected, room)
        assert peaks[found] == its_peak <= room
        if not error:
            assert found == max(n for n, value in enumerate(peaks) if value <= room)
        calls.append(len(tried))
    assert max(calls) <= (1 if not error else 5)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_said_not_to_fit_before_all_was_tried(seed):
    """What is expected may be worthless; with less patience than there are numbers, what is
    returned is the least of those that were tried.
    """
    rng = random.Random(seed)
    for _ in range(200):
        peaks = [rng.randint(50, 100) for _ in range(rng.randint(1, 20))]
        expected = [peaks[0], *(rng.randint(0, 200) for _ in peaks[1:])]
        room = rng.randint(40, 100)
        found, its_peak = most(peaks.__getitem__, expected, room)
        assert peaks[found] == its_peak
        assert (its_peak <= room) == (min(peaks) <= room)
        assert its_peak <= room or its_peak == min(peaks)
        tried = {0: peaks[0]}
        found, its_peak = most(
            lambda n, peaks=peaks, tried=tried: tried.setdefault(n, peaks[n]), expected, 0, 5
        )
        assert its_peak == min(tried.values())
        assert len(tried) == min(6, len(peaks))


class TestPeakModel:
    """Two units of a parameter each, gathered in forward in this order and in backward in the
    other.
    """

    def trial(self) -> Trial:
        halves = []
        for names in ("vw", "wv"):
            hand = Hand()
            x = hand.input("x", 64, 64)
            flats = {name: hand.input(f"flat_{name}", 2048) for name in names}
            for name, flat in flats.items():
                (spec,) = unit(name, {name: (64, 64)})
                x = hand(torch.ops.aten.mm.default, x, hand.unshard(flat, spec))
            halves.append(run_pipeline(hand.returns(x), PLAN, HALF).graph)
        lifetimes = tuple(map(Lifetimes, halves))
        return Trial(lifetimes, tuple(map(profile_of, lifetimes)))

    def test_kept_bytes_in_place_of_those_that_are_gathered_again(self):
        trial = self.trial()
        forward, backward = ([n.name for n in part.graph.nodes] for part in trial.lifetimes)
        curve = [n for part in trial.profiles for n in part.curve.during]
        dropped = {"w": forward.index("free_default_1"), "v": forward.index("free_default")}
        gathered = {
            "w": backward.index("all_gather_into_tensor_default"),
            "v": backward.index("all_gather_into_tensor_default_1"),
        }
        freed = {"w": backward.index("free_default"), "v": backward.index("free_default_1")}
        huge, full = 10**9, 64 * 64 * 4
        for name in "wv":
            candidate = Candidate("keep", (name, name), huge)
            right = list(curve)
            for i in range(dropped[name] + 1, len(forward) + freed[name] + 1):
                right[i] += huge
            for i in range(gathered[name], freed[name] + 1):
                right[len(forward) + i] -= full
            assert PeakModel.of(trial, [candidate]).peaks() == [max(curve), max(right)]

    def test_peaks(self):
        """By hand: keeping the first takes more where nothing else is alive; the second less."""
        changes = ((Span(0, 1, 5),), (Span(2, 3, 7), Span(3, 4, -20)), (), (Span(0, 4, 1),))
        assert PeakModel((10, 50, 10, 60, 55), changes).peaks() == [60, 60, 55, 55, 56]

    def test_any_spans(self):
        rng = random.Random(0)
        for _ in range(50):
            row = [rng.randint(0, 50) for _ in range(rng.randint(1, 40))]
            changes = [
                [
                    Span(*sorted(rng.choices(range(len(row)), k=2)), rng.randint(-20, 20))
                    for _ in range(rng.randint(0, 4))
                ]
                for _ in range(8)
            ]
            found, right = PeakModel(tuple(row), tuple(map(tuple, changes))).peaks(), [max(row)]
            for spans in changes:
                for first, last, num_bytes in spans:
                    row[first : last + 1] = [n + num_bytes for n in row[first : last + 1]]
                right.append(max(row))
            assert found == right

    def test_what_backward_does_not_gather_again(self):
        """Keeping it costs nothing: backward has no use for it."""
        candidate = Candidate("keep", ("u", "u"), 16384)
        least, same = PeakModel.of(self.trial(), [candidate]).peaks()
        assert same == least


@pytest.mark.parametrize("name", ["split_bytes", "own_message"])
@pytest.mark.parametrize("size", [-1, 1.5, True])
def test_bad_sizes(name, size):
    with pytest.raises(
        ValueError,
        match=f"Plan: {name}={size!r}; should be a number of bytes, at least 0, or 'auto'",
    ):
        Plan(**{name: size})


def test_bad_reductions():
    with pytest.raises(ValueError, match="Plan: reductions='ring'; should be one of"):
        Plan(reductions="ring")
