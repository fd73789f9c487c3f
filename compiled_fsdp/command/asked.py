"""What `simulate` is asked by `--plan` and `--sweep`: fields of `Plan`, and environment variables
that the script reads, as text.
"""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from compiled_fsdp.planning.plan import ASKED, Plan

if TYPE_CHECKING:
    import argparse

ENVIRONMENT = "env:"


class AskedError(ValueError):
    """An option of the command line that cannot be."""


def check_options(options: argparse.Namespace) -> None:
    """Before anything runs: numbers, folders to write to, and what says nothing by itself.

    Raises:
        AskedError: an option of `simulate` cannot be, or would be ignored.
    """
    for name in ("json", "report"):
        path = getattr(options, name)
        if path is not None and not path.parent.is_dir():
            raise AskedError(f"--{name} {path}: there is no folder {path.parent}; make it first")
    for name, least, what in (("skip", 0, "leave out"), ("steps", 1, "time")):
        if (value := getattr(options, name)) < least:
            raise AskedError(
                f"--{name} {value}; should be how many steps to {what}, {least} or more"
            )
    for name in ("tokens", "peak_flops", "efficiency", "memory_limit"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            option = name.replace("_", "-")
            raise AskedError(f"--{option} {value:g}; should be a number above 0")
    if options.efficiency > 1:
        raise AskedError(
            f"--efficiency {options.efficiency:g}; should be a part of a machine's peaks, at most 1"
        )
    if options.efficiency != 1 and not options.machine:
        raise AskedError("--efficiency: what is measured here has its own; pass --machine, too")
    if options.memory_limit is not None and not options.sweep:
        raise AskedError("--memory-limit: it is about what a sweep may choose; pass --sweep, too")


def plan_of(text: str) -> dict[str, Any]:
    """Fields of a plan, from "memory_budget=0.5,prefetch=auto".

    Raises:
        AskedError: there is no such field, or it cannot have such a value.
    """
    parts = dict(_parts(part) for part in text.split(",") if part.strip())
    fields = {name: value_of(name, value) for name, value in parts.items()}
    check(fields)
    return fields


def check(fields: dict[str, Any]) -> None:
    """Whether a plan can have these fields together.

    Raises:
        AskedError: it cannot.
    """
    try:
        replace(Plan(), **fields)
    except ValueError as error:
        raise AskedError(f"--plan, --sweep: {error}") from error


def value_of(name: str, text: str) -> Any:
    """A value of a field of a plan; some only go with another field, which `check` sees.

    Raises:
        AskedError: there is no such field, or it is the script's to set.
    """
    known = [field for field in ASKED if field != "costs"]
    if name not in known:
        raise AskedError(
            f"--plan, --sweep: {name!r} is no field that can be set here; those are {known}"
        )
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def axis_of(text: str) -> tuple[str, list[str]]:
    """A name and the values to try, from "memory_budget=0.0,0.5" or "env:SHARD=8,64".

    Raises:
        AskedError: as for `plan_of`.
    """
    name, values = _parts(text)
    found = [value.strip() for value in values.split(",")]
    if not name.startswith(ENVIRONMENT):
        for value in found:
            value_of(name, value)
    return name, found


def _parts(text: str) -> tuple[str, str]:
    name, is_there, value = text.partition("=")
    if not is_there or not value.strip():
        raise AskedError(f"--plan, --sweep: {text!r} should be like memory_budget=0.5")
    return name.strip(), value.strip()
