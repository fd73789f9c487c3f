"""Chapter 4b of the specification: parameters that are DTensors before they are cut, and
`dp_mesh_dims`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.compare import plain
from kit.oracle import (
    Api,
    each,
    grads,
    mesh_of,
    message,
    params,
    raised,
    rows,
    same,
    stock_has,
)
from torch import Tensor, nn
from torch.distributed import fsdp as stock
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool

HAS_DIMS = hasattr(stock, "DataParallelMeshDims")
DataParallelMeshDims: Any = stock.DataParallelMeshDims if HAS_DIMS else dict
needs_dims = pytest.mark.skipif(not HAS_DIMS, reason="dp_mesh_dims came with torch 2.13")

# AOTAutograd traces DTensor's backward with other placements in between than eager autograd takes,
# with or without FSDP.
OTHER_PLACEMENTS = (1e-5, 1e-6)


class Block(nn.Module):
    """Ten hidden columns: over two tensor-parallel ranks five, over two data-parallel ones three
    and two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 10), nn.Linear(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def blocks(mesh: DeviceMesh | None = None, *, is_sequence_parallel: bool = False) -> nn.Sequential:
    """Two blocks and a head; with a mesh, each block computes in parallel, and the norms too if its
    sequence is cut.
    """
    torch.manual_seed(7)
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 3))
    if mesh is None:
        return model
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if is_sequence_parallel:
        plan = {
            "norm": SequenceParallel(use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        whole = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
        )
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh, {"0": whole, "2": head})
    for block in model[:2]:
        parallelize_module(block, mesh, plan)
    return model


def eager(observe: Callable[..., Any], *args: Any) -> None:
    same(observe, *args, kinds=("eager",))


def close_compiled(observe: Callable[..., Any], *args: Any) -> None:
    same(observe, *args, kinds=("compiled",), rtol=OTHER_PLACEMENTS[0], atol=OTHER_PLACEMENTS[1])


def each_eager(observe: Callable[..., Any]) -> None:
    each(observe, kinds=("eager",))


def stock_too(observe: Callable[..., Any]) -> None:
    each(observe, kinds=("stock", "eager"))


def batch(mesh: DeviceMesh, step: int, *axes: str) -> Tensor:
    """Different along these axes of the mesh, the same along the others."""
    seed = 100 * step + sum(
        10 ** (i + 1) * mesh.get_local_rank(axis) for i, axis in enumerate(axes)
    )
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed))


