"""The folder of a precompiled model: written, and read with every byte checked before any is used.

`manifest.json` says what everything was made for, and has the SHA-256 of every other file. Whoever
knows the SHA-256 of the manifest knows that of everything.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .target import PrecompiledError

MANIFEST = "manifest.json"
FORMAT = 3


def write(folder: Path, content: dict[str, Any], files: dict[str, bytes]) -> str:
    """Write a new folder, with `content` in its manifest; returns the SHA-256 of that.

    Raises:
        FileExistsError: there is something in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(
            f"precompile: {folder} is not empty. Nothing is written over: name a new folder"
        )
    manifest = {
        "format": FORMAT,
        **content,
        "files": {name: hash_of(files[name]) for name in sorted(files)},
    }
    text = json.dumps(manifest, indent=1).encode()
    for name, written in files.items():
        (folder / name).write_bytes(written)
    (folder / MANIFEST).write_bytes(text)
    return hash_of(text)


@dataclass(frozen=True)
class Content:
    """What is in a folder, as bytes: the manifest, and every file by its name."""

    manifest: bytes
    files: dict[str, bytes]


def read(folder: Path) -> Content:
    """Everything in a folder.

    Raises:
        PrecompiledError: it has no manifest, or something in it is no file.
    """
    if not (folder / MANIFEST).is_file():
        raise PrecompiledError(
            f"load_precompiled: {folder} has no {MANIFEST}. Name the folder that precompile wrote"
        )
    entries = sorted(entry for entry in folder.iterdir() if entry.name != MANIFEST)
    for entry in entries:
        if not entry.is_file():
            raise PrecompiledError(
                f"load_precompiled: {folder} is not what precompile wrote: {entry.name} is no "
                "file. Nothing in it was executed. Copy the folder again, or precompile again"
            )
    files = {entry.name: entry.read_bytes() for entry in entries}
    return Content((folder / MANIFEST).read_bytes(), files)


def checked(content: Content, folder: Path, sha256: str | None) -> dict[str, Any]:
    """The manifest, once all that there is agrees with it.

    sha256: what the manifest must have; None: any.

    Raises:
        PrecompiledError: a file is missing, changed, or not in the manifest; or the manifest is
            another.
    """
    path = folder / MANIFEST
    if sha256 is not None and hash_of(content.manifest) != sha256.lower():
        raise PrecompiledError(
            f"load_precompiled: the SHA-256 of {path} is {hash_of(content.manifest)}, and should "
            f"be {sha256}. Nothing in the folder was executed. Take the folder that precompile "
            "returned this for"
        )
    manifest: dict[str, Any] = json.loads(content.manifest)
    if manifest.get("format") != FORMAT:
        raise PrecompiledError(
            f"load_precompiled: {path} has the format {manifest.get('format')!r}; this version "
            f"reads {FORMAT}. Precompile again"
        )
    hashes: dict[str, str] = manifest["files"]
    names = content.files.keys()
    wrong = {name: "is not in the manifest" for name in sorted(names - hashes.keys())}
    wrong |= {name: "is missing" for name in sorted(hashes.keys() - names)}
    for name in sorted(hashes.keys() & names):
        if (found := hash_of(content.files[name])) != hashes[name]:
            wrong[name] = f"has the SHA-256 {found}, and should have {hashes[name]}"
    if wrong:
        raise PrecompiledError(
            f"load_precompiled: {folder} is not what precompile wrote: "
            + "; ".join(f"{name} {why}" for name, why in wrong.items())
            + ". Nothing in it was executed. Copy the folder again, or precompile again"
        )
    return manifest


def digest(manifest: dict[str, Any]) -> str:
    """A short name of a folder's content."""
    return hash_of(json.dumps(manifest["files"], sort_keys=True).encode())[:16]


def hash_of(content: bytes) -> str:
    """The SHA-256."""
    return hashlib.sha256(content).hexdigest()
