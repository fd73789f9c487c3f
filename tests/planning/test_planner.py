"""The planner: starts as late as still hides, waits when done, budgets that fit; all from costs,
the same on every rank.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from unittest import mock

import pytest
import torch
from compiled_fsdp.passes.delay_wait import delay_wait
from compiled_fsdp.passes.invariants.memory import bounded_in_flight
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.prefetch_all_gather import prefetch_all_gather
from kit.passes_harness import PLAN, Hand, aten, numel, unit
from kit.schedules import (
    BYTES,
    GRADIENT,
    MATMUL,
    MM,
    WIDTH,
    backward,
    chain,
    costs,
    marks,
    planned_backward,
    routed,
    scheduled,
)
from torch.fx import GraphModule
from torch.utils.flop_counter import flop_registry

import compiled_fsdp.compiler.backend  # noqa: F401  # registers "compiled_fsdp_eager"
from compiled_fsdp import fully_shard
from compiled_fsdp.compiler import inductor
from compiled_fsdp.compiler.inductor import HalfPass, JointPass
from compiled_fsdp.ir.graph import find, starts
from compiled_fsdp.planning.costs import Costs, Link, flops, traffic
from compiled_fsdp.planning.plan import Plan, current_plan, planned, use
from compiled_fsdp.planning.planner import (
    AHEAD,
    REDUCTIONS,
    Gathers,
    gather_anchors,
    program,
    simulate,
    wait_anchors,
)


def under_way(gm: GraphModule) -> int:
    """The most reductions that are under way at once."""
    now = worst = 0
    for mark in marks(gm):
        now += (mark == "R") - (mark == "r")
        worst = max(worst, now)
    return worst


def reducing(gradients: float) -> Plan:
    """Reductions by costs, with room for so many gradients under way."""
    machine = costs(matmul=1.0, transfer=20.0)
    return Plan(
        reduces_in_flight=None,
        bucket_bytes=0,
        reduction_bytes=int(gradients * GRADIENT),
        costs=machine,
    )


class TestCosts:
    def test_matmul_and_bytes_on_the_wire(self):
        gm = chain(1)
        (start,) = starts(gm.graph)
        assert flops(find(gm.graph, MM)[0]) == MATMUL
        assert traffic(start) == (BYTES, "shard")
        assert costs(1.0, 2.0).wire(start) == pytest.approx(2.0)

    @pytest.mark.parametrize(("key_heads", "name"), [(8, "flash"), (2, "flash"), (2, "efficient")])
    def test_attention_with_fewer_heads_for_keys_is_estimated(self, key_heads: int, name: str):
        """Torch's formula takes them for an error."""
        hand = Hand()
        query, key = hand.input("q", 2, 8, 16, 4), hand.input("k", 2, key_heads, 16, 4)
        op = getattr(aten, f"_scaled_dot_product_{name}_attention")
        more = (None, False) if name == "efficient" else ()
        node = hand.graph.call_function(op.default, (query, key, key, *more))
        node.meta["val"] = [query.meta["val"]]
        forward = 2 * 2 * 2 * 8 * 16 * 16 * 4
        assert flops(node) == forward
        backward = aten._scaled_dot_product_flash_attention_backward.default
        rest = (None, None, None, None, 16, 16, 0.0, False, None, None)
        node = hand.graph.call_function(backward, (query, query, key, key, query, *rest))
        node.meta["val"] = [query.meta["val"]]
        assert flops(node) == 2.5 * forward
        assert costs(1.0, 1.0).compute(node) > 0.0

    def test_what_a_formula_rejects_costs_its_traffic(self):
        """Formulas are anybody's: `register_flop_formula`."""

        def fails(*_: object, **__: object) -> int:
            raise KeyError("no such layout")

        gm = chain(1)
        node, *_ = find(gm.graph, MM)
        machine = replace(costs(1.0, 1.0), bandwidth=1e6)
        with mock.patch.dict(flop_registry, {aten.mm: fails}):
            assert flops(node) == 0.0
            assert machine.compute(node) == machine.overhead + machine._traffic(node)

    def test_links_have_a_latency_and_a_bandwidth(self):
        assert Link(0.5, 100.0).seconds(200) == 2.5

    def test_starting_takes_the_training_threads_time(self):
        gm = chain(1)
        (start,) = starts(gm.graph)
        machine = Costs(1.0, 1.0, 0.5, (("shard", Link(0.0, 1.0, start=0.75, issue=0.01)),))
        assert machine.compute(start) == pytest.approx(0.75 + 0.01 * BYTES)

    def test_a_fused_chain_counts_what_crosses_its_border(self):
        """Three pointwise kernels: read once and written once under fusion, three times without."""
        hand = Hand()
        x = hand.input("x", 1000)
        y = x
        for _ in range(3):
            y = hand.compute(y)
        gm = hand.returns(y)
        machine = Costs(1.0, 4000.0, 0.0, (("shard", Link(0.0, 1.0)),))
        seconds = [
            sum(m.compute(n) for n in gm.graph.nodes) for m in (machine, machine.fused(False))
        ]
        assert seconds == [2.0, 6.0]

    def test_tokens_travel_as_far_as_they_are_expected_to(self):
        """All but the part that the rank keeps, at the speed of the group's all-to-alls."""
        gm = routed(1)
        (_, tokens, _) = starts(gm.graph)
        assert traffic(tokens) == (GRADIENT / 2, "shard")
        machine = replace(costs(1.0, 1.0), links=(("shard", Link(0.0, 1.0, exchange=BYTES / 3)),))
        assert machine.wire(tokens) == pytest.approx(3.0)