def learn(model: nn.Module, call: Any, inputs: list[Tensor]) -> Any:
    """Losses, gradients and parameters of some steps; foreach optimizers refuse parameters on
    several meshes.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    found = []
    for x in inputs:
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(plain((loss, grads(model), params(model))))
        optimizer.zero_grad()
    return found


def places(model: nn.Module) -> Any:
    """Where every parameter is."""
    found = {}
    for name, p in model.named_parameters():
        mesh = p.device_mesh if isinstance(p, DTensor) else None
        found[name] = (
            mesh
            and (mesh.mesh_dim_names, mesh.shape, str(p.placements), tuple(p.to_local().shape)),
            tuple(p.shape),
        )
    return found


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
@rows("4b.1", "4b.2", "4b.7", "4b.8", "4b.9")
def test_tensor_parallel(two: Pool, four: Pool, is_sequence_parallel: bool) -> None:
    if not is_sequence_parallel:
        two.run(same, tensor_parallel, (1, 2), False)
    four.run(same, tensor_parallel, (2, 2), is_sequence_parallel)


def tensor_parallel(api: Api, shape: tuple[int, ...], is_sequence_parallel: bool) -> Any:
    """With a norm computed on a part of the sequence, its gradient is Partial on the
    tensor-parallel axis.
    """
    mesh = mesh_of(*shape, names=("dp", "tp"))
    model = api.units(
        blocks(mesh["tp"], is_sequence_parallel=is_sequence_parallel), "0", "1", mesh=mesh["dp"]
    )
    found = [places(model)]
    model[0].unshard()
    found += [places(model), plain(params(model[0]))]
    model[0].reshard()
    found += [
        places(model),
        learn(model, api.compile(model), [batch(mesh, step, "dp") for step in range(3)]),
    ]
    return found


@pytest.mark.skipif(not HAS_DIMS, reason="torch 2.11 cannot view what is cut on a sequence")
def test_each_slice_of_a_mesh_is_another_object(four: Pool) -> None:
    """A DTensor goes in over one `mesh["tp"]`, parameters are over others, and a DTensor comes
    out.
    """
    four.run(same, over_equal_meshes)


def over_equal_meshes(api: Api) -> Any:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    assert mesh["tp"] is not mesh["tp"]
    model = nn.Sequential(Block(), Block())
    torch.manual_seed(7)
    for block in model:
        plan: dict[str, Any] = {"up": ColwiseParallel()}
        plan["down"] = RowwiseParallel(use_local_output=False)
        parallelize_module(block, mesh["tp"], {**plan, "norm": SequenceParallel()})
        api.fully_shard(block, mesh=mesh["dp"])
    call = api.compile(model)
    x = DTensor.from_local(batch(mesh, 0, "dp"), mesh["tp"], [Replicate()])
    result = call(x)
    result.to_local().square().mean().backward()
    return plain((result.detach(), grads(model)))


@rows("4b.8")
def test_in_bf16(four: Pool) -> None:
    """Since 2.15 gradients are summed over the tensor-parallel axis in the dtype of the reduction,
    not in bf16.
    """
    four.run(same, in_bf16)


def in_bf16(api: Api) -> Any:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = api.units(
        blocks(mesh["tp"], is_sequence_parallel=True), "0", "1", mesh=mesh["dp"], mp_policy=policy
    )
    model[0].unshard()
    dtypes = [(p.dtype, p.to_local().dtype) for p in model[0].parameters()]
    model[0].reshard()
    return dtypes, learn(model, api.compile(model), [batch(mesh, step, "dp") for step in range(2)])


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)])
@rows("4b.1", "4b.4")
def test_hsdp_and_tensor_parallel(four: Pool, shape: tuple[int, ...]) -> None:
    four.run(same, hsdp_and_tensor_parallel, shape)


def hsdp_and_tensor_parallel(api: Api, shape: tuple[int, ...]) -> Any:
    mesh = mesh_of(*shape, names=("replicate", "shard", "tp"))
    model = nn.Sequential(*blocks(mesh["tp"])[1:])
    api.units(model, "0", mesh=mesh["replicate", "shard"])
    steps = learn(
        model, api.compile(model), [batch(mesh, step, "replicate", "shard") for step in range(2)]
    )
    return places(model), steps


@rows("4b.5")
def test_unsupported_inputs(two: Pool) -> None:
    two.run(eager, unsupported_inputs)
    two.run(each_eager, unsupported_inputs_in_words)


def _unsupported(api: Api) -> dict[str, Any]:
    def linear(mesh: DeviceMesh) -> nn.Module:
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(
            distribute_tensor(layer.weight.detach(), mesh, [Replicate()] * mesh.ndim)
        )
        return layer

    many = mesh_of(2, 1, 1, 1, names=("dp", "a", "b", "c"))
    both = mesh_of(2, 1, names=("dp", "tp"))
    other = DeviceMesh("cpu", torch.tensor([[1], [0]]), mesh_dim_names=("x", "y"))
    return {
        "only supports one or two axes": lambda: api.fully_shard(
            linear(many["a", "b", "c"]), mesh=many["dp"]
        ),
        "both need mesh_dim_names": lambda: api.fully_shard(
            linear(both["tp"]), mesh=init_device_mesh("cpu", (2,))
        ),
        "different device mesh": lambda: api.fully_shard(linear(other["y"]), mesh=both["dp"]),
        "overlapping": lambda: api.fully_shard(linear(both["dp"]), mesh=both["dp"]),
    }


def unsupported_inputs(api: Api) -> Any:
    return [raised(call) for call in _unsupported(api).values()]


def unsupported_inputs_in_words(api: Api) -> None:
    for text, call in _unsupported(api).items():
        said = message(call)
        assert text in said, said
        assert "parameter weight" in said or "weight of shape" in said, said


@rows("4b.9")
def test_gradient_that_is_no_dtensor(two: Pool) -> None:
    two.run(same, gradient_that_is_no_dtensor)


class Plain(torch.autograd.Function):
    """Takes a DTensor, and gives a plain gradient for it."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        return weight.to_local().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Careless(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ Plain.apply(self.weight)


def gradient_that_is_no_dtensor(api: Api) -> Any:
    mesh = mesh_of(2, 1, names=("dp", "tp"))
    model = Careless(8, 8, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Replicate()]))
    api.fully_shard(model, mesh=mesh["dp"])
    model.set_is_last_backward(True)
    error = raised(lambda: model(batch(mesh, 0, "dp")).sum().backward())
    if not api.is_stock or stock_has("reset_iter_state"):
        model.reset_iter_state()
    return error


@rows("4b.10", status="improved")
def test_int_reshard(four: Pool) -> None:
    """Stock fails in the first forward, ours in the call."""
    four.run(stock_too, int_reshard)


