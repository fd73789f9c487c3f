"""The folder of a precompiled model: written, and read with every byte checked before any is used.

`manifest.json` says what everything was made for, and has the SHA-256 of every other file. Whoever
knows the SHA-256 of the manifest knows that of everything.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from .target import PrecompiledError

MANIFEST = "manifest.json"
FORMAT = 1


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
        "files": {name: _hash(files[name]) for name in sorted(files)},
    }
    text = json.dumps(manifest, indent=1).encode()
    for name, written in files.items():
        (folder / name).write_bytes(written)
    (folder / MANIFEST).write_bytes(text)
    return _hash(text)


def read(folder: Path, sha256: str | None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest, and the content of every file.

    sha256: what the manifest must have; None: any.

    Raises:
        PrecompiledError: a file is missing, changed, or not in the manifest; or the manifest is
            another.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise PrecompiledError(
            f"load_precompiled: {folder} has no {MANIFEST}. Name the folder that precompile wrote"
        )
    text = path.read_bytes()
    if sha256 is not None and _hash(text) != sha256.lower():
        raise PrecompiledError(
            f"load_precompiled: the SHA-256 of {path} is {_hash(text)}, and should be {sha256}. "
            "Nothing in the folder was executed. Take the folder that precompile returned this for"
        )
    manifest: dict[str, Any] = json.loads(text)
    if manifest.get("format") != FORMAT:
        raise PrecompiledError(
            f"load_precompiled: {path} has the format {manifest.get('format')!r}; this version "
            f"reads {FORMAT}. Precompile again"
        )
    return manifest, _checked(folder, manifest["files"])


def _checked(folder: Path, hashes: dict[str, str]) -> dict[str, bytes]:
    names = {entry.name for entry in folder.iterdir()} - {MANIFEST}
    wrong = {name: "is not in the manifest" for name in sorted(names - hashes.keys())}
    wrong |= {name: "is missing" for name in sorted(hashes.keys() - names)}
    files: dict[str, bytes] = {}
    for name in sorted(hashes.keys() & names):
        if not (folder / name).is_file():
            wrong[name] = "is no file"
            continue
        files[name] = (folder / name).read_bytes()
        if (found := _hash(files[name])) != hashes[name]:
            wrong[name] = f"has the SHA-256 {found}, and should have {hashes[name]}"
    if wrong:
        raise PrecompiledError(
            f"load_precompiled: {folder} is not what precompile wrote: "
            + "; ".join(f"{name} {why}" for name, why in wrong.items())
            + ". Nothing in it was executed. Copy the folder again, or precompile again"
        )
    return files


def digest(manifest: dict[str, Any]) -> str:
    """A short name of a folder's content."""
    return _hash(json.dumps(manifest["files"], sort_keys=True).encode())[:16]


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
