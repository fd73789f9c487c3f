"""`simulate --sweep`: the same script under several plans and environments, each in a process of
its own, one after the other.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .asked import ENVIRONMENT, AskedError, axis_of, plan_of
from .machines import machine_named
from .script import say

if TYPE_CHECKING:
    import argparse

# Options that each of the processes gets as they are; the others are the sweep's own.
HANDED_ON = (
    "world",
    "rank",
    "gpus_per_node",
    "network",
    "link",
    "latency",
    "issue",
    "skip",
    "steps",
    "tokens",
    "peak_flops",
    "machine",
    "efficiency",
)


def sweep(options: argparse.Namespace) -> int:
    """Try all combinations, print a table and what to write; returns the exit status: 1 if none
    could run within the limit.

    Raises:
        AskedError: what is to be tried cannot be.
    """
    axes = [axis_of(text) for text in options.sweep]
    if options.report is not None:
        raise AskedError("--report: the page is about one run; leave --sweep out")
    names, values = zip(*axes, strict=True)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise AskedError(
            f"--sweep {twice}: it is given twice; write all its values in one, {twice}=A,B"
        )
    choices = [dict(zip(names, each, strict=True)) for each in itertools.product(*values)]
    for chosen in choices:
        _plan(options, chosen)
    rows: list[dict[str, Any]] = []
    for chosen in choices:
        say(f"{len(rows) + 1}: {', '.join(f'{k}={v}' for k, v in chosen.items())}")
        sys.stdout.flush()
        rows.append({"chosen": chosen, **_measured(options, chosen)})
    limit = limit_of(options)
    best = choose(rows, limit)
    say(table(rows, best, limit, is_predicted=options.machine is not None))
    say(_advice(best, limit, options))
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows, "best": best}, indent=1))
    return 0 if best is not None else 1


def limit_of(options: argparse.Namespace) -> float | None:
    """How many bytes a combination may take: as was asked, or what the machine has that is
    predicted; None for any.
    """
    if options.memory_limit is not None or options.machine is None:
        given: float | None = options.memory_limit
        return given
    return machine_named(options.machine).memory_bytes


def _plan(options: argparse.Namespace, chosen: dict[str, str]) -> dict[str, Any]:
    """The fields of a plan of one combination."""
    swept = [f"{name}={value}" for name, value in chosen.items() if not _is_variable(name)]
    return plan_of(",".join([options.plan, *swept]))


def choose(rows: list[dict[str, Any]], limit: float | None) -> dict[str, Any] | None:
    """The fastest one that ran, with a peak of no more than `limit` bytes."""
    fitting = [row for row in rows if row["step_s"] is not None and _fits(row, limit)]
    return min(fitting, key=lambda row: row["step_s"], default=None)


def _fits(row: dict[str, Any], limit: float | None) -> bool:
    return limit is None or (row["peak"] is not None and row["peak"] <= limit)


def table(
    rows: list[dict[str, Any]],
    best: dict[str, Any] | None,
    limit: float | None,
    *,
    is_predicted: bool,
) -> str:
    """A line for each combination; `peak` includes what is at rest."""
    names = list(rows[0]["chosen"])
    widths = {
        name: 2 + max(len(name), *(len(row["chosen"][name]) for row in rows)) for name in names
    }
    lines = [
        "",
        "PREDICTED, nothing was measured" if is_predicted else "measured here",
        "".join(f"{name:<{width}}" for name, width in widths.items())
        + f"{'step ms':>10}{'exposed ms':>12}{'peak MB':>12}",
    ]
    for row in rows:
        text = "".join(f"{row['chosen'][name]:<{width}}" for name, width in widths.items())
        if row["step_s"] is None:
            lines.append(f"{text}  failed: {row['error']}")
            continue
        peak = "not known" if row["peak"] is None else f"{row['peak'] / 1e6:.2f}"
        mark = "  best" if row is best else "" if _fits(row, limit) else "  too large"
        lines.append(
            f"{text}{row['step_s'] * 1e3:>10.2f}{row['exposed_s'] * 1e3:>12.2f}{peak:>12}{mark}"
        )
    return "\n".join(lines)


def _advice(best: dict[str, Any] | None, limit: float | None, options: argparse.Namespace) -> str:
    if best is None:
        return "nothing ran" + ("" if limit is None else f" in at most {limit / 1e6:.2f} MB")
    chosen = best["chosen"]
    plan = _plan(options, chosen)
    text = ", ".join(f"{name}={value!r}" for name, value in plan.items())
    lines = [f"compiled_fsdp.set_plan(compiled_fsdp.Plan({text}))"] if plan else []
    lines += [
        f"{name.removeprefix(ENVIRONMENT)}={value}"
        for name, value in chosen.items()
        if _is_variable(name)
    ]
    return "\n".join(["", "to use it:", *lines])


def _is_variable(name: str) -> bool:
    return name.startswith(ENVIRONMENT)


def _measured(options: argparse.Namespace, chosen: dict[str, str]) -> dict[str, Any]:
    """One combination, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        variables = {
            name.removeprefix(ENVIRONMENT): value
            for name, value in chosen.items()
            if _is_variable(name)
        }
        command = [sys.executable, "-m", "compiled_fsdp", *_arguments(options, chosen, out)]
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
        )
        if done.returncode or not out.exists():
            return {"step_s": None, "exposed_s": None, "peak": None, "error": _why(done)}
        found = json.loads(out.read_text())
        return {name: found[name] for name in ("step_s", "exposed_s")} | {"peak": _peak(found)}


def _why(done: subprocess.CompletedProcess[str]) -> str:
    """Why a combination has no result: the signal that ended it, or the last line that names an
    error, or else the last that it wrote and that goes on with no other.
    """
    if done.returncode < 0:
        return f"ended by {signal.Signals(-done.returncode).name}"
    plain = (re.sub(r"^\[rank\d+\]: ?", "", line) for line in done.stderr.splitlines())
    lines = [line for line in plain if line.strip() and not line[0].isspace()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return [f"exit status {done.returncode}", *lines[-1:], *errors[-1:]][-1]


def _peak(found: dict[str, Any]) -> int | None:
    """Bytes at the peak, with what is at rest: as predicted, of an accelerator, or of the CPU."""
    memory: dict[str, Any] = found["memory"]
    above: int | None = memory["peak"]
    known: list[int | None] = [found.get("peak"), memory["device_peak"]]
    if above is not None:
        known.append(memory["parameters"] + memory["frozen"] + memory["optimizer"] + above)
    return next((peak for peak in known if peak is not None), None)


def _arguments(options: argparse.Namespace, chosen: dict[str, str], out: Path) -> list[str]:
    given = {name: getattr(options, name) for name in HANDED_ON}
    plan = [f"{k}={v}" for k, v in chosen.items() if not _is_variable(k)]
    found = ["simulate", "--json", str(out)]
    for name, value in given.items():
        found += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    if options.plan or plan:
        found += ["--plan", ",".join([*([options.plan] if options.plan else []), *plan])]
    found += ["--replace"] * options.replace + ["-m"] * options.is_module
    return [*found, options.script, *options.arguments]
