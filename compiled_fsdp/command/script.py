"""Somebody's script, run as Python would run it; and what is said about it."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from compiled_fsdp.ir.printer import printable

if TYPE_CHECKING:
    from collections.abc import Sequence


def is_there(script: str, *, is_module: bool, command: str) -> bool:
    """Whether there is such a file, or such a module here or installed; if not, it is said."""
    if is_module:
        if _has_module(script):
            return True
        what = f"module {script!r}, here or installed. For a file, leave -m out"
    elif Path(script).is_file():
        return True
    else:
        what = f"file {script!r}. For a module, say -m"
    sys.stderr.write(f"python -m compiled_fsdp {command}: there is no {what}\n")
    return False


def _has_module(name: str) -> bool:
    """Whether Python finds it, also in the working directory, where `run_script` looks first; of
    packages, those above it are imported.
    """
    with mock.patch.object(sys, "path", ["", *sys.path]):
        try:
            return importlib.util.find_spec(name) is not None
        except (ModuleNotFoundError, ValueError):
            return False


def say(text: str) -> None:
    """Line by line, since line ends are control characters too."""
    sys.stdout.write("\n".join(map(printable, text.split("\n"))) + "\n")


def run_script(script: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """As `python SCRIPT ...`, or `python -m SCRIPT ...`, would."""
    sys.argv = [script, *arguments]
    if is_module:
        sys.path.insert(0, "")
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")
