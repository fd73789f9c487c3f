"""How long the first step takes of a model that another process has compiled ahead, and whether a
compiler is called in it.

One process compiles a training step for two ranks, over a fake group; two new ones load the folder
and train. The C++ compiler, Dynamo, AOTAutograd, our passes and Inductor are counted by the
functions of theirs that are called, in loading and in the first step (which is slower for it).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from gpt import GPTConfig
from job import Job, make_batches, make_model, shard, trainer
from results import Panel, Report, Table, machine
from screen import leave

import compiled_fsdp

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from screen import Screen
    from settings import Settings

INDUCTOR, QUICK = "compiled_fsdp", "compiled_fsdp_eager"
GOAL_S = 3.0  # more than a later step
COMPILERS = {
    "_dynamo/convert_frame.py": "Dynamo",
    "_functorch/aot_autograd.py": "AOTAutograd",
    "_inductor/compile_fx.py": "Inductor",
    "_inductor/cpp_builder.py": "C++",
    "compiler/driver.py": "our passes",
}
COLUMNS = (
    "layers",
    "ahead s",
    "folder MB",
    "load s",
    "first step s",
    "later step s",
    "first less later s",
    "calls of compilers",
)


def run(settings: Settings, screen: Screen) -> Report:
    """Every depth, `rounds` times."""
    rounds = settings.rounds or 2
    rows, bars = [], {}
    with screen.pieces(rounds * len(settings.depths)) as done:
        for depth in settings.depths:
            seen = []
            for _ in range(rounds):
                seen.append(measured(depth, QUICK if settings.quick else INDUCTOR))
                done(f"{depth} layers: first step {seen[-1]['first_s']:.2f} s")
            values = {name: statistics.median(s[name] for s in seen) for name in seen[0]}
            extra = values["first_s"] - values["later_s"]
            rows.append(
                [
                    str(depth),
                    f"{values['ahead_s']:.1f}",
                    f"{values['bytes'] / 1e6:.1f}",
                    *(f"{values[name]:.2f}" for name in ("load_s", "first_s", "later_s")),
                    f"{extra:.2f}",
                    f"{max(s['calls'] for s in seen):.0f}",
                ]
            )
            bars[f"{depth} layers"] = {"load": values["load_s"], "first step": values["first_s"]}
    facts = [
        machine(),
        "GPT of width 128, batch 2 x 64 per rank, two local ranks, one thread each; medians.",
    ]
    notes = [
        "**ahead**: seconds of the process that compiles, one for both ranks. **load**: of "
        "`load_precompiled`. **calls of compilers**: functions of Dynamo, AOTAutograd, our passes, "
        "Inductor and the C++ compiler that are called in loading and the first step.",
        f"Targets: the first step takes at most {GOAL_S:g} s more than a later one, and no "
        "compiler is called.",
    ]
    table = Table("A model that was compiled ahead", facts, COLUMNS, rows)
    return Report(
        "ahead", "Compiled ahead", [table], [Panel("To the first step", "s", bars)], notes
    )


def measured(depth: int, backend: str) -> dict[str, float]:
    """Compile in one process, train in two others."""
    with tempfile.TemporaryDirectory() as place:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        script, output = str(Path(__file__).resolve()), Path(place) / "seen.json"
        folder = Path(place) / "folder"
        start = time.perf_counter()
        command = [sys.executable, script, backend, str(depth), str(folder), str(output)]
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{place}/cache"}
        subprocess.run(command, env=environment | caches, check=True)
        ahead_s = time.perf_counter() - start
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *torchrun, script, "load", str(depth), str(folder), str(output)]
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{place}/empty"}
        subprocess.run(command, env=environment | caches, check=True)
        seen: dict[str, float] = json.loads(output.read_text())
        size = sum(path.stat().st_size for path in folder.iterdir())
    return {**seen, "ahead_s": ahead_s, "bytes": float(size)}


def work(what: str, depth: int, folder: Path, output: Path) -> None:
    """One process: "load" and train, or compile ahead by this backend."""
    torch.set_num_threads(1)
    config = GPTConfig(num_layers=depth, width=128, num_heads=2, hidden=384)
    job = Job(config, batch=2, length=64)
    model = make_model(job)
    if what != "load":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        shard(model, compiled_fsdp.fully_shard)
        target = compiled_fsdp.Target(backend=what, modes=("training",))
        compiled_fsdp.precompile(model, make_batches(job)[0], folder, target=target)
        return
    dist.init_process_group("gloo")
    shard(model, compiled_fsdp.fully_shard)
    times = []
    with counted() as calls:
        start = time.perf_counter()
        compiled_fsdp.load_precompiled(folder, model)
        load_s = time.perf_counter() - start
        step = trainer(model, model, job)
        for index in range(5):
            if index == 1:
                sys.setprofile(None)
            dist.barrier()
            start = time.perf_counter()
            step(index)
            times.append(time.perf_counter() - start)
    seen: dict[str, Any] = {
        "load_s": load_s,
        "first_s": times[0],
        "later_s": min(times[1:]),
        "calls": sum(calls.values()),
    }
    if dist.get_rank() == 0:
        output.write_text(json.dumps(seen))
    leave()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How many functions of each compiler are called, until the profile function is taken away."""
    found: Counter[str] = Counter()
    known: dict[str, str] = {}

    def called(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call":
            if file not in known:
                known[file] = next((n for end, n in COMPILERS.items() if file.endswith(end)), "")
            if known[file]:
                found[known[file]] += 1

    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(None)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
