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


def summarise(text: Callable[[], str]) -> None:
    """Log a summary, unless the logger's level, or `logging.disable`, is above INFO."""
    is_silenced = log.level > logging.INFO or log.disabled or log.manager.disable >= logging.INFO
    if is_silenced:
        return
    record = log.makeRecord(log.name, logging.INFO, __file__, 0, text(), (), None)
    if log.hasHandlers():
        log.handle(record)
    else:
        sys.stderr.write(f"{record.getMessage()}\n")
