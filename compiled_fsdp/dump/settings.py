"""The settings that graphs are made under: versions, this process, the plan."""

from __future__ import annotations

import os
import platform
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from compiled_fsdp.planning.plan import Plan, current_plan
from compiled_fsdp.version import __version__

if TYPE_CHECKING:
    from .layout import Settings

SHOWN = ("COMPILED_FSDP_", "TORCH_LOGS", "TORCHINDUCTOR_", "OMP_", "MKL_", "GLOO_", "NCCL_")


def settings() -> Settings:
    """Returns them as they are now."""
    has_ranks = dist.is_initialized()
    plan = current_plan()
    return {
        "versions": {
            "torch": torch.__version__,
            "compiled_fsdp": __version__,
            "python": platform.python_version(),
        },
        "rank": dist.get_rank() if has_ranks else 0,
        "world_size": dist.get_world_size() if has_ranks else 1,
        "backend": dist.get_backend() if has_ranks else "",
        "plan": {f.name: _plain(plan.shown(f.name)) for f in fields(Plan) if f.name != "costs"},
    }


def _plain(value: Any) -> Any:
    """What JSON has a form for: a dtype by its name."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def environment() -> dict[str, str]:
    """Returns the environment variables that torch and this package read."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN)}