class TestSimulate:
    def test_on_demand_everything_is_exposed(self):
        line = simulate(program(chain(3).graph, costs(matmul=1.0, transfer=2.0)))
        assert line.total == pytest.approx(3 * (2 + 4))
        assert sum(line.exposed.values()) == pytest.approx(6)

    def test_the_wire_carries_one_after_the_other(self):
        gm = chain(3)
        first, second, third = starts(gm.graph)
        for node in (second, third):
            first.append(node)
        line = simulate(program(gm.graph, costs(matmul=1.0, transfer=10.0)))
        assert [line.carried[n] for n in (first, third, second)] == [(0, 10), (10, 20), (20, 30)]


class TestSchedule:
    def test_started_as_late_as_still_hides_it(self):
        """A gather takes one matmul of four: it starts before the last, with the margin before the
        last two.
        """
        gm = scheduled(chain(3), costs(matmul=1.0, transfer=1.0))
        assert marks(gm) == "GgmmGmmgmmGmmgmmmm"
        line = simulate(program(gm.graph, costs(matmul=1.0, transfer=1.0)))
        assert line.total == pytest.approx(1 + 12)

    def test_a_slow_wire_is_never_idle(self):
        """Wire-bound: each gather waits in line behind the one before it, and no more than one."""
        machine = costs(matmul=1.0, transfer=6.0)
        gm = scheduled(chain(4), machine)
        line = simulate(program(gm.graph, machine))
        assert line.total == pytest.approx(4 * 6 + 4)
        assert "GGG" not in marks(gm)

    def test_small_units_share_the_look_ahead(self):
        """A long unit after short ones: its gather must start several units early, but not further
        than the bound.
        """
        machine = costs(matmul=1.0, transfer=3.0)
        gm = scheduled(chain(6, matmuls=1), machine)
        ahead = used = worst = 0
        for mark in marks(gm):
            ahead += mark == "G"
            used += mark == "g"
            worst = max(worst, ahead - used)
        assert worst <= AHEAD + 1

    def test_a_free_wire_changes_nothing(self):
        gm = chain(3)
        before = marks(gm)
        assert marks(scheduled(gm, costs(matmul=1.0, transfer=1e-9))) == before

    def test_a_piece_of_a_buffer_at_the_beginning(self):
        """The first node of the graph prepares the gather that should start there."""
        hand = Hand()
        x = hand.input("x", WIDTH, WIDTH)
        flats = []
        for n in range(3):
            specs = unit(f"u{n}", {"w": (WIDTH, WIDTH), "unused": (WIDTH, WIDTH)})
            flats.append((hand.input(f"flat{n}", numel(specs)), specs[0]))
        for flat, spec in flats:
            x = hand(MM, hand(MM, x, hand.unshard(flat, spec)), x)
        gm = scheduled(lower(hand.returns(x), PLAN), costs(matmul=1.0, transfer=2.0))
        gm.graph.lint()
        assert marks(gm).startswith("G")

    def test_reductions_are_awaited_when_done(self):
        """A reduction takes two matmuls: it is awaited in the middle of the next unit, the last one
        at the end.
        """
        gm = scheduled(backward(3), costs(matmul=1.0, transfer=2.0))
        assert marks(gm).count("r") == 3
        assert "Rr" not in marks(gm)[:-2]
        first = marks(gm).index("R")
        assert marks(gm)[first:].index("r") > 2

    def test_few_reductions_are_under_way(self):
        gm = scheduled(backward(8, matmuls=1, is_kept=True), costs(matmul=1.0, transfer=20.0))
        assert under_way(gm) == REDUCTIONS

    @pytest.mark.parametrize(("rooms", "at_most"), [(0, 1), (1.9, 1), (2, 2), (4.9, 4), (100, 8)])
    def test_bytes_of_reductions_under_way(self, rooms: float, at_most: int):
        """In gradients, each of which is alive while it is sent; one at a time is always
        allowed.
        """
        gm = delay_wait(backward(8, matmuls=1, is_kept=True), reducing(rooms))
        assert under_way(gm) == at_most
        assert not list(bounded_in_flight(gm, reducing(rooms)))

    def test_verify_counts_the_bytes_of_reductions(self):
        gm = delay_wait(backward(8, matmuls=1, is_kept=True), reducing(3))
        ((_, detail), *_) = bounded_in_flight(gm, reducing(2))
        assert detail.endswith(
            f"makes 3 reduces of together {3 * GRADIENT} bytes under way; the plan allows "
            f"{2 * GRADIENT} bytes"
        )

    def test_a_units_own_bound_comes_before_costs(self):
        """Then the others go by distance, in the pass and for verify."""
        plan = reducing(100)
        gm = delay_wait(backward(8, matmuls=1, is_kept=True, reduces_in_flight=2), plan)
        assert under_way(gm) == 2
        assert not list(bounded_in_flight(gm, plan))

    def test_the_same_every_time(self):
        machine = costs(matmul=1.0, transfer=2.5)
        decided = []
        for _ in range(2):
            gm = backward(5)
            names = {k.name: v.name for k, v in gather_anchors(gm.graph, machine).items()}
            waits = {k.name: v and v.name for k, v in wait_anchors(gm.graph, machine).items()}
            decided.append((names, waits))
        assert decided[0] == decided[1]

    @pytest.mark.parametrize(
        ("transfer", "matmuls", "order"),
        [
            (5.0, 4, "GgmmmmRGrmmmmgm"),  # the gather is late either way, the tokens need not be
            (3.0, 2, "GgmmmmRGrmmgm"),
            (1.0, 3, "GgmmmmRrmGmmgm"),
            (5.0, 1, "GgGmmmmRrmgm"),  # hidden by what comes before the tokens
        ],
    )
    def test_tokens_go_before_a_gather_that_can_wait(
        self, transfer: float, matmuls: int, order: str
    ):
        assert marks(scheduled(routed(matmuls), costs(1.0, transfer))) == order

    @pytest.mark.parametrize("made", [chain(4), routed(3), backward(4)])
    def test_a_total_is_that_of_the_run(self, made: GraphModule):
        """To the bit, whatever the places:
        what is decided by one is what the other would decide.
        """
        gathers, generator = Gathers(made.graph, costs(1.0, 1.7)), random.Random(0)
        for _ in range(100):
            drawn = (generator.randint(0, wait) for wait in gathers.waits)
            places = [*accumulate(drawn, max)]
            places = [min(pair) for pair in zip(places, gathers.waits, strict=True)]
            assert gathers.total(places) == gathers.play(places).total

    def test_distances_come_before_costs(self):
        """A distance that the user set is kept, whatever the costs say."""
        machine = costs(matmul=1.0, transfer=2.0)
        gm = prefetch_all_gather(chain(3), Plan(prefetch=0, costs=machine))
        assert marks(gm) == marks(chain(3))


