"""A sharded checkpoint: tensors by torch.distributed.checkpoint, the rest in a readable `run.json`.

Each rank writes its shards; `run.json` holds the options, the step, the losses so far, and size and
SHA-256 of every file. A new checkpoint replaces the old one only when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safe_read import Planner, Reader
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from usage import UsageError

FOLDER, RUN = "checkpoint", "run.json"
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]  # one, or several
RUN_TYPES = {"job": str, "options": dict, "step": int, "text": str, "history": dict, "files": dict}


def save(out: Path, model: nn.Module, optimizers: Optimizers, run: dict[str, Any]) -> Path:
    """Write `out/checkpoint` on all ranks together and return it; `run` is what `read_run` returns.

    The file table is added here.
    """
    final, new, old = out / FOLDER, out / f"{FOLDER}.new", out / f"{FOLDER}.old"
    if dist.get_rank() == 0:
        shutil.rmtree(new, ignore_errors=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizers)
    try:
        save_shards({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=new)
    except CheckpointException as error:
        raise UsageError(f"saving the checkpoint {final}: {_first_cause(error)}") from error
    if dist.get_rank() == 0:
        paths = sorted(new.iterdir())
        files = {path.name: [path.stat().st_size, _sha256(path)] for path in paths}
        (new / RUN).write_text(json.dumps({**run, "files": files}, indent=1))
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        new.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    return final


def load(out: Path, model: nn.Module, optimizers: Optimizers) -> None:
    """Read the tensors of `out/checkpoint` into the model and the optimizers, at any number of
    ranks.
    """
    model_state, optimizer_state = get_state_dict(model, optimizers)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    try:
        load_shards(state, storage_reader=Reader(_whole(out)), planner=Planner())
    except CheckpointException as error:
        raise UsageError(f"reading the checkpoint {out / FOLDER}: {_first_cause(error)}") from error
    set_state_dict(
        model,
        optimizers,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def exists(out: Path) -> bool:
    """Whether there is a checkpoint, whole or not."""
    return _whole(out).exists()


def read_run(out: Path) -> dict[str, Any]:
    """Return the contents of `run.json`, or raise saying what is missing or damaged."""
    path = _whole(out) / RUN
    if not path.is_file():
        raise UsageError(
            f"reading the checkpoint: {path} does not exist; --resume needs the --out folder of a"
            " run that ended; give that folder, or train anew without --resume"
        )
    try:
        run = json.loads(path.read_text())
    except ValueError as error:
        raise _damaged(path, f"is not JSON ({error})") from error
    if isinstance(run, dict):
        run.setdefault("job", "")  # of a version that gave jobs no names
    wrong = [
        name
        for name, kind in RUN_TYPES.items()
        if not isinstance(run, dict) or not isinstance(run.get(name), kind)
    ]
    if wrong:
        raise _damaged(path, f"has no proper entry {', '.join(wrong)}")
    return dict(run)


def verify(out: Path) -> None:
    """Raise unless every file of the checkpoint is there, unchanged."""
    for name, (size, digest) in read_run(out)["files"].items():
        path = _whole(out) / name
        if not path.is_file():
            raise _damaged(path, "does not exist")
        if path.stat().st_size != size:
            raise _damaged(path, f"has {path.stat().st_size} bytes, was saved with {size}")
        if _sha256(path) != digest:
            raise _damaged(path, f"has other contents than were saved (SHA-256 {digest[:12]}...)")


def _whole(out: Path) -> Path:
    """The folder of the last whole checkpoint: the old one if the job was killed between the two
    renames of `save`.
    """
    final, old = out / FOLDER, out / f"{FOLDER}.old"
    return old if old.is_dir() and not final.exists() else final


def _damaged(path: Path, what: str) -> UsageError:
    return UsageError(
        f"reading the checkpoint: {path} {what}; a checkpoint is used only whole; restore the file,"
        " or train anew without --resume"
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _first_cause(error: CheckpointException) -> str:
    """Return one line for the failures of all ranks, which DCP wraps with their tracebacks."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}".splitlines()[0]
