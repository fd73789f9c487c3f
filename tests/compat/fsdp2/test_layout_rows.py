"""Chapters 3, 4 and 5 of the specification: which parameters form a group, how they are cut, where
they live.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from kit.compare import plain
from kit.harness import SLOW
from kit.oracle import (
    Api,
    Own,
    ShardPlacementResult,
    batch,
    close,
    communications,
    each,
    eager_same,
    grads,
    inductor_same,
    is_sharded,
    mesh_of,
    message,
    needs_meshes_of_their_own,
    net,
    params,
    raised,
    rows,
    same,
    train_step,
)
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard

if TYPE_CHECKING:
    from kit.pool import Pool


def even(seed: int = 5) -> nn.Sequential:
    """Every size divides by four."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def last_dim(parameter: Any) -> Shard:
    """Cut on the last dimension."""
    return Shard(parameter.dim() - 1)


def tied() -> nn.Sequential:
    """Two layers with one weight."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=False))
    model[2].weight = model[0].weight
    return model


def warm_counts(call: Any) -> dict[str, int]:
    """The communications of a step that is compiled already; its input requires a gradient, so
    backward needs every weight.
    """

    def step() -> None:
        call(batch(requires_grad=True)).square().mean().backward()

    step()
    return communications(step)


# -- chapter 3


@rows("3.1", "3.2")
def test_groups_of_nested_calls(two: Pool) -> None:
    two.run(same, groups_of_nested_calls, ("0", "2"))
    two.run(eager_same, groups_of_nested_calls, (), ("0",), ("0", "2", "4"))


def groups_of_nested_calls(api: Api, *units: tuple[str, ...]) -> Any:
    found = []
    for names in units:
        model = api.units(net(), *names)
        model.unshard()
        direct = is_sharded(model)
        model.reshard()
        counts = warm_counts(api.compile(model))
        found.append((direct, is_sharded(model), counts, plain(grads(model))))
    return found


@rows("3.2")
def test_parent_with_nothing_left(two: Pool) -> None:
    two.run(same, parent_with_nothing_left)


def parent_with_nothing_left(api: Api) -> Any:
    model = api.units(net(), "0", "2", "4")
    handle = model.unshard(async_op=True)
    result = [
        model.unshard(),
        handle.wait(),
        handle.wait(),
        isinstance(handle, api.UnshardHandle),
        model.reshard(),
    ]
    return (
        type(model).__name__,
        api.fully_shard.state(model) is not None,
        result,
        train_step(api.compile(model)),
    )


@rows("3.3")
def test_order_in_a_group(two: Pool) -> None:
    two.run(same, order_in_a_group)


def order_in_a_group(api: Api) -> Any:
    found, flats = [], []
    own, parts = Own(), net()
    api.fully_shard(own)
    api.fully_shard([parts[4], parts[0], parts[2]])
    api.fully_shard(parts)
    for model, holder in ((own, own), (parts, parts[4])):
        holder.set_all_reduce_hook(lambda flat: flats.append(flat.clone()))
        train_step(api.compile(model))
        found.append(([name for name, _ in model.named_parameters()], plain(grads(model))))
    return found, [
        flat / flat.abs().max() for flat in flats
    ]  # whether a hook sees the sum or the mean is row 12.11


@rows("3.5")
def test_tied_in_one_call(two: Pool) -> None:
    two.run(same, tied_in_one_call)


def tied_in_one_call(api: Api) -> Any:
    found = []
    shared = nn.Linear(6, 6)
    twice = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(6, 3))
    for model in (api.fully_shard(tied()), api.fully_shard(twice)):
        losses = [train_step(api.compile(model), step) for step in range(2)]
        found.append(
            (losses, grads(model), list(model.state_dict()), model[0].weight is model[2].weight)
        )
    return found


@rows("3.5")
def test_tied_into_a_nested_unit(two: Pool) -> None:
    two.run(same, tied_into_a_nested_unit)


def tied_into_a_nested_unit(api: Api) -> Any:
    """The inner call ignores the weight, the outer one takes it: both places are re-pointed."""
    model = tied()
    api.fully_shard(model[0], ignored_params={model[0].weight})
    api.fully_shard(model)
    before = is_sharded(model), model[0].weight is model[2].weight
    model.unshard()
    between = is_sharded(model), model[0].weight is model[2].weight
    model.reshard()
    loss = train_step(api.compile(model))
    return before, between, loss, grads(model), is_sharded(model)


@rows("3.6", status="improved")
def test_tied_over_two_calls(two: Pool) -> None:
    """Stock raises at the first forward and asks for one call; ours gathers the weight once."""
    two.run(each, tied_over_two_calls)


def tied_over_two_calls(api: Api) -> None:
    two_calls, one_call = api.units(tied(), "0", "2"), Api("stock").fully_shard(tied())
    error = raised(lambda: Api("stock").units(tied(), "0", "2")(batch()))
    assert error in ("ValueError", None)  # torch 2.11 says nothing
    assert error is None or "fully_shard([" in message(
        lambda: Api("stock").units(tied(), "0", "2")(batch())
    )
    losses = [train_step(call) for call in (api.compile(two_calls), one_call)]
    assert torch.equal(*losses)
    for name, p in two_calls.named_parameters():
        torch.testing.assert_close(p.grad.to_local(), one_call.get_parameter(name).grad.to_local())


def _info(mesh: Any) -> Any:
    if mesh.ndim == 2:
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return FSDPMeshInfo(mesh, shard_mesh_dim=0)


@needs_meshes_of_their_own
@rows("3.8")
def test_meshes_of_their_own(four: Pool) -> None:
    four.run(close, meshes_of_their_own)


def meshes_of_their_own(api: Api) -> Any:
    mesh, found = mesh_of(2, 2, names=("r", "s")), []
    for special in (_info(mesh["s"]), _info(mesh)):
        for reshard in (True, False):
            model = even()
            own = {model[0].weight: Shard(1), model[2].bias: None}
            result = {p: ShardPlacementResult(placement, special) for p, placement in own.items()}
            api.fully_shard(
                model, mesh=mesh_of(4), shard_placement_fn=result.get, reshard_after_forward=reshard
            )
            cut = plain(params(model)), [p.device_mesh.mesh for p in model.parameters()]
            out = api.compile(model)(batch(4))
            out.square().sum().backward()
            found.append((cut, out, plain(grads(model))))
    return found


@needs_meshes_of_their_own
@rows("3.8")
def test_groups_of_meshes(four: Pool) -> None:
    four.run(same, groups_of_meshes)


def groups_of_meshes(api: Api) -> Any:
    model, special = even(), _info(mesh_of(2, 2, names=("r", "s")))
    result = {p: ShardPlacementResult(None, special) for p in (model[0].weight, model[2].bias)}
    api.fully_shard(model, mesh=mesh_of(4), shard_placement_fn=result.get)
    call = api.compile(model)
    call(batch(4)).sum().backward()
    with torch.profiler.profile() as profiler:
        call(batch(4)).sum().backward()
    names = [e.name for e in profiler.events()]
    return names.count("fsdp::all_gather") + names.count("c10d::_allgather_base_")


@needs_meshes_of_their_own
@rows("3.8")
def test_size_of_all_of_a_sub_mesh(four: Pool) -> None:
    four.run(same, size_of_all_of_a_sub_mesh, timeout=60)


def size_of_all_of_a_sub_mesh(api: Api) -> Any:
    result = ShardPlacementResult(None, _info(mesh_of(2, 2, names=("r", "s"))["s"]))
    model = api.fully_shard(
        even(), mesh=mesh_of(4), shard_placement_fn=lambda p: result, reshard_after_forward=2
    )
    return api.compile(model)(batch(4))


@needs_meshes_of_their_own
@rows("3.8")
def test_size_must_divide_every_mesh(four: Pool) -> None:
    four.run(same, size_must_divide_every_mesh)


def size_must_divide_every_mesh(api: Api) -> Any:
    result = ShardPlacementResult(None, _info(mesh_of(4, 1, names=("r", "s"))))
    return raised(
        lambda: api.fully_shard(
            even(), shard_placement_fn=lambda p: result, reshard_after_forward=2
        )
    )


@needs_meshes_of_their_own
@rows("3.9", status="improved")
def test_equal_meshes_in_two_objects(two: Pool) -> None:
    """Stock wants one object for one mesh; ours compares the meshes."""
    two.run(each, equal_meshes_in_two_objects)


def equal_meshes_in_two_objects(api: Api) -> None:
    mesh, counts = mesh_of(2), []

    def placement(_: Any) -> Any:
        return ShardPlacementResult(None, _info(mesh))

    assert (
        raised(lambda: Api("stock").fully_shard(net(), mesh=mesh, shard_placement_fn=placement))
        == "ValueError"
    )
    for kwargs in ({}, {"shard_placement_fn": placement}):
        model = api.fully_shard(net(), mesh=mesh, **kwargs)
        counts.append(warm_counts(api.compile(model)))
    assert counts[0] == counts[1]


@rows("3.13")
def test_frozen_parameters_of_other_dtypes(two: Pool) -> None:
    two.run(same, frozen_of_other_dtypes)


class Mixed(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__()
        self.inner = net()
        scale = torch.arange(3, dtype=torch.bfloat16) + 1
        self.scale = nn.Parameter(scale, requires_grad=not is_frozen)

    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.scale


def frozen_of_other_dtypes(api: Api) -> Any:
    model = api.fully_shard(Mixed(is_frozen=True))
    loss = train_step(api.compile(model))
    model.unshard()
    found = [(p.dtype, p.detach().clone()) for p in model.parameters()]
    model.reshard()
    return loss, grads(model), found


@rows("3.13", status="improved")
def test_trainable_parameters_of_two_dtypes(two: Pool) -> None:
    """Stock refuses trainable parameters of two dtypes in a unit; ours has a buffer for each."""
    two.run(each, trainable_of_two_dtypes)


def trainable_of_two_dtypes(api: Api) -> None:
    stock, alone, model = (
        Api("stock").fully_shard(Mixed(is_frozen=False)),
        Mixed(is_frozen=False),
        Mixed(is_frozen=False),
    )
    assert raised(lambda: stock(batch())) == "AssertionError"
    loss = train_step(api.compile(api.fully_shard(model)))
    assert torch.equal(loss, train_step(alone))
    assert [p.grad.dtype for p in model.parameters()] == [p.dtype for p in alone.parameters()]


@rows("3.15")
def test_parameter_registered_later(two: Pool) -> None:
    two.run(same, registered_later)


def registered_later(api: Api) -> Any:
    model = api.units(Own(), "inner.0")
    model.late = late = nn.Parameter(torch.ones(3))
    model.inner[0].late = nn.Parameter(torch.ones(7))
    model.inner[0].register_forward_hook(lambda m, _, out: out * m.late)
    out = api.compile(model)(batch()) * model.late
    out.square().sum().backward()
    return model.late is late, is_sharded(model), out, grads(model), list(model.state_dict())


# -- chapter 4


@rows("4.1", "4.2")
def test_placements(four: Pool) -> None:
    four.run(same, placements)


def placements(api: Api) -> Any:
    found = []
    for mesh in (mesh_of(4), mesh_of(2, 2, names=("r", "s"))):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            model = api.fully_shard(nn.Conv2d(3, 6, 2).to(dtype), mesh=mesh)
            kinds = [
                (p.stride(), p.dtype, p.is_leaf, p.device_mesh == mesh, p.device.type)
                for p in model.parameters()
            ]
            found.append((kinds, plain(params(model))))
    return found


@rows("4.3")
def test_uneven_cuts(four: Pool) -> None:
    four.run(same, uneven_cuts)


def uneven_cuts(api: Api) -> Any:
    found = []
    for size in (1, 2, 3, 4, 5, 6, 7, 9, 13):
        model = api.fully_shard(nn.Linear(3, size))
        model.unshard()
        full = [p.detach().clone() for p in model.parameters()]
        model.reshard()
        found.append((plain(params(model)), full))
    return found


@rows("4.5", status="improved")
def test_padding(four: Pool) -> None:
    """One storage for all parameters of a unit, with the same zeros behind each; stock has one for
    each parameter.
    """
    four.run(each, padding)


def padding(api: Api) -> None:
    for one in (api, Api("stock")):
        model = one.fully_shard(nn.Linear(3, 5))
        train_step_of(one.compile(model), 3)
        storages = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}
        assert len(storages) == (2 if one.is_stock else 1)
        for p in model.parameters():
            local = p.to_local()
            rows_of_all = local.as_strided((2, *p.shape[1:]), p.stride())
            assert torch.equal(rows_of_all[: len(local)], local)
            assert not rows_of_all[len(local) :].any()


def train_step_of(call: Any, width: int) -> None:
    """A step on a batch of this width."""
    call(batch(width)).sum().backward()


@rows("4.6")
def test_one_rank(two: Pool) -> None:
    two.run(same, one_rank)


def one_rank(api: Api) -> Any:
    whole, found = mesh_of(2, 1, names=("r", "s")), []
    for mesh in (whole["s"], whole):
        model = net()
        old = dict(model.named_parameters())
        api.fully_shard(model, mesh=mesh)
        with torch.no_grad():
            for parameter in old.values():
                parameter.fill_(100.0)
        cut = plain(params(model))
        found.append((cut, train_step(api.compile(model)), plain(grads(model))))
    return found


@rows("4.7", "4.13")
def test_other_dims(four: Pool) -> None:
    four.run(close, other_dims)


def test_other_dims_with_inductor(four: Pool) -> None:
    four.run(inductor_same, other_dims, timeout=SLOW)


def other_dims(api: Api) -> Any:
    model = api.fully_shard(even(), shard_placement_fn=last_dim)
    cut, is_contiguous = (
        plain(params(model)),
        [p.to_local().is_contiguous() for p in model.parameters()],
    )
    model.unshard()
    full = [p.detach().clone() for p in model.parameters()]
    model.reshard()
    out = api.compile(model)(batch(4))
    out.square().sum().backward()
    return cut, is_contiguous, full, out, grads(model)


@rows("4.8", "4.10")
def test_dims_that_are_refused(two: Pool) -> None:
    two.run(same, dims_that_are_refused)


def dims_that_are_refused(api: Api) -> Any:
    found: list[Any] = []
    for dim in (-3, -2, -1, 0, 1, 2, 5):
        linear = nn.Linear(4, 7, bias=False)
        error = raised(
            lambda m=linear, d=dim: api.fully_shard(m, shard_placement_fn=lambda p: Shard(d))
        )
        found.append((dim, error, plain(linear.weight)))
    odd = nn.Linear(37, 4, bias=False)
    text = message(lambda: api.fully_shard(odd, shard_placement_fn=last_dim))
    return (
        found,
        ["37" in text, "2" in text, "uneven sharding on dim 1" in text],
        type(odd).__name__,
    )


@rows("4.12")
def test_unsharded_parameters(two: Pool) -> None:
    two.run(same, unsharded_parameters)


def unsharded_parameters(api: Api) -> Any:
    found = []
    for policy in (
        api.MixedPrecisionPolicy(),
        api.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    ):
        model = net()
        model[2].bias.requires_grad_(False)
        api.fully_shard(model, mp_policy=policy)
        model.unshard()
        found.append(
            [
                (type(p) is nn.Parameter, p.stride(), p.requires_grad, p.is_leaf, p)
                for p in model.parameters()
            ]
        )
        found[-1] = plain(found[-1])
        model.reshard()
    return found


@rows("4.15")
def test_storage_of_unsharded_parameters(two: Pool) -> None:
    two.run(same, storage_of_unsharded_parameters)


def storage_of_unsharded_parameters(api: Api) -> Any:
    model = api.fully_shard(net())
    model.unshard()
    full, view = model[0].weight, model[0].weight.detach().t()
    before = view.clone()
    model.reshard()
    freed = full.untyped_storage().nbytes(), view.untyped_storage().nbytes()
    model.unshard()
    again = (
        model[0].weight is full,
        torch.equal(view, before),
        full.untyped_storage().nbytes() >= view.nbytes,
    )
    model.reshard()
    return freed, again


@rows("4.16")
def test_nothing_is_broadcast(four: Pool) -> None:
    four.run(same, nothing_is_broadcast, mesh_of_replicas)
    four.run(eager_same, nothing_is_broadcast, mesh_of)


def mesh_of_replicas() -> Any:
    return mesh_of(2, 2, names=("r", "s"))


def nothing_is_broadcast(api: Api, make_mesh: Any) -> Any:
    model, mesh = net(seed=torch.distributed.get_rank()), make_mesh()
    model.register_buffer("own", torch.full((2,), float(torch.distributed.get_rank())))
    counts = communications(lambda: api.fully_shard(model, mesh=mesh))
    cut = plain(params(model))
    out = api.compile(model)(batch())
    return counts, cut, out, model.own


@rows("4.17")
def test_gradients_are_placed_as_parameters(two: Pool) -> None:
    two.run(same, gradients_are_placed)


def gradients_are_placed(api: Api) -> Any:
    model = api.units(net(), "0")
    train_step(api.compile(model))
    local = [p.grad.to_local() for p in model.parameters()]
    storages = [t.untyped_storage().data_ptr() for t in local]
    is_alike = [
        p.grad.device_mesh == p.device_mesh and p.grad.placements == p.placements
        for p in model.parameters()
    ]
    return (
        is_alike,
        [storages.index(s) for s in storages],
        [t.is_contiguous() for t in local],
        grads(model),
    )


# -- chapter 5


@rows("5.1", "5.3", "5.4")
def test_devices_and_buffers(two: Pool) -> None:
    two.run(same, devices_and_buffers)


def devices_and_buffers(api: Api) -> Any:
    model, policy = Own(), api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model.register_buffer("count", torch.tensor(torch.distributed.get_rank()))
    model.register_buffer("later", torch.empty(2, device="meta"), persistent=False)
    model.inner[1].register_buffer("apart", torch.zeros(1))
    old, kept = dict(model.named_buffers()), model.scale
    api.fully_shard(model, mp_policy=policy, ignored_params={kept})
    same_objects = [b is old[name] for name, b in model.named_buffers()], model.scale is kept
    loss = train_step(api.compile(model))
    state = {
        name: value for name, value in model.state_dict().items() if not isinstance(value, DTensor)
    }
    devices = [p.device.type for p in model.parameters()], [b.device.type for b in model.buffers()]
    return same_objects, devices, loss, state, grads(model)


def _meta() -> Any:
    with torch.device("meta"):
        return Own()


@rows("5.5")
def test_meta_device(two: Pool) -> None:
    two.run(same, meta_device)


def meta_device(api: Api) -> Any:
    model = api.units(_meta(), "inner.0")
    shapes = [
        (type(p.to_local()), p.to_local().shape, p.to_local().device.type)
        for p in model.parameters()
    ]
    kinds = [
        (isinstance(p, DTensor), p.device.type, p.shape, str(p.placements))
        for p in model.parameters()
    ]
    return shapes, kinds, [b.device.type for b in model.buffers()]


@rows("5.6")
def test_meta_parameters_in_use(two: Pool) -> None:
    two.run(same, meta_in_use)


def meta_in_use(api: Api) -> Any:
    model = api.units(_meta(), "inner.0")
    text = message(lambda: model(batch()))
    named = [
        word in text for word in ("inner.0.weight", "inner.0.bias", "to_empty", "reset_parameters")
    ]
    return (
        raised(lambda: api.units(_meta(), "inner.0")(batch())),
        named,
        raised(lambda: api.units(_meta(), "inner.0").unshard()),
    )


@rows("5.6", status="improved")
def test_meta_parameters_unsharded(two: Pool) -> None:
    """Says which parameters are on the meta device; stock's `unshard` before a forward does not."""
    two.run(each, meta_unsharded)


