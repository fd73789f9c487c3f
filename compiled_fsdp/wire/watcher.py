"""A thread that looks at something every so often, and has ended before the interpreter does.

A daemon thread that is inside a call of torch when the interpreter ends comes back to an
interpreter that is gone, and takes the process with it: "terminate called without an active
exception", exit code -6 of a job that was done. So it is told to end, and awaited, at exit; on
whichever way the main thread leaves, since all but `os._exit` come by `atexit`.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

JOIN_S = 5.0  # for a look that does not come back; an exit must not hang


class EndedError(Exception):
    """The thread is to end, whatever it is at."""


class _Thread(threading.Thread):
    """A watching thread; is_over: it is to end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.is_over = threading.Event()


def pause(seconds: float) -> None:
    """Sleep, in whichever thread.

    Raises:
        EndedError: this is a watching thread, and it is to end.
    """
    thread = threading.current_thread()
    if not isinstance(thread, _Thread):
        time.sleep(seconds)
    elif thread.is_over.wait(seconds):
        raise EndedError


class Watcher:
    """One thread; a forked child has none until it starts its own.

    look: called with the number of looks so far.
    period: seconds between two looks.
    """

    _thread: _Thread | None

    def __init__(self, name: str, look: Callable[[int], None], period: float) -> None:
        self.name, self.look, self.period = name, look, period
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def start(self) -> None:
        """Begin to look, once."""
        if self._thread is None:
            self._thread = _Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
            atexit.register(self.stop)

    def stop(self) -> None:
        """Let the thread end, and wait until it has."""
        if self._thread is None:
            return
        self._thread.is_over.set()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            log.warning(
                "compiled_fsdp: the process ends while its thread %s still waits in a call",
                self.name,
            )

    def _forget(self) -> None:
        self._thread = None

    def _run(self) -> None:
        with suppress(EndedError):
            looks = 0
            while True:
                pause(self.period)
                self.look(looks)
                looks += 1
