"""Private torch: when a compilation ends, what of torch it is in, who compiles, with which options,
and how often Python looks for garbage meanwhile. Tried on torch 2.11, 2.13 and 2.15; `instead_of`,
`collect_rarely` and `config_of` on 2.13 and 2.15.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch._dynamo.backends.registry import _COMPILER_FNS, lookup_backend
from torch._dynamo.callback import CallbackArgs, callback_handler

from .dynamo import trace_number, untraced
from .graphs import with_quick_nodes, without_quick_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
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

# Called around functions of others: what these do is not what the compilation does.
AROUND = str(TORCH / "_dynamo/eval_frame.py")

# Thresholds of Python's garbage collector (`gc.set_threshold`) while something of ours is compiled.
RARELY = (50_000, 20, 100)


def at_end(fn: Callable[[], None]) -> None:
    """Call `fn` when the outermost compilation under way ends, with an error too.

    Untraced: where a backward is compiled inside of a function that Dynamo has broken, Dynamo would
    trace it, and wait forever for this same compilation to end.
    """

    @untraced
    def end(_: CallbackArgs) -> None:
        callback_handler.end_callbacks = [c for c in callback_handler.end_callbacks if c is not end]
        fn()

    callback_handler.register_end_callback(end)


def hurry() -> None:
    """Until the compilation under way ends, leave out what takes long and changes nothing: see
    `collect_rarely` and `with_quick_nodes`; nothing outside of one.
    """
    collect_rarely()
    if trace_number() is not None and with_quick_nodes():
        at_end(without_quick_nodes)


def collect_rarely() -> None:
    """Let Python look for garbage rarely until the compilation under way ends; nothing outside of
    one, nor where the user has it look rarely already.

    A compiler makes objects that stay, millions of them at many layers, and by Python's own
    thresholds each few hundred are reason to look at the young ones, again and again. Torch 2.15
    does the same for the last of the three thresholds.
    """
    before = gc.get_threshold()
    if trace_number() is None or before[0] == 0 or before[0] >= RARELY[0]:
        return
    rarely = tuple(map(max, before, RARELY))
    gc.set_threshold(*rarely)

    def put_back() -> None:
        if gc.get_threshold() == rarely:
            gc.set_threshold(*before)

    at_end(put_back)


def doing(frame: FrameType | None) -> str:
    """What the compilation does in a thread whose innermost frame this is: that of `PARTS` which is
    called by no other; "" where nothing is compiled.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        for where, text in PARTS.items():
            if file.startswith(where) and file != AROUND:
                return text
        frame = frame.f_back
    return ""


def config_of(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """What these two arguments of `torch.compile` change in Inductor's config, as its default
    backend reads them; what it does not know raises there.
    """
    wrapper: Any = vars(torch)["_TorchCompileInductorWrapper"]
    config: dict[str, Any] = wrapper(mode, options, None).config
    return config


@contextmanager
def instead_of(names: Sequence[str], backend: Callable[..., Any]) -> Iterator[None]:
    """Inside, `backend` compiles whatever `torch.compile` is asked to compile by the backends of
    these names, and by its default.
    """
    for name in names:
        lookup_backend(name)  # so that it is in the table
    wrapper: Any = vars(torch)["_TorchCompileInductorWrapper"]
    with (
        mock.patch.dict(_COMPILER_FNS, dict.fromkeys(names, backend)),
        mock.patch.object(wrapper, "__call__", lambda _, gm, inputs: backend(gm, inputs)),
    ):
        yield