class TestPlan:
    @pytest.mark.parametrize("budget", [-1, -0.1, 1.5, True, "1 GB"])
    def test_budget(self, budget):
        with pytest.raises(ValueError, match="memory_budget="):
            Plan(memory_budget=budget)


def test_what_costs_should_decide_and_there_are_none(fake_world):
    """Nothing is measured over a fake group; the ranks' graphs are as by default, and it says so
    once.
    """
    model = fully_shard(torch.nn.Linear(4, 4))
    with planned(prefetch=None, split_bytes=None):
        with pytest.warns(
            UserWarning,
            match="the plan leaves prefetch, split_bytes to costs, and no costs are known",
        ):
            torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(torch.ones(2, 4))
    with planned(prefetch=None, split_bytes=None, costs=costs(1.0, 1.0)), warnings.catch_warnings():
        warnings.simplefilter("error")
        current_plan().say_missing_costs()
    torch._dynamo.reset()


CHANGES = {
    "prefetch": 3.0,
    "backward_prefetch": 3.0,
    "reduces_in_flight": 3.0,
    "bucket_bytes": 3,
    "split_bytes": 3,
    "own_message": 3,
    "reductions": "all_to_all",
    "copy_out": "strided",
    "reduction_bytes": 3,
    "recompute": False,
    "overlap_exchanges": False,
    "exchange_group": "shared",
    "record_routing": True,
    "regions": "off",
    "memory_budget": 0.5,
    "offload": "budget",
    "optimizer_state": "budget",
    "host_budget": 3,
    "kept": (("u", "w"),),
    "dropped": (("u", "w"),),
    "recomputed": ("mm",),
    "offloaded": ("mm",),
    "states_on_host": (("u", "w"),),
    "costs": costs(1.0, 1.0),
    "gather_quantized": torch.int8,
    "reduce_quantized": torch.float8_e4m3fn,
    "exact": ("head.*",),
    "check": "checksums",
}
WITH = {  # what a field cannot be without
    "offload": {"memory_budget": 0.5},
    "optimizer_state": {"memory_budget": 0.5},
    "host_budget": {"memory_budget": 0.5, "offload": "budget"},
}