def int_reshard(api: Api) -> None:
    """Stock fails in the first forward, ours in the call."""
    mesh = mesh_of(4, 1, names=("dp", "tp"))
    for size in (1, 4):  # means False and True
        model = api.fully_shard(blocks(mesh["tp"]), mesh=mesh["dp"], reshard_after_forward=size)
        model(batch(mesh, 0, "dp")).sum().backward()
    assert raised(lambda: _forward(api, mesh)) == "NotImplementedError"
    if not api.is_stock:
        text = message(
            lambda: api.fully_shard(blocks(mesh["tp"]), mesh=mesh["dp"], reshard_after_forward=2)
        )
        assert "reshard_after_forward=2" in text
        assert "up.weight" in text


def _forward(api: Api, mesh: DeviceMesh) -> None:
    api.fully_shard(blocks(mesh["tp"]), mesh=mesh["dp"], reshard_after_forward=2)(
        batch(mesh, 0, "dp")
    )


def test_mixed_unit(four: Pool) -> None:
    """One unit, plain norms and parallel layers: it trains, and what torch refuses for several
    meshes, it refuses for both.
    """
    four.run(same, mixed_unit)


def mixed_unit(api: Api) -> Any:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    model = api.fully_shard(blocks(mesh["tp"]), mesh=mesh["dp"])
    call = api.compile(model)
    call(batch(mesh, 0, "dp")).sum().backward()
    errors = [
        raised(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        raised(torch.optim.SGD(model.parameters(), lr=0.1, foreach=True).step),
    ]
    model.zero_grad()
    return errors, learn(model, call, [batch(mesh, step, "dp") for step in range(2)])


# -- dp_mesh_dims; names of their own, since stock compares meshes by identity and DTensor's caches
# hold equal ones

DIMS = {
    "shard": ((2, 2), ("data", "model"), DataParallelMeshDims(shard="data"), 1),
    "shard, model first": ((2, 2), ("model", "data"), DataParallelMeshDims(shard="data"), 0),
    "replicate": ((2, 2), ("data", "model"), DataParallelMeshDims(replicate="data"), 1),
    "both": (
        (2, 2),
        ("outer", "inner"),
        DataParallelMeshDims(shard="inner", replicate="outer"),
        None,
    ),
    "two shard": (
        (2, 1, 2),
        ("one", "another", "model"),
        DataParallelMeshDims(shard=("one", "another")),
        2,
    ),
    "two replicate": (
        (2, 1, 2),
        ("one", "another", "model"),
        DataParallelMeshDims(replicate=("one", "another")),
        2,
    ),
    "three": (
        (2, 1, 2),
        ("r", "one", "another"),
        DataParallelMeshDims(shard=("one", "another"), replicate="r"),
        None,
    ),
}


# Each kind of axis once: which axes are meant is settled before a graph is made.
COMPILED_DIMS = ("shard", "replicate", "both", "three")


class Local(nn.Module):
    """A block and a head on a full mesh, where every activation is a DTensor too; returns this
    rank's part of the batch.

    A loss over the whole batch would leave it to DTensor whether a gradient is a sum over the
    data-parallel ranks already: stock takes the mean over them either way.
    """

    def __init__(self, body: nn.Module, placements: list[Any]) -> None:
        super().__init__()
        self.body, self.placements = body, placements

    def forward(self, x: DTensor) -> Tensor:
        return self.body(x).redistribute(placements=self.placements).to_local()


def distributed(mesh: DeviceMesh, model_axis: int | None, placements: list[Any]) -> Local:

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, p in list(module.named_parameters(recurse=False)):
            placements: list[Any] = [Replicate()] * mesh.ndim
            if model_axis is not None and name.endswith("up"):
                placements[model_axis] = Shard(0)
            elif model_axis is not None and (name[-4:], key) == ("down", "weight"):
                placements[model_axis] = Shard(1)
            module.register_parameter(
                key, nn.Parameter(distribute_tensor(p.detach(), mesh, placements))
            )

    model = nn.Sequential(*blocks()[1:])
    distribute_module(model, mesh, partition)
    return Local(model, placements)


def distributed_batches(
    mesh: DeviceMesh, dims: DataParallelMeshDims, *, is_cut: bool
) -> tuple[list[Tensor], list[Any]]:
    """Cut over the data-parallel axes, or the whole of it everywhere; and how it is placed."""
    names = (*dims.replicate_names, *dims.shard_names) if is_cut else ()
    placements = [Shard(0) if name in names else Replicate() for name in mesh.mesh_dim_names or ()]
    return [
        DTensor.from_local(batch(mesh, step, *names), mesh, placements) for step in range(3)
    ], placements


@needs_dims
@pytest.mark.parametrize("case", DIMS)
@rows("4b.11", "4b.13", "4b.17", "4b.19")
def test_dims(four: Pool, case: str) -> None:
    """A batch that is cut leaves gradients Partial on the data-parallel axes, one that is not
    leaves them Replicate.
    """
    for is_cut in (True, False):
        four.run(eager, dims_of, case, is_cut)
    if case in COMPILED_DIMS:
        four.run(close_compiled, dims_of, case, case != "replicate")


def dims_of(api: Api, case: str, is_cut: bool) -> Any:
    shape, names, dims, model_axis = DIMS[case]
    mesh = mesh_of(*shape, names=names)
    inputs, placements = distributed_batches(mesh, dims, is_cut=is_cut)
    model = api.units(
        distributed(mesh, model_axis, placements), "body.0", mesh=mesh, dp_mesh_dims=dims
    )
    found = [places(model)]
    model.body[0].unshard()
    found.append(places(model))
    model.body[0].reshard()
    return [*found, learn(model, api.compile(model), inputs)]


@needs_dims
@rows("1.17", "1.20", "1.29", "4b.11", "4b.14", "4b.15", "12.8", "12.19")
def test_dims_errors(four: Pool) -> None:
    four.run(eager, dims_errors)
    four.run(each_eager, dims_errors_in_words)


def _wrong_dims(api: Api) -> dict[str, Any]:
    def placed(*placements: Any) -> nn.Module:
        layer = nn.Linear(4, 4, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, placements))
        return layer

    mesh = mesh_of(2, 2, names=("data", "model"))
    other = mesh_of(2, 2, names=("outer", "inner"))
    whole, shard, replicate = (
        (Replicate(), Replicate()),
        DataParallelMeshDims("data"),
        DataParallelMeshDims(None, "data"),
    )

    def call(
        model: nn.Module, mesh: DeviceMesh = mesh, dims: Any = shard, **options: Any
    ) -> nn.Module:
        return api.fully_shard(model, mesh=mesh, dp_mesh_dims=dims, **options)

    def replicated() -> Any:
        return call(placed(*whole), dims=replicate)

    return {
        "an int is not supported with dp_mesh_dims": lambda: call(
            placed(*whole), reshard_after_forward=2
        ),
        "needs a mesh that shards": lambda: call(
            placed(*whole), dims=replicate, shard_placement_fn=lambda p: Shard(0)
        ),
        "no mesh_dim_names": lambda: call(placed(*whole), mesh=init_device_mesh("cpu", (2, 2))),
        "'x' is not found": lambda: call(placed(*whole), dims=DataParallelMeshDims(shard="x")),
        "plain tensor": lambda: call(nn.Linear(4, 4)),
        "Pass the full mesh": lambda: call(
            placed(*whole), mesh=other, dims=DataParallelMeshDims("outer")
        ),
        "dim 'data' (index 0)": lambda: call(placed(Shard(0), Replicate())),
        "placed as S(1)": lambda: call(placed(Shard(1), Replicate()), dims=replicate),
        "at least one": lambda: DataParallelMeshDims(),
        "set_reshard_after_forward": lambda: replicated().set_reshard_after_forward(True),
        "set_separate_reduce_scatter_group": lambda: (
            replicated().set_separate_reduce_scatter_group()
        ),
    }


def dims_errors(api: Api) -> Any:
    return [raised(call) for call in _wrong_dims(api).values()]


def dims_errors_in_words(api: Api) -> None:
    for text, call in _wrong_dims(api).items():
        assert text.lower() in message(call).lower(), (text, message(call))


@needs_dims
@rows("4b.11", "4b.17")
def test_other_arguments_beside_dims(four: Pool) -> None:
    """Another dim to cut, and parameters that are kept after forward."""
    four.run(eager, other_arguments)


def other_arguments(api: Api) -> Any:
    mesh = mesh_of(2, 2, names=("data", "model"))
    dims = DataParallelMeshDims("data")
    inputs, placements = distributed_batches(mesh, dims, is_cut=True)
    model = distributed(mesh, 1, placements)

    def columns(p: nn.Parameter) -> Shard | None:
        return Shard(1) if p.dim() == 2 and p.to_local().shape[1] % 2 == 0 else None

    options = {"mesh": mesh, "dp_mesh_dims": dims, "reshard_after_forward": False}
    api.fully_shard(model, shard_placement_fn=columns, **options)
    return places(model), learn(model, model, inputs)
