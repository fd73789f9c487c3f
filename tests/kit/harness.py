"""One training loop for every way to train, so that tests can lay the results side by side.

`trace_of(kind, options)` runs inside a worker of a `Pool` and returns a `Trace`: losses, and after
each step this rank's shard of every gradient and parameter. The kinds:

unsharded  the model as it is; each backward's gradients are averaged over the ranks, in an order
           written down here
stock      torch.distributed.fsdp.fully_shard, eager
eager      ours, not compiled
compiled   ours, torch.compile(backend="compiled_fsdp_eager", fullgraph=True)
inductor   ours, torch.compile(fullgraph=True)
aot_eager  ours, the ops run as they are, unlowered
"""

from __future__ import annotations

import logging
import math
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from kit.compare import check_equal
from kit.models import RECIPES, loss_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from compiled_fsdp import fully_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor, nn

BACKENDS = {"compiled": "compiled_fsdp_eager", "inductor": "inductor", "aot_eager": "aot_eager"}

# Cannot do some things that 2.13 can, sharded or not: docs/torch_versions.md.
IS_2_11 = TorchVersion(torch.__version__) < "2.12"
IS_BEFORE_2_14 = TorchVersion(torch.__version__) < "2.14"
SLOW = 600.0  # seconds that a test gets in which a C++ compiler runs
ROUNDING = (1e-4, 1e-5)  # relative, absolute: where operations are fused, or added in another order

Tensors = dict[str, "Tensor | None"]


@contextmanager
def quiet() -> Iterator[None]:
    """Without Dynamo's own words about its limit."""
    log = logging.getLogger("torch._dynamo")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


@dataclass(frozen=True)
class Options:
    """A training run; the same for every kind.

    policies: one `MixedPrecisionPolicy` by argument, for all units, or one for each unit in turn
        (the last repeats).
    mesh: "1d", "hsdp" (world size / 2 replicas of 2 shards), or "hsdp_1x4".
    ignore: names of parameters that are not sharded; their gradients are left per rank.
    num_backwards: backwards before each optimizer step.
    """

    model: str
    steps: int = 5
    reshard: bool | int | None = None
    policies: tuple[MixedPrecisionPolicy, ...] = (MixedPrecisionPolicy(),)
    mesh: str = "1d"
    ignore: tuple[str, ...] = ()
    optimizer: str = "adamw"
    num_backwards: int = 1
    set_to_none: bool = True
    max_norm: float | None = None
    evaluate: bool = False


@dataclass
class Trace:
    """What happened: per step the loss, every gradient and parameter (this rank's shard); at the
    end every buffer.
    """

    losses: list[float] = field(default_factory=list)
    grads: list[Tensors] = field(default_factory=list)
    params: list[Tensors] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    buffers: Tensors = field(default_factory=dict)
    num_graphs: int = 0


@cache
def mesh_of(kind: str) -> DeviceMesh:
    """Process groups are costly: one mesh of a kind for all tests of a worker."""
    world = dist.get_world_size()
    if kind == "1d":
        return init_device_mesh("cpu", (world,))
    if kind == "hsdp_1x4":
        return init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))


def build(model: str) -> nn.Module:
    torch.manual_seed(1234)
    return RECIPES[model].build()


def shard(model: nn.Module, options: Options, apply: Callable[..., Any]) -> nn.Module:
    """Apply stock's or our `fully_shard` to the units of a recipe."""
    names = dict(model.named_parameters())
    ignored = {names[name] for name in options.ignore} or None
    for i, unit in enumerate(RECIPES[options.model].units(model)):
        policy = options.policies[min(i, len(options.policies) - 1)]
        apply(
            unit,
            mesh=mesh_of(options.mesh),
            reshard_after_forward=options.reshard,
            mp_policy=policy,
            ignored_params=ignored,
        )
    return model


def make(kind: str, options: Options) -> tuple[nn.Module, Callable[..., Any], list[int]]:
    """The model, what to call (the model, or it compiled), and a count of the graphs that Dynamo
    captured.
    """
    model, graphs = build(options.model), [0]
    if kind != "unsharded":
        shard(model, options, stock_fully_shard if kind == "stock" else fully_shard)
    if kind not in BACKENDS:
        return model, model, graphs
    backend = torch._dynamo.lookup_backend(BACKENDS[kind])

    def counting(gm: Any, inputs: Any, **more: Any) -> Any:
        graphs[0] += 1
        return backend(gm, inputs, **more)

    return model, torch.compile(model, backend=counting, fullgraph=True), graphs


def optimizer_of(name: str, params: Iterable[Any]) -> torch.optim.Optimizer:
    kind, *flags = name.split("+")
    on = dict.fromkeys(flags, True)
    trained = [p for p in params if p.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01, **on)
    return torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1, **on)