def test_every_field_is_part_of_the_compile_caches_key(monkeypatch):
    """Of the plan, of its costs, and of each link; once ranks have decided, before which nothing is
    cached.
    """
    monkeypatch.setattr(inductor, "is_undecided", lambda plan: False)
    assert [f.name for f in fields(Plan)] == list(CHANGES)
    plans = [Plan(**{name: changed}, **WITH.get(name, {})) for name, changed in CHANGES.items()]
    machine = costs(1.0, 1.0)
    ((_, link),) = machine.links
    links = [replace(link, **{f.name: 7.0}) for f in fields(Link)]
    machines = [
        replace(machine, **{name: 7.0}) for name in ("flops", "bandwidth", "overhead", "host")
    ]
    machines += [machine.fused(False), replace(machine, kernels=(("mm", 7.0),))]
    machines += [replace(machine, links=(("shard", changed),)) for changed in links]
    assert len(machines) == len(fields(Costs)) - 1 + len(links)
    plans += [Plan(costs=changed) for changed in machines]
    for key in (JointPass().uuid, HalfPass().uuid):
        seen = {key()}
        for plan in plans:
            before = current_plan()
            use(plan)  # with what a budget chooses, which nobody sets
            seen.add(key())
            use(before)
        assert len(seen) == 1 + len(plans)


PROGRAM = """
import sys
sys.path[:0] = %r
from kit.schedules import planned_backward
sys.stdout.write(planned_backward())
"""


def test_the_same_in_every_process():
    """Whatever the seed of Python's hashes."""
    here = Path(__file__).parents[1]
    script = PROGRAM % [str(here), str(here.parent), str(here.parent / "benchmarks")]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert "wait_tensor" in done.stdout
    assert done.stdout == planned_backward()


def test_from_costs_units_share_until_the_link_is_busy():
    """Eight times what it carries within its latency; by size, or without costs, a fixed number of
    bytes.
    """
    machine = Costs(1.0, 1.0, 0.0, (("shard", Link(1e-3, 1e6)),))
    assert Plan(bucket_bytes=None, costs=machine).bucket_limit("shard") == pytest.approx(8000)
    assert (
        Plan(bucket_bytes=None).bucket_limit("shard")
        == Plan(costs=machine).bucket_limit("shard")
        == 1 << 20
    )
    assert Plan(bucket_bytes=None).is_from_costs
