"""Print the python3 that `make` makes its environments with: the first on the path, unless another
is 1.2 times as fast.

Most of the tests' time is tracing, in Python and in torch. A Python that was built without
profile-guided optimization, as pyenv builds it, takes 1.4 times as long for a loop, and 1.13 times
for three files of tests. How it was built is not told by every distribution, so a loop is timed.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

WORTH = 1.2
# Leaves with an error where no environment could be made, or Inductor's C++ not be compiled.
TIMED = """
import ensurepip, sys, sysconfig, time, timeit, venv
from os.path import exists, join
assert sys.version_info >= (3, 10) and exists(join(sysconfig.get_path("include"), "Python.h"))
class Point:
    def __init__(self, x):
        self.x = x
    def moved(self, by):
        return self.x + by if isinstance(by, int) else None
def work():
    found = {}
    for i in range(20_000):
        found[i & 255, "x"] = Point(i).moved(3)
        [each for each in (1, 2, 3)]
print(min(timeit.repeat(work, timer=time.process_time, number=1, repeat=30)))
"""


def seconds(python: Path) -> float | None:
    """What the loop takes there; None if it cannot be used."""
    done = subprocess.run([python, "-c", TIMED], capture_output=True, text=True, check=False)
    return float(done.stdout) if done.returncode == 0 else None


def chosen(pythons: list[Path]) -> Path:
    """The first that can be used, or one that is so much faster."""
    timed = [(each, took) for each in pythons if (took := seconds(each)) is not None]
    if not timed:
        return Path("python3")  # whose own error is the one to read
    (first, took), (fastest, least) = timed[0], min(timed, key=lambda pair: pair[1])
    return fastest if took > WORTH * least else first


if __name__ == "__main__":
    found = [Path(folder, "python3") for folder in os.get_exec_path()]
    usable = [each for each in found if os.access(each, os.X_OK)]
    print(chosen(list({each.resolve(): each for each in reversed(usable)}.values())[::-1]))
