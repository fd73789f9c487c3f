"""Which seeds say most of all that there is, and so are always run.

# after these, others of the first 800
PYTHONPATH=tests:benchmarks:. python tests/programs/order.py [SEEDS]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from programs.draw import AOT_EAGER, INDUCTOR, make

if TYPE_CHECKING:
    from programs.program import Program

# Seeds of programs with a fault that is known: benchmarks/results/random_programs.md.
OPEN: set[int] = set()
TORCHS = {"aot_eager": AOT_EAGER, "inductor": INDUCTOR}  # how often a program has them: `kinds_of`


def as_always(program: Program) -> Program:
    """Without most runs of torch's own backends: `make test` has every sixth of them."""
    out = {k for k, every in TORCHS.items() if program.seed % (6 * every) != every - 2}
    return replace(program, kinds=tuple(k for k in program.kinds if k not in out))


def words(program: Program) -> set[object]:
    """All that a program says and is."""
    flags = {("world", program.world), ("low", program.low_precision)}
    flags |= {("heads", program.heads), ("fullgraph", program.fullgraph)}
    flags |= {("dynamic", program.dynamic), ("replicas", program.replicas)}
    flags |= {("step", program.step is not None), ("cells", program.cells)}
    return program.names() | {program.way, program.optimizer, *program.kinds} | flags


def cost(program: Program) -> float:
    """Roughly, in programs of two ranks and few statements."""
    is_slow = program.world == 4, "inductor" in program.kinds
    return 1 + 3 * sum(is_slow) + 0.3 * ("aot_eager" in program.kinds) + 0.05 * len(program.names())


def in_order(count: int, first: tuple[int, ...] = ()) -> list[tuple[int, int]]:
    """After those in `first`, seeds below `count` until all is said, each time the one that says
    most for what it costs; and how much that is.
    """
    programs = {seed: as_always(make(seed)) for seed in range(count) if seed not in OPEN}
    left = {seed: words(program) for seed, program in programs.items()}
    said: set[object] = set().union(*(left.pop(seed) for seed in first))
    found = [(seed, 0) for seed in first]
    while not set().union(*left.values()) <= said:
        best = max(left, key=lambda s: (len(left[s] - said) / cost(programs[s]), -s))
        found.append((best, len(left[best] - said)))
        said |= left.pop(best)
    return found


if __name__ == "__main__":
    found = in_order(800, tuple(map(int, sys.argv[1:])))
    print(len(found), found)
