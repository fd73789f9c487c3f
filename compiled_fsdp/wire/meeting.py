"""The ranks of a group meet in its store, before they use it to tell each other anything.

A store can outlive the processes that wrote to it: torchrun keeps its own over restarts, so that a
restarted rank would read what a dead one left. Therefore each process publishes a word of its own;
rank 0 lists the words; every rank confirms a list that has its word; and rank 0 declares the list
that all ranks have confirmed. No rank of before can have confirmed a list with the word of a
process of now. The list gives the part of the store in which these very processes talk.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from typing import Any

PAUSE_S = 0.05  # at most, between two looks


def meet(store: Any, rank: int, size: int, timeout_s: float) -> str:
    """Returns what to prefix keys with in this store; the same on all ranks, and on no process that
    is gone.

    Raises:
        TimeoutError: `args` are the ranks that did not come.
    """
    mine = uuid.uuid4().hex
    store.set(f"word/{rank}", mine)
    deadline, pause, confirmed = time.monotonic() + timeout_s, 0.001, ""
    while True:
        if rank == 0:
            _lead(store, size)
        words = _read(store, "words")
        if mine in words.split():
            name = _name(words)
            if name != confirmed:
                store.set(f"confirmed/{rank}", name)
                confirmed = name
            if _read(store, "declared") == name:
                return name
        if time.monotonic() > deadline:
            others = [r for r in range(size) if r != rank]
            raise TimeoutError(*(_unconfirmed(store, others, confirmed) if confirmed else others))
        time.sleep(pause)
        pause = min(pause * 1.5, PAUSE_S)


def _lead(store: Any, size: int) -> None:
    """List the words there are; declare the list if all have confirmed it."""
    words = [_read(store, f"word/{rank}") for rank in range(size)]
    if all(words):
        text = " ".join(words)
        store.set("words", text)
        if not _unconfirmed(store, range(size), _name(text)):
            store.set("declared", _name(text))


def _unconfirmed(store: Any, ranks: Any, name: str) -> list[int]:
    return [rank for rank in ranks if _read(store, f"confirmed/{rank}") != name]


def _name(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def _read(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