def meta_unsharded(api: Api) -> None:
    ours, theirs = (message(one.units(_meta(), "inner.0").unshard) for one in (api, Api("stock")))
    named = re.search(r"parameters ([\w.]+), .* are on the meta device", ours)
    assert named
    assert "to_empty" in ours
    assert named[1] not in theirs


@rows("5.7")
def test_to_empty(two: Pool) -> None:
    two.run(same, to_empty)


def to_empty(api: Api) -> Any:
    model = api.units(_meta(), "inner.0")
    objects = list(model.parameters())
    model.to_empty(device="cpu")
    after = [p.device.type for p in model.parameters()], [b.device.type for b in model.buffers()]
    torch.manual_seed(1)
    with torch.no_grad():
        model.shift.fill_(2.0)
        model.scale.fill_(3.0)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
    is_kept = [a is b for a, b in zip(objects, model.parameters(), strict=True)]
    call = api.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(2):
        losses.append(train_step(call, step))
        optimizer.step()
    return after, is_kept, losses, params(model), grads(model)


@rows("5.10")
def test_to_dtype(two: Pool) -> None:
    two.run(same, to_dtype, "double", "bfloat16")
    two.run(eager_same, to_dtype, "to float64", "cpu")


CHANGES: dict[str, Any] = {
    "to float64": lambda m: m.to(torch.float64),
    "double": lambda m: m.double(),
    "cpu": lambda m: m.cpu(),
    "bfloat16": lambda m: m.bfloat16(),
}


