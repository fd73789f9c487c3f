"""The command line of `python -m compiled_fsdp simulate`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_fsdp.dump.writer import dumped_to
from compiled_fsdp.inspection.check import DumpError
from compiled_fsdp.inspection.report.measured import add_profile
from compiled_fsdp.inspection.report.page import write_report
from compiled_fsdp.planning.plan import forced
from compiled_fsdp.wire.world import Wire, World

from .asked import AskedError, check_options, plan_of
from .machines import Machine, machine_named
from .prediction import predicted
from .replacement import replace_stock
from .script import is_there, run_script, say
from .simulate import simulated
from .steps import SimulationError
from .sweep import sweep

if TYPE_CHECKING:
    from .found import Found
    from .prediction import Predicted


def add_simulate(commands: Any, script: argparse.ArgumentParser) -> None:
    """Add the command with its options; script: what it takes as `run` does."""
    parser = commands.add_parser(
        "simulate",
        parents=[script],
        help="run a training script on the CPU as one rank of many, on wires of known speed, or "
        "predict it for a machine that is not here",
    )
    _add_world(parser)
    parser.add_argument(
        "--skip", type=int, default=3, metavar="STEPS", help="first ones, untimed; default: 3"
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="to time; then the script is ended; default: 10"
    )
    parser.add_argument(
        "--tokens", type=float, metavar="N", help="in a step, of all ranks: for tokens/s"
    )
    parser.add_argument(
        "--peak-flops", type=float, metavar="F", help="that the device could do: for its share"
    )
    parser.add_argument(
        "--replace", action="store_true", help="torch's FSDP by ours first, as `run` does"
    )
    parser.add_argument(
        "--plan",
        default="",
        metavar="FIELD=VALUE,...",
        help="fields of Plan, whatever the script sets: memory_budget=0.5,prefetch=1",
    )
    _add_prediction(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it down")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="also write the page of `report` about it"
    )
    parser.set_defaults(run=simulate)


def _add_world(parser: argparse.ArgumentParser) -> None:
    """What there is of ranks and wires."""
    parser.add_argument("--world", type=int, required=True, help="how many ranks there are")
    parser.add_argument("--rank", type=int, default=0, help="which one this is; default: 0")
    parser.add_argument(
        "--gpus-per-node", type=int, help="ranks; default: 1, or as many as the machine has"
    )
    parser.add_argument(
        "--network", type=float, metavar="B/S", help="between nodes, per rank: 50e9"
    )
    parser.add_argument(
        "--link", type=float, metavar="B/S", help="within a node; default: as the network"
    )
    parser.add_argument("--latency", type=float, metavar="S", help="of a collective; default: 2e-5")
    parser.add_argument(
        "--issue",
        type=float,
        default=0.0,
        metavar="S/B",
        help="of the processor for each byte that is sent, as gloo needs it; default: 0",
    )


def _add_prediction(parser: argparse.ArgumentParser) -> None:
    """Machines that are not here, and what is tried on them."""
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help="predict, do not run: h100, h200, b200, mi300x, or a file like theirs",
    )
    parser.add_argument(
        "--efficiency",
        type=float,
        default=1.0,
        help="with --machine: what kernels and wires reach of its peaks; default: 1.0, as "
        "published",
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="FIELD=VALUE,...",
        help="try each, and each with each of other --sweep: of Plan, or env:NAME=VALUE,... that "
        "the script reads",
    )
    parser.add_argument(
        "--memory-limit", type=float, metavar="BYTES", help="of what a sweep may choose"
    )


def simulate(options: argparse.Namespace) -> int:
    """Run it, predict it, or try several; returns the exit status."""
    if not is_there(options.script, is_module=options.is_module, command="simulate"):
        return 2
    try:
        check_options(options)
        if options.sweep:
            return sweep(options)
        machine = machine_named(options.machine) if options.machine else None
        found = _one(options, machine)
    except (AskedError, SimulationError, DumpError) as error:
        sys.stderr.write(f"python -m compiled_fsdp simulate: {error}\n")
        return 2
    say(str(found))
    if options.json is not None:
        options.json.write_text(found.to_json())
    return 0


def _one(options: argparse.Namespace, machine: Machine | None) -> Found | Predicted:
    world = world_of(options, machine)

    def run() -> None:
        run_script(options.script, options.arguments, is_module=options.is_module)

    with ExitStack() as stack:
        stack.enter_context(forced(**plan_of(options.plan)))
        if options.replace:
            stack.enter_context(replace_stock())
        folder = None
        if options.report is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "simulated"
            stack.enter_context(dumped_to(folder))
        found: Found | Predicted
        if machine is not None:
            found = predicted(run, world, machine, options)
        else:
            found, profile = simulated(run, world, options.skip, options.steps)
            found.tokens, found.peak_flops = options.tokens, options.peak_flops
        if folder is not None and not folder.is_dir():
            raise SimulationError(
                "--report: the page is about compiled graphs of ours, and the script has none. "
                "Compile the sharded model, with --replace if it is sharded by torch's FSDP"
            )
        if folder is not None:
            if machine is None and profile is not None:
                add_profile(folder, profile, world.rank)
            write_report(folder, options.report)
    return found


def world_of(options: argparse.Namespace, machine: Machine | None) -> World:
    """The ranks and their wires.

    Raises:
        AskedError: there can be no such world.
    """
    if options.network is None and machine is None:
        raise AskedError("--network says how fast nodes reach each other: pass it, or --machine")
    share = options.efficiency if machine else 1.0
    network, link = options.network, options.link
    if network is None:
        network = machine.network_bandwidth * share if machine else 0.0
    if link is None:
        link = machine.link_bandwidth * share if machine else network
    latency = 2e-5 if options.latency is None else options.latency
    each = options.gpus_per_node
    if each is None:
        each = machine.devices_per_node if machine else 1
    try:
        return World(
            options.world,
            options.rank,
            Wire("network", network, latency, options.issue),
            Wire("link", link, latency, options.issue),
            min(each, options.world) if options.gpus_per_node is None else each,
        )
    except ValueError as error:
        raise AskedError(str(error)) from error
