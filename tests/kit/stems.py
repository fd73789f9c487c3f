"""What the files of a pass are called in dumps, wherever in the pipeline it stands."""

from __future__ import annotations

from compiled_fsdp.passes.base import Executor
from compiled_fsdp.passes.pipeline import HALF, JOINT

from compiled_fsdp.dump.layout import pass_stem

PLAIN = (None, Executor.PLAIN)
JOINT_NAMES = [entry.name for entry in JOINT if entry.only in PLAIN]
HALF_NAMES = [entry.name for entry in HALF if entry.only in PLAIN]


def stem(name: str) -> str:
    """The stem of a pass' files, where our own backend runs a graph that has something of ours."""
    names = HALF_NAMES if name in HALF_NAMES else JOINT_NAMES
    return pass_stem(1 + names.index(name), name)
