"""The main job, for torchrun, with a model of one layer; `FAULTS` says where its ranks die, each
time once, as JSON: [[place, step], ...].

Places: "step", before a training step; "save", when this rank's shards of a checkpoint are written
and the checkpoint is not complete, and torchrun dies too. `MARKS` is a folder that remembers what
has happened.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import train
import trainer
from gpt import SIZES
from torch.distributed.checkpoint.filesystem import FileSystemWriter

ONE_LAYER = {"tiny": replace(SIZES["tiny"], num_layers=1)}

faults = [tuple(fault) for fault in json.loads(os.environ.get("FAULTS", "[]"))]
take_step, write_data = trainer.Trainer.step, FileSystemWriter.write_data
num_done = 0


def is_due(place: str, number: int) -> bool:
    mark = Path(os.environ["MARKS"], f"{place}{number}")
    if (place, number) not in faults or mark.exists():
        return False
    mark.touch()
    return True


def step(self: trainer.Trainer, index: int, *args: Any) -> Any:
    global num_done
    if is_due("step", index):
        os.kill(os.getpid(), signal.SIGKILL)
    num_done = index + 1
    return take_step(self, index, *args)


def write(self: FileSystemWriter, *args: Any, **kwargs: Any) -> Any:
    written = write_data(self, *args, **kwargs)
    if is_due("save", num_done):
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return written


if __name__ == "__main__":
    SIZES.update(ONE_LAYER)
    trainer.Trainer.step = step  # type: ignore[assignment]
    FileSystemWriter.write_data = write  # type: ignore[method-assign]
    sys.exit(train.main(sys.argv[1:]))
