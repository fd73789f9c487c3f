"""`python -m compiled_fsdp simulate SCRIPT`: somebody's own training script as rank k of N, on
wires of known speed, in one process.

Every process group that the script makes is one of a timed world (`wire/timed.py`), and what would
wait for other processes does not: how ranks meet, objects from other ranks, checkpoints.
"""

from __future__ import annotations

import inspect
import os
import sys
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from compiled_fsdp.eager.optimizer_steps import watched
from compiled_fsdp.errors import warn_once
from compiled_fsdp.torch_private.groups import lone_store
from compiled_fsdp.wire.runs import told_of_runs
from compiled_fsdp.wire.timed import BACKEND
from compiled_fsdp.wire.world import World, timed_world

from .steps import EnoughError, SimulationError, Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .found import Found

# Arguments that only real groups have a use for.
DROPPED = ("init_method", "pg_options", "device_id")


def simulated(run: Callable[[], None], world: World, skip: int, most: int) -> tuple[Found, Any]:
    """Call `run` as that rank, until `most` steps are timed, or to its end; returns what was found,
    and the profile of the last steps that are not timed, or None. What it raises goes through, with
    what was seen until then as a note.

    Raises:
        SimulationError: too few steps were made.
    """
    steps = Steps(world, skip, most)
    with as_rank(world), watched(steps), told_of_runs(steps.before_graph):
        steps.probe.watch()
        try:
            run()
        except EnoughError:
            pass
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        except Exception as error:
            _note(error, steps)
            raise
        finally:
            steps.probe.finish()
    return steps.found(), steps.probe.profile


def _note(error: Exception, steps: Steps) -> None:
    """Add what was found before an error to it, if anything was."""
    try:
        steps.probe.finish()
        text = f"before this, the simulation had found:\n{steps.found()}"
    except SimulationError:
        return
    if hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(text)
    else:
        sys.stderr.write(f"{text}\n")


@contextmanager
def as_rank(world: World) -> Iterator[None]:
    """Inside, this process is that rank, as torchrun would have told it; its groups are gone
    afterwards.
    """
    with (
        timed_world(world),
        mock.patch.dict(os.environ, environment(world)),
        _timed_groups(world),
    ):
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def environment(world: World) -> dict[str, str]:
    """What torchrun would tell it."""
    each = min(world.ranks_per_node, world.size)
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.rank % each),
        "LOCAL_WORLD_SIZE": str(each),
        "GROUP_RANK": str(world.rank // each),
        "GROUP_WORLD_SIZE": str(world.size // each),
        "ROLE_RANK": str(world.rank),
        "ROLE_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        "TORCH_DIST_INIT_BARRIER": "0",
    }


@contextmanager
def _timed_groups(world: World) -> Iterator[None]:
    """Whatever backend is asked for, groups are timed, and nobody waits for other ranks to come;
    wherever torch's functions are found.
    """
    store = lone_store()

    def rendezvous(*_: object, **__: object) -> Iterator[tuple[Any, int, int]]:
        yield store, world.rank, world.size

    torch_rendezvous: Any = vars(dist)["rendezvous"]
    fixed: dict[str, object] = {"backend": BACKEND}
    here = {**fixed, "store": store, "rank": world.rank, "world_size": world.size}
    replaced: dict[Any, Any] = {
        torch_rendezvous: rendezvous,
        dist.init_process_group: _timed(dist.init_process_group, here),
        dist.new_group: _timed(dist.new_group, fixed),
        dist.monitored_barrier: lambda group=None, *_, **__: dist.barrier(group),
        **{vars(dcp)[name]: _not_saved for name in ("save", "async_save", "save_state_dict")},
        **{
            fn: _from_here(fn, world.rank)
            for fn in (
                dist.broadcast_object_list,
                dist.scatter_object_list,
                dist.recv_object_list,
            )
        },
    }
    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            for original, other in replaced.items():
                name = str(original.__name__)
                if module is not None and vars(module).get(name) is original:
                    stack.enter_context(mock.patch.object(module, name, other))
        yield


def _timed(fn: Callable[..., Any], fixed: dict[str, object]) -> Callable[..., Any]:
    signature = inspect.signature(fn)

    @wraps(fn)
    def made(*args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*args, **kwargs).arguments
        asked = {k: v for k, v in asked.items() if k not in DROPPED}
        return fn(**{**asked, **fixed})

    return made


def _from_here(fn: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """Objects that another rank has are not known."""
    signature = inspect.signature(fn)

    @wraps(fn)
    def sent(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        asked = bound.arguments
        source = asked.get("group_src")
        if source is not None:
            source = dist.get_process_group_ranks(asked["group"] or dist.group.WORLD)[source]
        elif (source := asked["src"]) is None:
            source = 0
        if source != rank or fn is dist.recv_object_list:
            raise SimulationError(
                f"the script, simulated as rank {rank}, gets objects of rank {source} by "
                f"{fn.__name__}, and nobody knows what they are: pass --rank {source}, or let the "
                "script make them itself"
            )
        return fn(*args, **kwargs)

    return sent


def _not_saved(*_: object, **__: object) -> Any:
    """A checkpoint has parts of every rank's, and there is one."""
    warn_once(
        "compiled_fsdp: the script saves a checkpoint, of which one simulated rank has a part "
        "only: nothing was written, and no time was spent on it",
        about="checkpoints in a simulation",
    )
    done: Any = torch.futures.Future()
    done.set_result(None)
    return done
