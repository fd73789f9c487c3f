"""What gradients take between two graphs, and what rests without an optimizer, or on the host."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from compiled_fsdp.torch_private.dtensors import local_tensor
from compiled_fsdp.units.registered import UNITS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from torch import Tensor

    from compiled_fsdp.units.flat import FlatBuffer
    from compiled_fsdp.units.unit import Unit


def held_gradients(params: Iterable[Tensor]) -> int:
    """The bytes of the gradients that are there where units of these parameters compute: reduced
    ones, and what backwards without synchronization have left, which is as large as the unsharded
    parameters.
    """
    wanted = set(map(id, params))
    found = {
        storage.data_ptr(): storage.nbytes()
        for unit in list(UNITS)
        for flat in unit.flats
        if any(id(held) in wanted for param in flat.params for held in param.held_as)
        for grad in _gradients(flat)
        if grad.device.type == flat.device.type
        for storage in (grad.untyped_storage(),)
    }
    return sum(found.values())


def _gradients(flat: FlatBuffer) -> Iterator[Tensor]:
    yield from flat.retained.values()
    if flat.unit.offload is not None:
        return  # those that are reduced are on the host
    for param in flat.params:
        for held in (param.sharded, *param.held_as):
            if held.grad is not None:
                yield local_tensor(held.grad)


class AtRest(NamedTuple):
    """Bytes between steps.

    frozen: shards that no optimizer has stepped.
    hosted, hosted_frozen, hosted_states: of shards that one has, of those, and of states of
        optimizers, what is on the host (`CPUOffloadPolicy`).
    """

    frozen: int
    hosted: int
    hosted_frozen: int
    hosted_states: int


def rest_of_new_units() -> Callable[[Iterable[torch.optim.Optimizer]], AtRest]:
    """To be asked later: of the units that are made from now on, and these optimizers."""
    before = weakref.WeakSet(UNITS)

    def ask(optimizers: Iterable[torch.optim.Optimizer]) -> AtRest:
        optimizers = list(optimizers)
        known = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        units = [unit for unit in list(UNITS) if unit not in before]
        hosted = [unit for unit in units if unit.offload is not None]
        states = [
            value
            for unit in hosted
            for held in {id(held): held for p in unit.params for held in p.held_as}.values()
            for optimizer in optimizers
            if held in optimizer.state
            for value in optimizer.state[held].values()
        ]
        hosted_frozen = _frozen(hosted, known)
        return AtRest(
            _frozen(units, known),
            num_bytes(param.sharded for unit in hosted for param in unit.params) - hosted_frozen,
            hosted_frozen,
            num_bytes(states),
        )

    return ask


def _frozen(units: Iterable[Unit], known: Collection[int]) -> int:
    """Bytes of their shards of which nothing has one of these ids."""
    found = 0
    for param in (param for unit in units for param in unit.params):
        stepped = [held for held in param.held_as if id(held) in known]
        if len(stepped) < len(param.held_as):  # a flat parameter may be frozen in part
            found += num_bytes([param.sharded]) - num_bytes(stepped)
    return found


def num_bytes(values: Iterable[object]) -> int:
    """Of the tensors among them, this rank's part of each, each once."""
    tensors = {id(v): v for v in values if isinstance(v, torch.Tensor)}.values()
    return sum(t.numel() * t.element_size() for t in map(local_tensor, tensors))


def gradients_that_stay(params: Iterable[Tensor]) -> Callable[[], int]:
    """To be asked later: the bytes of those that are there now and still are then, the same
    tensors in the same memory, as `zero_grad(set_to_none=False)` leaves them.
    """
    params = list(params)
    before = {id(p): (weakref.ref(p.grad), _place(p.grad)) for p in params if p.grad is not None}

    def ask() -> int:
        stay = [
            p.grad
            for p in params
            if p.grad is not None
            and id(p) in before
            and before[id(p)][0]() is p.grad
            and before[id(p)][1] == _place(p.grad)
        ]
        return num_bytes(stay)

    return ask


def _place(tensor: Tensor) -> int:
    return local_tensor(tensor).data_ptr()
