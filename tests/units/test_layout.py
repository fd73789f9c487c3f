"""The flat buffers: which elements are whose, and gradients that are views of one buffer."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.models import OddMLP, loss_of
from torch import nn
from torch.distributed.tensor import DTensor

from compiled_fsdp import fully_shard
from compiled_fsdp.frontend.state import get_state
from compiled_fsdp.units import unwritten
from compiled_fsdp.units.layout import flat_layout

pytestmark = pytest.mark.usefixtures("fake_world")


# -- arithmetic


def sizes(*shapes: tuple[int, ...]) -> list[torch.Size]:
    return [torch.Size(shape) for shape in shapes]


def test_offsets_follow_padded_shards() -> None:
    layout = flat_layout(sizes((5, 2), (1,), (4, 3)), 4)
    assert [(s.offset, s.rows, s.numel) for s in layout.shards] == [(0, 2, 4), (4, 1, 1), (5, 1, 3)]
    assert layout.numel == 8


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9])
def test_rows_are_those_of_torch_chunk(rows: int, world: int) -> None:
    (place,) = flat_layout(sizes((rows, 3)), world).shards
    chunks = torch.arange(rows).chunk(world)
    for rank in range(world):
        assert place.local_rows(rank) == (len(chunks[rank]) if rank < len(chunks) else 0)
    assert place.rows == len(chunks[0])


def test_views_of_a_flat_buffer() -> None:
    layout = flat_layout(sizes((5, 2), (3,)), 2)
    flat = torch.arange(layout.numel)
    assert layout.shards[0].view(flat, 0).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert layout.shards[0].view(flat, 1).tolist() == [[0, 1], [2, 3]]
    assert layout.shards[1].view(flat, 1).tolist() == [6]
    assert layout.shards[1].padded_view(flat).tolist() == [6, 7]


def test_no_rows_at_all() -> None:
    layout = flat_layout(sizes((0, 4), (2,)), 2)
    assert [(s.offset, s.numel) for s in layout.shards] == [(0, 4), (4, 1)]
    assert layout.shards[0].view(torch.zeros(5), 1).shape == (0, 4)


# -- parameters


def storage(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def test_shards_are_back_to_back_in_one_buffer() -> None:
    torch.manual_seed(0)
    model = OddMLP(is_deep=True)
    originals = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model)
    assert len({storage(p) for p in model.parameters()}) == 1
    places = sorted(
        (p._local_tensor.storage_offset(), name) for name, p in model.named_parameters()
    )
    sizes_ = {name: -(-p.shape[0] // 2) * p[0].numel() for name, p in originals.items()}
    expected = 0
    for offset, name in places:
        assert offset == expected, name
        expected += sizes_[name]
        assert torch.equal(model.get_parameter(name)._local_tensor, originals[name].chunk(2)[0])
    nbytes = model.last.weight._local_tensor.untyped_storage().nbytes()
    assert nbytes == 4 * expected


def test_one_buffer_for_each_dtype_and_requires_grad() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.float64), nn.Linear(4, 4))
    model[2].requires_grad_(False)
    fully_shard(model)
    owners: dict[int, set[str]] = {}
    for name, p in model.named_parameters():
        owners.setdefault(storage(p), set()).add(name.split(".")[0])
    assert sorted(map(sorted, owners.values())) == [["0"], ["1"], ["2"]]


def test_padding_is_zero() -> None:
    model = nn.Linear(3, 5, bias=False)
    with torch.no_grad():
        model.weight.fill_(7.0)
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    fully_shard(model)
    local = model.weight._local_tensor
    assert local.shape == (2, 3)
    whole = torch.empty(0).set_(local.untyped_storage())
    assert whole.tolist() == [7.0] * 6 + [0.0] * 3


# -- gradients: collectives move nothing here, so only where things lie is checked


def backward(model: nn.Module, call: nn.Module | None = None) -> None:
    loss_of(
        (model if call is None else call)(
            torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        )
    ).backward()


def fake_group_reduces() -> bool:
    """Whether the fake group writes anything at all for a reduce-scatter."""
    written = torch.zeros(1)
    dist.reduce_scatter_tensor(written, torch.ones(2))
    return bool(written.item())


@pytest.fixture(params=["eager", "compiled"])
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """A model of two units, and what to call."""
    model = OddMLP(is_deep=True)
    fully_shard(model.layers[1])
    fully_shard(model)
    if request.param == "eager":
        return model, model
    torch._dynamo.reset()
    return model, torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)


def test_gradients_are_views_of_one_buffer(pair: tuple[nn.Module, nn.Module]) -> None:
    model, call = pair
    backward(model, call)
    for name, p in model.named_parameters():
        assert isinstance(p.grad, DTensor), name
        assert p.grad.placements == p.placements
        assert p.grad.shape == p.shape
        assert p.grad.dtype == p.dtype
        assert p.grad._local_tensor.shape == p._local_tensor.shape
    inner = {storage(p.grad) for p in model.layers[1].parameters()}
    outer = {storage(p.grad) for n, p in model.named_parameters() if not n.startswith("layers.1.")}
    assert (len(inner), len(outer), len(inner | outer)) == (1, 1, 2)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(pair: tuple[nn.Module, nn.Module], set_to_none: bool) -> None:
    model, call = pair
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, call)
    before = {name: p.grad for name, p in model.named_parameters()}
    places = {name: p.grad._local_tensor.data_ptr() for name, p in model.named_parameters()}
    optimizer.zero_grad(set_to_none=set_to_none)
    assert all((p.grad is None) == set_to_none for p in model.parameters())
    if not set_to_none:
        assert all(p.grad._local_tensor.count_nonzero() == 0 for p in model.parameters())
    backward(model, call)
    for name, p in model.named_parameters():
        assert (p.grad is before[name]) != set_to_none, name
        if not set_to_none:
            assert p.grad._local_tensor.data_ptr() == places[name]


def test_memory_at_an_address_as_before_is_another_version() -> None:
    """What was gathered of the memory that lay there first is stale, however often it was replaced
    since.
    """
    model = fully_shard(OddMLP())
    unit = get_state(model).unit
    (flat,) = unit.flats
    before, first = flat.version(), flat.data.data
    memory = [torch.empty_like(first), first]
    with mock.patch.object(unit, "zeros", side_effect=memory) as asked:
        for _ in range(2):
            model._apply(torch.clone)
            flat.refresh()
    assert asked.call_count == 2
    assert storage(flat.data) == storage(first)
    assert flat.version() != before


def test_the_leaf_keeps_no_gradient(pair: tuple[nn.Module, nn.Module]) -> None:
    model, call = pair
    backward(model, call)
    for module in model.modules():
        for handle in module.__dict__.get("_fsdp_handles", {}).values():
            assert handle.flat.grad is None


def test_a_gradient_the_user_replaced_is_added_to(pair: tuple[nn.Module, nn.Module]) -> None:
    model, call = pair
    backward(model, call)
    weight = model.layers[0].weight
    first = weight.grad._local_tensor.clone()
    with torch.no_grad():
        weight.grad = weight.grad * 2
    model.last.weight.grad = None
    backward(model, call)
    assert storage(model.last.weight.grad) != storage(weight.grad)
    if not fake_group_reduces():
        pytest.skip(
            "the fake group of this torch leaves what a reduce-scatter is to write as it was: "
            "numbers mean nothing"
        )
    torch.testing.assert_close(weight.grad._local_tensor, first * 3)
    bias = model.layers[0].bias.grad._local_tensor
    assert bias.isfinite().all()


def test_post_accumulate_hooks_fire_once_a_backward(pair: tuple[nn.Module, nn.Module]) -> None:
    model, call = pair
    fired: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda q, name=name: fired.append(name) or setattr(q, "grad", None)
        )
    for _ in range(2):
        fired.clear()
        backward(model, call)
        assert sorted(fired) == sorted(name for name, _ in model.named_parameters())
        assert all(p.grad is None for p in model.parameters())


def test_detach_keeps_the_old_gradient(pair: tuple[nn.Module, nn.Module]) -> None:
    """A gradient taken before `zero_grad` is not overwritten by the next backward."""
    model, call = pair
    backward(model, call)
    kept = model.layers[0].weight.grad
    copy = kept._local_tensor.clone()
    model.zero_grad()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    backward(model, call)
    assert torch.equal(
        kept._local_tensor.view(torch.uint8), copy.view(torch.uint8)
    )  # bytes: it may hold nan


def test_frozen_gets_no_gradient() -> None:
    model = OddMLP(is_deep=True)
    model.layers[1].requires_grad_(False)
    fully_shard(model)
    backward(model)
    assert all(
        (p.grad is None) == name.startswith("layers.1.") for name, p in model.named_parameters()
    )


def test_what_a_device_prints_is_cut() -> None:
    """`_assert_async` on CUDA refuses a longer message, for an assertion that holds too."""
    text = "parameters of a.b " + 40 * "were written to "
    assert unwritten._for_device(text, torch.device("cpu")) == text
    assert len(unwritten._for_device(text, torch.device("cuda"))) < 255
