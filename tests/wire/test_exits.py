"""A process that is done ends with its own exit code, whatever the watcher thread is at: a few runs
of `exits.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jobs import exits

from compiled_fsdp.wire import watcher
from compiled_fsdp.wire.watcher import EndedError, Watcher, pause

if TYPE_CHECKING:
    import pytest

ROOT = Path(exits.__file__).parents[2]


def test_every_way_to_end() -> None:
    """The watcher is inside the store all the time."""
    path = os.pathsep.join(str(ROOT / name) for name in ("", "tests", "benchmarks"))
    command = [sys.executable, exits.__file__, "--runs", "5", "--period", "0"]
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_thread_that_is_told_to_end_has_ended() -> None:
    looks: list[int] = []
    thread = Watcher("test", looks.append, 0.0)
    thread.start()
    thread.start()
    while len(looks) < 3:
        time.sleep(0.001)
    thread.stop()
    count = len(looks)
    assert looks == list(range(count))
    assert not any(t.name == "test" for t in threading.enumerate())


def test_a_look_is_left_by_its_next_pause() -> None:
    """However long it meant to go on."""
    left = threading.Event()

    def look(_: int) -> None:
        try:
            pause(100.0)
        except EndedError:
            left.set()
            raise

    thread = Watcher("test", look, 0.0)
    thread.start()
    thread.stop()
    assert left.wait(1.0)


def test_a_look_that_never_returns_does_not_hold_up_the_exit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watcher, "JOIN_S", 0.05)
    begun, store = threading.Event(), threading.Event()

    def look(_: int) -> None:
        begun.set()
        store.wait(60.0)

    thread = Watcher("test", look, 0.0)
    thread.start()
    begun.wait(10.0)
    start = time.monotonic()
    thread.stop()
    assert time.monotonic() - start < 10.0
    assert "while its thread test still waits in a call" in caplog.text
    store.set()


def test_others_only_sleep_in_a_pause() -> None:
    thread = Watcher("test", lambda _: None, 0.0)
    thread.stop()  # nothing was started
    pause(0.0)
