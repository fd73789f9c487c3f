"""Gradients that are still being reduced after backward has returned: tensors that wait when
somebody reads them.

`.grad` is a DTensor whose local tensor is `InFlight`. Whatever reads it (an optimizer,
`clip_grad_norm_`, a scaler, a print) waits for the reduction first, and finds a plain tensor in its
place from then on. So nobody can see a gradient too early.

Private torch used here (tried on 2.13): `torch.utils._pytree`, `Tensor._make_wrapper_subclass`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from compiled_fsdp.torch_private.autograd import without_torch_function
from compiled_fsdp.torch_private.dtensors import make_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from compiled_fsdp.wire.deferred import Deferred, Value

_numbers = itertools.count()


class Arrival:
    """The rest of a reduction, and the gradients that are views of its result.

    number: counts up in the order in which reductions were left in flight.
    """

    def __init__(self, program: Deferred, result: Value) -> None:
        self.number = next(_numbers)
        self.is_done = False
        self._program, self._result = program, result
        self._grads: list[tuple[DTensor, InFlight, Callable[[Tensor], Tensor]]] = []

    def make_grad(self, param: DTensor, view: Callable[[Tensor], Tensor]) -> DTensor:
        """A gradient for `param` that becomes `view` of the result; `view` must not hold on to the
        model.
        """
        with without_torch_function():
            local = _local(param, self)
            grad = make_dtensor(local, param)
        self._grads.append((grad, local, view))
        return grad

    def wait(self) -> None:
        """Finish the reduction, and make plain tensors of the gradients; does nothing when called
        again.
        """
        if self.is_done:
            return
        self.is_done = True
        with torch.inference_mode(mode=False), torch.no_grad():
            self._program.finish()
            for grad, local, view in self._grads:
                grad._local_tensor = local.arrived = view(self._result.tensor)
        self._grads.clear()


class SteppedGrad:
    """Stands for a gradient that the optimizer has used up inside backward: who reads it is told
    so.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def make_grad(self, param: DTensor) -> DTensor:
        """In the place of a gradient for `param`."""
        with without_torch_function():
            return make_dtensor(_local(param, self), param)

    def wait(self) -> None:
        """There is nothing to wait for.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"the gradient of {self.name} was read after backward, and the optimizer has used it "
            "up inside backward already. To clip, scale, log or add up gradients, leave out "
            "in_backward=True of overlap_optimizer; to forget them, call "
            "zero_grad(set_to_none=True)"
        )


def is_stepped_grad(grad: Tensor | None) -> bool:
    """Whether this stands for a gradient that was used up."""
    with without_torch_function():
        local = (
            object.__getattribute__(grad, "_local_tensor") if isinstance(grad, DTensor) else None
        )
        return isinstance(local, InFlight) and isinstance(local.arrival, SteppedGrad)


class InFlight(Tensor):
    """A local gradient that is not there yet, or was used up."""

    arrival: Arrival | SteppedGrad
    arrived: Tensor | None

    @staticmethod
    def __new__(cls, like: Tensor, arrival: Arrival | SteppedGrad, dtype: torch.dtype) -> InFlight:
        """Shape, strides, offset and device of `like`; a DTensor keeps the offset that it is made
        with.
        """
        made: InFlight = Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=dtype,
            device=like.device,
        )
        made.arrival, made.arrived = arrival, None
        return made

    def __init__(self, like: Tensor, arrival: Arrival | SteppedGrad, dtype: torch.dtype) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any method or function of torch that gets one: with the real tensor in its place.

        But for whether it is a view: of what, torch asks this one
        (Dynamo, of `.grad` of what it meets).
        """
        if func is Tensor._is_view:
            return False
        return func(*_arrived(args), **_arrived(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Any op, such as those that a DTensor calls on its local tensor."""
        return func(*_arrived(args), **_arrived(kwargs or {}))


def _local(param: DTensor, arrival: Arrival | SteppedGrad) -> InFlight:
    return InFlight(param._local_tensor, arrival, param.grad_dtype or param.dtype)


def _arrived(values: Any) -> Any:
    return tree_map_only(InFlight, _wait_for, values)


def _wait_for(grad: InFlight) -> Tensor:
    with without_torch_function():
        grad.arrival.wait()
        if grad.arrived is None:
            raise RuntimeError(
                "This gradient was still being reduced after backward, and its reduction failed "
                "(see the first error). Its value is lost: call optimizer.zero_grad() and run the "
                "step again"
            )
        return grad.arrived
