"""What `fully_shard` makes of the package and of a module, beyond the rows of the table."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed.fsdp as stock
from kit.models import OddMLP
from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

import compiled_fsdp
from compiled_fsdp import FSDPModule, UnshardHandle, fully_shard
from compiled_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP

pytestmark = pytest.mark.usefixtures("fake_world")


def test_policies_are_those_of_stock() -> None:
    assert issubclass(compiled_fsdp.MixedPrecisionPolicy, stock.MixedPrecisionPolicy)
    ours, theirs = (
        tuple(f.name for f in fields(p.MixedPrecisionPolicy)) for p in (compiled_fsdp, stock)
    )
    newer = ("param_dtype_override_fn",)  # came with torch 2.15
    assert ours == (*(name for name in theirs if name not in newer), *newer)
    assert (ours == theirs) == (compiled_fsdp.MixedPrecisionPolicy is stock.MixedPrecisionPolicy)
    assert compiled_fsdp.CPUOffloadPolicy is stock.CPUOffloadPolicy
    assert issubclass(FSDPModule, stock.FSDPModule)
    assert issubclass(UnshardHandle, stock.UnshardHandle)


def test_class_of_a_child_used_by_others_is_unchanged() -> None:
    fully_shard(OddMLP(is_deep=True))
    assert not isinstance(nn.Linear(2, 2).__class__.__dict__.get("weight"), property)


def test_what_is_noted_on_parameters_stays() -> None:
    """As in the unsharded model, by which optimizers' groups are made; stock's sharded parameters
    have none of it. A tensor would be of another shape.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    noted = {"_no_weight_decay": True, "_optim": {"lr": 0.1, "betas": (0.9, 0.95)}}
    vars(model[1].bias).update(noted, scale=torch.ones(4))
    for module in (model[0], model):
        fully_shard(module)

    def found() -> list[dict[str, Any]]:
        names = (*noted, "scale")
        return [{n: v for n, v in vars(p).items() if n in names} for p in model.parameters()]

    expected: list[dict[str, Any]] = [{}, {}, {}, noted]
    assert found() == expected
    loss = model(torch.ones(2, 4)).sum()  # here the outermost module's are full ones
    assert found() == expected
    loss.backward()
    assert found() == expected


def test_no_method_of_stock_reaches_stocks_state() -> None:
    """Each public method of stock's class is ours, or says that it is not there."""
    inherited = [
        name
        for name, value in vars(stock.FSDPModule).items()
        if getattr(FSDPModule, name) is value and callable(value) and not name.startswith("_")
    ]
    assert inherited == []


def annotated_classes() -> list[type]:
    public = (getattr(compiled_fsdp, name) for name in compiled_fsdp.__all__)
    return [FSDP, FSDPModule, *(each for each in public if isinstance(each, type))]


@pytest.mark.parametrize("kind", annotated_classes(), ids=lambda kind: kind.__name__)
def test_annotations_can_be_asked_for(kind: type) -> None:
    """As those who build configurations from text do, and Hugging Face's models of their own
    classes, for each subclass.
    """
    get_type_hints(kind)


def test_a_class_that_asks_its_subclasses_for_annotations() -> None:
    class Model(nn.Linear):
        config: int

        def __init_subclass__(cls) -> None:
            assert get_type_hints(cls)["config"] is int

    fully_shard(Model(2, 2))


def test_classes_that_keep_a_table_of_their_subclasses() -> None:
    """By name, say, or with arguments: it has none but the user's own."""
    known: dict[str, type] = {}

    class Part(nn.Linear):
        def __init_subclass__(cls, *, kind: str) -> None:
            known[cls.__name__] = cls
            cls.kind = kind

    class Layer(Part, kind="layer"):
        pass

    class Block(Part, kind="block"):
        pass

    model = nn.Sequential(nn.Sequential(Layer(2, 2)), Block(2, 2))
    fully_shard(model[1])
    fully_shard(model)
    assert known == {"Layer": Layer, "Block": Block}
    assert (model[0][0].kind, model[1].kind) == ("layer", "block")
    model(torch.ones(2, 2)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moved_parameters_are_back_in_the_flat_buffers_of_their_units(dtype: torch.dtype) -> None:
    with torch.device("meta" if dtype == torch.float32 else "cpu"):
        model = OddMLP(is_deep=True)
    fully_shard(model.layers[0])
    fully_shard(model)
    if dtype == torch.float32:
        model.to_empty(device="cpu")
    else:
        model.to(dtype)
    assert len({p._local_tensor.untyped_storage().data_ptr() for p in model.parameters()}) == 2
    model(torch.randn(2, 6, dtype=dtype)).sum().backward()
    assert all(p.grad.dtype == dtype for p in model.parameters())


def test_a_trace_goes_straight_to_the_forward_of_modules_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`nn.Module.__call__` and its hooks are most of what Dynamo would follow in a layer."""
    followed: Counter[str] = Counter()
    step = InstructionTranslatorBase.step

    def counted(self: Any) -> Any:
        followed[self.f_code.co_name] += 1
        return step(self)

    monkeypatch.setattr(InstructionTranslatorBase, "step", counted)

    def instructions(num_layers: int) -> int:
        torch._dynamo.reset()
        followed.clear()
        model = fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers))))
        torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(torch.ones(2, 4))
        return followed["_call_impl"]

    assert instructions(1) == instructions(3) > 0, "only the outermost module has hooks"
