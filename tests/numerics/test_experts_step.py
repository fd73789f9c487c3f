"""`compile_step` for mixtures of experts that are divided among ranks: experts that no unit has are
updated in the graph, with the numbers of the ordinary loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import check_equal
from kit.graphs import captured
from kit.harness import ROUNDING, SLOW, local
from kit.overlap import OPTIMIZERS
from kit.routed import ALONE
from kit.routed import BALANCED as CONFIG
from moe import Mixture, MoEGPT, share_experts
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from compiled_fsdp import Muon, compile_step, fully_shard, planned
from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import find, order
from compiled_fsdp.ir.schema import UPDATE
from compiled_fsdp.torch_private.compiled import recompiles

if TYPE_CHECKING:
    from kit.pool import Pool

STEPS = 4
SCALES = {"init_scale": 1331.0, "growth_factor": 1.5, "backoff_factor": 0.7, "growth_interval": 2}


@dataclass(frozen=True)
class Way:
    """How a step is taken.

    optimizer: of two, joined by "+", the first has the experts.
    is_scaled: with a scaler, and a loss that is infinite on one rank in the second step.
    is_plain: experts are plain tensors, not DTensors.
    is_scheduled: the learning rate halves with each step.
    """

    optimizer: str = "adamw"
    clip: float | None = None
    count: int = 1
    once: bool = False
    chunks: int = 1
    is_scaled: bool = False
    is_plain: bool = False
    is_scheduled: bool = False


def build(way: Way = Way()) -> MoEGPT:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MoEGPT(CONFIG)
    for mixture in mixtures(model):
        mixture.router.weight.data.mul_(8.0)  # so that routing differs from token to token
        mixture.chunks = way.chunks
    return model


def mixtures(model: nn.Module) -> list[Mixture]:
    return [m for m in model.modules() if isinstance(m, Mixture)]


def distribute(model: Any, way: Way = Way(), *, with_efsdp: bool = False) -> Any:
    """Experts over all ranks, in no unit; or over two, and in units over the other axis."""
    if with_efsdp:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
        whole = mesh["efsdp", "ep"]._flatten("dp")
        share_experts(model, mesh["ep"])
        for layer in model.layers:
            fully_shard(layer.mixture.experts, mesh=mesh["efsdp"])
            fully_shard(layer, mesh=whole)
        return fully_shard(model, mesh=whole)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ignored = share_experts(model, mesh)
    if way.is_plain:
        for mixture in mixtures(model):
            for name, p in [*mixture.experts.named_parameters()]:
                setattr(mixture.experts, name, nn.Parameter(p.to_local().detach().clone()))
        ignored = {p for m in mixtures(model) for p in m.experts.parameters()}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    return fully_shard(model, mesh=mesh, ignored_params=ignored)


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    data = torch.randint(CONFIG.vocab, (2, 9), generator=generator)
    return data[:, :-1], data[:, 1:]


def loss_fn(model: Any, tokens: Tensor, targets: Tensor, factor: Tensor) -> Tensor:
    loss: Tensor = model(tokens, targets) * factor
    return loss


def batches(way: Way, step: int, rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    is_infinite = way.is_scaled and step == 1 and rank == dist.get_world_size() - 1
    factor = torch.tensor(float("inf") if is_infinite else 1.0)
    return [(*batch(way.count * step + i, rank), factor) for i in range(way.count)]


def route(model: nn.Module, step: int) -> None:
    """In the third step all tokens go to the first experts: the last rank gets none;
    in the fourth to the last ones.
    """
    for mixture in mixtures(model):
        mixture.bias.zero_()
        if step >= 2:
            half = slice(0, 2) if step == 2 else slice(2, 4)
            mixture.bias[half] = 10.0


def schedule_of(way: Way, optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if way.is_scheduled else None


def optimizers_of(model: Any, way: Way) -> list[Any]:
    if "+" not in way.optimizer:
        return [OPTIMIZERS[way.optimizer](model.parameters())]
    experts = [p for m in mixtures(model) for p in m.experts.parameters()]
    held = {id(p) for p in experts}
    others = [p for p in model.parameters() if id(p) not in held]
    kinds = way.optimizer.split("+")
    return [OPTIMIZERS[kind](ps) for kind, ps in zip(kinds, (experts, others), strict=True)]


def state_of(model: Any, *optimizers: Any) -> list[Any]:
    state = [
        [local(v) for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
        for optimizer in optimizers
        for p in model.parameters()
    ]
    return [[local(p) for p in model.parameters()], state]


def looped(model: Any, way: Way, call: Any = None) -> list[Any]:
    """Losses and scales of the ordinary loop, and the state at its end."""
    optimizers = optimizers_of(model, way)
    scaler = torch.amp.GradScaler("cpu", enabled=way.is_scaled, **SCALES)
    schedule = schedule_of(way, optimizers[0])
    losses = []
    for step in range(STEPS):
        route(model, step)
        total = torch.zeros(())
        for i, each in enumerate(batches(way, step, dist.get_rank())):
            if way.once:
                model.set_requires_gradient_sync(i == way.count - 1)
            loss = loss_fn(call or model, *each) / way.count
            scaler.scale(loss).backward()
            total = total + loss.detach()
        if way.clip:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), way.clip)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        if schedule is not None:
            schedule.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(str(float(total)))
    return [losses, scaler.get_scale(), *state_of(model, *optimizers)]


def whole(
    model: Any, way: Way, backend: str = "compiled_fsdp_eager", **more: Any
) -> tuple[list[Any], Any, Any]:
    """The same by a compiled step; and its first optimizer."""
    optimizers = optimizers_of(model, way)
    scaler = torch.amp.GradScaler("cpu", enabled=way.is_scaled, **SCALES)
    step = compile_step(
        model, optimizers, loss_fn, clip=way.clip, accumulate=way.count, reduce_once=way.once,
        scaler=scaler, schedule=schedule_of(way, optimizers[0]), backend=backend, **more,
    )  # fmt: skip
    losses = []
    counters.clear()
    for i in range(STEPS):
        route(model, i)
        given = batches(way, i, dist.get_rank())
        losses.append(str(float(step(given) if way.count > 1 else step(*given[0]))))
        if not more.get("keep_grads"):
            assert all(p.grad is None for p in model.parameters())
    assert counters["stats"]["unique_graphs"] == 1, (counters["stats"], recompiles())
    return [losses, scaler.get_scale(), *state_of(model, *optimizers)], optimizers[0], step


WAYS = {
    "adamw": Way(),
    "clipped": Way("sgd", clip=0.05, is_scheduled=True),
    "accumulated": Way("adamw_fused", clip=0.1, count=2),
    "reduced once, in chunks": Way("sgd", count=2, once=True, chunks=2),
    "scaled": Way("adamw", clip=0.05, is_scaled=True),
    "scaled, fused": Way("adamw_fused", is_scaled=True),
    "scaled, two optimizers": Way("adamw+sgd", clip=0.05, is_scaled=True, is_scheduled=True),
    "scaled, two fused": Way("adamw_fused+adamw_fused", is_scaled=True),
    "plain tensors": Way("adamw", count=2, is_plain=True),
}


def compare(name: str) -> None:
    way = WAYS[name]
    wanted = looped(distribute(build(way), way), way)
    found, _, _ = whole(distribute(build(way), way), way)
    assert len(set(wanted[0])) == STEPS, wanted[0]
    check_equal(found, wanted, name)


@pytest.mark.parametrize("name", WAYS)
def test_two_ranks(two: Pool, name: str) -> None:
    """Bit for bit the loop; ranks without tokens, and no second graph."""
    two.run(compare, name, timeout=SLOW)


# -- beside one process that has all the experts


def alone(model: Any, way: Way) -> list[Any]:
    """Losses of this rank, and all parameters at the end, of one process with all experts and the
    tokens of all ranks.
    """
    optimizer = OPTIMIZERS[way.optimizer](model.parameters())
    losses = []
    for step in range(STEPS):
        route(model, step)
        means = []
        for rank in range(dist.get_world_size()):
            each = [loss_fn(model, *one) / way.count for one in batches(way, step, rank)]
            means.append(torch.stack(each).sum())
        torch.stack(means).mean().backward()
        losses.append(float(means[dist.get_rank()].detach()))
        if way.clip:
            nn.utils.clip_grad_norm_(model.parameters(), way.clip)
        optimizer.step()
        optimizer.zero_grad()
    return [losses, [p.detach() for p in model.parameters()]]


def full(model: Any) -> list[Tensor]:
    return [p.full_tensor().detach() for p in model.parameters()]


# By SGD: the first steps of Adam are signs of gradients, whatever their size.
BESIDE_ALONE = Way("sgd", clip=0.05, count=2)


def compare_alone(with_efsdp: bool, backend: str = "compiled_fsdp_eager") -> list[Any]:
    """What the compiled step has found, close to one process."""
    way = BESIDE_ALONE
    wanted = alone(build(way), way)
    model = distribute(build(way), way, with_efsdp=with_efsdp)
    found, _, _ = whole(model, way, backend)
    check_equal([float(loss) for loss in found[0]], wanted[0], "losses", *ALONE)
    check_equal(full(model), wanted[1], "parameters", *ALONE)
    return found


def test_one_process(two: Pool) -> None:
    two.run(compare_alone, False, timeout=SLOW)


def looped_by_kind(model: Any, way: Way) -> list[Any]:
    """The loop where `clip_grad_norm_` cannot be called, since parameters lie on two meshes: one
    norm each, put together by hand.
    """
    optimizer = OPTIMIZERS[way.optimizer](model.parameters())
    losses = []
    for step in range(STEPS):
        route(model, step)
        total = torch.zeros(())
        for each in batches(way, step, dist.get_rank()):
            loss = loss_fn(model, *each) / way.count
            loss.backward()
            total = total + loss.detach()
        kinds: dict[int, list[Any]] = {}
        for p in model.parameters():
            kinds.setdefault(p.device_mesh.ndim, []).append(p)
        norms = [nn.utils.get_total_norm([p.grad for p in each]) for each in kinds.values()]
        norm = torch.linalg.vector_norm(torch.stack([norm.full_tensor() for norm in norms]))
        if way.clip:
            assert len(kinds) == 2
            for each in kinds.values():
                nn.utils.clip_grads_with_norm_(each, way.clip, norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(str(float(total)))
    return [losses, *state_of(model, optimizer)]


def compare_efsdp() -> None:
    losses, _, *state = compare_alone(True)
    way = BESIDE_ALONE
    wanted = looped_by_kind(distribute(build(way), way, with_efsdp=True), way)
    check_equal([losses, *state], wanted, "two meshes")


def test_efsdp(four: Pool) -> None:
    """Experts in units over an axis of their own: bit for bit the loop, whose norms are put
    together by hand, and close to one process.
    """
    four.run(compare_efsdp, timeout=SLOW)


def compare_four() -> None:
    way = Way("adamw", clip=0.05, is_scaled=True)
    check_equal(
        whole(distribute(build(way), way), way)[0], looped(distribute(build(way), way), way), "four"
    )
    compare_alone(False)


def test_four_ranks(four: Pool) -> None:
    four.run(compare_four, timeout=SLOW)


def compare_inductor() -> None:
    compare_alone(False, "compiled_fsdp")
    rtol, atol = ROUNDING
    way = Way("adamw_fused", clip=0.05)
    wanted = looped(distribute(build(way), way), way)
    found, _, _ = whole(distribute(build(way), way), way, "compiled_fsdp")
    losses = [[float(loss) for loss in each[0]] for each in (found, wanted)]
    check_equal(*losses, "losses", rtol, atol)


def test_inductor(two: Pool) -> None:
    two.run(compare_inductor, timeout=SLOW)


# -- what scripts do, and what is seen


def between() -> None:
    """Kept gradients, a checkpoint's state dicts, replaced and frozen experts, steps of the loop in
    between; updates stand where the gradients are.
    """
    way = Way()
    loop, own = (distribute(build(way), way) for _ in range(2))
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in (loop, own)]
    with captured() as graphs:
        step = compile_step(
            own, optimizers[1], loss_fn, keep_grads=True, backend="compiled_fsdp_eager"
        )
        for i in range(5):
            if i == 2:
                for model, optimizer in zip((loop, own), optimizers, strict=True):
                    replace_experts(model, optimizer)
            (given,) = batches(way, i, dist.get_rank())
            optimizers[0].zero_grad()
            loss = loss_fn(loop, *given)
            loss.backward()
            optimizers[0].step()
            if i == 1:
                other = loss_fn(own, *given)
                optimizers[1].zero_grad()
                other.backward()
                optimizers[1].step()
                optimizers[1].zero_grad()
            else:
                other = step(*given)
                grads = [[local(p.grad) for p in model.parameters()] for model in (own, loop)]
                check_equal(*grads, f"gradients of step {i}")
            check_equal(other.item(), loss.item(), f"loss of step {i}")
    check_equal(state_of(own, optimizers[1]), state_of(loop, optimizers[0]), "state")
    dicts = [get_state_dict(m, o) for m, o in zip((loop, own), optimizers, strict=True)]
    check_equal(*(flat_of(each) for each in dicts), "state dicts")
    (graph, *_) = [g for g in graphs if find(g, UPDATE)]
    updates = [n for n in find(graph, UPDATE) if not n.args[2]]
    last_wait = find(graph, WAIT)[-1]
    assert len(updates) == 3
    assert all(order(graph)[n] < order(graph)[last_wait] for n in updates), graph


def replace_experts(model: Any, optimizer: Any) -> None:
    """As a script does that grows or resets them: other parameters,
    in the model and the optimizer.
    """
    for mixture in mixtures(model):
        for name, p in [*mixture.experts.named_parameters()]:
            new = nn.Parameter(p.detach() * 0.5)
            setattr(mixture.experts, name, new)
            for group in optimizer.param_groups:
                group["params"] = [new if each is p else each for each in group["params"]]
            optimizer.state[new] = optimizer.state.pop(p)


def flat_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: flat_of(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [flat_of(each) for each in value]
    return local(value) if isinstance(value, Tensor) else value


def planned_otherwise() -> None:
    """Checksums, before which nothing is updated, and a memory budget, which is tried on copies."""
    way = Way("sgd")
    wanted = looped(distribute(build(way), way), way)
    with planned(check="checksums", memory_budget=0.5):
        check_equal(whole(distribute(build(way), way), way)[0], wanted, "both")


def test_between(two: Pool) -> None:
    two.run(between, timeout=SLOW)


def test_plans(two: Pool) -> None:
    two.run(planned_otherwise, timeout=SLOW)


# -- what is refused


def refused() -> None:
    (given,) = batches(Way(), 0, dist.get_rank())
    plain = Way(is_plain=True)
    model = distribute(build(plain), plain)
    everything = torch.optim.SGD(model.parameters(), lr=0.1)
    for more in ({"clip": 1.0}, {"scaler": torch.amp.GradScaler("cpu")}):
        with pytest.raises(NotImplementedError, match=r"experts.gate.* plain tensors: what other"):
            compile_step(model, everything, loss_fn, **more)
    for p in mixtures(model)[0].experts.parameters():
        p.register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match=r"experts.gate has hooks on its gradient"):
        compile_step(model, everything, loss_fn, backend="compiled_fsdp_eager")(*given)

    model = distribute(build())
    experts = [*mixtures(model)[0].experts.parameters()]
    others = [p for p in model.parameters() if not any(p is each for each in experts)]
    with pytest.raises(ValueError, match=r"does not hold layers.0.mixture.experts.gate"):
        compile_step(model, torch.optim.SGD(others, lr=0.1), loss_fn)(*given)
    muon = [torch.optim.AdamW(others), Muon([nn.Parameter(experts[0].detach().flatten(1))])]
    muon[1].param_groups[0]["params"] = experts
    with pytest.raises(NotImplementedError, match=r"a Muon holds .*experts.gate"):
        compile_step(model, muon, loss_fn)(*given)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, p in [*mixtures(model)[0].experts.named_parameters()]:
        same = DTensor.from_local(p.to_local().detach(), mesh, [Replicate()])
        setattr(mixtures(model)[0].experts, name, nn.Parameter(same))
    with pytest.raises(NotImplementedError, match=r"with placements \[Replicate\(\)\]"):
        compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)


def test_refused(two: Pool) -> None:
    two.run(refused, timeout=SLOW)
