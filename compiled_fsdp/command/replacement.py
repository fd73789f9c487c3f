"""Other people's scripts unchanged: torch's `fully_shard` and `FullyShardedDataParallel` become
ours wherever they are found.

A script or a library has such a name from a module of torch that exports it, or cached from an
import of its own. Both are replaced: in the modules of torch that people import from, and in all
that are loaded and not torch's. What torch itself needs of its own functions, and what ours are
made of, stays.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed.fsdp as stock

from compiled_fsdp.fsdp1.wrapper import FullyShardedDataParallel
from compiled_fsdp.fsdp2.api import fully_shard
from compiled_fsdp.fsdp2.fsdp_module import register_fsdp_forward_method, share_comm_ctx
from compiled_fsdp.log import summarise

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

OURS: dict[str, Any] = {
    "fully_shard": fully_shard,
    "FullyShardedDataParallel": FullyShardedDataParallel,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}
# Torch 2.11 has not all of them.
THEIRS = {name: getattr(stock, name) for name in OURS if hasattr(stock, name)}
# Modules of torch from which people import these names; others of torch use them for themselves.
EXPORTING = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
KEPT = ("torch", "compiled_fsdp")  # packages


class Replaced(NamedTuple):
    """A name that was replaced: the module that has it, and what it stood for."""

    module: ModuleType
    name: str
    before: Any


class Replacement:
    """The result of `replace_stock`: in force until `restore()`, or the end of a `with` block.

    replaced: the names, by module.
    """

    def __init__(self) -> None:
        self.replaced: list[Replaced] = []

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Give its names back to torch, and to all that had them; what has imported ours meanwhile
        keeps them.
        """
        for module, name, before in self.replaced:
            setattr(module, name, before)
        self.replaced.clear()

    def __str__(self) -> str:
        names: dict[str, list[str]] = {}
        for module, name, _ in self.replaced:
            names.setdefault(module.__name__, []).append(name)
        return "; ".join(f"{', '.join(found)} of {module}" for module, found in names.items())


def replace_stock() -> Replacement:
    """Make torch's FSDP ours, for scripts and libraries that import it: Accelerate, Lightning,
    transformers and others.

    `fully_shard`, `FullyShardedDataParallel`, `register_fsdp_forward_method` and `share_comm_ctx`
    are replaced under whatever name a loaded module has them. Call it before the model is sharded,
    or use it as a context. Rank 0 says which names were replaced. Called again, it replaces what
    has been loaded since. `python -m compiled_fsdp run SCRIPT` calls it first.
    """
    made = Replacement()
    theirs = {id(before): OURS[name] for name, before in THEIRS.items()}
    for module in _modules():
        for name, value in list(vars(module).items()):
            if id(value) in theirs:
                made.replaced.append(Replaced(module, name, value))
                setattr(module, name, theirs[id(value)])
    if made.replaced and os.environ.get("RANK", "0") == "0":
        summarise(lambda: f"compiled_fsdp: in place of torch's: {made}")
    return made


def _modules() -> Iterator[ModuleType]:
    """Those that may hold a name of torch's for somebody else."""
    for name, module in list(sys.modules.items()):
        is_kept = name.split(".")[0] in KEPT and name not in EXPORTING
        if not is_kept and isinstance(getattr(module, "__dict__", None), dict):
            yield module
