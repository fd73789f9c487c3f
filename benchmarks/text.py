"""The text to train on: Python sources as bytes, split into train and validation by file.

Without a folder it is the standard library of the running Python, which every machine has. Nothing
is downloaded, and the same Python version gives the same bytes in the same order.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from usage import UsageError

# Not the library's own prose and code: installed packages, tests, demos, generated tables.
EXCLUDED = frozenset({
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo",
    "encodings", "pydoc_data", "__pycache__",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Text:
    """The bytes of both parts, and the digest that tells one text from another."""

    train: bytes
    validation: bytes
    num_files: int
    digest: str


def load_text(folder: Path | None = None) -> Text:
    """Read all `.py` files under `folder`, or of the standard library; a tenth is validation.

    A file's part depends only on its name relative to the folder.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise UsageError(f"reading text: --text {root} is not a folder; give one with .py files")
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not EXCLUDED.intersection(path.relative_to(root).parts)
    )
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    digest = hashlib.sha256()
    for name in names:
        data = (root / name).read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
        parts[hashlib.sha256(name.encode()).digest()[0] % 10 == 0].append(data)
    train, validation = (b"".join(part) for part in parts)
    return Text(train, validation, len(names), digest.hexdigest())


def require_bytes(text: Text, length: int, folder: Path | None = None) -> None:
    """Raise unless each part holds at least 64 crops of `length` bytes."""
    least = 64 * (length + 1)
    sizes = {"train": len(text.train), "validation": len(text.validation)}
    short = [f"{name} has {size} bytes" for name, size in sizes.items() if size < least]
    if short:
        where = folder or "the standard library"
        raise UsageError(
            f"splitting {text.num_files} .py files of {where}: {', '.join(short)}, at least {least}"
            f" are needed for --length {length}; give a smaller --length or a larger --text folder"
        )


def random_crops(
    data: bytes, seed: int, step: int, part: range, batch: int, length: int
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 [len(part), length]: of the sequences of a step, those in
    `part`.

    The sequences come in streams of `batch`. A resumed run draws what the uninterrupted one would
    have drawn, at any number of ranks: nothing depends on anything but the arguments, and there is
    no state to save.
    """
    first = part.start // batch
    starts: list[int] = []
    for stream in range(first, -(-part.stop // batch)):
        key = hashlib.sha256(f"{seed} {step} {stream}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        starts += torch.randint(len(data) - length, (batch,), generator=generator).tolist()
    return _crops(data, starts[part.start - first * batch : part.stop - first * batch], length)


def even_crops(
    data: bytes, index: int, num_batches: int, rank: int, world: int, batch: int, length: int
) -> tuple[Tensor, Tensor]:
    """Return this rank's part of batch `index` of `num_batches`, spread evenly over the data."""
    count = num_batches * world * batch
    first = (index * world + rank) * batch
    last = len(data) - length - 1
    starts = [crop * last // max(1, count - 1) for crop in range(first, first + batch)]
    return _crops(data, starts, length)


def _crops(data: bytes, starts: list[int], length: int) -> tuple[Tensor, Tensor]:
    windows = torch.tensor([list(data[start : start + length + 1]) for start in starts])
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