def to_dtype(api: Api, *changes: str) -> Any:
    found = []
    for change in map(CHANGES.get, changes):
        model = api.units(Own(), "inner.0")
        objects = list(model.parameters())
        change(model)
        is_kept = [a is b for a, b in zip(objects, model.parameters(), strict=True)]
        out = api.compile(model)(batch().to(model.scale.dtype))
        out.sum().backward()
        found.append((is_kept, plain(params(model)), out, plain(grads(model))))
    return found


@rows("5.9")
def test_apply_reshards(two: Pool) -> None:
    two.run(same, apply_reshards)


def apply_reshards(api: Api) -> Any:
    model = api.units(Own(), "inner.0")
    train_step(api.compile(model))
    model.unshard()
    model.inner[0].unshard()
    seen: list[Any] = []
    model._apply(lambda t: seen.append(isinstance(t, DTensor)) or t)
    return seen, is_sharded(model), train_step(api.compile(model), 1), grads(model)


@rows("5.11")
def test_to_dtype_after_forward(two: Pool) -> None:
    two.run(same, to_dtype_after_forward)


def to_dtype_after_forward(api: Api) -> Any:
    """Stock does not support it; what ours does must be right or an error."""
    model, expected = api.units(net(), "0"), net().double()(batch().double())
    call = api.compile(model)
    train_step(call)
    model.double()
    dtypes = [(p.dtype, p.to_local().dtype) for p in model.parameters()]
    try:
        out = call(batch().double())
    except RuntimeError:
        out = None
    assert out is None or (not api.is_stock and torch.allclose(out, expected))
    return dtypes


