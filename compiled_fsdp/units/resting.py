"""Checksums of what a flat buffer holds while nobody should write to it.

Each parameter's sum is that of when it was first seen under its present version; whatever is seen
under the same version later has to have the same sum. A write that is counted makes a new version,
an optimizer's step a new sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Version = tuple[int, ...]


@dataclass(eq=False)
class Resting:
    """The sums of a flat buffer's parameters, by their places in it.

    sums: [P]; None before the first.
    changed: bool [P], whether a later sum differed under the same version.
    seen: of each parameter, the version that its sum is of, and when it was taken; None: no sum.
    latest: when sums were compared last, for errors.
    num_forgotten: how often an optimizer was about to write, or had written.
    """

    sums: Tensor | None = None
    changed: Tensor | None = None
    seen: list[tuple[Version, str] | None] = field(default_factory=list)
    latest: str = ""
    num_forgotten: int = 0

    def note(
        self, places: Sequence[int], now: Tensor, version: Version, when: str, num: int
    ) -> None:
        """Compare sums [len(places)] that are taken now, of `num` parameters, with those of before;
        nothing is awaited.
        """
        if self.sums is None or self.changed is None or self.sums.device != now.device:
            self.sums = torch.zeros(num, dtype=torch.int64, device=now.device)
            self.changed = torch.zeros(num, dtype=torch.bool, device=now.device)
            self.seen = [None] * num
        known = [at for at in places if (seen := self.seen[at]) and seen[0] == version]
        if known == list(range(num)):
            self.changed |= self.sums != now
            self.latest = when
            return
        for place, at in enumerate(places):
            if at in known:
                self.changed[at] |= self.sums[at] != now[place]
                self.latest = when
            else:
                self.sums[at], self.changed[at] = now[place], False
                self.seen[at] = version, when

    def forget(self) -> None:
        """What comes next may be anything: an optimizer is about to write."""
        self.num_forgotten += 1
        self.seen = [None] * len(self.seen)

    def accept(self, places: Sequence[int]) -> None:
        """What is there now of these is right: it was written by the program."""
        assert self.changed is not None
        for at in places:
            self.seen[at], self.changed[at] = None, False
