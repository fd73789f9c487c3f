"""Handles that a traced read of a parameter finds: plain values that compiled code guards on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Handle:
    """The things that a traced read of one parameter needs: the graph input, and the key of the
    op's other arguments in `SPECS`.

    key: "" while an eager forward has the full parameter registered: then that is what is read.
    is_frozen: frozen by now, in a flat buffer that requires a gradient.
    full: "", or the key of what the gathered tensor becomes (`tensor_parallel.Full`).
    is_resident: the full parameter is there, see `resident.py`; the owning module has it.
    view: "", or the key of the part that is read of a flat parameter (`views.View`).
    units: the number of its unit, as text, and of those that read it too (tied after sharding):
        while the forward of one of them runs it is gathered.
    """

    flat: nn.Parameter
    key: str
    is_frozen: bool = False
    full: str = ""
    is_resident: bool = False
    view: str = ""
    units: tuple[str, ...] = ()


OPEN = Handle(nn.Parameter(torch.empty(0)), "")
APART = Handle(
    nn.Parameter(torch.empty(0)), "apart"
)  # of an all-gather extension: a traced read breaks the graph