def batch_of(model: str, step: int) -> tuple[Tensor, ...]:
    """Different on every rank, the same for every kind."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return RECIPES[model].batch(generator)


def local(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def shard_of(full: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows as `torch.chunk` cuts them, and none on ranks that chunk leaves out."""
    size, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    rows = math.ceil(full.shape[0] / size)
    return full[min(rank * rows, full.shape[0]) : min((rank + 1) * rows, full.shape[0])]


def mean_over_ranks(grad: Tensor, mesh: DeviceMesh) -> Tensor:
    """The mean, summed within a shard group in rank order and then over the replicas in rank
    order.
    """
    pieces = [torch.empty_like(grad) for _ in range(mesh.size())]
    dist.all_gather(pieces, grad.contiguous())
    width = mesh.size(mesh.ndim - 1)
    groups = [sum(pieces[i : i + width][1:], pieces[i]) for i in range(0, len(pieces), width)]
    return sum(groups[1:], groups[0]) / len(pieces)


def train(
    call: Callable[..., Tensor], optimizer: torch.optim.Optimizer, batches: Iterable[Any]
) -> list[float]:
    """The loss of each step; a step is a forward, a backward and the optimizer's for one batch."""
    losses = []
    for batch in batches:
        loss = loss_of(call(*batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compiled(model: Any, **options: Any) -> Any:
    """The model, or a function, compiled into whole graphs by our own backend."""
    return torch.compile(model, **{"backend": BACKENDS["compiled"], "fullgraph": True, **options})


def trace_of(kind: str, options: Options) -> Trace:
    """One run; see the module docstring."""
    model, call, graphs = make(kind, options)
    optimizer = optimizer_of(options.optimizer, model.parameters())
    trace = Trace()
    params = dict(model.named_parameters())
    for step in range(options.steps):
        for micro in range(options.num_backwards):
            before = {name: p.grad for name, p in params.items()}
            if kind == "unsharded":
                optimizer.zero_grad()
            loss = loss_of(call(*batch_of(options.model, step * options.num_backwards + micro)))
            loss.backward()
            trace.losses.append(loss.item())
            if kind == "unsharded":
                _reduce(params, before, options)
        if options.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_norm)
            trace.norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        trace.grads.append(_shards({name: p.grad for name, p in params.items()}, kind, options))
        optimizer.step()
        optimizer.zero_grad(set_to_none=options.set_to_none)
        trace.params.append(_shards(dict(model.named_parameters()), kind, options))
        if options.evaluate:
            model.eval()
            with torch.no_grad():
                trace.evaluations.append(loss_of(call(*batch_of(options.model, 777 + step))).item())
            model.train()
    trace.buffers = {name: b.clone() for name, b in model.named_buffers()}
    trace.num_graphs = graphs[0]
    return trace


def _reduce(params: dict[str, nn.Parameter], before: Tensors, options: Options) -> None:
    """What FSDP does after each backward by itself: the mean over the ranks, added to the gradients
    from `before`.
    """
    for name, p in params.items():
        if p.grad is not None and name not in options.ignore:
            p.grad = mean_over_ranks(p.grad, mesh_of(options.mesh))
        earlier = before[name]
        if earlier is not None:
            p.grad = earlier if p.grad is None else earlier + p.grad


def _shards(tensors: Tensors, kind: str, options: Options) -> Tensors:
    """Copies of this rank's shards; an unsharded tensor is cut by the rule, an ignored one stays
    whole.
    """
    mesh, shards = mesh_of(options.mesh), {}
    for name, tensor in tensors.items():
        is_cut = kind == "unsharded" and tensor is not None and name not in options.ignore
        shards[name] = shard_of(tensor, mesh).detach().clone() if is_cut else local(tensor)
    return shards


def observed(trace: Trace) -> dict[str, Any]:
    """What two traces must have in common."""
    return {name: value for name, value in vars(trace).items() if name != "num_graphs"}


def check_parity(
    options: Options,
    against: tuple[str, ...] = ("stock", "unsharded"),
    kinds: tuple[str, ...] = ("eager", "compiled"),
    rtol: float = 0.0,
    atol: float = 0.0,
    exact: tuple[str, ...] = (),
) -> None:
    """Worker function: train every kind and compare each of ours with each oracle; with the `exact`
    ones every bit counts.
    """
    oracles = {kind: trace_of(kind, options) for kind in against}
    for oracle in oracles.values():
        assert len(set(oracle.losses)) > 1, (
            "the oracle does not learn, so the comparison shows nothing"
        )
    for kind in kinds:
        ours = trace_of(kind, options)
        for name, oracle in oracles.items():
            tolerances = (0.0, 0.0) if name in exact else (rtol, atol)
            check_equal(
                observed(ours), observed(oracle), f"{kind} against {name}, {options}", *tolerances
            )
        if kind in BACKENDS:
            # one graph for training; evaluation under no_grad is another
            assert ours.num_graphs == 1 + options.evaluate, f"{kind}: {ours.num_graphs} graphs"
