"""A dump for the tests of the report: a small model with a module whose name is markup, compiled,
and profiled on two ranks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measure import record_step
from torch import nn

from compiled_fsdp import dumped_to, fully_shard
from compiled_fsdp.inspection.report.page import unpacked
from compiled_fsdp.report import add_profile

if TYPE_CHECKING:
    from torch import Tensor

EVIL = "</script><img src=x onerror=alert(1)>"


class Model(nn.Module):
    """Two layers under plain names and one under another."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", EVIL, "last"):
            self.add_module(name, nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)))

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        for layer in self.children():
            x = layer(x)
        return x


def record(folder: str) -> None:
    """On every rank: compile inside a dump, then lay a profiled step over it."""
    model = Model()
    for layer in model.children():
        fully_shard(layer)
    call = torch.compile(fully_shard(model), backend="compiled_fsdp_eager", fullgraph=True)
    x = torch.ones(16, 32)
    with dumped_to(folder):
        call(x).sum().backward()
    trace = Path(folder) / f"{torch.distributed.get_rank()}.json"
    record_step(lambda: call(x).sum().backward(), trace)
    add_profile(Path(folder), trace, torch.distributed.get_rank())


def data_of(page: Path) -> Any:
    """What a report shows."""
    (found,) = re.findall(r'id="data">([^<]*)</script>', page.read_text())
    return unpacked(found)
