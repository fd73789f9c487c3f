"""State of optimizers that rests on the host, and how it comes back where a step wants it on the
device.

[Note: state at rest]
A whole step may have what its optimizers remember on the host between updates
(`hosted_states.py`). There it is what `optimizer.state` has: DTensors like the parameters', around
parts of a pinned buffer, so that state dicts and checkpoints read and write it where it is. A step
that is taken otherwise, `optimizer.step()` or in a graph that does not fetch it, computes on the
device: before it, `bring_home` puts copies on the device in its place, which the next compiled step
takes to the host again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from compiled_fsdp.torch_private.dtensors import local_tensor, make_dtensor
from compiled_fsdp.wire import copies

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import optim

# The local tensors that rest on the host -> the type of device that computes with them.
_at_rest: Any = WeakTensorKeyDictionary()


def note_at_rest(local: Tensor, device: str) -> None:
    """Say that a tensor rests on the host for a type of device."""
    _at_rest[local] = device


def is_at_rest(local: Tensor) -> bool:
    """Whether a tensor rests on the host."""
    return local in _at_rest


def bring_home(optimizer: optim.Optimizer, params: Iterable[Tensor]) -> None:
    """Let what an optimizer remembers of these be on the device; see [Note: state at rest]."""
    if not _at_rest:
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        for param in params:
            state: Any = optimizer.state.get(param)
            for name, value in state.items() if isinstance(state, dict) else ():
                local = local_tensor(value) if isinstance(value, Tensor) else None
                if local is not None and is_at_rest(local):
                    copied, work = copies.begin(local, _at_rest[local], False)
                    work.wait()
                    state[name] = make_dtensor(copied, param)
