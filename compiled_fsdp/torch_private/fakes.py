"""Private torch: what a fake tensor looks like, another one that looks the same, and fake tensors
in the place of real ones. Tried on torch 2.13 and 2.15.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorConfig,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# shape, stride, offset, dtype, device
Look = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device]

# By mode and device: attributes of a new fake tensor (`_fields`).
_made: WeakKeyDictionary[FakeTensorMode, dict[torch.device, dict[str, Any] | None]] = (
    WeakKeyDictionary()
)


def mode_of(value: object) -> FakeTensorMode | None:
    """The mode that a fake tensor belongs to; None of everything else."""
    return value.fake_mode if isinstance(value, FakeTensor) else None


def look(value: object) -> Look | None:
    """What decides how an op's result looks; None of what is more than a plain fake tensor of known
    sizes.
    """
    if not is_plain(value) or value._has_symbolic_sizes_strides or value.requires_grad:
        return None
    return (
        tuple(value.shape),
        value.stride(),
        int(value.storage_offset()),
        value.dtype,
        value.fake_device,
    )


def is_plain(value: object) -> TypeGuard[FakeTensor]:
    """Whether this is a fake tensor and no more: strided, not a constant, nor conjugated."""
    return (
        type(value) is FakeTensor
        and value.layout is torch.strided
        and value.constant is None
        and not value.is_conj()
        and not value.is_neg()
    )


def storage_of(value: Tensor) -> tuple[int, int]:
    """Which storage a tensor has, and its bytes."""
    return storage_key(value), value.untyped_storage().nbytes()


def storage_key(value: Tensor) -> int:
    """Which storage a tensor has."""
    key: int = value.untyped_storage()._cdata
    return key


def alike(mode: FakeTensorMode, look: Look, base: Any = None) -> FakeTensor:
    """A fake tensor that looks like this: in the storage of `base`, or in one of its own. It is
    made as torch's own cache of fake results makes it.
    """
    shape, stride, offset, dtype, device = look
    with in_kernel_invocation_manager(mode):
        plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if base is not None:
            plain.set_(base.untyped_storage(), offset, shape, stride)
    made = _made.setdefault(mode, {})
    if device not in made:
        fake = FakeTensor(mode, plain, device)
        made[device] = _fields(fake)
        return fake
    fields = made[device]
    return FakeTensor(mode, plain, device) if fields is None else _with(fields, mode, plain, device)


def empty_like_fake(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`like.new_empty(shape, dtype=dtype)`; of a plain fake tensor in a third of the time, since no
    mode is asked.
    """
    if type(like) is not FakeTensor or not all(type(size) is int for size in shape):
        return like.new_empty(shape, dtype=dtype)
    stride = make_contiguous_strides_for(tuple(shape))
    return alike(like.fake_mode, (tuple(shape), stride, 0, dtype, like.fake_device))


def _fields(fake: FakeTensor) -> dict[str, Any] | None:
    """The attributes of a new fake tensor, apart from its mode: any other has the same. None if the
    constructor does more than `_with` makes up for.
    """
    mode, device = fake.fake_mode, fake.fake_device
    if FakeTensorConfig.debug:
        return None
    fields = {name: value for name, value in vars(fake).items() if name != "fake_mode"}
    again = _with(fields, mode, torch.empty(0, device="meta"), device)
    is_all = vars(again) == vars(fake) and mode_of(again) is mode and again.fake_device == device
    return fields if is_all else None


def _with(fields: dict[str, Any], mode: FakeTensorMode, plain: Tensor, device: Any) -> FakeTensor:
    """What the constructor of fake tensors makes, in a third of the time: with the attributes of
    one that it has made.
    """
    fake: FakeTensor = Tensor._make_subclass(
        FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(fields, fake_mode=mode)
    return fake


@contextmanager
def as_fakes(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Fake tensors that look like these, and a mode in which ops on them compute nothing."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield [mode.from_tensor(tensor.detach()) for tensor in tensors]


@contextmanager
def writes_to(tensors: Sequence[Tensor]) -> Iterator[list[str]]:
    """The ops that write to the memory of one of these fake tensors, or to a real one, by name."""
    found: list[str] = []
    memory = {tensor.untyped_storage()._cdata for tensor in tensors}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(map(is_traceable_wrapper_subclass_type, types)):
                return NotImplemented
            for argument, value in zip(func._schema.arguments, args, strict=False):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                values = value if isinstance(value, list | tuple) else [value]
                for each in values if is_written else ():
                    is_real = isinstance(each, Tensor) and not isinstance(each, FakeTensor)
                    if is_real or each.untyped_storage()._cdata in memory:
                        found.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        yield found


def tells_what_is_inside(tensor: object) -> bool:
    """Whether this is a subclass with tensors inside, which it names and can be made of again
    (`__tensor_flatten__`, `__tensor_unflatten__`).
    """
    return is_traceable_wrapper_subclass(tensor)
