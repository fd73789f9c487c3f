"""Private torch: when a compilation ends, and what of torch it is in. Tried on torch 2.11, 2.13 and
2.15.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch._dynamo.callback import CallbackArgs, callback_handler

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

TORCH, OURS = Path(torch.__file__).parent, Path(__file__).parents[1]
# Folders and files, and what a compilation does while their code runs.
PARTS = {
    str(OURS / "compiler"): "passes of compiled_fsdp",
} | {
    str(TORCH / where): text
    for where, text in {
        "_inductor": "Inductor generates code",
        "_functorch/partitioners.py": "partition into forward and backward",
        "_functorch": "AOTAutograd traces forward and backward",
        "_dynamo": "Dynamo traces",
    }.items()
}


def at_end(fn: Callable[[], None]) -> None:
    """Call `fn` when the outermost compilation under way ends, with an error too."""

    def end(_: CallbackArgs) -> None:
        callback_handler.end_callbacks = [c for c in callback_handler.end_callbacks if c is not end]
        fn()

    callback_handler.register_end_callback(end)


def doing(frame: FrameType | None) -> str:
    """What the compilation does in a thread whose innermost frame this is: that of `PARTS` which is
    called by no other; "" where nothing is compiled.
    """
    while frame is not None:
        for where, text in PARTS.items():
            if frame.f_code.co_filename.startswith(where):
                return text
        frame = frame.f_back
    return ""
