"""A folder that only some ranks read: they check it and say so to all, and the others get its bytes
from them, through the process group of all ranks.

Ranks from one reader up to the next get what that one has read (those before the first, from the
first): each passes it on to two others, so that a reader sends two copies, however many ranks
follow it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from compiled_fsdp.torch_private.groups import default_group, is_alone
from compiled_fsdp.wire.agreement import everyones

from .folder import Content, checked, hash_of, read
from .target import PrecompiledError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor


def delivered(folder: Path, sha256: str | None, readers: Sequence[int]) -> Content:
    """What is in the folder, on every rank; collective.

    Raises:
        ValueError: no rank reads, or one that there is not.
        PrecompiledError: a reader found something wrong, or readers found different folders; on all
            ranks, with the same words.
    """
    group, size, rank = default_group(), dist.get_world_size(), dist.get_rank()
    readers = sorted(set(readers))
    if not readers or readers[0] < 0 or readers[-1] >= size:
        raise ValueError(
            f"load_precompiled: readers={readers}; should be some of the ranks 0 to {size - 1}"
        )
    if is_alone(group) and rank not in readers:
        raise ValueError(
            f"load_precompiled: readers={readers}, and over a group of the backend "
            f"{dist.get_backend(group)!r} rank {rank} gets nothing from them. Leave readers out"
        )
    content, mine_says = _read(folder, sha256) if rank in readers else (None, {})
    what = f"load_precompiled, read by ranks {readers}"
    texts = everyones(group.group_name, what, json.dumps(mine_says))
    said = {rank: mine_says} if is_alone(group) else dict(enumerate(map(json.loads, texts)))
    _all_well({r: said[r] for r in readers if r in said})
    if content is not None and is_alone(group):
        return content
    mine = max((r for r in readers if r <= rank), default=readers[0])
    last = min((r for r in readers if r > mine), default=size)
    first = 0 if mine == readers[0] else mine
    return _passed_on(content, [mine, *(r for r in range(first, last) if r != mine)])


def _read(folder: Path, sha256: str | None) -> tuple[Content | None, dict[str, str]]:
    """What a reader has, and what it says to all."""
    try:
        content = read(folder)
        checked(content, folder, sha256)
    except (PrecompiledError, OSError, ValueError) as error:
        return None, {"error": f"{error}" or type(error).__name__}
    return content, {"manifest": hash_of(content.manifest)}


def _all_well(said: dict[int, dict[str, str]]) -> None:
    wrong = [f"  rank {r}: {words['error']}" for r, words in said.items() if "error" in words]
    if wrong:
        raise PrecompiledError(
            "load_precompiled: not every rank of readers could read its folder, so no rank "
            "loads it:\n" + "\n".join(wrong)
        )
    found: dict[str, list[int]] = {}
    for r, words in said.items():
        found.setdefault(words["manifest"], []).append(r)
    if len(found) > 1:
        raise PrecompiledError(
            "load_precompiled: readers found different folders: "
            + "; ".join(f"ranks {ranks} the manifest {digest}" for digest, ranks in found.items())
            + ". Copy the same folder to all of them"
        )


def _passed_on(content: Content | None, ranks: list[int]) -> Content:
    """From the first of these ranks to the others, as a binary tree."""
    place = ranks.index(dist.get_rank())
    packed = _packed(content) if content is not None else _received(ranks[(place - 1) // 2])
    for after in ranks[2 * place + 1 : 2 * place + 3]:
        dist.send(torch.tensor([packed.numel()]), after)
        dist.send(packed, after)
    return _unpacked(packed)


def _received(rank: int) -> Tensor:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank)
    packed = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(packed, rank)
    return packed


def _packed(content: Content) -> Tensor:
    """One tensor: the size of a list of names and sizes, that list as JSON, and what it lists."""
    parts = [("", content.manifest), *content.files.items()]
    names = json.dumps([(name, len(part)) for name, part in parts]).encode()
    whole = b"".join([len(names).to_bytes(8, "little"), names, *(part for _, part in parts)])
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Content:
    whole = bytes(packed.untyped_storage())
    at = 8 + int.from_bytes(whole[:8], "little")
    files = {}
    for name, size in json.loads(whole[8:at]):
        files[name] = whole[at : at + size]
        at += size
    return Content(files.pop(""), files)
