"""Short jobs of two ranks, one after another, and the exit code of every process: a finished job
must not end with another.

    # a fifth of them in each way to end
    PYTHONPATH=.:tests:benchmarks python tests/jobs/exits.py --runs 200
    # the watcher is always inside the store
    PYTHONPATH=.:tests:benchmarks python tests/jobs/exits.py --runs 20 --period 0

Every process is forked from this one, which has imported torch, and ends as any interpreter does.
They train a few steps and go on for up to a second, so that the exit falls anywhere between two
looks of the watcher. Of those that compile, one rank wishes at the end that units were run eagerly.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from kit import harness
from kit.pool import IMPORTS
from torch import nn

from compiled_fsdp import fully_shard
from compiled_fsdp.frontend import together
from compiled_fsdp.frontend.state import get_state
from compiled_fsdp.wire import answers

EXPECTED = {"end": 0, "sys.exit": 3, "exception": 1, "destroy_process_group": 0, "fork": 0}
TIMEOUT_S = 120.0


def train(compiled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    for module in (model[0], model):
        fully_shard(module)
    call = torch.compile(model, backend="compiled_fsdp_eager") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters())
    harness.train(call, optimizer, [(torch.randn(2, 8),) for _ in range(3)])
    state = get_state(model)
    assert state is not None
    assert state.together is not None
    if compiled and dist.get_rank():
        state.together.wish(0, "as asked")


def job(rank: int, number: int, ending: str, folder: str, period: float | None) -> int:
    """One rank; returns to the end of this script, as any script does."""
    output = os.open(f"{folder}/{number}.{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    if period is not None:
        answers.watcher.period = together._watcher.period = period
    store = dist.FileStore(f"{folder}/store{number}", 2) if number % 3 == 2 else None
    port = os.environ["MASTER_PORT"]
    place = {"store": store} if store else {"init_method": f"tcp://127.0.0.1:{port}"}
    dist.init_process_group("gloo", rank=rank, world_size=2, **place)
    train(compiled=number % 4 == 1)
    time.sleep(random.Random(2 * number + rank).random())
    if ending == "destroy_process_group":
        dist.destroy_process_group()
    if ending == "exception":
        raise RuntimeError("as asked")
    if ending == "fork" and (child := os.fork()):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return EXPECTED[ending]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def code_of(pid: int, deadline: float) -> int | str:
    """How a process ended; one that hangs is killed."""
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hangs"


def main() -> int:
    """The exit code of this script, or of the job that a forked process has run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument(
        "--period", type=float, default=None, help="seconds between two looks of the watcher"
    )
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    codes: dict[str, Counter[int | str]] = {ending: Counter() for ending in EXPECTED}
    folder = tempfile.mkdtemp()
    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    for number in range(options.runs):
        ending = list(EXPECTED)[number % len(EXPECTED)]
        os.environ["MASTER_PORT"] = str(free_port())
        pids = []
        for rank in range(2):
            pid = os.fork()
            if not pid:
                return job(rank, number, ending, folder, options.period)
            pids.append(pid)
        deadline = time.monotonic() + TIMEOUT_S
        for rank, pid in enumerate(pids):
            code = code_of(pid, deadline)
            codes[ending][code] += 1
            if code != EXPECTED[ending]:
                said = Path(f"{folder}/{number}.{rank}").read_text().splitlines()
                lines = [line for line in said if "leaked" not in line][
                    -20:
                ]  # Triton, at each exit
                print(
                    f"run {number}, rank {rank}, {ending}: {code}", *lines, sep="\n    ", flush=True
                )
    for ending, found in codes.items():
        print(f"{ending}: expected {EXPECTED[ending]}, got {dict(found)}")
    return int(any(set(found) - {EXPECTED[ending]} for ending, found in codes.items()))


if __name__ == "__main__":
    sys.exit(main())
