"""What gradients take between two graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.torch_private.dtensors import local_tensor
from compiled_fsdp.units.registered import UNITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from compiled_fsdp.units.flat import FlatBuffer


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
