"""Values laid side by side: what differs, in words."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

CLOSE = (1.3e-6, 1e-5)  # relative, absolute: those of `torch.testing` in fp32


def check_equal(found: Any, expected: Any, what: str, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Assert that what two `plain` values hold is the same."""
    wrong = list(_differences(found, expected, "result", rtol, atol))
    assert not wrong, f"{what}: " + "; ".join(wrong[:6])


def plain(value: Any) -> Any:
    """Copies that no later step changes; a DTensor as its local tensor, placements and global
    shape.
    """
    if isinstance(value, DTensor):
        placements = tuple(str(p) for p in value.placements)
        return {
            "local": value.to_local().detach().clone(),
            "placements": placements,
            "shape": tuple(value.shape),
        }
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    return value


def _differences(a: Any, b: Any, path: str, rtol: float, atol: float) -> Any:  # noqa: C901
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{path}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        elif not (torch.equal(a, b) or ((rtol or atol) and torch.allclose(a, b, rtol, atol))):
            yield (
                f"{path}: tensors differ by up to "
                f"{(a.double() - b.double()).abs().max().item():.3e}"
            )
    elif isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b):
            yield f"{path}: keys {list(a)} and {list(b)}"
        else:
            for key in a:
                yield from _differences(a[key], b[key], f"{path}[{key!r}]", rtol, atol)
    elif isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            yield f"{path}: {len(a)} and {len(b)} entries"
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from _differences(x, y, f"{path}[{i}]", rtol, atol)
    elif isinstance(a, float) and isinstance(b, float) and (rtol or atol):
        if not math.isclose(a, b, rel_tol=rtol, abs_tol=atol):
            yield f"{path}: {a!r} and {b!r}"
    elif type(a) is not type(b) or a != b:
        yield f"{path}: {a!r} and {b!r}"


def whole(tensor: Any) -> Tensor:
    """The full tensor of a sharded one; a copy that no later step changes.

    What one mesh dim shards is put together here: `full_tensor` gathers by gloo's
    `allgather_coalesced`, which now and then ends a process (`wire/gloo.py`).
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    if tensor.device_mesh.ndim > 1 or not tensor.placements[0].is_shard():
        return tensor.full_tensor().detach().clone()
    parts: list[Any] = [None] * tensor.device_mesh.size()
    mine = tensor.to_local().detach().cpu().clone()
    dist.all_gather_object(parts, mine, tensor.device_mesh.get_group())
    return torch.cat(parts, tensor.placements[0].dim).to(tensor.device)


def is_same(a: Any, b: Any) -> bool:
    """Whether two results are the same to the last bit; NaN counts as equal to NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0))
        )
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b
