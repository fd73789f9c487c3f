"""`compile_step` with several optimizers, and with `Muon`: the numbers of the loop, matrices that
travel to their owners as nodes of the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.compare import check_equal, whole
from kit.harness import SLOW, Options, batch_of, build, shard
from kit.models import loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from compiled_fsdp import Muon, compile_step, fully_shard, pipeline, planned

if TYPE_CHECKING:
    from pathlib import Path

    from kit.pool import Pool

STEPS = 3


def matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.ndim == 2]


def adamw_and_muon(model: nn.Module, kind: Any = Muon, **settings: Any) -> list[Any]:
    """AdamW for what is no matrix, first."""
    held = {id(p) for _, p in matrices(model)}
    others = [p for p in model.parameters() if id(p) not in held]
    return [torch.optim.AdamW(others, lr=0.02), kind(matrices(model), lr=0.05, **settings)]


def loss_fn(model: Any, *batch: Any) -> Any:
    return loss_of(model(*batch))


def state_of(model: nn.Module, optimizers: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: whole(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(p, {}).items():
                found[f"{name}, {key}"] = whole(value) if torch.is_tensor(value) else value
    return found


def made(options: Options, make: Any) -> tuple[nn.Module, list[Any]]:
    torch._dynamo.reset()
    model = shard(build(options.model), options, fully_shard)
    return model, make(model)


def looped(options: Options, model: nn.Module, optimizers: list[Any], steps: range) -> list[float]:
    losses = []
    for i in steps:
        loss = loss_fn(model, *batch_of(options.model, i))
        loss.backward()
        if options.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def step_of(model: nn.Module, optimizers: Any, **more: Any) -> Any:
    return compile_step(model, optimizers, loss_fn, backend="compiled_fsdp_eager", **more)


def compare(options: Options, make: Any = adamw_and_muon, **more: Any) -> None:
    """Losses, parameters and states, of the step and of the eager loop."""
    model, optimizers = made(options, make)
    wanted = looped(options, model, optimizers, range(STEPS))
    ours, others = made(options, make)
    step = step_of(ours, others, clip=options.max_norm, **more)
    losses = [step(*batch_of(options.model, i)).item() for i in range(STEPS)]
    assert len(set(wanted)) > 1, "the loop does not learn, so the comparison shows nothing"
    check_equal(losses, wanted, f"losses, {options}")
    check_equal(state_of(ours, others), state_of(model, optimizers), f"state, {options}")


def compare_models() -> None:
    compare(Options("odd"))
    compare(Options("tied", max_norm=0.05), lambda m: adamw_and_muon(m, ns_dtype=torch.float32))
    with planned(bucket_bytes=0):  # an exchange for each unit, under way with others
        compare(Options("odd", reshard=True), lambda m: adamw_and_muon(m)[::-1])


def test_models(two: Pool) -> None:
    """Bit for bit: uneven and empty shards, tied parameters, clipping, units by themselves."""
    two.run(compare_models, timeout=SLOW)


def compare_hsdp() -> None:
    compare(Options("odd", mesh="hsdp"))
    compare(Options("odd", reshard=2))


def test_four_ranks(four: Pool) -> None:
    four.run(compare_hsdp, timeout=SLOW)


def compare_unsharded() -> None:
    """torch.optim.Muon on the unsharded model. The batch is the same on both ranks, so that the
    mean of their gradients is that of one.
    """
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))

    def build_one() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3))

    def square(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        return loss

    plain, model = build_one(), build_one()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    theirs, ours = adamw_and_muon(plain, torch.optim.Muon), adamw_and_muon(model)
    step = compile_step(model, ours, square, backend="compiled_fsdp_eager")
    for _ in range(STEPS):
        loss = square(plain, x)
        loss.backward()
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
        assert step(x).item() == loss.item()
    check_equal(state_of(model, ours), state_of(plain, theirs), "unsharded")


def test_unsharded(two: Pool) -> None:
    two.run(compare_unsharded, timeout=SLOW)


def compare_inductor() -> None:
    """In fp32, since the iteration in bfloat16 would round what Inductor's gradients have in their
    last bits up to another update.
    """
    options, make = Options("odd"), lambda m: adamw_and_muon(m, ns_dtype=torch.float32)
    model, optimizers = made(options, make)
    wanted = looped(options, model, optimizers, range(2))
    ours, others = made(options, make)
    step = compile_step(ours, others, loss_fn)
    losses = [step(*batch_of("odd", i)).item() for i in range(2)]
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-4)


def test_inductor(two: Pool) -> None:
    two.run(compare_inductor, timeout=SLOW)


# -- what scripts do


class Adapted(nn.Module):
    """LoRA: a frozen matrix and two small ones that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x + self.base(x) + self.up(self.down(x)))
        return y


