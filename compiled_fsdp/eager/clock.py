"""How long steps take: from one `optimizer.step()` to the next, measured without any cost or
synchronisation.

The first optimizer that steps a model's parameters is its metronome; the steps in which something
was compiled are in the median like any other, and drop out of it soon.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

from compiled_fsdp import options

if TYPE_CHECKING:
    from torch.optim import Optimizer

KEPT = 20  # steps that the median is of


class Clock:
    """The optimizer steps of one model, and when they ended.

    count: optimizer steps so far.
    seconds: of the last steps; the time of the first is not known.
    moments: of the ends of the last two (see `options.py`).
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds: deque[float] = deque(maxlen=KEPT)
        self.moments: deque[int] = deque(maxlen=2)
        self._last = 0.0
        self._metronome: weakref.ref[Optimizer] | None = None

    def tick(self, optimizer: Optimizer) -> bool:
        """An optimizer has stepped; whether that was the model's first step."""
        if self._metronome is None or self._metronome() is None:
            self._metronome = weakref.ref(optimizer)
        if self._metronome() is not optimizer:
            return False
        now = time.perf_counter()
        if self.count:
            self.seconds.append(now - self._last)
        self._last = now
        self.moments.append(options.now())
        self.count += 1
        return self.count == 1

    @property
    def median(self) -> float | None:
        """Seconds a step; None before the second."""
        return statistics.median(self.seconds) if self.seconds else None
