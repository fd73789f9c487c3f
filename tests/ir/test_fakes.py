"""Results on fake tensors that are made again are those that torch makes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_fsdp.ir import fakes
from compiled_fsdp.torch_private import fakes as private

aten = torch.ops.aten


class Asked(TorchDispatchMode):
    """Which ops torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[object] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(op)
        return op(*args, **(kwargs or {}))


def look(x: Tensor) -> tuple[object, ...]:
    return (
        *(x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad, type(x)),
        x.untyped_storage().nbytes(),
    )


def test_made_again_as_torch_makes_them() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x, y = torch.empty(6, 4), torch.empty(6, 4)
        other = torch.empty(6, 5)
        turned, flat = torch.empty(4, 6).t(), torch.empty(24, dtype=torch.bfloat16)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.slice.Tensor, (x, 0, 2, 5), {}),
        (aten.slice.Tensor, (turned, 1, 1, 3), {}),
        (aten.view.default, (x, [4, 6]), {}),
        (aten.reshape.default, (turned, [24]), {}),
        (aten.expand.default, (flat, [3, 24]), {}),
        (aten.permute.default, (x, [1, 0]), {}),
        (aten.cat.default, ([x, other], 1), {}),
        (aten.add.Tensor, (x, y), {"alpha": 2}),
        (aten.div.Tensor, (x, 2), {}),
        (aten.div.Tensor, (x, 2.0), {}),
        (aten.sum.dim_IntList, (flat, [0]), {"dtype": torch.float32}),
        (aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}),
        (torch.ops.prims.convert_element_type.default, (x, torch.bfloat16), {}),
        (aten.constant_pad_nd.default, (flat, [1, 2]), {}),
    ]
    first = [fakes.run(op, args, dict(kwargs)) for op, args, kwargs in calls]
    with Asked() as asked:
        again = [fakes.run(op, args, dict(kwargs)) for op, args, kwargs in calls]
    assert asked.ops == []
    for (op, args, kwargs), made, one in zip(calls, again, first, strict=True):
        with mode:
            expected = op(*args, **kwargs)
        assert look(made) == look(expected) == look(one), op
        storage = made.untyped_storage()._cdata
        (source, *_) = args[0] if isinstance(args[0], list) else args
        is_view = expected.untyped_storage()._cdata == source.untyped_storage()._cdata
        assert (storage == source.untyped_storage()._cdata) == is_view, op
        assert is_view or storage != one.untyped_storage()._cdata, op


def test_near_miss() -> None:
    """Torch is asked for what looks otherwise, changes something,
    or has sizes that data decides.
    """
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        x, wide = torch.empty(6, 4), torch.empty(6, 8)[:, ::2]
        unknown = torch.empty(env.create_unbacked_symint(), 4)
    for args in ((x, 1), (x, True), (x, 1.0), (wide, 1), (unknown, 1), (unknown, 1)):
        with Asked() as asked:
            fakes.run(aten.add.Tensor, args, {})
        assert aten.add.Tensor in asked.ops, args
    for _ in range(2):
        with Asked() as asked:
            assert fakes.run(aten.zero_.default, (x,), {}) is x
        assert aten.zero_.default in asked.ops
    assert not isinstance(fakes.run(aten.add.Tensor, (torch.ones(2), 1), {}), type(x))


def test_known_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one graph has asked for, the next one knows, whose mode is another; a default dtype
    decides what a quotient is; a full table is begun anew.
    """
    asked: list[list[object]] = []
    made: list[Any] = []
    monkeypatch.setattr(fakes, "MOST", 2)
    monkeypatch.setattr(fakes, "_known", {})

    def call(op: Any, *args: Any) -> None:
        with Asked() as here:
            made.append(fakes.run(op, args, {}))
        asked.append(here.ops)

    for default in (torch.float32, torch.float32, torch.float64):
        torch.set_default_dtype(default)
        try:
            with FakeTensorMode() as mode:
                x = torch.empty(6, dtype=torch.int64)
            call(aten.div.Tensor, x, 7)
        finally:
            torch.set_default_dtype(torch.float32)
        assert made[-1].fake_mode is mode
    assert [each.dtype for each in made] == [torch.float32, torch.float32, torch.float64]
    assert [aten.div.Tensor in ops for ops in asked] == [True, False, True]
    call(aten.div.Tensor, x, 9)  # the third of two
    call(aten.div.Tensor, x, 7)
    call(aten.div.Tensor, x, 9)
    assert [aten.div.Tensor in ops for ops in asked[3:]] == [True, True, False]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_made_without_the_constructor_as_by_it(device: str) -> None:
    """Attributes and dispatch keys, of the first, which is made by it, and of those behind it."""
    with FakeTensorMode() as mode:
        for shape in ((6, 4), (3,)):
            for dtype in (torch.float32, torch.int64):
                expected = torch.empty(shape, dtype=dtype, device=device)
                seen = private.look(expected)
                assert seen is not None
                made = private.alike(mode, seen)
                assert private.look(made) == seen
                assert vars(made) == vars(expected)
                assert torch._C._dispatch_keys(made) == torch._C._dispatch_keys(expected)
    assert private._made[mode][torch.device(device)] is not None, "all by the constructor"
    forgotten = weakref.ref(mode)
    del mode, expected, made
    gc.collect()
    assert forgotten() is None


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (4, 3)])
def test_empty_like_a_fake(shape: tuple[int, ...]) -> None:
    """As torch makes it; of what is no plain fake tensor, torch makes it."""
    with FakeTensorMode() as mode:
        like = torch.empty(5)
        like.requires_grad_()
        for dtype in (torch.float32, torch.bfloat16):
            made, expected = (
                private.empty_like_fake(like, shape, dtype),
                like.new_empty(shape, dtype=dtype),
            )
            assert private.look(made) == private.look(expected)
            assert made.fake_mode is mode
            assert private.storage_of(made)[1] == private.storage_of(expected)[1]
    plain = private.empty_like_fake(torch.empty(5), shape, torch.int32)
    assert type(plain) is torch.Tensor
    assert plain.shape == shape