class Schedules:
    """Of each optimizer, another."""

    def __init__(self, optimizers: list[Any]) -> None:
        scheduler = torch.optim.lr_scheduler
        self.made = [
            scheduler.StepLR(optimizers[0], 2, 0.5),
            scheduler.ExponentialLR(optimizers[1], 0.9),
        ]


def between(i: int, adamw: Any, muon: Any, first: nn.Parameter) -> None:
    if i == 1:
        muon.param_groups[0]["lr"] = 0.2
        for optimizer in (adamw, muon):
            optimizer.load_state_dict(optimizer.state_dict())
    if i == 2:  # a matrix of Muon's goes to AdamW
        moved = muon.param_groups[1]["params"].pop()
        muon.param_groups[1]["param_names"].pop()
        adamw.add_param_group({"params": [moved], "lr": 0.01})
    if i == 3:
        first.requires_grad_(False)


def scripted(is_whole: bool) -> dict[str, Any]:
    """Groups with settings of their own, schedules, frozen parameters, micro-batches, rates written
    by hand, states loaded, matrices that change their optimizer and are frozen.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), nn.Linear(6, 6))
    fully_shard(model[0])
    fully_shard(model)
    mats = [(n, p) for n, p in model.named_parameters() if p.ndim == 2 and p.requires_grad]
    others = [p for p in model.parameters() if p.ndim == 1 and p.requires_grad]
    muon = Muon(
        [{"params": mats[:1], "lr": 0.03}, {"params": mats[1:], "weight_decay": 0.0}],
        lr=0.05,
        ns_dtype=torch.float32,
    )
    adamw = torch.optim.AdamW([{"params": others[:1], "lr": 0.1}, {"params": others[1:]}], lr=0.02)
    optimizers: list[Any] = [adamw, muon]
    schedules = Schedules(optimizers).made
    more: dict[str, Any] = {
        "accumulate": 2,
        "schedule": schedules,
        "backend": "compiled_fsdp_eager",
    }
    step = compile_step(model, optimizers, square_of, **more) if is_whole else None
    losses = []
    for i in range(4):
        between(i, adamw, muon, mats[0][1])
        generator = torch.Generator().manual_seed(i)
        batches = [torch.randn(3, 6, generator=generator) for _ in range(2)]
        if step is not None:
            losses.append(step(batches).item())
            continue
        total = torch.zeros(())
        for batch in batches:
            loss = square_of(model, batch) / 2
            loss.backward()
            total += loss.detach()
        for each in (*optimizers, *schedules):
            each.step()
        model.zero_grad()
        losses.append(total.item())
    rates = [group["lr"] for each in optimizers for group in each.param_groups]
    return {"losses": losses, "rates": rates, **state_of(model, optimizers)}


def square_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) * torch.arange(6.0)).square().mean()
    return loss


def compare_scripts() -> None:
    check_equal(scripted(True), scripted(False), "scripts")


def test_scripts(two: Pool) -> None:
    two.run(compare_scripts, timeout=SLOW)


def checkpointed(folder: str) -> None:
    """The state of a step through `torch.distributed.checkpoint` into a loop and a step; as a
    whole, into torch's own optimizers.
    """
    options = Options("odd")
    model, optimizers = made(options, adamw_and_muon)
    step = step_of(model, optimizers)
    for i in range(2):
        step(*batch_of("odd", i))
    names, states = get_state_dict(model, optimizers)
    dcp.save({"model": names, "optimizer": states}, checkpoint_id=folder)
    full = get_optimizer_state_dict(
        model, optimizers, options=StateDictOptions(full_state_dict=True)
    )
    if dist.get_rank() == 0:
        plain = build("odd")
        theirs = adamw_and_muon(plain, torch.optim.Muon)
        set_optimizer_state_dict(plain, theirs, full)
        assert sum("momentum_buffer" in each for each in theirs[1].state.values()) == len(
            matrices(plain)
        )
    wanted = [step(*batch_of("odd", i)).item() for i in (2, 3)]
    for is_loop in (True, False):
        again, others = made(options, adamw_and_muon)
        other = step_of(again, others)
        other(*batch_of("odd", 9))
        names, states = get_state_dict(again, others)
        dcp.load({"model": names, "optimizer": states}, checkpoint_id=folder)
        set_state_dict(again, others, model_state_dict=names, optim_state_dict=states)
        losses = (
            looped(options, again, others, range(2, 4))
            if is_loop
            else [other(*batch_of("odd", i)).item() for i in (2, 3)]
        )
        check_equal(losses, wanted, f"resumed, loop {is_loop}")
        check_equal(
            state_of(again, others), state_of(model, optimizers), f"resumed, loop {is_loop}"
        )


def test_checkpoint(two: Pool, tmp_path: Path) -> None:
    two.run(checkpointed, str(tmp_path / "checkpoint"), timeout=SLOW)


# -- what is seen, and what is refused


def seen() -> str:
    """The graph of a step with checksums and an exchange for each unit: `verify` has seen it, and
    its numbers are the loop's. Returns what it does, in order.
    """
    graphs: list[str] = []

    def note(gm: Any, plan: Any) -> None:
        graphs.append(" ".join(getattr(n.target, "_opname", "") for n in gm.graph.nodes))

    with planned(bucket_bytes=0, check="checksums"), pipeline(note, before="verify"):
        compare(Options("odd"))
    return graphs[-1]


def test_seen(two: Pool) -> None:
    words = two.run(seen, timeout=SLOW)[0].split()
    assert words.count("to_owners") == words.count("from_owners") == words.count("momentum_") == 3
    assert words.index("verdict_") < words.index("momentum_")
    kinds = [word for word in words if word in ("to_owners", "orthogonalize", "from_owners")]
    assert kinds[:3] == ["to_owners", "to_owners", "orthogonalize"]


def refused() -> None:
    """Parameters in two optimizers or in none, by name; optimizers, schedulers and scalers that do
    not go together.
    """
    model, (adamw, muon) = made(Options("odd"), adamw_and_muon)
    batch = batch_of("odd", 0)
    name = matrices(model)[0][0]
    both = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"two of the optimizers .*hold .*{name}"):
        step_of(model, [muon, both])
    with pytest.raises(ValueError, match=rf"the Muon does not hold .*{name[:-6]}bias.*a list of"):
        step_of(model, muon)(*batch)
    with pytest.raises(ValueError, match="each once"):
        step_of(model, [adamw, adamw])
    with pytest.raises(ValueError, match="each once"):
        step_of(model, [])
    with pytest.raises(TypeError, match="optimizer=int; should be an optimizer"):
        step_of(model, [adamw, 3])
    with pytest.raises(TypeError, match=r"Give the matrices to a compiled_fsdp.Muon"):
        step_of(model, [adamw, torch.optim.Muon(matrices(model))])
    schedule = torch.optim.lr_scheduler.StepLR(muon, 2)
    with pytest.raises(ValueError, match="schedule has one scheduler twice"):
        step_of(model, [adamw, muon], schedule=[schedule, schedule])
    with pytest.raises(ValueError, match="is of another optimizer than the AdamW"):
        step_of(model, adamw, schedule=schedule)
    step = step_of(model, [adamw, muon])
    step(*batch)
    adamw.add_param_group({"params": [matrices(model)[0][1]]})
    with pytest.raises(ValueError, match=rf"two of the optimizers .*hold .*{name}"):
        step(*batch)
    adamw.param_groups.pop()
    muon.param_groups[0]["params"].pop(0)
    muon.param_groups[0]["param_names"].pop(0)
    with pytest.raises(ValueError, match=rf"the AdamW and the Muon does not hold .*{name}"):
        step(*batch)


def test_refused(two: Pool) -> None:
    two.run(refused, timeout=SLOW)


def refused_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(8, 8)), mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    muon = Muon([("0.weight", model[0].weight)])
    adamw = torch.optim.AdamW([model[0].bias])
    with pytest.raises(NotImplementedError, match=r"compile_step: Muon: 0.weight is placed as"):
        compile_step(model, [adamw, muon])


def test_refused_tensor_parallel(four: Pool) -> None:
    four.run(refused_tensor_parallel)
