"""Peak memory of the ways of `bench gpu` to train, by the allocator of a CUDA build of torch on a
device that computes nothing (`phantom/`): no device is needed.

Memory is asked for, handed out and given back as on a device: the allocator is torch's own, and
what torch, Inductor and Triton ask of it does not depend on what kernels compute. Left out is what
CUDA's libraries allocate by themselves or ask for as workspace.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu import SLOW, Child, Way, asked_for, described, gib
from gpu_rank import SIZES, VARIANTS
from hosts import HostsError
from phantom.build import build
from results import Panel, Report, Table, machine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from screen import Screen
    from settings import Settings

READY = 1200.0  # seconds until a way has compiled, Triton's kernels included, on two cores
WAYS = (
    "local stock stock_kept ours ours_whole ours_whole_kept ours_half ours_whole_half ours_fp8 "
    "ours_offload ours_whole_graphs"
)
FEW = "local stock ours ours_whole"
# Stock compiles parts of blocks with experts; an unsharded model would need all experts here.
EXPERTS = "stock_loss ours ours_whole"
BATCHES = (
    ("1b", 64, WAYS),
    ("1b", 8, FEW),
    ("1b", 512, FEW),
    ("8b", 64, FEW),
    ("16b", 64, EXPERTS),
)
QUICK = (("tiny", 64, "stock ours ours_whole"), ("tiny_experts", 64, "ours"))
COLUMNS = [
    *("", "peak", "over stock", "reserved", "at rest", "predicted", "over peak"),
    *("kernels, GB", "launches", "host, ms"),
]
NOTES = (
    "GiB. **peak** and **reserved**: what the allocator had handed out, and had taken from the "
    "device, at most, behind the first step. **at rest**: behind the last. **predicted**: by the "
    "planner, with what is at rest.",
    "**kernels**: the tensors that a step gives to kernels that Inductor has generated, those that "
    "are read and written in place twice. Not among them: matmuls, attention, the optimizer, and "
    "the copies into and out of stock's buckets, which no compiler makes (a copy of all gathered "
    "parameters, twice, and of all gradients).",
    "**host**: the processor's time for a step, the median of 20; what CUDA's driver would take "
    "is not in it.",
)


def run(settings: Settings, screen: Screen) -> Report:
    """One way after the other, of the models that are asked for, or of all.

    Raises:
        HostsError: torch is no CUDA build, or there is no such model.
    """
    sizes = asked_for(settings.batches, dict.fromkeys(size for size, _, _ in BATCHES))
    batches = QUICK if settings.quick else [batch for batch in BATCHES if batch[0] in sizes]
    ways = [
        Way(name, world, size, (SLOW,)) for size, world, names in batches for name in names.split()
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            variables = build(Path(folder))
        except RuntimeError as error:
            raise HostsError(str(error)) from error
        found: dict[Way, dict[str, Any]] = {}
        failed: list[str] = []
        for way in ways:
            screen.line(f"gpu_memory: {way.size}, {way.world} ranks: {way.variant}")
            try:
                found[way] = each = peak(way, variables)
            except (RuntimeError, TimeoutError) as error:
                screen.line(f"  failed: {error}")
                failed.append(f"{way.name}: failed.")
                continue
            screen.line(f"  peak {gib(each['peak'])} GiB, reserved {gib(each['reserved'])}")
            screen.line(f"  kernels: {each['kernels'].splitlines()[0]}")
    return report(found, failed)


def peak(way: Way, variables: Mapping[str, str]) -> dict[str, Any]:
    """What a way answers in the end.

    Raises:
        RuntimeError: it has failed; says what it wrote last.
        TimeoutError: it took too long.
    """
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), _path())))
    with tempfile.TemporaryFile() as said:
        child = Child(way, "cuda", said, "phantom/rank.py", {**variables, "PYTHONPATH": path})
        try:
            child.answer(READY)
            child.ask("end")
            return child.answer(READY)
        finally:
            child.close()


def _path() -> str:
    return os.environ.get("PYTHONPATH", "")


def report(found: Mapping[Way, dict[str, Any]], failed: Sequence[str] = ()) -> Report:
    """A table for each model and world; ratios are to stock's peak, and of the prediction to the
    peak.
    """
    tables, panels = [], []
    for size, world in dict.fromkeys((way.size, way.world) for way in found):
        mine = {
            way.variant: each
            for way, each in found.items()
            if (way.size, way.world) == (size, world)
        }
        table = Table(
            f"{size}, {world} ranks",
            [machine(), f"{described(SIZES[size])}; bf16 parameters, fp32 reductions, AdamW."],
            COLUMNS,
            _rows(mine),
        )
        tables.append(table)
        bars = {name: {"peak": each["peak"] / 2**30} for name, each in mine.items()}
        panels.append(Panel(table.title, "GiB", bars))
    names = dict.fromkeys(way.variant for way in found)
    notes = [*failed, *NOTES, *(f"**{name}**: {VARIANTS[name].summary}." for name in names)]
    return Report("gpu_memory", "Peak memory on a device, without one", tables, panels, notes)


def _rows(found: Mapping[str, dict[str, Any]]) -> Sequence[list[str]]:
    stock = found.get("stock", found.get("stock_loss"))
    rows = []
    for name, each in found.items():
        total = each["predicted_peak"] + each["at_rest"] if "predicted_peak" in each else None
        rows.append(
            [
                name,
                gib(each["peak"]),
                f"{each['peak'] / stock['peak']:.2f}" if stock else "",
                gib(each["reserved"]),
                gib(each["at_rest"]),
                gib(total),
                f"{total / each['peak']:.3f}" if total else "",
                f"{each['traffic'] / 1e9:.1f}" if each["traffic"] else "",
                f"{each['launches']}" if each["launches"] else "",
                f"{1e3 * each['host']:.1f}",
            ]
        )
    return rows
