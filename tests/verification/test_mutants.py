"""The mutation test of `verify`: at least 99 % of the harmful mutants are caught, and every
mutation is tried.
"""

from __future__ import annotations

from collections import Counter

import pytest
from kit.mutants import MUTATIONS, Mutant, report, trials
from kit.simulation import Hang, Simulation
from kit.subjects import subjects


@pytest.fixture(scope="module")
def mutants() -> list[Mutant]:
    return trials(100)  # 2,000: `python tests/kit/mutants.py`


def test_harmful_mutants_are_caught(mutants: list[Mutant]) -> None:
    harmful = [m for m in mutants if m.harm]
    caught = [m for m in harmful if m.rule]
    assert len(harmful) > 55, report(mutants)
    assert len(caught) >= 0.99 * len(harmful), report(mutants)


def test_every_mutation_is_tried_and_most_do_harm(mutants: list[Mutant]) -> None:
    tried = Counter(m.name for m in mutants)
    assert set(tried) == {mutation.__name__ for mutation in MUTATIONS}, report(mutants)
    harmless = {
        "duplicate_wait",
        "duplicate_free",
        "drop_free",
        "reorder_starts",
    }  # of no consequence in execution
    for name in set(tried) - harmless:
        assert any(m.harm for m in mutants if m.name == name), f"{name}\n{report(mutants)}"


def test_correct_graphs_pass_and_execute() -> None:
    """So that "caught" means something: nothing is caught in them, and every rank gets a result."""
    for subject in subjects():
        assert subject.caught(lambda gm, plan: gm) is None, subject.name
        results, moved = subject.executed
        assert len(results) == subject.world
        assert moved or subject.name.startswith("flat whole forward"), (
            "under NO_SHARD forward has nothing to gather"
        )


def test_ranks_that_start_in_another_order_hang() -> None:
    """What no rank can see in its own graph: here the simulation hangs, and in use the comparison
    of sequences finds it.
    """
    subject = next(s for s in subjects() if s.name.startswith("fp32 forward"))
    gather, other = subject.compiled().graph, subject.compiled().graph
    nodes = [n for n in other.nodes if "all_gather" in str(n.target)]
    nodes[0].args, nodes[1].args = nodes[1].args, nodes[0].args
    with pytest.raises(Hang):
        Simulation(2, subject.groups).run([gather, other], subject.inputs())
