"""Words of errors, and warnings that are given once."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence


def named(thing: object) -> str:
    """An object for an error: its class, and a short text of it unless it is long."""
    text = repr(thing)
    kind = type(thing).__name__
    return kind if len(text) > 60 or "\n" in text else f"{kind} {text}"


def shortened(names: Sequence[str], most: int = 3) -> str:
    """Returns the first names, and how many more there are: "a, b, c and 9 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


_said: set[str] = set()
_on_every_rank = False
NOT_THE_USERS = (
    str(Path(torch.__file__).parent) + os.sep,  # not torchtitan, which stands beside it
    str(Path(__file__).parent) + os.sep,
    # which stands beside the package in a checkout
    str(Path(__file__).parents[1] / "passes") + os.sep,
    contextlib.__file__,
    functools.__file__,
    "<eval_with_key",  # code that torch made
    "<frozen",
)


def warn_once(text: str, about: str = "") -> None:
    """Warn, the first time this text, or any text about the same, comes up in this process: on rank
    0, at the user's line that led here. Other ranks log it, at INFO; where warnings are errors, all
    ranks raise it, as they would wait for rank 0.
    """
    key = about or text
    if key in _said:
        return
    if _on_every_rank or not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(text, stacklevel=_level_of_the_user())
    else:
        with warnings.catch_warnings():
            warnings.showwarning = _log
            warnings.warn(text, stacklevel=_level_of_the_user())
    _said.add(key)  # behind it: where warnings are errors, who tries again is told again


def _log(message: Warning | str, *_: object, **__: object) -> None:
    logging.getLogger("compiled_fsdp").info(message)


def is_users(filename: str) -> bool:
    """Whether code of this file is the user's, or a library's that calls us: not torch's, nor
    ours.
    """
    return not filename.startswith(NOT_THE_USERS)


def _level_of_the_user() -> int:
    """The innermost frame outside torch and this package, counted from the caller; the caller of
    `warn_once` if there is none.
    """
    frame, level = inspect.currentframe(), 0
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return level
        frame, level = frame.f_back, level + 1
    return 3


def check_dense(grad: torch.Tensor, fqn: str) -> None:
    """A gradient that is to be reduced.

    Raises:
        NotImplementedError: it is sparse.
    """
    if grad.layout is not torch.strided:
        raise NotImplementedError(
            f"compiled_fsdp: the gradient of {fqn} is sparse ({grad.layout}); gradients are "
            "reduced as dense tensors, as by torch's FSDP2. Build its module with sparse=False"
        )
