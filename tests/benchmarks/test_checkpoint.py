"""The main job's checkpoint: whole, or refused by the name of the file; nothing in it is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import checkpoint
import pytest
import torch
import torch.distributed as dist
from loop import Budget, from_all
from options import Options, is_restarted, parse
from safe_read import MetadataUnpickler, Planner
from text import random_crops
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.planner import LoadItemType
from usage import UsageError

from compiled_fsdp import fully_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RUN = {"job": "j", "options": {}, "step": 1, "text": "x", "history": {}}
SHARD, META = "__0_0.distcp", ".metadata"


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(world: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved")
    checkpoint.save(out, *made(), RUN)
    return out


@pytest.fixture
def out(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "out"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


DAMAGE = [
    (SHARD, flip, "has other contents than were saved"),
    (SHARD, truncate, "bytes, was saved with"),
    (SHARD, empty, "has 0 bytes, was saved with"),
    (SHARD, Path.unlink, "does not exist"),
    (META, flip, "has other contents than were saved"),
    (META, truncate, "bytes, was saved with"),
    (META, Path.unlink, "does not exist"),
    ("run.json", truncate, "is not JSON"),
    ("run.json", empty, "is not JSON"),
    ("run.json", Path.unlink, "does not exist"),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGE)
def test_a_damaged_file_is_named(
    out: Path, name: str, damage: Callable[[Path], None], words: str
) -> None:
    path = out / checkpoint.FOLDER / name
    damage(path)
    with pytest.raises(
        UsageError, match=f"^reading the checkpoint: {re.escape(str(path))} .*{words}"
    ):
        checkpoint.verify(out)


def test_a_checkpoint_from_before_jobs_had_names(out: Path) -> None:
    """Belongs to no job that could be restarted."""
    path = out / checkpoint.FOLDER / "run.json"
    path.write_text(
        json.dumps(
            {name: value for name, value in json.loads(path.read_text()).items() if name != "job"}
        )
    )
    assert checkpoint.read_run(out)["job"] == ""


@pytest.mark.parametrize("entry", [name for name in checkpoint.RUN_TYPES if name != "job"])
def test_a_missing_entry_is_named(out: Path, entry: str) -> None:
    path = out / checkpoint.FOLDER / "run.json"
    path.write_text(
        json.dumps(
            {name: value for name, value in json.loads(path.read_text()).items() if name != entry}
        )
    )
    with pytest.raises(
        UsageError, match=f"run.json has no proper entry {entry}; a checkpoint is used only whole"
    ):
        checkpoint.read_run(out)


@pytest.mark.parametrize("name", [SHARD, META])
@pytest.mark.parametrize("damage", [truncate, empty, Path.unlink])
def test_reading_without_checking_first(
    out: Path, name: str, damage: Callable[[Path], None]
) -> None:
    """torch's reader finds it too; the error names the checkpoint."""
    damage(out / checkpoint.FOLDER / name)
    with pytest.raises(UsageError, match=f"^reading the checkpoint {re.escape(str(out))}"):
        checkpoint.load(out, *made())


def test_what_was_saved_is_read(out: Path) -> None:
    checkpoint.verify(out)
    model, optimizer = made()
    before = [p.full_tensor().clone() for p in model.parameters()]
    states = [s["exp_avg"].full_tensor().clone() for s in optimizer.state.values()]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    checkpoint.load(out, model, optimizer)
    assert all(
        torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True)
    )
    assert all(
        torch.equal(s["exp_avg"].full_tensor(), b)
        for s, b in zip(optimizer.state.values(), states, strict=True)
    )
    assert checkpoint.read_run(out)["step"] == 1


# -- nothing is run


class Evil:
    ran: list[str] = []  # noqa: RUF012

    def __reduce__(self) -> Any:
        return Evil.ran.append, ("ran",)


def test_metadata_that_would_run_code_is_refused(out: Path) -> None:
    (out / checkpoint.FOLDER / META).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(
        UsageError, match=r"'append' of \[\] does not belong in the metadata|metadata is None"
    ):  # torch 2.11
        checkpoint.load(out, *made())
    assert not Evil.ran
    with pytest.raises(pickle.UnpicklingError, match=r"os\.system|posix\.system"):
        MetadataUnpickler(io.BytesIO(pickle.dumps(os.system))).load()


class Got:
    """Pickled as Python up to 3.11.3 pickles the member of an enumeration."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


def test_members_of_enumerations_are_read_and_no_other_attributes() -> None:
    def read(owner: object, name: str) -> object:
        return MetadataUnpickler(io.BytesIO(pickle.dumps(Got(owner, name)))).load()

    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert read(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT") is member
    for owner, name in ((_MEM_FORMAT_ENCODING, "mro"), (Metadata, "__init__"), ("text", "join")):
        with pytest.raises(pickle.UnpicklingError, match=f"{name}' of .* does not belong"):
            read(owner, name)


def test_an_entry_that_would_run_code_is_refused() -> None:
    data = io.BytesIO()
    torch.save(Evil(), data)
    data.seek(0)
    item = type("Item", (), {"type": LoadItemType.BYTE_IO})
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        Planner().load_bytes(item, data)  # type: ignore[arg-type]
    assert not Evil.ran


# -- going on


def options(world: int, *words: str) -> Options:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(world))
        return parse(["--size", "tiny", "--steps", "4", "--batch", "2", *words])


def started(out: Path) -> None:
    """A run of two ranks with two sequences each."""
    path = out / checkpoint.FOLDER / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "options": options(2).saved()}))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_another_number_of_ranks_divides_the_same_sequences(out: Path, num_ranks: int) -> None:
    started(out)
    resumed = options(num_ranks, "--resume", "--out", str(out))
    assert (resumed.sequences, resumed.streams, resumed.world) == (4, 2, num_ranks)
    data = bytes(range(256)) * 4
    share = resumed.sequences // num_ranks
    parts = [
        random_crops(data, 0, 3, range(r * share, (r + 1) * share), resumed.batch, 8)[0]
        for r in range(num_ranks)
    ]
    assert torch.equal(torch.cat(parts), random_crops(data, 0, 3, range(4), 2, 8)[0])


def test_a_number_of_ranks_that_does_not_divide_them(out: Path) -> None:
    started(out)
    with pytest.raises(UsageError, match="--world is 3, does not divide the 4 sequences of a step"):
        options(3, "--resume", "--out", str(out))


def test_only_a_checkpoint_of_this_job_is_gone_on_with(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_restarted(out), "not under torchrun"
    for job, expected in {"j": True, "another": False}.items():
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        assert is_restarted(out) is expected
    assert not is_restarted(out / "empty")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not is_restarted(out)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UsageError, match="start it with torchrun --standalone, or with --rdzv-id"):
        is_restarted(out)


def test_numbers_of_all_ranks(world: None) -> None:
    assert from_all([2.0**53 - 1, 0.1]) == [[2.0**53 - 1, 0.1]]


def test_signals_are_left_as_they_were_after_an_error() -> None:
    import signal

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="x"), Budget(options(2), None).listening():
        raise ValueError("x")
    assert signal.getsignal(signal.SIGTERM) is before
