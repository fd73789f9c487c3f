"""Measure what computing and communicating cost here, and agree on it: every rank must plan with the same numbers."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from . import collectives as comm
from . import schema
from .costs import Costs, Link
from .plan import current_plan, use

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .mesh import MeshInfo

REPEATS = 5
SMALL, LARGE = 1 << 8, 1 << 20  # bytes that each rank contributes to a collective
MESSAGES = 8  # of the same collective, to see what each further one costs
IN_FLIGHT = 4  # large ones that are started together, as a schedule does
MATMUL = {"cpu": 512, "cuda": 4096}
OPERANDS = {"cpu": 32, "cuda": 2}  # matrices to multiply: on the CPU more than caches hold, as in a model
STREAM = {"cpu": 1 << 24, "cuda": 1 << 26}  # elements of fp32 to read and write
DIGITS = 2  # that count; runs on one machine should find each other's compiled code


def calibrate(infos: Sequence[MeshInfo]) -> Costs | None:
    """Measure and agree; collective over the groups of `infos`. Takes a second or two, less than five on a slow wire.

    None where nothing is communicated: one rank, or a fake process group.
    """
    groups = groups_of(infos)
    if not groups:
        return None
    device = infos[0].device
    measured = [_flops(device), _bandwidth(device), _overhead(device)]
    for group in groups.values():
        measured += _link(group, device)
    for group in groups.values():  # along one axis, then along the other: then all have the same
        measured = _medians(measured, group, device)
    flops, bandwidth, overhead, *links = [float(f"{x:.{DIGITS}g}") for x in measured]
    count = len(links) // len(groups)
    each = [Link(*links[n : n + count]) for n in range(0, len(links), count)]
    return Costs(flops, bandwidth, overhead, tuple(zip(groups, each, strict=True)))


def groups_of(infos: Sequence[MeshInfo]) -> dict[str, dist.ProcessGroup]:
    """The groups of these meshes over which anything is communicated, by name."""
    found: dict[str, dist.ProcessGroup] = {}
    for info in infos:
        for group in (info.shard_group, info.replicate_group if info.replicate_size > 1 else None):
            if group is not None and group.size() > 1 and dist.get_backend(group) != "fake":
                found[group.group_name] = group
    return found


def calibrate_plan(infos: Sequence[MeshInfo]) -> None:
    """Complete the current plan with costs, if it needs them and lacks them for one of these groups."""
    plan = current_plan()
    if not plan.is_from_costs:
        return
    known = {name for name, _ in plan.costs.links} if plan.costs else set()
    new = [info for info in infos if info.shard_size > 1 and info.shard_group.group_name not in known]
    if new and (costs := calibrate(new)) is not None:
        if plan.costs is not None:
            costs = replace(plan.costs, links=plan.costs.links + tuple(e for e in costs.links if e[0] not in known))
        use(replace(plan, costs=costs))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median time of a call, the first one left out."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _flops(device: torch.device) -> float:
    width = MATMUL.get(device.type, MATMUL["cuda"])
    operands = [torch.ones(width, width, device=device) for _ in range(OPERANDS.get(device.type, OPERANDS["cuda"]))]
    pairs = list(zip(operands, reversed(operands), strict=True))
    return 2 * width**3 * len(pairs) / _seconds(lambda: [a @ b for a, b in pairs], device)


def _bandwidth(device: torch.device) -> float:
    numel = STREAM.get(device.type, STREAM["cuda"])
    a, out = torch.ones(numel, device=device), torch.empty(numel, device=device)
    return 2 * numel * a.itemsize / _seconds(lambda: torch.mul(a, 2.0, out=out), device)


def _overhead(device: torch.device) -> float:
    a = torch.ones(16, device=device)
    count = 100

    def launch() -> None:
        for _ in range(count):
            a.mul_(1.0)

    return _seconds(launch, device) / count


def _link(group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The fields of a `Link`; bandwidths are those of several collectives that follow each other."""
    name, size = group.group_name, group.size()
    small = torch.ones(SMALL, dtype=torch.uint8, device=device)
    large = torch.ones(LARGE // 4, device=device)
    rows = large.expand(size, -1).contiguous()

    def seconds(start: Callable[[], torch.Tensor], count: int = 1) -> float:
        def run() -> None:
            for out in [start() for _ in range(count)]:
                comm.call(comm.WAIT, out)

        return _seconds(run, device)

    def bandwidth(start: Callable[[], torch.Tensor]) -> float:
        return IN_FLIGHT * (size - 1) * LARGE / max(seconds(start, IN_FLIGHT) - latency, 1e-9)

    pieces = [SMALL // MESSAGES] * MESSAGES
    latency = seconds(lambda: comm.call(comm.ALL_GATHER, small, size, name))
    several = seconds(lambda: comm.call(schema.ALL_GATHER, small, pieces, size, name))
    return [
        latency,
        bandwidth(lambda: comm.call(comm.ALL_GATHER, large, size, name)),
        max(several - latency, 0.0) / (MESSAGES - 1),
        bandwidth(lambda: comm.call(comm.REDUCE_SCATTER, rows.view(-1), "sum", size, name)),
        bandwidth(lambda: comm.call(comm.ALL_TO_ALL, [rows], size, name)),
        start := _busy(lambda: comm.call(comm.ALL_GATHER, small, size, name), time.thread_time),
        max(_busy(lambda: comm.call(comm.ALL_GATHER, large, size, name), _core_time()) - start, 0.0) / ((size - 1) * LARGE),
    ]


def _core_time() -> Callable[[], float]:
    """The processor time spent on the training thread's core: by all threads, if the process has no other core."""
    is_alone = len(os.sched_getaffinity(0)) == 1 if hasattr(os, "sched_getaffinity") else os.cpu_count() == 1
    return time.process_time if is_alone else time.thread_time


def _busy(start: Callable[[], torch.Tensor], clock: Callable[[], float]) -> float:
    """Processor seconds of a collective, from its start to the end of its wait."""
    count = REPEATS * IN_FLIGHT  # together: clocks of threads are coarse
    comm.call(comm.WAIT, start())
    begin = clock()
    for _ in range(count):
        comm.call(comm.WAIT, start())
    return (clock() - begin) / count


def _medians(mine: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    values = torch.tensor(mine, dtype=torch.float64, device=device)
    everyone = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(everyone, values, group=group)
    medians: list[float] = torch.stack(everyone).median(0).values.tolist()
    return medians
