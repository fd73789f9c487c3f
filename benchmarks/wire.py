"""Seconds per training step on two hosts joined by a slow wire, for several ways to shard.

    python benchmarks/wire.py --rate 1 --rate 4 --write --picture

All variants live in one pair of processes and take turns in rounds, so that drift of the machine
meets all of them. They have the same model, initial weights, data, dtype and optimizer. A barrier
precedes every timed step, and a step takes as long as on the slower host. Needs root; see hosts.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, SIZES
from hosts import (
    HostsError,
    ProcessError,
    default_burst_kib,
    gloo_rate,
    parse_burst,
    parse_rate,
    rate_name,
    sent_bytes,
    two_hosts,
)
from measure import peak_tensor_bytes
from rich.console import Console
from rich.table import Table
from wire_variants import BUILDERS, Step

RESULTS = Path(__file__).parent / "results"
NUM_WARMUP = 3


@dataclass(slots=True)
class Variant:
    """One way to train: `step(index)` trains on batch `index` and returns this rank's loss."""

    name: str
    step: Step
    num_steps: int = 0
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def run(self, num_timed: int, num_untimed: int) -> None:
        """Take some steps, and record all but the first ones."""
        for index in range(num_untimed + num_timed):
            dist.barrier()
            sent, start = sent_bytes(), time.perf_counter()
            loss = self.step(self.num_steps)
            seconds = time.perf_counter() - start
            self.num_steps += 1
            if loss is not None:
                self.losses.append(loss.item())
            if index >= num_untimed:
                self.times.append(seconds)
                self.sent.append(sent_bytes() - sent)


# --- on each host ---------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    """Build, warm up and time all variants on this rank; rank 0 writes what was seen."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    console = Console(stderr=True, quiet=dist.get_rank() > 0, highlight=False)
    rates = {num: gloo_rate(num) for num in (1, 2)}
    variants = []
    for name in options.variants:
        start = time.perf_counter()
        variants.append(Variant(name, BUILDERS[name](options)))
        variants[-1].run(0, NUM_WARMUP)
        console.print(f"  {name}: ready after {time.perf_counter() - start:.0f} s")
    for number in range(options.rounds):
        for variant in variants:
            variant.run(options.steps, num_untimed=1)
            seen = statistics.median(variant.times[-options.steps :])
            console.print(f"  round {number + 1}/{options.rounds} {variant.name}: {seen:.2f} s")
    seen_by_all = {variant.name: summarize(variant, variants) for variant in variants}
    if dist.get_rank() == 0:
        options.rank_output.write_text(json.dumps({"gloo": rates, "variants": seen_by_all}))
    dist.barrier()
    dist.destroy_process_group()


