"""Checks of what users pass in: each error names the call, the argument, its value, and what it
should be.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from compiled_fsdp.errors import named

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_type(
    call: str, name: str, value: object, kinds: type | tuple[type, ...], what: str
) -> None:
    """Raise `TypeError` unless `value` is one of `kinds`, which `what` says in words."""
    if not isinstance(value, kinds):
        raise TypeError(f"{call}: {name} is {named(value)}; should be {what}")


def check_bool(call: str, **values: object) -> None:
    """Raise `TypeError` unless all are bools: 0 and "no" are what mistakes look like."""
    for name, value in values.items():
        check_type(call, name, value, bool, "a bool")


def check_factor(call: str, factor: Any) -> float:
    """A number that gradients can be divided by."""
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise TypeError(f"{call}: factor is {named(factor)}; should be a number")
    if not math.isfinite(factor) or factor <= 0:
        raise ValueError(f"{call}: factor is {factor!r}; should be finite and greater than 0")
    return float(factor)


def check_callable(call: str, name: str, value: object, *methods: str) -> None:
    """Raise `TypeError` unless `value` can be called and has these methods."""
    missing = [m for m in methods if not callable(getattr(value, m, None))]
    if not callable(value) or missing:
        lacks = f"has no {missing[0]}()" if callable(value) else "cannot be called"
        needs = "".join(f" with {m}()" for m in methods)
        raise TypeError(
            f"{call}: {name} is {named(value)}, which {lacks}; should be a callable{needs}"
        )


def check_sharding(
    mesh: object, placement_fn: object, policy: object, offload: object, ignored: Any
) -> None:
    """The arguments of `fully_shard` that have one type."""
    call = "fully_shard"
    if mesh is not None:
        check_type(
            call,
            "mesh",
            mesh,
            DeviceMesh,
            "a DeviceMesh, for example init_device_mesh('cpu', (2,))",
        )
    if placement_fn is not None:
        check_callable(call, "shard_placement_fn", placement_fn)
    check_type(call, "mp_policy", policy, MixedPrecisionPolicy, "a MixedPrecisionPolicy")
    if offload is not None:  # stock takes anything that is no CPUOffloadPolicy for none
        check_type(call, "offload_policy", offload, OffloadPolicy, "an OffloadPolicy")
    if ignored is not None:
        check_type(
            call, "ignored_params", ignored, (set, frozenset, list, tuple), "a set of parameters"
        )
        _check_parameters(call, ignored)


def _check_parameters(call: str, ignored: Iterable[object]) -> None:
    for entry in ignored:
        if not isinstance(entry, nn.Parameter):
            raise TypeError(
                f"{call}: ignored_params holds {named(entry)}; should hold the nn.Parameters "
                "themselves, not names"
            )
