"""`python -m compiled_fsdp simulate SCRIPT`: somebody's own training script as rank k of N, on
wires of known speed, in one process.

Every process group that the script makes is one of a timed world (`wire/timed.py`). A step is what
lies between two ends of `optimizer.step()`, of the first optimizer that steps.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import wraps
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from compiled_fsdp.torch_private.groups import lone_store
from compiled_fsdp.wire.timed import BACKEND, Wire, World, timed_world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class SimulationError(Exception):
    """Nothing can be said of what was run."""


@dataclass
class Kind:
    """Collectives of a kind over a wire, per step: how many, what this rank sends, how long they
    occupy the wire, and how long somebody waited.
    """

    kind: str
    wire: str
    count: float
    sent_bytes: float
    wire_s: float
    exposed_s: float


@dataclass
class Found:
    """What a simulation has shown of the timed steps: medians in seconds, and means by kind.

    exposed_s: that the script waited for collectives.
    floor_s: what is left if no collective is waited for, or what the busiest wire needs, whichever
        is larger.
    """

    rank: int
    world: int
    ranks_per_node: int
    wires: list[Wire]
    num_skipped: int
    num_steps: int
    step_s: float
    fastest_s: float
    slowest_s: float
    exposed_s: float
    floor_s: float
    kinds: list[Kind] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"rank {self.rank} of {self.world}, {self.ranks_per_node} on each node; "
            + "; ".join(
                f"{w.name} {w.bandwidth / 1e9:g} GB/s, {w.latency * 1e6:g} us" for w in self.wires
            ),
            f"{self.num_steps} steps timed, the first {self.num_skipped} left out",
            f"step      {self.step_s * 1e3:9.2f} ms  median; {self.fastest_s * 1e3:.2f} to "
            f"{self.slowest_s * 1e3:.2f}",
            f"exposed   {self.exposed_s * 1e3:9.2f} ms  {self.exposed_s / self.step_s:.0%} of the step",
            f"floor     {self.floor_s * 1e3:9.2f} ms  the larger of computing alone and the busiest wire",
            "",
            f"{'per step':<16}{'wire':<9}{'number':>7}{'MB sent':>10}{'wire ms':>10}{'exposed ms':>12}",
        ]
        lines += [
            f"{kind.kind:<16}{kind.wire:<9}{kind.count:>7.1f}{kind.sent_bytes / 1e6:>10.2f}"
            f"{kind.wire_s * 1e3:>10.2f}{kind.exposed_s * 1e3:>12.2f}"
            for kind in self.kinds
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self), indent=1)


class Steps:
    """Ends of steps, and how many collectives there had been."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ends: list[tuple[float, int]] = []
        self.optimizer: object = None

    def __call__(self, optimizer: object, *_: object) -> None:
        """After a step of any optimizer."""
        self.optimizer = self.optimizer or optimizer
        if optimizer is self.optimizer:
            self.ends.append((time.perf_counter(), len(self.world.carried)))

    def found(self, skip: int) -> Found:
        """The summary, without the first steps.

        Raises:
            SimulationError: too few steps.
        """
        ends = self.ends[max(skip - 1, 0) :]
        if len(ends) < 2:
            raise SimulationError(
                f"the script ended after {len(self.ends)} steps of its optimizer. The first {skip} "
                "are left out, since they compile, and one more is needed at least: let it run "
                "longer, or pass a smaller --skip"
            )
        times = [after - before for (before, _), (after, _) in pairwise(ends)]
        carried = self.world.carried[ends[0][1] : ends[-1][1]]
        groups = defaultdict(list)
        for each in carried:
            groups[each.kind, each.wire].append(each)
        kinds = [
            Kind(
                *key,
                len(found) / len(times),
                sum(c.num_bytes for c in found) / len(times),
                sum(c.seconds for c in found) / len(times),
                sum(c.blocked for c in found) / len(times),
            )
            for key, found in sorted(groups.items())
        ]
        busy: dict[str, float] = defaultdict(float)
        for kind in kinds:
            busy[kind.wire] += kind.wire_s
        blocked = [
            sum(c.blocked for c in self.world.carried[begin:end])
            for (_, begin), (_, end) in pairwise(ends)
        ]
        alone = median(t - waited for t, waited in zip(times, blocked, strict=True))
        world = self.world
        return Found(
            rank=world.rank,
            world=world.size,
            ranks_per_node=world.ranks_per_node,
            wires=[world.network] if world.ranks_per_node == 1 else [world.link, world.network],
            num_skipped=len(self.ends) - len(times),
            num_steps=len(times),
            step_s=median(times),
            fastest_s=min(times),
            slowest_s=max(times),
            exposed_s=median(blocked),
            floor_s=max(alone, *busy.values()),
            kinds=kinds,
        )


def simulated(run: Callable[[], None], world: World, skip: int) -> Found:
    """Call `run` as that rank; what it raises goes through.

    Raises:
        SimulationError: too few steps were made.
    """
    steps = Steps(world)
    with (
        timed_world(world),
        mock.patch.dict(os.environ, _environment(world)),
        _timed_groups(world),
    ):
        hook = register_optimizer_step_post_hook(steps)
        try:
            run()
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        finally:
            hook.remove()
            if dist.is_initialized():
                dist.destroy_process_group()
    return steps.found(skip)


def _environment(world: World) -> dict[str, str]:
    """What torchrun would tell it."""
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.rank % world.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(min(world.ranks_per_node, world.size)),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }


@contextmanager
def _timed_groups(world: World) -> Iterator[None]:
    """Whatever backend is asked for, groups are timed, and nobody waits for other ranks to come;
    wherever torch's functions are found.
    """

    def timed(fn: Callable[..., Any], **fixed: object) -> Callable[..., Any]:
        signature = inspect.signature(fn)

        @wraps(fn)
        def made(*args: Any, **kwargs: Any) -> Any:
            asked = signature.bind(*args, **kwargs).arguments
            asked = {k: v for k, v in asked.items() if k not in ("init_method", "pg_options")}
            return fn(**{**asked, **fixed})

        return made

    def rendezvous(*_: object, **__: object) -> Iterator[tuple[Any, int, int]]:
        yield store, world.rank, world.size

    store = lone_store()
    torch_rendezvous: Any = vars(dist)["rendezvous"]
    replaced: dict[Any, Any] = {torch_rendezvous: rendezvous}
    for fn in (dist.init_process_group, dist.new_group):
        fixed: dict[str, object] = {"backend": BACKEND}
        if fn is dist.init_process_group:
            fixed |= {"store": store, "rank": world.rank, "world_size": world.size}
        replaced[fn] = timed(fn, **fixed)
    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            for original, other in replaced.items():
                if module is not None and vars(module).get(original.__name__) is original:
                    stack.enter_context(mock.patch.object(module, original.__name__, other))
        yield
