"""What random programs are made of: statements of a forward (`forward.py`, `operators.py`), of the
set-up around sharding, and of a training loop (`around.py`).

Each is a few lines of Python under a heading: its name, and what it needs. `{m}` is a linear layer
(`self.up` in a block, `self.a` in the model), `{d}` the width. A forward statement turns `x` [rows,
d] into another `x`; `ids` [rows] are tokens.

    at=PLACE    where in the set-up or in the loop (`source.py`); in the loop forward, step and
                zero replace that line
    breaks      Dynamo cannot trace it, so no full graph is asked for
    for_block   `{m}` may be a block, too
    needs=WHAT  see `legal.py`; several by comma
    init: LINE  for `__init__`; of the loop, before its first step

`routed` sends each row to one of two ranks, where `{m}` is computed, and back; `alone` breaks the
graph on one rank. They are drawn apart (`draw.make_routed`, `draw.make_alone`).
"""

from __future__ import annotations

from programs.around import LOOP, OPTIMIZERS, OTHERS, SETUP
from programs.forward import ALONE, PLAIN, ROUTED
from programs.grammar import Statement
from programs.operators import OPERATORS

FORWARD = {**PLAIN, **OPERATORS}

__all__ = [
    "ALONE",
    "FORWARD",
    "LOOP",
    "OPERATORS",
    "OPTIMIZERS",
    "OTHERS",
    "PLAIN",
    "ROUTED",
    "SETUP",
    "Statement",
]
