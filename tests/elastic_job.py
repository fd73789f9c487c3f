"""The main job, for torchrun; `FAULTS` says which restart of the job dies where, as JSON: [[restart, place, step], ...].

A fault hits the ranks of the agent that has it in its environment. Places: "step", before a training step; "save", when this
rank's shards of a checkpoint are written and the checkpoint is not complete; "agent", as "save", and torchrun dies too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import train
import trainer
from torch.distributed.checkpoint.filesystem import FileSystemWriter

faults = [tuple(fault) for fault in json.loads(os.environ.get("FAULTS", "[]"))]
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
take_step, write_data = trainer.Trainer.step, FileSystemWriter.write_data
num_done = 0


def step(self: trainer.Trainer, index: int, *args: Any) -> Any:
    global num_done
    if (restart, "step", index) in faults:
        os.kill(os.getpid(), signal.SIGKILL)
    num_done = index + 1
    return take_step(self, index, *args)


def write(self: FileSystemWriter, *args: Any, **kwargs: Any) -> Any:
    written = write_data(self, *args, **kwargs)
    if (restart, "agent", num_done) in faults:
        os.kill(os.getppid(), signal.SIGKILL)
    if {(restart, "save", num_done), (restart, "agent", num_done)} & set(faults):
        os.kill(os.getpid(), signal.SIGKILL)
    return written


trainer.Trainer.step = step  # type: ignore[assignment]
FileSystemWriter.write_data = write  # type: ignore[method-assign]
sys.exit(train.main(sys.argv[1:]))
