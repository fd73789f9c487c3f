"""What a layer more costs to compile: processor seconds of a cold first step at several depths, the
C++ compiler's and its calls apart, and which part of the compiler takes what for each layer.

One process for each depth, as rank 0 of 2 in a fake process group: no other rank, no worker of
Inductor's. What it takes hardly depends on what else the machine does, as seconds of `compile` do.
A signal every few milliseconds of processor time looks where the process is; that is part of what
it takes, and less than a twentieth of it.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from gpt import GPTConfig
from hosts import ProcessError
from job import Job
from results import Panel, Report, Table, machine
from variants import VARIANTS, legend

if TYPE_CHECKING:
    from types import FrameType

    from screen import Screen
    from settings import Settings

# Those that compile the whole model; a block that is compiled by itself has no depth.
PLAIN = ("ours", "ours_regions_units", "local_compile")
CHECKPOINTED = tuple(f"{name}_checkpoints" for name in PLAIN)
COMPILED = (
    *PLAIN,
    "ours_regions_off",
    *CHECKPOINTED,
    "ours_mixture",
    "local_compile_mixture",
)
GOAL = 1.5
SAMPLE_S = 0.005
GARBAGE, REST, CXX = "looking for garbage", "the rest of the step", "C++ compiler"
# Functions, by file and name ("" for any of the file), and what runs inside of them; of several
# that are under way, the innermost counts.
PARTS: dict[tuple[str, str], str] = {
    ("compiler/driver.py", "run_joint"): "our passes, joint graph",
    ("compiler/driver.py", "run_half"): "our passes, halves",
    ("_functorch/partitioners.py", ""): "partition",
    ("_inductor/compile_fx.py", "_recursive_joint_graph_passes"): "torch's passes, joint graph",
    ("_inductor/compile_fx.py", "_recursive_post_grad_passes"): "Inductor's passes, halves",
    ("_inductor/compile_fx.py", "fake_tensor_prop"): "Inductor's fake values",
    ("_inductor/compile_fx.py", "codegen_and_compile"): "the rest of Inductor",
    ("_inductor/compile_fx.py", "_compile_fx_inner"): "the rest of Inductor",
    ("_inductor/codecache.py", ""): "the rest of Inductor",
    ("_inductor/graph.py", "run"): "lowering",
    ("_inductor/graph.py", "compile_to_module"): "code generation",
    ("_inductor/scheduler.py", "_init"): "scheduling, fusion",
    ("_aot_autograd/graph_capture.py", ""): "AOTAutograd: joint graph",
    ("_aot_autograd/collect_metadata_analysis.py", ""): "AOTAutograd: the rest",
    ("_functorch/aot_autograd.py", ""): "AOTAutograd: the rest",
    ("_aot_autograd/graph_compile.py", ""): "AOTAutograd: the rest",
    ("_aot_autograd/autograd_cache.py", ""): "AOTAutograd: the rest",
    ("_inductor/compile_fx.py", ""): "the rest of Inductor",
    ("_dynamo/output_graph.py", "call_user_compiler"): "AOTAutograd: the rest",
    ("_dynamo/symbolic_convert.py", ""): "Dynamo: tracing",
    ("_dynamo/convert_frame.py", ""): "Dynamo: guards, and what stands around the graph",
}


@dataclass
class Sampler:
    """Processor seconds by part of the compiler, and by the functions that were innermost."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    last: float = 0.0
    collecting: float = 0.0
    known: dict[str, dict[str, str]] = field(default_factory=dict)

    def start(self) -> None:
        """Look from now on."""
        self.last = time.process_time()
        gc.callbacks.append(self.collected)
        signal.signal(signal.SIGPROF, self.look)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)

    def stop(self) -> None:
        """What is left is the rest's."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        gc.callbacks.remove(self.collected)
        self.look(0, None)

    def look(self, _: int, frame: FrameType | None) -> None:
        """What has passed since the last time is the part's that is under way."""
        now = time.process_time()
        self.seconds[self.part(frame)] += now - self.last
        self.last = now

    def collected(self, phase: str, _: dict[str, int]) -> None:
        """Garbage has a part of its own."""
        now = time.process_time()
        if phase == "start":
            self.collecting = now
            return
        self.seconds[GARBAGE] += now - self.collecting
        self.last += now - self.collecting

    def part(self, frame: FrameType | None) -> str:
        """The part of the innermost function that has one."""
        while frame is not None:
            file = frame.f_code.co_filename
            if file not in self.known:
                self.known[file] = {n: p for (end, n), p in PARTS.items() if file.endswith(end)}
            names = self.known[file]
            if names and (found := names.get(frame.f_code.co_name) or names.get("")):
                return found
            frame = frame.f_back
        return REST


