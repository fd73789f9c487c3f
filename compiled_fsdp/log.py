"""Our log, the logger `compiled_fsdp`: one line a pass at INFO, whole graphs at DEBUG, and one
summary a model.

`TORCH_LOGS="compiled_fsdp"` or `"+compiled_fsdp"` turns it on, as does
`torch._logging.set_logs(modules={"compiled_fsdp": ...})`. (torch reads the variable when it is
imported, and refuses names that it cannot import then.)

The summary is meant to be seen without any setting, once, by rank 0: a logger whose level nobody
set lets it through, to whatever handlers there are, and to stderr if there are none.
`logging.getLogger("compiled_fsdp").setLevel(logging.WARNING)` silences it.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from compiled_fsdp.torch_private.tracing import register_log

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("compiled_fsdp")
register_log("compiled_fsdp")


def is_on(level: int = logging.INFO) -> bool:
    """Whether anybody asked for this level of the log."""
    return log.isEnabledFor(level)


def is_wanted() -> bool:
    """Whether summaries are seen: the logger's level, or `logging.disable`, is not above INFO."""
    return not (log.level > logging.INFO or log.disabled or log.manager.disable >= logging.INFO)


def summarise(text: Callable[[], str]) -> None:
    """Log a summary, if it is seen."""
    if not is_wanted():
        return
    record = log.makeRecord(log.name, logging.INFO, __file__, 0, text(), (), None)
    if log.hasHandlers():
        log.handle(record)
    else:
        sys.stderr.write(f"{record.getMessage()}\n")


def is_terminal() -> bool:
    """Whether summaries go to a terminal, where a line can be written over."""
    return not log.hasHandlers() and sys.stderr.isatty()


def say_progress(text: str, is_last: bool) -> None:
    """Log how far something is; on a terminal, over what was said before."""
    if not is_terminal():
        summarise(lambda: text)
        return
    sys.stderr.write(f"\r\x1b[K{text}" + "\n" * is_last)
    sys.stderr.flush()
