"""How long `torch.compile` takes: sharded against unsharded, with an empty and with a warm cache.

Every number comes from a fresh pair of processes: seconds until the first forward and backward are done, less one step
at full speed. `sharded` and `unsharded` compile the same model under the default backend, on two ranks at once, one
thread each; `unsharded` communicates nothing. The warm start runs in the cache that the cold start left, and counts how
often our passes would have had to run again (0: the cached code is what they made).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, SIZES
from rich.console import Console
from rich.progress import track

HERE = Path(__file__).resolve()
MODES = ("unsharded", "sharded")


def worker(mode: str, size: str, out: Path) -> None:
    """One rank: compile, time, and write what was seen."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = GPT(SIZES[size])
    run: torch.nn.Module = model
    if mode == "sharded":
        from compiled_fsdp import fully_shard

        for block in model.layers:
            fully_shard(block)
        fully_shard([model.norm, model.head])
        run = fully_shard(model)  # type: ignore[assignment]
    step = torch.compile(run, fullgraph=True)
    tokens = torch.randint(0, 256, (2, 256), generator=torch.Generator().manual_seed(0))
    times = []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        step(tokens, tokens).backward()
        times.append(time.perf_counter() - start)
    counters = torch._dynamo.utils.counters
    seen = {
        "compile_s": times[0] - min(times[1:]),
        "step_s": min(times[1:]),
        "misses": counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"],
        "hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
    }
    if dist.get_rank() == 0:
        out.write_text(json.dumps(seen))
    dist.destroy_process_group()


def fresh(mode: str, size: str, cache: str) -> dict[str, float]:
    """Run a pair of workers in new processes on a cache folder."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seen.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(HERE), "--worker", mode, "--size", size, "--out", str(out)]
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True)
        seen: dict[str, float] = json.loads(out.read_text())
        return seen


def measure(size: str, rounds: int) -> list[dict[str, float]]:
    """Cold and warm for both modes, in turn, `rounds` times."""
    found = []
    for _ in track(range(rounds), "rounds"):
        row: dict[str, float] = {}
        for mode in MODES:
            with tempfile.TemporaryDirectory() as cache:
                cold = fresh(mode, size, cache)
                warm = fresh(mode, size, cache)
            row[f"{mode} cold"], row[f"{mode} warm"] = cold["compile_s"], warm["compile_s"]
            row[f"{mode} warm misses"] = warm["misses"]
        found.append(row)
    return found


def report(size: str, found: list[dict[str, float]]) -> str:
    """The measurements as Markdown."""

    def cell(key: str) -> str:
        values = [row[key] for row in found]
        return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"

    ratios = [row["sharded cold"] / row["unsharded cold"] for row in found]
    speedups = [row["sharded cold"] / row["sharded warm"] for row in found]
    misses = sum(int(row["sharded warm misses"]) for row in found)
    lines = [
        "# Compile time",
        "",
        f"`python benchmarks/compile_time.py --size {size} --rounds {len(found)} --write`",
        "",
        f"{date.today()}, torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores; GPT {size}, "
        "two ranks, one thread each; seconds, median (least to most).",
        "",
        "| | cold | warm |",
        "| --- | --- | --- |",
        *(f"| {mode} | {cell(f'{mode} cold')} | {cell(f'{mode} warm')} |" for mode in MODES),
        "",
        f"Sharded over unsharded, cold: {statistics.median(ratios):.2f} (target: at most 1.3).",
        f"Cold over warm, sharded: {statistics.median(speedups):.1f} (target: at least 4); {misses} cache misses when warm.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="10m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/compile_time.md")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.size, options.out)
        return
    text = report(options.size, measure(options.size, options.rounds))
    Console().print(text, markup=False, highlight=False)
    if options.write:
        (HERE.parent / "results" / "compile_time.md").write_text(text)


if __name__ == "__main__":
    main()
