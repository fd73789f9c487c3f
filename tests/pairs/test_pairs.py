"""Features in pairs: each pair in a program that equals the unsharded model and ours without a
graph, or refused in words; see `features.py`, and `python tests/pairs` for all of them.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import pytest
from pairs.cover import Cover, pairs_of
from pairs.features import FEATURES, closed, fit, pairs
from pairs.refused import REFUSED
from pairs.verdict import Judge

if TYPE_CHECKING:
    from kit.pool import Pool

NUM_PROGRAMS = 4
# What was at fault, smallest first.
MENDED = (
    ("checkpointed", "reshard_int"),
    ("checkpointed", "stay_gathered"),
    ("regions_named", "tp"),
    ("state_dict", "states"),
)


def programs(count: int) -> list[frozenset[str]]:
    """The first programs, on two ranks, of those that `python tests/pairs` runs."""
    here = [pair for pair in pairs() if not pair & {"tp", "hsdp", "reshard_int"}]
    cover, found = Cover(here, REFUSED), []
    for program in islice(cover, count):
        found.append(program)
        cover.done(program)
    return found


@pytest.mark.parametrize("number", range(NUM_PROGRAMS))
def test_programs(two: Pool, four: Pool, number: int) -> None:
    program = programs(number + 1)[-1]
    assert str(Judge({2: two, 4: four})(program)) == "equal", sorted(program)


@pytest.mark.parametrize("names", MENDED, ids="+".join)
def test_mended(two: Pool, four: Pool, names: tuple[str, ...]) -> None:
    assert str(Judge({2: two, 4: four})(names)) == "equal"


@pytest.mark.parametrize("names", REFUSED, ids=lambda names: "+".join(sorted(names)))
def test_refused(two: Pool, four: Pool, names: frozenset[str]) -> None:
    """By all ranks, in these words."""
    verdict = Judge({2: two, 4: four})(names)
    assert verdict.word == "refused", verdict
    assert REFUSED[names] in verdict.text


def test_every_pair_is_in_a_program() -> None:
    """But what is refused, which is in none."""
    some = {*list(FEATURES)[::3], "compile_step"}
    wanted = [pair for pair in pairs() if pair <= some]
    cover, made = Cover(wanted, REFUSED), list[frozenset[str]]()
    assert 0 < len(cover.left) < len(wanted)
    for program in cover:
        made.append(closed(program))
        assert fit(program)
        cover.done(program)
    assert not any(names <= program for names in REFUSED for program in made)
    there = set().union(*map(pairs_of, made))
    for pair in wanted:
        assert pair in there or any(names <= closed(pair) for names in REFUSED), pair


def test_what_is_refused_is_told_by_the_fewest() -> None:
    for names in REFUSED:
        assert fit(names), names
        assert not any(other < names for other in REFUSED), names


def test_features() -> None:
    """What they name is there, and no feature is left out of all pairs."""
    slots = {feature.slot for feature in FEATURES.values()}
    for name, feature in FEATURES.items():
        assert {*feature.without} <= slots | {*FEATURES}, name
        assert {*feature.needs} <= {*FEATURES}, name
        assert fit({name}), name
    assert {name for pair in pairs(with_slow=True) for name in pair} == {*FEATURES}
    assert frozenset({"states", "compile_step"}) in pairs_of(closed({"states"}))
