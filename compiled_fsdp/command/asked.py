"""What `simulate` is asked by `--plan` and `--sweep`: fields of `Plan`, and environment variables
that the script reads, as text.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from compiled_fsdp.planning.plan import ASKED, Plan

ENVIRONMENT = "env:"


class AskedError(ValueError):
    """An option of the command line that cannot be."""


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
