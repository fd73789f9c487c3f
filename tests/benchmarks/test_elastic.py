"""The main job under torchrun: ranks are killed, it goes on from the last good checkpoint, and
loses nothing.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

if TYPE_CHECKING:
    from kit.pool import Pool

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 9, 3
JOB = "elastic"
OPTIONS = [
    "--size",
    "tiny",
    "--steps",
    str(STEPS),
    "--batch",
    "1",
    "--length",
    "16",
    "--optimizer",
    "muon",
]


def uninterrupted(out: str) -> list[float]:
    """The losses of the same job, in this pool; eager, which is the same bit for bit."""
    import train
    from gpt import SIZES
    from jobs.elastic_job import ONE_LAYER
    from loop import Budget, Loop, Outcome
    from options import check_machine, parse
    from screen import Screen
    from trainer import Trainer, variants

    more = ["--backend", "eager", "--out", out, "--text", str(ROOT / "benchmarks")]
    options = parse([*OPTIONS, *more])
    text = check_machine(options)
    with mock.patch.dict(SIZES, ONE_LAYER):
        trainer = Trainer(options, variants(options)[0], text)
    outcome = Outcome("")
    Loop(
        trainer, Screen(1), Budget(options, None), outcome, lambda: train.save(trainer, outcome)
    ).run()
    return outcome.losses


def agent(
    out: Path, port: int, backend: str, *, is_host: bool, faults: list[object]
) -> subprocess.Popen[str]:
    """torchrun with one rank; the job goes on while there is one agent or two."""
    torchrun = (
        "-m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 "
        f"--monitor-interval 0.2 --rdzv-id {JOB}"
    )
    rendezvous = f"--rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-conf "
    rendezvous += f"is_host={int(is_host)},last_call_timeout=5,keep_alive_interval=2"
    command = [
        sys.executable,
        *torchrun.split(),
        *rendezvous.split(),
        str(ROOT / "tests" / "jobs" / "elastic_job.py"),
        *OPTIONS,
        "--backend",
        backend,
    ]
    command += ["--save-every", str(EVERY), "--out", str(out), "--text", str(ROOT / "benchmarks")]
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"FAULTS": json.dumps(faults), "MARKS": str(out)}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
        "1"  # or an agent that joins late waits for an address for ever (torch 2.13)
    )
    with (out / f"agent{int(is_host)}").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, text=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("backend", "faults"),
    [("eager", [["save", 6]]), ("compiled_fsdp_eager", [["step", 4], ["save", 6]])],
    ids=["once", "twice"],
)
def test_a_job_that_loses_ranks(
    two: Pool, tmp_path: Path, backend: str, faults: list[object]
) -> None:
    """A rank is killed, perhaps in step 4, and then, after the restart, in the save after step 6,
    with its torchrun; one rank ends the job. What a rank that starts again compiles, it compiles as
    any.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    agents = [
        agent(tmp_path, port, backend, is_host=True, faults=[]),
        agent(tmp_path, port, backend, is_host=False, faults=faults),
    ]
    expected, _ = two.run(uninterrupted, str(tmp_path / "uninterrupted"))
    try:
        codes = [process.wait(300) for process in agents]
    finally:
        for process in agents:
            process.kill()
    log = (tmp_path / "agent1").read_text()
    assert codes == [0, -9], log[-4000:] + (tmp_path / "agent0").read_text()[-4000:]
    run = json.loads((tmp_path / "checkpoint" / "run.json").read_text())
    assert (run["step"], run["job"]) == (STEPS, JOB)
    losses = run["history"]["losses"]
    assert losses[:EVERY] == expected[:EVERY]
    # the rank that is left adds up both ranks' sequences in one batch, in another order
    assert losses == pytest.approx(expected, rel=1e-4)
    resumed = [line.split("at step ")[1][0] for line in log.splitlines() if "resuming from" in line]
    assert set(resumed) == {"3"}, (
        "the checkpoint under way when its rank died is not used, the one before is"
    )
    assert not list(tmp_path.glob("checkpoint.*"))