@rows("5.12")
def test_apply_on_a_plain_child(two: Pool) -> None:
    two.run(same, apply_on_a_plain_child)


def apply_on_a_plain_child(api: Api) -> Any:
    model = api.fully_shard(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)))
    for child in model:
        child.double()
    dtypes = [(p.dtype, p.to_local().dtype) for p in model.parameters()]
    out = api.compile(model)(batch().double())
    out.sum().backward()
    return dtypes, out, grads(model)


@rows("5.13")
def test_local_tensor_of_another_size(two: Pool) -> None:
    two.run(same, local_tensor_of_another_size)
    two.run(each, local_tensor_of_another_size_by_name)


def local_tensor_of_another_size(api: Api) -> Any:
    model = api.fully_shard(even(), shard_placement_fn=last_dim)
    model[0].weight._local_tensor = torch.zeros(8, 3)
    return raised(lambda: model._apply(lambda t: t))


def local_tensor_of_another_size_by_name(api: Api) -> None:
    model = api.fully_shard(even(), shard_placement_fn=last_dim)
    model[0].weight._local_tensor = torch.zeros(8, 3)
    assert message(lambda: model._apply(lambda t: t)) == (
        "Sequential: local tensors were replaced by some of another size: 0.weight: (8, 3) instead "
        "of (8, 2). A rank's shard keeps its size; load a state dict to change values"
    )


