"""Programs of a few features each, in which every pair occurs."""

from __future__ import annotations

import random
from itertools import combinations
from typing import TYPE_CHECKING

from pairs.features import FEATURES, SLOW, closed, fit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

SIZE = 5  # features of a program: more hide each other's faults, fewer need more programs
TRIES = 12


def pairs_of(names: Collection[str]) -> set[frozenset[str]]:
    """All pairs of these features."""
    return {frozenset(pair) for pair in combinations(sorted(names), 2)}


class Cover:
    """Greedy: programs one by one, each with as many pairs that have not been in one as it finds.

    left: pairs that have to be in a program yet.
    refused: combinations that no program may have; grows while programs run.
    """

    def __init__(
        self,
        pairs: Collection[frozenset[str]],
        refused: Collection[frozenset[str]],
        seed: int = 0,
        size: int = SIZE,
    ) -> None:
        self.refused = set(refused)
        self.left = dict.fromkeys(pair for pair in pairs if not self._is_refused(pair))
        self._random, self._size = random.Random(seed), size
        self._is_slow = any(pair.intersection(SLOW) for pair in pairs)

    def __iter__(self) -> Iterator[frozenset[str]]:
        while self.left:
            made = max((self._program() for _ in range(TRIES)), key=self._gain)
            yield made

    def done(self, program: Collection[str]) -> None:
        """Its pairs have been in one that ran."""
        for pair in pairs_of(closed(program)):
            self.left.pop(pair, None)

    def refuse(self, names: frozenset[str]) -> None:
        """No further program has these together; what they have alone is done."""
        self.refused.add(names)
        for pair in [pair for pair in self.left if self._is_refused(pair)]:
            del self.left[pair]

    def _is_refused(self, names: Collection[str]) -> bool:
        found = closed(names)
        return any(each <= found for each in self.refused)

    def _gain(self, names: Collection[str]) -> int:
        return sum(pair in self.left for pair in pairs_of(closed(names)))

    def _program(self) -> frozenset[str]:
        """From a pair that is left, feature by feature, what adds most."""
        found = self._random.choice(list(self.left))
        while len(found) < self._size:
            others = [n for n in FEATURES if n not in found and (self._is_slow or n not in SLOW)]
            self._random.shuffle(others)
            fitting = [n for n in others if fit({*found, n}) and not self._is_refused({*found, n})]
            best = max(fitting, key=lambda n: self._gain({*found, n}), default="")
            if not best or self._gain({*found, best}) == self._gain(found):
                break
            found |= {best}
        return found
