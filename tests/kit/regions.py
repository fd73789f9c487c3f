"""Regions that are compiled once, without a compiler: so that random models have them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from compiled_fsdp.compiler import backend
from compiled_fsdp.compiler.driver import run_half
from compiled_fsdp.ir import repeats
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.subgraphs import INVOKE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import GraphModule


@dataclass
class Calls:
    """num: of regions, in all graphs that were compiled."""

    num: int = 0


@contextmanager
def in_regions() -> Iterator[Calls]:
    """Inside, "compiled_fsdp_eager" runs the passes as Inductor does, and all that a graph computes
    between what has to stay is a call, however little it is, and though it occurs once.
    """
    calls = Calls()

    def run(gm: GraphModule, **_: Any) -> GraphModule:
        gm = run_half(gm, is_fused=True)
        calls.num += len(find(gm.graph, INVOKE))
        return gm

    with (
        mock.patch.object(backend, "run_half", run),
        mock.patch.object(repeats, "LEAST_NODES", 1),
        mock.patch.object(repeats, "LEAST_TIMES", 1),
    ):
        yield calls
