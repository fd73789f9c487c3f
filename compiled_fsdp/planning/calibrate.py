"""Measure what computing and communicating cost here, and agree on it: every rank must plan with
the same numbers.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir import schema
from compiled_fsdp.torch_private.groups import common_name
from compiled_fsdp.wire import launch
from compiled_fsdp.wire.timed import known_wire

from .costs import Costs, Link
from .plan import current_plan, use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


REPEATS = 5
SMALL, LARGE = 1 << 8, 1 << 20  # bytes that each rank contributes to a collective
MESSAGES = 8  # of the same collective, to see what each further one costs
IN_FLIGHT = 4  # large ones that are started together, as a schedule does
BULK = 1 << 23  # the same, where so much is moved that starting does not count
# seconds that a collective takes at most whose cost to the core is measured; on a slow link, it is
# a smaller one
UNDER_WAY = 0.01
# Times as long as a collective is computed beside it, so that none of it is left to wait for.
LONGER = 4
MATMUL = {"cpu": 512, "cuda": 4096}
# Matrices to multiply: on the CPU more than caches hold, as in a model.
OPERANDS = {"cpu": 32, "cuda": 2}
STREAM = {"cpu": 1 << 24, "cuda": 1 << 26}  # elements of fp32 to read and write
ROUNDS = 3  # of everything, while repeats scatter
SCATTER = 3.0  # of the middle repeats, the slowest over the fastest
DIGITS = 2  # that count; runs on one machine should find each other's compiled code


class Mesh(Protocol):
    """A mesh to be measured: the groups that its ranks communicate over, and where their tensors
    are.
    """

    @property
    def device(self) -> torch.device:
        """The device of the tensors that are communicated."""
        ...

    @property
    def shard_size(self) -> int:
        """Ranks that a parameter is cut over."""
        ...

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The group that gathers parameters and scatters gradients."""
        ...

    @property
    def replicate_size(self) -> int:
        """Ranks that hold the same shard; 1 if there is no replicate axis."""
        ...

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The group that all-reduces gradients over them."""
        ...


def calibrate(infos: Sequence[Mesh], beside: Sequence[dist.ProcessGroup] = ()) -> Costs | None:
    """Measure and agree; collective over the groups of `infos`, and over those `beside`. Takes a
    second or two, less than five on a slow wire.

    beside: groups of axes that no parameter is gathered over, but whose ranks run the same graphs
        (tensor parallelism): they have to agree too, and the links are not measured.

    Where repeats scatter, as on a machine that others work on, everything is measured again, and
    the calmest round counts.

    None where nothing is communicated: one rank, or a fake process group.
    """
    groups = groups_of(infos)
    if not groups:
        return None
    rounds: list[tuple[float, list[float]]] = []
    while len(rounds) < ROUNDS and (not rounds or rounds[-1][0] > SCATTER):
        rounds.append(_round(groups, beside, infos[0].device))
    scatter, measured = min(rounds)
    if scatter > SCATTER:
        warn_once(
            "compiled_fsdp: costs were measured on a busy machine: repeats of the same differ by a "
            f"factor of {scatter:.0f}, after {ROUNDS} tries. What is decided and predicted from "
            "them may be off by as much; measure on a quiet machine, or leave distances as they "
            "are by default",
            about="costs that scatter",
        )
    flops, bandwidth, overhead, *links = [float(f"{x:.{DIGITS}g}") for x in measured]
    count = len(links) // len(groups)
    each = [Link(*links[n : n + count]) for n in range(0, len(links), count)]
    return Costs(flops, bandwidth, overhead, tuple(zip(groups, each, strict=True)))


def _round(
    groups: dict[str, dist.ProcessGroup], beside: Sequence[dist.ProcessGroup], device: torch.device
) -> tuple[float, list[float]]:
    """Returns by how much the repeats of one measurement scattered, at most, and all of them, the
    same on every rank.
    """
    watch = Stopwatch(device)
    measured = [_flops(watch), _bandwidth(watch), _overhead(watch)]
    for group in groups.values():
        measured += _link(group, watch)
    measured.append(max(watch.scatter))
    several = [g for g in beside if g.size() > 1 and dist.get_backend(g) != "fake"]
    for group in [*groups.values(), *several]:  # axis by axis: then all have the same
        *_, most = _everyones(measured, group, device).max(0).values.tolist()
        measured = [*_medians(measured[:-1], group, device), most]
    return measured[-1], measured[:-1]


def groups_of(infos: Sequence[Mesh]) -> dict[str, dist.ProcessGroup]:
    """The groups of these meshes over which anything is communicated, by name."""
    found: dict[str, dist.ProcessGroup] = {}
    for info in infos:
        for group in (info.shard_group, info.replicate_group if info.replicate_size > 1 else None):
            if group is not None and group.size() > 1 and dist.get_backend(group) != "fake":
                found[common_name(group.group_name)] = group
    return found


def calibrate_plan(infos: Sequence[Mesh], beside: Iterable[dist.ProcessGroup] = ()) -> None:
    """Complete the current plan with costs, if it needs them and lacks them for one of the groups
    of `infos`; `beside` as for `calibrate`.
    """
    plan = current_plan()
    if not plan.is_from_costs:
        return
    known = plan.costs.knows if plan.costs is not None else lambda _: False
    new = [
        info
        for info in infos
        if info.shard_size > 1 and not known(common_name(info.shard_group.group_name))
    ]
    if new and (costs := calibrate(new, [*beside])) is not None:
        if plan.costs is not None:
            costs = replace(
                plan.costs,
                links=plan.costs.links + tuple(e for e in costs.links if not known(e[0])),
            )
        use(replace(plan, costs=costs))


class Stopwatch:
    """Times calls on a device.

    scatter: of each measurement so far, the slowest of the middle repeats over the fastest.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scatter: list[float] = []

    def seconds(self, run: Callable[[], object]) -> float:
        """The median time of a call, the first one left out."""
        times = sorted([self.once(run) for _ in range(REPEATS + 1)][1:])
        self.scatter.append(times[-2] / max(times[1], 1e-9))
        return statistics.median(times)

    def once(self, run: Callable[[], object]) -> float:
        """The time of one call."""
        start = time.perf_counter()
        run()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start


