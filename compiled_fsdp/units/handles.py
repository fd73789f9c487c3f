"""Handles that a traced read of a parameter finds: plain values that compiled code guards on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


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
    inner: the tensors inside of a shard that brings an all-gather of its own
        (`traced_extension.py`); then the buffer is only where its gradient goes.
    is_plain: a read is an `unshard` and nothing else. Compiled code guards on this, on the key and
        on the buffer; on the other fields only where it is False.
    """

    flat: nn.Parameter
    key: str
    is_frozen: bool = False
    full: str = ""
    is_resident: bool = False
    view: str = ""
    units: tuple[str, ...] = ()
    inner: tuple[Tensor, ...] = field(default=(), compare=False)
    is_plain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        others = (self.is_frozen, self.full, self.is_resident, self.view, self.inner)
        object.__setattr__(self, "is_plain", self.key not in ("", _APART) and not any(others))


_APART = "apart"
OPEN = Handle(nn.Parameter(torch.empty(0)), "")
# Of an all-gather extension that no graph can have: a traced read breaks the graph.
APART = Handle(nn.Parameter(torch.empty(0)), _APART)
