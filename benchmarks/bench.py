"""Every benchmark, in one command: `make bench`, or `make bench ARGS="wire --rates 1"` for parts.

    wire      two hosts joined by a wire of 0.5, 1, 2, 4 Gbit/s and unshaped; needs root
    experts   a mixture of 8 experts over the same wire, its experts divided among the ranks
    latency   24 layers of width 64 on two local ranks: many tiny parameters
    muon      Muon beside AdamW and the usual ways to run it on shards; over a wire too as root
    budget    step time against memory: what keeping parameters for backward buys; needs root
    memory    exact peak tensor bytes, and resident memory
    activations  peak and step time with activations computed again under a budget
    compile   seconds to compile, cold and warm, from 4 to 48 layers
    compile_depth  what a layer more costs to compile, in processor seconds, by part of the compiler
    ahead     seconds of the first step of a model that was compiled ahead
    plan      seconds to plan a 405 B Llama on 1,024 ranks that do not exist
    plan_experts  the same for DeepSeek-V3 on 2,048 ranks
    graphs    how many graphs a model wrapped by FSDP1 is, ours and stock's
    coding    what codes on the wire cost a processor
    page      bytes of the report and of its dump, at 4 and 32 layers
    simulate  a step on two hosts against the same step simulated; needs root
    gpu       Llamas as one rank of 8 and 64 on a timed wire; needs a CUDA device
    gpu_memory  their peak memory on a device that computes nothing; needs a CUDA build of torch

Each writes a table and a picture to benchmarks/results, or to out/bench with --quick.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import activations
import ahead
import budget
import coding
import compile as compile_
import depth
import experts
import gpu
import gpu_memory
import graphs
import latency
import memory
import muon
import page
import plan
import simulated
import wire
from gpt import SIZES
from hosts import HostsError, ProcessError, parse_rate
from results import Report, show, write
from screen import Screen
from settings import Settings
from variants import VARIANTS

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS: dict[str, Callable[[Settings, Screen], Report]] = {
    "wire": wire.run,
    "experts": experts.run,
    "latency": latency.run,
    "muon": muon.run,
    "budget": budget.run,
    "memory": memory.run,
    "activations": activations.run,
    "compile": compile_.run,
    "compile_depth": depth.run,
    "ahead": ahead.run,
    "plan": plan.run,
    "plan_experts": plan.run_experts,
    "graphs": graphs.run,
    "coding": coding.run,
    "page": page.run,
    "simulate": simulated.run,
    "gpu": gpu.run,
    "gpu_memory": gpu_memory.run,
}
MISSING, FAILED = 2, 1


def main(argv: list[str]) -> int:
    """Run what is asked for, and go on after a benchmark that this machine cannot do."""
    options = parse(argv)
    names = options.benchmarks or list(BENCHMARKS)
    settings = settings_of(options)
    out = options.out or (
        ROOT / "out" / "bench" if options.quick else ROOT / "benchmarks" / "results"
    )
    screen = Screen(0)
    code = 0
    for name in names:
        start = time.monotonic()
        try:
            report = BENCHMARKS[name](settings, screen)
        except HostsError as error:
            sys.stderr.write(f"{name}: left out: {error}\n")
            code = code or MISSING
            continue
        except (ProcessError, subprocess.CalledProcessError) as error:
            sys.stderr.write(f"{name}: stopped: {error}\n")
            code = FAILED
            continue
        show(report, screen.console)
        paths = write(report, out, command_of(name, argv, names))
        where = ", ".join(str(path) for path in paths)
        screen.line(f"{name} took {(time.monotonic() - start) / 60:.1f} minutes and wrote {where}")
    return code


def command_of(name: str, argv: list[str], names: list[str]) -> str:
    """The command that measures one benchmark again as it was; where files went is left out."""
    words = list(argv)
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    arguments = [word for word in words if word not in names]
    return f'make bench ARGS="{" ".join([name, *arguments])}"'


def settings_of(options: argparse.Namespace) -> Settings:
    """What was given replaces the defaults, of which --quick has others."""
    defaults = (
        Settings(quick=True, rates=(None,), rounds=1, depths=(1, 2), layers=(2, 4))
        if options.quick
        else Settings()
    )
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name in Settings.__slots__ and value is not None
    }
    return Settings(**{**{name: getattr(defaults, name) for name in Settings.__slots__}, **given})


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help="all of them if none")
    parser.add_argument(
        "--quick", action="store_true", help="everything in small, to see that it runs"
    )
    parser.add_argument("--rates", nargs="+", type=parse_rate, metavar="GBIT|none")
    parser.add_argument("--rounds", type=positive)
    parser.add_argument("--size", choices=SIZES, help="of the model, for wire")
    parser.add_argument("--steps", type=positive, help="timed in each round, for wire")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT")
    parser.add_argument("--depths", nargs="+", type=positive, metavar="LAYERS", help="for compile")
    parser.add_argument("--layers", nargs="+", type=positive, metavar="LAYERS", help="for plan")
    parser.add_argument("--batches", nargs="+", metavar="NAME", help="of gpu and gpu_memory")
    parser.add_argument("--out", type=Path, help="where results go")
    options = parser.parse_args(argv)
    unknown = [name for name in options.benchmarks if name not in BENCHMARKS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no benchmark; there are {', '.join(BENCHMARKS)}")
    return options


def positive(text: str) -> int:
    """A whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