def _flops(watch: Stopwatch) -> float:
    device = watch.device
    width = MATMUL.get(device.type, MATMUL["cuda"])
    operands = [
        torch.ones(width, width, device=device)
        for _ in range(OPERANDS.get(device.type, OPERANDS["cuda"]))
    ]
    pairs = list(zip(operands, reversed(operands), strict=True))
    return 2 * width**3 * len(pairs) / watch.seconds(lambda: [a @ b for a, b in pairs])


def _bandwidth(watch: Stopwatch) -> float:
    device = watch.device
    numel = STREAM.get(device.type, STREAM["cuda"])
    a, out = torch.ones(numel, device=device), torch.empty(numel, device=device)
    return 2 * numel * a.itemsize / watch.seconds(lambda: torch.mul(a, 2.0, out=out))


def _overhead(watch: Stopwatch) -> float:
    a = torch.ones(16, device=watch.device)
    count = 100

    def launch() -> None:
        for _ in range(count):
            a.mul_(1.0)

    return watch.seconds(launch) / count


def _link(group: dist.ProcessGroup, watch: Stopwatch) -> list[float]:
    """The fields of a `Link`; bandwidths are those of several collectives that follow each
    other.

    A group of a timed world (`wire/timed.py`) knows its own, and nothing is measured.
    """
    if (wire := known_wire(group)) is not None:
        return [wire.latency, wire.bandwidth, 0.0, wire.bandwidth, wire.bandwidth, 0.0, wire.issue]
    name, size, device = group.group_name, group.size(), watch.device
    small = torch.ones(SMALL, dtype=torch.uint8, device=device)
    large = torch.ones(LARGE // 4, device=device)
    rows = large.expand(size, -1).contiguous()

    def seconds(start: Callable[[], torch.Tensor], count: int = 1) -> float:
        def run() -> None:
            for out in [start() for _ in range(count)]:
                launch.call(comm.WAIT, out)

        return watch.seconds(run)

    def bandwidth(start: Callable[[], torch.Tensor]) -> float:
        return IN_FLIGHT * (size - 1) * LARGE / max(seconds(start, IN_FLIGHT) - latency, 1e-9)

    pieces = [SMALL // MESSAGES] * MESSAGES
    latency = seconds(lambda: launch.call(comm.ALL_GATHER, small, size, name))
    several = seconds(lambda: launch.call(schema.ALL_GATHER, small, pieces, size, name))
    gathering = bandwidth(lambda: launch.call(comm.ALL_GATHER, large, size, name))
    (agreed,) = _medians([gathering], group, device)  # all ranks gather as much
    some, bulk = (_ones(agreed / (size - 1) * UNDER_WAY, most, device) for most in (LARGE, BULK))
    delay = _taken(
        lambda: launch.call(comm.ALL_GATHER, some, size, name),
        latency + (size - 1) * some.nbytes / gathering,
        watch,
    )
    issue = _busy(lambda: launch.call(comm.ALL_GATHER, bulk, size, name)) / (
        (size - 1) * bulk.nbytes
    )
    return [
        latency,
        gathering,
        max(several - latency, 0.0) / (MESSAGES - 1),
        bandwidth(lambda: launch.call(comm.REDUCE_SCATTER, rows.view(-1), "sum", size, name)),
        bandwidth(lambda: launch.call(comm.ALL_TO_ALL, [rows], size, name)),
        max(delay - issue * (size - 1) * some.nbytes, 0.0),
        issue,
    ]


def _busy(start: Callable[[], torch.Tensor]) -> float:
    """Processor seconds that a collective needs on the training thread's core: of all threads, if
    the process has no other core.
    """
    is_alone = (
        len(os.sched_getaffinity(0)) == 1
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() == 1
    )
    clock = time.process_time if is_alone else time.thread_time
    launch.call(comm.WAIT, start())
    begin = clock()
    for _ in range(REPEATS):  # together: clocks of threads are coarse
        launch.call(comm.WAIT, start())
    return (clock() - begin) / REPEATS


def _ones(nbytes: float, most: int, device: torch.device) -> torch.Tensor:
    return torch.ones(max(1, int(min(nbytes, most)) // torch.float.itemsize), device=device)


def _taken(start: Callable[[], torch.Tensor], seconds: float, watch: Stopwatch) -> float:
    """Seconds by which a collective of so many seconds delays what is computed while it is under
    way; 0 where repeats differ by more than that, as on a machine that others work on.
    """
    width = MATMUL.get(watch.device.type, MATMUL["cuda"])
    a = torch.ones(width, width, device=watch.device)
    count = ceil(LONGER * seconds / watch.seconds(lambda: a @ a))

    def run(*, is_beside: bool) -> None:
        for _ in range(IN_FLIGHT):
            out = start() if is_beside else None
            for _ in range(count):
                a @ a
            if out is not None:
                launch.call(comm.WAIT, out)

    delays = [
        watch.once(lambda: run(is_beside=True)) - watch.once(lambda: run(is_beside=False))
        for _ in range(REPEATS + 1)
    ]
    return certain(delays[1:]) / IN_FLIGHT


def certain(differences: Sequence[float]) -> float:
    """Returns the median, or 0 if it is smaller than what lies between the middle ones."""
    found = sorted(differences)
    median = statistics.median(found)
    return median if median > found[-2] - found[1] else 0.0


def _medians(mine: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    medians: list[float] = _everyones(mine, group, device).median(0).values.tolist()
    return medians


def _everyones(mine: list[float], group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    values = torch.tensor(mine, dtype=torch.float64, device=device)
    everyone = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(everyone, values, group=group)
    return torch.stack(everyone)
