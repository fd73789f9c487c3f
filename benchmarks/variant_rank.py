"""A training script for `simulate`: any variant of the benchmarks, as `bench wire` trains it.

    PYTHONPATH=benchmarks python -m compiled_fsdp simulate --world 2 --machine core.json \\
        benchmarks/variant_rank.py ours_whole_step
"""

from __future__ import annotations

import itertools
import sys

import torch.distributed as dist
from gpt import SIZES
from job import Job
from variants import VARIANTS


def main(name: str) -> None:
    """Train, until `simulate` has seen enough."""
    dist.init_process_group()
    step = VARIANTS[name].build(Job(SIZES["30m"], batch=2, length=256))
    for index in itertools.count():
        step(index)


if __name__ == "__main__":
    main(sys.argv[1])