def run(settings: Settings, screen: Screen) -> Report:
    """Every depth and variant once, or `rounds` times, of which the cheapest counts."""
    names = [name for name in COMPILED if name in settings.sides()]
    if not names:
        raise ProcessError(
            f"none of the variants asked for is one that it compiles: {', '.join(COMPILED)}"
        )
    seen: dict[tuple[str, int], dict[str, Any]] = {}
    rounds = settings.rounds or 1
    with screen.pieces(rounds * len(settings.depths) * len(names)) as done:
        for _ in range(rounds):
            for depth in settings.depths:
                for name in names:
                    found = fresh(name, depth)
                    best = seen.setdefault((name, depth), found)
                    if found["seconds"] < best["seconds"]:
                        seen[name, depth] = found
                    done(f"{name}, {depth} layers: {found['seconds']:.1f} s")
    return report(settings.depths, names, seen)


def fresh(name: str, depth: int) -> dict[str, Any]:
    """One cold start in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        output = Path(cache) / "seen.json"
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        script = [sys.executable, str(Path(__file__).resolve()), name, str(depth), str(output)]
        subprocess.run(script, env=environment, check=True)
        seen: dict[str, Any] = json.loads(output.read_text())
        seen["kernels"] = len(list(Path(cache).rglob("*.main.so")))
    return seen


def work(name: str, depth: int, output: Path) -> None:
    """The process: compile, and write what it took."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    config = GPTConfig(num_layers=depth, width=128, num_heads=2, hidden=384)
    step = VARIANTS[name].build(Job(config, batch=2, length=64))
    sampler = Sampler()
    children, start = children_s(), time.process_time()
    sampler.start()
    step(0)
    sampler.stop()
    own, cxx = time.process_time() - start, children_s() - children
    seen = {
        "seconds": own + cxx,
        "parts": {**sampler.seconds, CXX: cxx},
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }
    output.write_text(json.dumps(seen))
    dist.destroy_process_group()


def children_s() -> float:
    """Processor seconds of the processes that were started from here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def report(
    depths: tuple[int, ...], names: list[str], seen: dict[tuple[str, int], dict[str, Any]]
) -> Report:
    """A row for each cold start, and what a layer takes of each part from the least to the most."""
    least, most = min(depths), max(depths)
    rows = [
        [
            name,
            str(depth),
            f"{found['seconds']:.1f}",
            f"{found['seconds'] / seen[name, least]['seconds']:.2f}",
            f"{found['parts'][CXX]:.1f}",
            str(found["kernels"]),
            f"{found['memory']:.0f}",
        ]
        for (name, depth), found in sorted(seen.items())
    ]
    columns = ("variant", "layers", "CPU s", f"over {least}", "of it C++", "libraries", "MB")
    facts = [
        machine(),
        "GPT of width 128 (mixtures: of width 64, 16 experts, 2 of them a token), batch 2 x 64 per "
        "rank, rank 0 of 2 in a fake group, one thread.",
    ]
    parts = dict.fromkeys(p for found in seen.values() for p in found["parts"])
    order = [*dict.fromkeys(PARTS.values()), GARBAGE, CXX, REST]
    parts_rows = [
        [part, *(f"{per_layer(seen, name, part, least, most):.0f}" for name in names)]
        for part in sorted(parts, key=order.index)
    ]
    parts_rows.append(["all", *(f"{per_layer(seen, n, '', least, most):.0f}" for n in names)])
    tables = [Table("Cold starts", facts, columns, rows)]
    if most > least:
        title = f"What a layer takes, ms ({most} layers less {least}, over {most - least})"
        tables.append(Table(title, (), ("", *names), parts_rows))
    bars = {f"{name}, {depth} layers": found["parts"] for (name, depth), found in seen.items()}
    notes = [
        legend(names),
        "**CPU s**: processor seconds of the first step, the C++ compiler's included. **of it "
        "C++**: those of the compiler's processes. **libraries**: what they built. **MB**: "
        "resident memory at its highest.",
    ]
    notes += [
        f"{name}: {seen[name, most]['seconds'] / seen[name, least]['seconds']:.2f} times as much "
        f"at {most} layers as at {least}"
        + (f" (target: at most {GOAL} from 4 to 48)." if name == "ours" else ".")
        for name in names
    ]
    panels = [Panel("Cold starts", "processor seconds", bars)]
    return Report("compile_depth", "Compile time against depth", tables, panels, notes)


def per_layer(
    seen: dict[tuple[str, int], dict[str, Any]], name: str, part: str, least: int, most: int
) -> float:
    """Milliseconds that a layer adds to a part, or to all of them."""

    def seconds(depth: int) -> float:
        found = seen[name, depth]
        total: float = found["parts"].get(part, 0.0) if part else found["seconds"]
        return total

    return 1e3 * (seconds(most) - seconds(least)) / max(1, most - least)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
