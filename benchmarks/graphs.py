"""How many graphs a model wrapped by `FullyShardedDataParallel` is, ours and stock's, by strategy
and `use_orig_params`.

Each case is compiled and trained for three steps on four ranks. Counted on rank 0: graphs of each
direction, as AOTAutograd hands them to a backend; Dynamo's graph breaks; collectives inside the
graphs. No Inductor: it changes none of these numbers.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpt import GPT, SIZES, Block
from results import Report, Table, machine
from screen import Screen, leave
from settings import Settings
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as StockFSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from compiled_fsdp import FullyShardedDataParallel, Plan, set_plan
from compiled_fsdp.compiler import driver
from compiled_fsdp.ir.collectives import STARTS
from compiled_fsdp.ir.graph import find, is_backward

WORLD, STEPS = 4, 3
CONFIG = replace(SIZES["tiny"], num_layers=4)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
COLUMNS = (
    "strategy",
    "use_orig_params",
    "FSDP1",
    "forward graphs",
    "backward graphs",
    "collectives forward",
    "collectives backward",
    "graph breaks",
    "fullgraph=True",
    "loss gap",
)
NOTES = (
    "**ours**: compiled_fsdp, compiled with `fullgraph=True`, backend `compiled_fsdp_eager`; "
    "**stock**: torch's, compiled without `fullgraph`, by AOTAutograd and no Inductor. "
    "**fullgraph=True**: what comes of it, for both.",
    "**graphs**: what AOTAutograd handed over in three steps, recompiles included; blocks alike "
    "may share one. **collectives**: inside them; stock runs its own in hooks between them. "
    "**graph breaks**: as Dynamo counts them; where it counts none and there is no graph either, "
    "it gave up whole frames. **loss gap**: of the three losses from stock's eager ones.",
    "Under NO_SHARD nothing is gathered. HYBRID_SHARD runs on a 2 x 2 mesh, and reduces each "
    "gradient twice. On four ranks gloo's reduce-scatter adds in another order than our all-to-all "
    "and local sum: hence a loss gap there, and none over two.",
)


def run(settings: Settings, screen: Screen) -> Report:
    """All cases; in small, one, which needs no more than two ranks."""
    cases = list(itertools.product(STRATEGIES, (True, False)))[: 1 if settings.quick else None]
    world = 2 if settings.quick else WORLD
    screen.line(f"graphs, {len(cases)} cases on {world} ranks")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(world),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command += [str(Path(__file__).resolve()), json.dumps(cases), str(output)]
        subprocess.run(command, env=environment, check=True)
        rows: list[list[str]] = json.loads(output.read_text())
    facts = [
        machine(),
        f"GPT of {CONFIG.num_layers} blocks, each wrapped, and the model around them; {world} "
        "local ranks, gloo.",
    ]
    return Report(
        "fsdp1_graphs",
        "Graphs of a model wrapped by FSDP1",
        [Table(f"{world} ranks", facts, COLUMNS, rows)],
        [],
        NOTES,
    )


# --- on each rank ---------------------------------------------------------------------------------


def work(cases: list[tuple[str, bool]], output: Path) -> None:
    """Count every case; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    set_plan(Plan(bucket_bytes=0))  # blocks this small would share their collectives
    rows = []
    for strategy, use_orig_params in cases:
        options: dict[str, Any] = {
            "sharding_strategy": ShardingStrategy[strategy],
            "use_orig_params": use_orig_params,
        }
        if strategy == "HYBRID_SHARD":
            options["device_mesh"] = init_device_mesh(
                "cpu", (WORLD // 2, 2), mesh_dim_names=("replicate", "shard")
            )
        rows += [[strategy, str(use_orig_params), *row] for row in rows_of(options)]
    if dist.get_rank() == 0:
        output.write_text(json.dumps(rows))
    leave()


def rows_of(options: dict[str, Any]) -> Iterator[list[str]]:
    """Of ours and of stock, the cells after the first two."""
    expected, _ = train(wrap(StockFSDP, options))
    for name, cls in (("ours", FullyShardedDataParallel), ("stock", StockFSDP)):
        is_ours = cls is not StockFSDP
        found: Counter[str] = Counter()
        with counted(found):
            compile_ = partial(
                torch.compile, backend="compiled_fsdp_eager" if is_ours else counting(found)
            )
            losses, error = train(wrap(cls, options), partial(compile_, fullgraph=is_ours))
        assert not error, error
        graph_breaks = sum(counters["graph_break"].values())
        if not is_ours:
            _, error = train(wrap(cls, options), partial(compile_, fullgraph=True))
        gap = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        numbers = [found[key] for key in ("forward", "backward", "in forward", "in backward")]
        yield [name, *map(str, (*numbers, graph_breaks)), error or "runs", f"{gap:.1e}"]


def wrap(cls: type, options: dict[str, Any]) -> Any:
    """The same model each time, an instance for each block."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD is deprecated
        return cls(
            GPT(CONFIG), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id="cpu", **options
        )


def train(
    model: Any, compile_: Callable[[Any], Any] = lambda model: model
) -> tuple[list[float], str]:
    """Losses of three steps; or what the first raised, by name."""
    call, optimizer = compile_(model), torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(dist.get_world_size() * step + dist.get_rank())
        text = torch.randint(0, 256, (2, 17), generator=generator)
        try:
            loss: Tensor = torch.nn.functional.cross_entropy(
                call(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten()
            )
        except torch._dynamo.exc.TorchDynamoException as error:
            return losses, type(error).__name__
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, ""


@contextmanager
def counted(found: Counter[str]) -> Iterator[None]:
    """Count the final graphs of our backend inside."""

    def run_half(gm: Any) -> Any:
        result = driver.run_half(gm)
        note(found, "backward" if is_backward(result.graph) else "forward", result)
        return result

    with mock.patch("compiled_fsdp.compiler.backend.run_half", run_half):
        yield


def counting(found: Counter[str]) -> Callable[..., Any]:
    """A backend that runs graphs as they are, and counts them."""

    def compiler(direction: str, gm: Any, inputs: Any) -> Any:
        note(found, direction, gm)
        return boxed_nop(gm, inputs)

    return aot_autograd(
        fw_compiler=partial(compiler, "forward"), bw_compiler=partial(compiler, "backward")
    )


def note(found: Counter[str], direction: str, gm: Any) -> None:
    """Count a graph and the collectives in it."""
    found[direction] += 1
    found[f"in {direction}"] += len(find(gm.graph, *STARTS))


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), Path(sys.argv[2]))
