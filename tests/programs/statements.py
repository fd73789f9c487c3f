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
graph on one rank. They are drawn apart (`draw.make_routed`, `draw.make_alone`), and so is what
whole scripts are made of (`scripts.py`, `draw.make_script`).
"""

from __future__ import annotations

from programs.around import LOOP as DRAWN_LOOP
from programs.around import OPTIMIZERS, OTHERS
from programs.around import SETUP as DRAWN_SETUP
from programs.forward import ALONE, PLAIN, ROUTED
from programs.grammar import Statement
from programs.operators import OPERATORS
from programs.scripts import NESTED_FORWARD, SCRIPT_FORWARD, SCRIPT_LOOP, SCRIPT_SETUP

FORWARD = {**PLAIN, **OPERATORS, **SCRIPT_FORWARD, **NESTED_FORWARD}
SETUP = {**DRAWN_SETUP, **SCRIPT_SETUP}
LOOP = {**DRAWN_LOOP, **SCRIPT_LOOP}

__all__ = [
    "ALONE",
    "DRAWN_LOOP",
    "DRAWN_SETUP",
    "FORWARD",
    "LOOP",
    "NESTED_FORWARD",
    "OPERATORS",
    "OPTIMIZERS",
    "OTHERS",
    "PLAIN",
    "ROUTED",
    "SCRIPT_FORWARD",
    "SCRIPT_LOOP",
    "SCRIPT_SETUP",
    "SETUP",
    "Statement",
]
