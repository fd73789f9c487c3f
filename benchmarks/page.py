"""How large the report's page is, and the dump that it is made of, by the number of layers, without
a profiled step and with one.

Bytes of graphs, not of parameters: the layers are tiny,
and would be as many bytes if they were not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, SIZES
from measure import record_step
from results import Report, Table, machine
from screen import Screen, leave
from settings import Settings

from compiled_fsdp import dumped_to, fully_shard
from compiled_fsdp.report import add_profile, write_report

WORLD, LAYERS, LENGTH = 2, (4, 32), 32
PAGES = {"plain.html": "page", "profiled.html": "page with a profiled step"}
COLUMNS = ("layers", "dump of both ranks", "files", *PAGES.values())
NOTES = (
    "MB of 1,000,000 bytes. The dump has every graph after every pass that changed it, on both "
    "ranks; the page is of both, with its data packed by gzip.",
    "The two pages of a number of layers are left by `torchrun --nproc-per-node 2 "
    "benchmarks/page.py LAYERS FOLDER`.",
)


def run(settings: Settings, screen: Screen) -> Report:
    """A table of both numbers of layers; in small, of one layer."""
    rows = [row_of(layers, screen) for layers in ((1,) if settings.quick else LAYERS)]
    facts = [
        machine(),
        f"GPT of width {SIZES['tiny'].width}, backend compiled_fsdp_eager, {WORLD} local ranks.",
    ]
    title = "Bytes of the report"
    return Report("page", title, [Table("By layers", facts, COLUMNS, rows)], [], NOTES)


def row_of(layers: int, screen: Screen) -> list[str]:
    """Compile, profile and draw in processes of their own."""
    screen.line(f"page of {layers} layers")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder:
        me = str(Path(__file__).resolve())
        subprocess.run([*launch, str(WORLD), me, str(layers), folder], env=environment, check=True)
        return [str(layers), *cells(Path(folder))]


def cells(folder: Path) -> Iterator[str]:
    """What is in a folder that `work` left."""
    files = [path for path in (folder / "dump").rglob("*") if path.is_file()]
    yield megabytes(files)
    yield str(len(files))
    for page in PAGES:
        yield megabytes([folder / page])


def megabytes(files: list[Path]) -> str:
    """How large files are together."""
    return f"{sum(path.stat().st_size for path in files) / 1e6:.2f} MB"


# --- on each rank ---------------------------------------------------------------------------------


def work(layers: int, folder: Path) -> None:
    """Leave a dump and two pages in a folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = GPT(replace(SIZES["tiny"], num_layers=layers))
    for block in model.layers:
        fully_shard(block)
    call = torch.compile(fully_shard(model), backend="compiled_fsdp_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)

    def step() -> None:
        call(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    with dumped_to(folder / "dump"):
        step()
    dist.barrier()
    if rank == 0:
        write_report(folder / "dump", folder / "plain.html")
    trace = folder / f"step{rank}.json"
    record_step(step, trace)
    add_profile(folder / "dump", trace, rank)
    dist.barrier()
    if rank == 0:
        write_report(folder / "dump", folder / "profiled.html")
    leave()


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]))
