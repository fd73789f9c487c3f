"""Many programs at once: jobs, each a process with pools of its own, that take the seeds one by one
until time is up.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from programs.results import Line, read

if TYPE_CHECKING:
    from collections.abc import Iterator

LATE = 30.0  # seconds that a job gets for its last program


def run_jobs(arguments: list[str], jobs: int, deadline: float, folder: str) -> list[Line]:
    """What all jobs have written; those that do not end in time are ended, and what they were at is
    not in it.
    """
    main = str(Path(__file__).with_name("__main__.py"))
    outs = [f"{folder}/{i}.jsonl" for i in range(jobs)]
    commands = [[sys.executable, main, *arguments, "--job", folder, "--out", out] for out in outs]
    running = [subprocess.Popen(command) for command in commands]
    try:
        for i, job in enumerate(running):
            code = _wait(job, deadline + LATE)
            if code != 0:
                print(f"job {i} {'was ended' if code is None else f'died with {code}'}", flush=True)
    finally:
        for job in running:
            job.kill()
    return [line for out in outs if os.path.exists(out) for line in read(out)]


def _wait(job: subprocess.Popen[bytes], until: float) -> int | None:
    try:
        return job.wait(None if until == float("inf") else max(0.0, until - time.time()))
    except subprocess.TimeoutExpired:
        return None


def claimed(seeds: range, folder: str) -> Iterator[int]:
    """Each seed that no other job has taken; all of them without a folder."""
    for seed in seeds:
        if not folder or _claim(Path(folder) / f"seed{seed}"):
            yield seed


def _claim(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
