"""How long `torch.compile` takes, cold and with a warm cache, against depth; and which part of the
compiler takes it.

Every number comes from a fresh pair of processes: seconds of the first training step, less one at
full speed. The warm start runs in the cache that the cold start left, and counts what it did not
find there (0: all that runs is what our passes made when cold). Both ranks compile at once.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from gpt import GPTConfig
from hosts import ProcessError
from job import Job
from results import Panel, Report, Table, machine, ratio, spread
from screen import leave
from variants import VARIANTS, legend

from compiled_fsdp.compiler import driver, inductor

if TYPE_CHECKING:
    from screen import Screen
    from settings import Settings

COMPILED = (
    *("ours", "ours_regions_units", "ours_regions_off"),
    *("stock_block_compile", "local_compile"),
)
GOALS = {"depth": 3.0, "unsharded": 1.3, "warm": 4.0}
REST = "the rest"
# What torch calls the parts of the compiler in its own records, and those that are nested in them
# and counted apart.
PHASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Dynamo": (("bytecode_tracing", "build_guards"), ()),
    "AOTAutograd": (("aot_collect_metadata", "aot_trace_joint_graph"), ()),
    "our passes": (("compiled_fsdp",), ()),
    "graph passes, partition": (
        (
            "_recursive_joint_graph_passes",
            "min_cut_rematerialization_partition",
            "_recursive_post_grad_passes",
        ),
        ("compiled_fsdp",),
    ),
    "lowering, fusion": (("GraphLowering.run", "Scheduler.__init__"), ()),
    "code generation": (("GraphLowering.codegen",), ("Scheduler.__init__",)),
    "C++ compiler": (("PyCodeCache.load_by_key_path",), ()),
}
COLUMNS = (
    "variant",
    "layers",
    "cold s",
    "quartiles",
    "warm s",
    "quartiles",
    "cold / warm",
    "misses warm",
    "of unsharded",
)
NOTES = (
    "**cold**, **warm**: median seconds of compiling (first step less a later one) of rank 0, "
    "while the other rank compiles too. **misses**: entries that the warm start did not find in "
    "the cache. **of unsharded**: cold over cold of `local_compile` at the same depth.",
)


def run(settings: Settings, screen: Screen) -> Report:
    """Every depth and variant, `rounds` times in turn."""
    names = [name for name in COMPILED if name in settings.sides()]
    if not names:
        raise ProcessError(
            f"none of the variants asked for is one that it compiles: {', '.join(COMPILED)}"
        )
    rounds = settings.rounds or 2
    seen: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with screen.pieces(rounds * len(settings.depths) * len(names)) as done:
        for _ in range(rounds):
            for depth in settings.depths:
                for name in names:
                    with tempfile.TemporaryDirectory() as cache:
                        cold, warm = fresh(name, depth, cache), fresh(name, depth, cache)
                    seen.setdefault((name, depth), []).append({"cold": cold, "warm": warm})
                    done(
                        f"{name}, {depth} layers: {cold['compile_s']:.0f} s cold, "
                        f"{warm['compile_s']:.0f} s warm"
                    )
    return report(settings.depths, names, seen)


def fresh(name: str, depth: int, cache: str) -> dict[str, Any]:
    """Compile on two new ranks with a cache folder."""
    output = Path(cache) / "seen.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(Path(__file__).resolve()), name, str(depth), str(output)]
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    subprocess.run([sys.executable, *torchrun, *script], env=environment, check=True)
    seen: dict[str, Any] = json.loads(output.read_text())
    return seen


def work(name: str, depth: int, output: Path) -> None:
    """One rank: compile, time, and write what was seen."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ours: list[float] = []
    for entry in (driver.run_joint, driver.run_half):
        setattr(inductor, entry.__name__, timed(entry, ours))
    config = GPTConfig(num_layers=depth, width=128, num_heads=2, hidden=384)
    step = VARIANTS[name].build(Job(config, batch=2, length=64))
    times = []
    for index in range(4):
        dist.barrier()
        start = time.perf_counter()
        step(index)
        times.append(time.perf_counter() - start)
    compile_s = times[0] - min(times[1:])
    counters = torch._dynamo.utils.counters
    seen = {
        "compile_s": compile_s,
        "phases": phases(compile_s, sum(ours)),
        "misses": counters["inductor"]["fxgraph_cache_miss"]
        + counters["aot_autograd"]["autograd_cache_miss"],
    }
    if dist.get_rank() == 0:
        output.write_text(json.dumps(seen))
    leave()


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The function, and a record of what each call of it took."""

    def run(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments, **options)
        seconds.append(time.perf_counter() - start)
        return result

    return run


def phases(compile_s: float, ours_s: float) -> dict[str, float]:
    """Where the compile time went, by torch's own records of this process and ours of the
    passes.
    """
    records = torch._dynamo.utils.compilation_time_metrics
    known = {key: sum(values) for key, values in records.items()} | {"compiled_fsdp": ours_s}
    found = {
        phase: sum(known.get(key, 0.0) for key in keys) - sum(known.get(key, 0.0) for key in nested)
        for phase, (keys, nested) in PHASES.items()
    }
    found[REST] = max(0.0, compile_s - sum(found.values()))
    return found


def report(
    depths: tuple[int, ...], names: list[str], seen: dict[tuple[str, int], list[dict[str, Any]]]
) -> Report:
    """Seconds and ratios, and the phases of cold starts."""

    def values(name: str, depth: int, start: str) -> list[float]:
        return [found[start]["compile_s"] for found in seen[name, depth]]

    def median(name: str, depth: int, start: str) -> float:
        return statistics.median(values(name, depth, start))

    rows, phase_rows, bars = [], [], {}
    for depth in depths:
        unsharded = median("local_compile", depth, "cold") if "local_compile" in names else None
        for name in names:
            cold, warm = median(name, depth, "cold"), median(name, depth, "warm")
            misses = max(found["warm"]["misses"] for found in seen[name, depth])
            times = [
                cell
                for start in ("cold", "warm")
                for cell in spread(values(name, depth, start), ".1f")
            ]
            rows.append(
                [name, str(depth), *times, ratio(cold, warm), str(misses), ratio(cold, unsharded)]
            )
            mean = {
                phase: statistics.mean(
                    found["cold"]["phases"][phase] for found in seen[name, depth]
                )
                for phase in (*PHASES, REST)
            }
            bars[f"{name}, {depth} layers"] = mean
            phase_rows.append([name, str(depth), *(f"{value:.1f}" for value in mean.values())])
    facts = [
        machine(),
        "GPT of width 128, batch 2 x 64 per rank, two local ranks, one thread each.",
    ]
    tables = [
        Table("Cold and warm", facts, COLUMNS, rows),
        Table(
            "Where a cold start goes, seconds", (), ("variant", "layers", *PHASES, REST), phase_rows
        ),
    ]
    least, most = min(depths), max(depths)
    notes = [legend(names), *NOTES]
    notes += [
        f"{name}: {median(name, most, 'cold') / median(name, least, 'cold'):.2f} times as long at "
        f"{most} layers as at {least}"
        + (f" (target: at most {GOALS['depth']:g} from 4 to 48)." if name == "ours" else ".")
        for name in names
    ]
    notes.append(
        f"Targets at every depth: of unsharded at most {GOALS['unsharded']}, cold / warm at least "
        f"{GOALS['warm']:g}."
    )
    return Report("compile", "Compile time", tables, [Panel("Cold starts", "seconds", bars)], notes)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
