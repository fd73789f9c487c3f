"""Checksums of what optimizers remember from one step to the next.

They are taken when a step has ended, and compared at the end of the next backward, before anything
is updated. A tensor that was replaced or written to meanwhile (a state dict was loaded) is not
compared.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compiled_fsdp.torch_private.autograd import backward_number
from compiled_fsdp.units.registered import UNITS
from compiled_fsdp.wire.checks import checksum

from . import optimizer_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.optim import Optimizer

    from compiled_fsdp.units.flat import FlatBuffer


@dataclass(frozen=True, slots=True)
class State:
    """One tensor that an optimizer remembers of a parameter.

    key: "exp_avg", say.
    version: of the tensor when its sum was taken, and which tensor it was.
    """

    param: int
    key: str
    version: tuple[int, ...]
    sum: Tensor


_sums: weakref.WeakKeyDictionary[Optimizer, list[State]] = weakref.WeakKeyDictionary()


def changed(flats: Iterable[FlatBuffer]) -> list[tuple[Optimizer, State, Tensor]]:
    """The states of these buffers' parameters,
    each with a bool: whether it has changed unnoticed.
    """
    params = {id(p.sharded) for flat in flats for p in flat.params}
    found = []
    for optimizer, states in _sums.items():
        now = {(param, key): tensor for param, key, tensor in _tensors(optimizer, params)}
        for state in states:
            tensor = now.get((state.param, state.key))
            if tensor is not None and _version(tensor) == state.version:
                found.append((optimizer, state, _sum(tensor) != state.sum))
    return found


def accept(optimizer: Optimizer, states: Iterable[State]) -> None:
    """What is there now is right: it was written by the program."""
    gone = [id(state) for state in states]
    _sums[optimizer] = [state for state in _sums[optimizer] if id(state) not in gone]


def _tensors(optimizer: Optimizer, params: set[int]) -> Iterator[tuple[int, str, Tensor]]:
    for param, state in optimizer.state.items():
        if id(param) not in params or not isinstance(state, dict):
            continue
        for key, value in state.items():
            if isinstance(value, Tensor) and _local(value).numel() > 1:
                yield id(param), str(key), value


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _version(tensor: Tensor) -> tuple[int, ...]:
    local = _local(tensor)
    return id(tensor), local.data_ptr(), tensor._version, local._version


def _sum(tensor: Tensor) -> Tensor:
    return checksum(_local(tensor).detach().reshape(1, -1))[0]


def _written(optimizer: Optimizer) -> Iterator[FlatBuffer]:
    """The flat buffers of checked units that an optimizer writes to: those of its parameters, and
    of FSDP1 all, since it may hold the user's own parameters (`use_orig_params`).
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for unit in UNITS:
        for flat in unit.flats if unit.settings.check else ():
            is_its = unit.is_flat or any(id(p.sharded) in held for p in flat.params)
            if is_its and flat.data.requires_grad:
                yield flat


def _before(optimizer: Optimizer) -> None:
    """It is about to write; a step that fails leaves nothing to compare.

    Raises:
        NotImplementedError: a backward is under way,
            and it writes to what ranks compare at its end.
    """
    written = list(_written(optimizer))
    if written and backward_number() != -1:
        unit = written[0].unit
        raise NotImplementedError(
            f"Plan(check={unit.settings.check!r}): {type(optimizer).__name__} steps {unit.name!r} "
            "inside of backward (from a hook on its gradients?), before the ranks have compared "
            "them, and the step could not be taken back. Call step() after loss.backward(), or "
            "set check=None"
        )
    _sums.pop(optimizer, None)
    for flat in written:
        flat.resting.forget()


def _after(optimizer: Optimizer) -> None:
    checked = [unit for unit in UNITS if unit.settings.check]
    if not checked:
        return
    with torch.no_grad():
        for flat in _written(optimizer):
            if not flat.is_apart and flat.data.device.type != "meta":
                flat.resting.forget()
                flat.note_rest("the last update")
        params = {id(p.sharded) for unit in checked for p in unit.params}
        _sums[optimizer] = [
            State(param, key, _version(tensor), _sum(tensor))
            for param, key, tensor in _tensors(optimizer, params)
        ]


optimizer_steps.before_writes(_before)
optimizer_steps.after(_after)