def summarize(variant: Variant, variants: list[Variant]) -> dict[str, Any]:
    """Return the results of one variant, the same on every rank."""
    times = torch.tensor(variant.times, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    reference = next((v.losses for v in variants if v.name == "stock_eager"), [])
    differences = [abs(a - b) for a, b in zip(variant.losses, reference, strict=False)]
    worst = torch.tensor([max(differences, default=0.0)], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    peak = peak_tensor_bytes(lambda: variant.step(0))
    return {
        "times": times.tolist(),
        "sent_bytes": statistics.median(variant.sent),
        "peak_bytes": peak.above_rest,
        "loss_difference": worst.item() if differences else None,
        "last_loss": variant.losses[-1] if variant.losses else None,
    }


# --- the report -----------------------------------------------------------------------------------

COLUMNS = (
    "variant",
    "s/step",
    "p10-p90",
    "ours is",
    "exposed s",
    "wire MB",
    "peak MB",
    "max dloss",
)


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """Return the table of one rate, a row per variant."""
    medians = {name: statistics.median(v["times"]) for name, v in result["variants"].items()}
    ours, floor = medians.get("ours"), medians.get("local_compiled")
    rows = []
    for name, seen in result["variants"].items():
        times = seen["times"] if len(seen["times"]) > 1 else seen["times"] * 2
        low, *_, high = statistics.quantiles(times, n=10, method="inclusive")
        training = name != "raw_collectives"
        difference = seen["loss_difference"]
        rows.append(
            [
                name,
                f"{medians[name]:.3f}",
                f"{low:.3f}-{high:.3f}",
                f"{medians[name] / ours:.2f}x" if ours else "",
                f"{medians[name] - floor:.2f}" if floor and training else "",
                f"{seen['sent_bytes'] / 1e6:.1f}",
                f"{seen['peak_bytes'] / 1e6:.1f}",
                "" if difference is None else f"{difference:.1e}",
            ]
        )
    return rows


def facts_of(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return under which conditions one table was measured, as one sentence per line."""
    rate, cores = result["rate_gbit"], result["cores"]
    burst = "" if rate is None else f", bucket {options.burst or default_burst_kib(rate)} KiB"
    model = GPT(SIZES[options.size])
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    gloo = ", ".join(f"{value:.2f} ({key} in flight)" for key, value in result["gloo"].items())
    return "\n".join(
        (
            f"Wire: {rate_name(rate)} each way{burst}; a raw gloo all-gather gets {gloo} Gbit/s.",
            f"GPT of {millions:.1f} M parameters, fp32, batch {options.batch} x {options.length} "
            "per rank, AdamW, two ranks, one core and one thread each"
            f"{' (the SAME core: this machine has one)' if cores[0] == cores[1] else ''}.",
            f"{date.today()}, torch {torch.__version__}, Python {platform.python_version()}, "
            f"{os.cpu_count()} cores; {options.rounds} rounds of {options.steps} steps a variant.",
        )
    )


NOTES = """\
s/step is the median, of the slower rank. "ours is": how many times faster `ours` is. exposed: step
less `local_compiled`. wire: sent per rank and step, headers included. peak: exact tensor bytes of
a step above the state at rest. dloss: against `stock_eager`, over all steps."""


def show(console: Console, options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Print one table."""
    table = Table(COLUMNS[0])
    for column in COLUMNS[1:]:
        table.add_column(column, justify="right")
    for row in rows_of(result):
        table.add_row(*row)
    console.print(facts_of(options, result), highlight=False)
    console.print(table)
    console.print(NOTES, highlight=False)


def markdown(options: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    """Return all tables as Markdown."""
    lines = ["# Training over a slow wire", "", f"`{command_of(options)}`", ""]
    for result in results:
        lines += [f"## {rate_name(result['rate_gbit'])}", "", facts_of(options, result), ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|---" + "|--:" * (len(COLUMNS) - 1) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in rows_of(result)]
        lines += [""]
    return "\n".join([*lines, NOTES, ""])


def command_of(options: argparse.Namespace) -> str:
    """Return the command that measures the same again; where files went is left out."""
    words = ["python", "benchmarks/wire.py"]
    for rate in options.rate:
        words += ["--rate", "none" if rate is None else f"{rate:g}"]
    if options.burst:
        words += ["--burst", str(options.burst)]
    for name in ("size", "rounds", "steps", "batch", "length"):
        words += [f"--{name}", str(getattr(options, name))]
    return " ".join([*words, "--variants", *options.variants])


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draw a bar per variant: compute, and what the wire adds to it; the line is the wire floor."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(results), squeeze=False, figsize=(8, 0.8 + 2.6 * len(results)), layout="constrained")
    for axis, result in zip(axes[:, 0], results, strict=True):
        medians = {name: statistics.median(v["times"]) for name, v in result["variants"].items()}
        wire, floor = medians.pop("raw_collectives", None), medians.get("local_compiled", 0.0)
        names = list(reversed(medians))
        compute = [min(floor, medians[name]) for name in names]
        exposed = [medians[name] - part for name, part in zip(names, compute, strict=True)]
        axis.barh(names, compute, color="#4c72b0", label="compute")
        bars = axis.barh(names, exposed, left=compute, color="#dd8452", label="exposed")
        axis.bar_label(bars, [f" {medians[name]:.2f}" for name in names])
        if wire is not None:
            axis.axvline(wire, color="black", linestyle=":", label="wire alone")
        axis.set(title=f"wire: {rate_name(result['rate_gbit'])}", xlabel="seconds per step")
        axis.margins(x=0.1)
        axis.legend(loc="lower right")
    figure.savefig(path, dpi=150)


# --- the command ----------------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", action="append", type=parse_rate, metavar="GBIT|none")
    parser.add_argument("--burst", type=parse_burst, metavar="KIB", help="token bucket of the wire")
    parser.add_argument("--size", choices=SIZES, default="30m")
    parser.add_argument("--variants", nargs="+", choices=BUILDERS, default=list(BUILDERS))
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--steps", default=4, type=int, help="timed steps per variant and round")
    parser.add_argument("--batch", default=2, type=int, help="sequences per rank")
    parser.add_argument("--length", default=256, type=int, help="bytes per sequence")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all that was measured")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/wire.md")
    parser.add_argument("--picture", action="store_true", help="write benchmarks/results/wire.png")
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in ("rounds", "steps", "batch", "length"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, and must be at least 1")
    longest = SIZES[options.size].max_length
    if options.length > longest:
        parser.error(f"--length is {options.length}; size {options.size} reads up to {longest}")
    if "ours" in options.variants and find_spec("compiled_fsdp") is None:
        parser.error("variant 'ours' needs compiled_fsdp: run `pip install -e .`")
    options.variants = list(dict.fromkeys(options.variants))
    options.rate = options.rate or [1.0]
    return options


def measure_at(options: argparse.Namespace, rate: float | None) -> dict[str, Any]:
    """Run all variants on two hosts and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder, two_hosts(rate, options.burst) as hosts:
        output = Path(folder) / "result.json"
        hosts.run([sys.executable, *sys.argv, "--rank-output", str(output)])
        seen: dict[str, Any] = json.loads(output.read_text())
        return {"rate_gbit": rate, "cores": hosts.cores, **seen}


def main() -> int:
    """Measure at every rate, then report."""
    options = parse_options()
    if options.rank_output:
        measure(options)
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    results = []
    try:
        for rate in options.rate:
            console.print(f"two hosts, wire {rate_name(rate)}", highlight=False)
            results.append(measure_at(options, rate))
            show(console, options, results[-1])
    except (HostsError, ProcessError) as error:
        sys.stderr.write(f"wire: {error}\n")
        return 2 if isinstance(error, HostsError) else 1
    except KeyboardInterrupt:
        return 130
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    RESULTS.mkdir(exist_ok=True)
    if options.write:
        (RESULTS / "wire.md").write_text(markdown(options, results))
    if options.picture:
        draw(results, RESULTS / "wire.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
