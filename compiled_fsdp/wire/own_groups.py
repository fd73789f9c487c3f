"""Second groups for the user's all-to-alls, beside those of gathers and reductions
(`passes/separate_exchanges.py`).

A graph names them; they are made, by all ranks of the first group together, when it first runs in a
process, also where it comes out of a compile cache. By then its ranks have agreed on the text of
the graph, which has the name of each.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from compiled_fsdp.ir.collectives import is_own_group, shared_group
from compiled_fsdp.torch_private.groups import (
    group_named,
    group_timeout,
    is_alone,
    kept_for,
    new_group,
    rename,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

log = logging.getLogger(__name__)

# By name, the first group and the second one.
_made: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def make(names: Iterable[str]) -> None:
    """Make those of the groups that are second ones, and are not there yet; collective."""
    for name in filter(is_own_group, names):
        first = group_named(shared_group(name))
        kept_for(first, name, _made, partial(_make, name, first))


def _make(name: str, first: dist.ProcessGroup) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(first)
    timeout = None if is_alone(first) else group_timeout(first)  # a fake one has none
    second = new_group(ranks, dist.get_backend(first), timeout)
    rename(second, name)
    log.info(
        "process group %r, of ranks %s: made, for the model's own all-to-alls, so that they do "
        "not stand behind gathers (Plan(exchange_group='shared'): none)",
        name,
        ranks,
    )
    return second


def second_of(first: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """The second groups that were made for this one."""
    return [second for each, second in _made.values() if each is first]