@rows("5.13", status="improved")
def test_replaced_parameters_where_swapping_is_on(two: Pool) -> None:
    """Stock takes over replaced parameters, but raises under
    `set_swap_module_params_on_conversion(True)`; ours takes them over.
    """
    two.run(each, replaced_where_swapping_is_on)


def replaced_where_swapping_is_on(api: Api) -> None:
    results = {}
    for one in (api, Api("stock")):
        model = one.fully_shard(even())
        model[0].weight = new = nn.Parameter(model[0].weight.detach() * 2)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            results[one.kind] = raised(lambda model=model: model._apply(lambda t: t))
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        if not one.is_stock:
            out = one.compile(model)(batch(4))
            model.unshard()
            assert torch.equal(out, nn.Sequential.forward(model, batch(4)))
            model.reshard()
            assert model[0].weight is new
    assert results == {api.kind: None, "stock": "AssertionError"}


@rows("5.9")
def test_apply_takes_replaced_parameters(two: Pool) -> None:
    two.run(same, apply_takes_replaced)


def apply_takes_replaced(api: Api) -> Any:
    model = api.fully_shard(net())
    model[0].weight = new = nn.Parameter(model[0].weight.detach() * 2)
    model.cpu()
    loss = train_step(api.compile(model))
    return model[0].weight is new, loss, grads(model)
