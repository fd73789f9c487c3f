"""`Muon` and `update_whole`: the numbers of the unsharded model, whole matrices at one rank each,
exchanges under way while others are updated.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.compare import check_equal, whole
from kit.harness import Options, batch_of, build, compiled, mesh_of, shard
from kit.models import Net, loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from compiled_fsdp import (
    DivergenceError,
    FullyShardedDataParallel,
    Muon,
    compile_step,
    fully_shard,
    overlap_optimizer,
    update_whole,
)
from compiled_fsdp.frontend.state import states_below
from compiled_fsdp.optim import exchange, muon, owners

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool

STEPS = 3
AT_OWNERS, EVERYWHERE = -1.0, 1e9  # latencies with which every matrix has an owner, or none has
ULP = 2.0**-7  # relative: torch's CPU kernel rounds `add_(x, alpha=)` of bf16 in two ways


def matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.ndim == 2]


def gradients(model: nn.Module, call: Callable[..., Any], name: str, step: int) -> dict[str, Any]:
    """One backward; copies of the whole gradients."""
    dtype = next(model.parameters()).dtype
    batch = [each.to(dtype) if each.is_floating_point() else each for each in batch_of(name, step)]
    loss_of(call(*batch)).backward()
    return {name: whole(p.grad) for name, p in matrices(model) if p.grad is not None}


def state_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    found = {name: whole(p) for name, p in matrices(model)}
    for name, p in matrices(model):
        if p in optimizer.state:
            found[f"{name}, momentum"] = whole(optimizer.state[p]["momentum_buffer"])
    return found


def check(
    apply: Callable[..., Any],
    call_of: Callable[[Any], Any],
    options: Options,
    latency: float = AT_OWNERS,
    dtype: torch.dtype = torch.float32,
    rtol: float = 0.0,
    **settings: Any,
) -> None:
    """The same gradients, sharded and unsharded; every bit of parameters and momentum."""
    model = shard(build(options.model).to(dtype), options, apply)
    plain = build(options.model).to(dtype)
    optimizer = Muon(matrices(model), bucket_bytes=600, **settings)
    kind = Muon if "ns_dtype" in settings else torch.optim.Muon
    reference = kind([p for _, p in matrices(plain)], **settings)
    call = call_of(model)
    with mock.patch.object(owners, "LATENCY", latency):
        for step in range(STEPS):
            found = gradients(model, call, options.model, step)
            for name, p in matrices(plain):
                p.grad = found.get(name)
            for each in (optimizer, reference):
                each.step()
            for p in model.parameters():  # those that no optimizer has too
                p.grad = None
            what = f"{options}, {settings}, step {step}"
            check_equal(
                state_of(optimizer, model), state_of(reference, plain), what, rtol, rtol / 8
            )


def as_it_is(model: Any) -> Any:
    return model


def check_all() -> None:
    for name in ("odd", "unused", "tied", "frozen"):
        check(fully_shard, as_it_is, Options(name), lr=0.05)
    check(fully_shard, compiled, Options("odd"), lr=0.05)
    check(stock_fully_shard, as_it_is, Options("odd"), lr=0.05)
    check(fully_shard, as_it_is, Options("odd"), latency=EVERYWHERE, lr=0.05)
    more = {"nesterov": False, "momentum": 0.9, "weight_decay": 0.3, "ns_steps": 3}
    check(fully_shard, as_it_is, Options("odd"), adjust_lr_fn="match_rms_adamw", **more)
    check(fully_shard, as_it_is, Options("odd"), ns_dtype=torch.float32)
    check(fully_shard, as_it_is, Options("odd"), lr=torch.tensor(0.05))
    check(fully_shard, as_it_is, Options("odd"), dtype=torch.bfloat16, rtol=ULP, lr=0.05)


def test_the_numbers_of_the_unsharded_model(two: Pool) -> None:
    two.run(check_all)


def check_four() -> None:
    check(fully_shard, as_it_is, Options("odd"), lr=0.05)
    check(fully_shard, as_it_is, Options("odd"), latency=EVERYWHERE, lr=0.05)
    for latency in (AT_OWNERS, EVERYWHERE):
        check(fully_shard, as_it_is, Options("odd", mesh="hsdp"), latency=latency, lr=0.05)


def test_four_ranks_and_replicas(four: Pool) -> None:
    four.run(check_four)


# -- what travels when


def check_overlap() -> None:
    """Two buckets are on their way while one is orthogonalized, and its results are awaited behind
    the next one: each rank orthogonalizes half of the matrices.
    """
    model = shard(build("equal_units"), Options("equal_units"), fully_shard)
    params = [p for _, p in matrices(model)]
    optimizer = Muon(params, bucket_bytes=1)
    said: list[str] = []
    start, wait, update = exchange.Exchange.__init__, exchange.Exchange.wait, muon.newton_schulz

    def noted(self: Any, *args: Any) -> None:
        self.what = args[-1].removeprefix("Muon ")
        said.append(f"start {self.what}")
        start(self, *args)

    def awaited(self: Any) -> Any:
        said.append(f"wait {self.what}")
        return wait(self)

    def updated(*args: Any) -> Any:
        said.append("update")
        return update(*args)

    gradients(model, model, "equal_units", 0)
    with (
        mock.patch.object(exchange.Exchange, "__init__", noted),
        mock.patch.object(exchange.Exchange, "wait", awaited),
        mock.patch.object(muon, "newton_schulz", updated),
        mock.patch.object(owners, "LATENCY", AT_OWNERS),
    ):
        optimizer.step()
    short = [re.sub(r" \(group 0, parameter (\d)\)", r" \1", each) for each in said]
    mine = [number % 2 == dist.get_rank() for number in range(4)]
    expected = [f"start to owners {number}" for number in range(3)]
    for number in range(4):
        expected += [f"wait to owners {number}", *["update"] * mine[number], f"start back {number}"]
        expected += ["start to owners 3"] if number == 0 else []
        expected += [f"wait back {number - 1}"] if number else []
    assert short == [*expected, "wait back 3"]


def test_buckets_travel_while_others_are_orthogonalized(two: Pool) -> None:
    two.run(check_overlap)


# -- inside of training


def two_optimizers(model: nn.Module, kind: Any = Muon) -> list[torch.optim.Optimizer]:
    """AdamW for what is no matrix, first."""
    held = {id(p) for _, p in matrices(model)}
    others = [p for p in model.parameters() if id(p) not in held]
    return [
        torch.optim.AdamW(others, lr=0.02),
        kind([p for _, p in matrices(model)], lr=0.05),
    ]


def steps(call: Any, optimizers: list[Any], name: str, after: Any = None) -> list[float]:
    losses = []
    for step in range(4):
        loss = loss_of(call(*batch_of(name, step)))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        if after is not None:
            after()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return losses


def check_overlapped() -> None:
    """With `overlap_optimizer`: the same bits; gathers ahead start where the other optimizer has
    stepped before, and only then.
    """
    for kind in ("compiled", "eager"):
        for is_last in (True, False):
            results = []
            for overlaps in (False, True):
                torch._dynamo.reset()
                model = shard(build("odd"), Options("odd"), fully_shard)
                adamw, optimizer = two_optimizers(model)
                ahead: list[int] = []
                if overlaps:
                    overlap_optimizer(model, optimizer)
                call = compiled(model) if kind == "compiled" else model
                order = [adamw, optimizer] if is_last else [optimizer, adamw]
                losses = steps(call, order, "odd", lambda: ahead.append(num_ahead(model)))  # noqa: B023
                assert [bool(each) for each in ahead] == [overlaps and is_last] * 4, (kind, ahead)
                results.append([losses, [whole(p) for p in model.parameters()]])
            check_equal(results[1], results[0], f"{kind}, Muon last: {is_last}")


def num_ahead(model: nn.Module) -> int:
    states = states_below(model)
    eager = sum(bool(state.runtime.pending) for state in states)
    return eager + sum(len(flat.ahead) for state in states for flat in state.unit.flats)


def test_overlap_optimizer(two: Pool) -> None:
    two.run(check_overlapped)


def check_plain_torch() -> None:
    """torch.optim.Muon on our shards: DTensor's matmuls add partial sums in bfloat16, so the
    directions are those of whole matrices up to that. (For gradients of full rank: of others the
    iteration blows up what rounding has left in directions that should be empty.)
    """
    model = shard(build("equal_units"), Options("equal_units"), fully_shard)
    plain = build("equal_units")
    before = [whole(p) for _, p in matrices(plain)]
    generator = torch.Generator().manual_seed(0)
    for (_, p), (_, q) in zip(matrices(model), matrices(plain), strict=True):
        q.grad = torch.randn(q.shape, generator=generator)
        p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements, src_data_rank=None)
    for each in (model, plain):
        torch.optim.Muon([p for _, p in matrices(each)], lr=0.05).step()
    for start, (_, p), (_, q) in zip(before, matrices(model), matrices(plain), strict=True):
        moved, wanted = (whole(p) - start).flatten(), (q.detach() - start).flatten()
        assert torch.cosine_similarity(moved, wanted, 0) > 0.999
        assert torch.allclose(moved.norm(), wanted.norm(), rtol=0.01)


def check_compiled_step() -> None:
    """A compiled function around it breaks there, and comes to the same numbers."""
    results = []
    for is_compiled in (False, True):
        model = shard(build("odd"), Options("odd"), fully_shard)
        optimizers = two_optimizers(model)
        if is_compiled:
            optimizers[1].step = torch.compile(optimizers[1].step, backend="eager")
        losses = steps(model, optimizers, "odd")
        results.append([losses, [whole(p) for p in model.parameters()]])
    check_equal(results[1], results[0], "compiled step")


def raises(kind: type[Exception], words: str, call: Callable[..., Any]) -> None:
    with pytest.raises(kind, match=words):
        call()


def check_refused() -> None:
    model = shard(build("odd"), Options("odd"), fully_shard)
    with pytest.raises(
        ValueError, match=r"Muon: 3 of .*layers.0.bias of shape \(7,\), .*fully_shard"
    ):
        Muon(model.named_parameters())
    raises(ValueError, "group 0, parameter 1 of shape", lambda: Muon(model.parameters()))
    raises(ValueError, "ns_dtype=torch.float16", lambda: Muon([], ns_dtype=torch.float16))
    optimizer = Muon(matrices(model))
    raises(
        NotImplementedError,
        "Leave out in_backward",
        lambda: overlap_optimizer(model, optimizer, in_backward=True),
    )
    stock = torch.optim.Muon([p for _, p in matrices(model)])
    raises(TypeError, "compiled_fsdp.Muon", lambda: overlap_optimizer(model, stock))
    raises(TypeError, "compile_step: .*Muon orthogonalizes", lambda: compile_step(model, stock))
    flat = FullyShardedDataParallel(
        Net(), device_id=torch.device("cpu"), use_orig_params=True, device_mesh=mesh_of("1d")
    )
    raises(ValueError, "FullyShardedDataParallel keeps parts", lambda: Muon(flat.parameters()))


def check_ranks_differ() -> None:
    """A gradient that one rank lacks is found before anything is sent."""
    model = shard(build("equal_units"), Options("equal_units"), fully_shard)
    optimizer = Muon(matrices(model))
    gradients(model, model, "equal_units", 0)
    if dist.get_rank():
        matrices(model)[2][1].grad = None
    raises(DivergenceError, "Muon of 4 matrices[^$]*2.weight", optimizer.step)


def check_hook() -> None:
    """Shampoo of docs/optimizers.md, sharded and not."""
    page = (Path(__file__).parents[2] / "docs/optimizers.md").read_text()
    (code,) = re.findall(r"```python\n(import torch\n.*?)```", page, re.DOTALL)
    space: dict[str, Any] = {}
    exec(code, space)
    model = shard(build("odd"), Options("odd"), fully_shard)
    plain = build("odd")
    params, others = ([p for _, p in matrices(m)] for m in (model, plain))
    sharded, reference = space["Shampoo"](params), space["Shampoo"](others)
    for latency in (AT_OWNERS, EVERYWHERE):
        found = gradients(model, model, "odd", 0)
        for (name, _), q in zip(matrices(plain), others, strict=True):
            q.grad = found[name]
        with mock.patch.object(owners, "LATENCY", latency):
            sharded.step()
        reference.step()
        model.zero_grad()
        for p, q in zip(params, others, strict=True):
            assert torch.equal(whole(p), q)
            for side in ("left", "right"):
                assert torch.equal(whole(sharded.state[p][side]), reference.state[q][side])
                assert sharded.state[p][side].placements == p.placements
    both = params[0], whole(params[0])
    raises(ValueError, "cut over different ranks", lambda: update_whole([both], as_it_is))
    raises(ValueError, "num_results=2", lambda: update_whole(params, as_it_is, num_results=2))
    raises(ValueError, "work has 1", lambda: update_whole(params, as_it_is, work=[1.0]))
    with mock.patch.object(owners, "LATENCY", EVERYWHERE):
        wrong = update_whole(params[:1], lambda _, matrix: matrix.double())
        raises(TypeError, "returned torch.float64 .*should be torch.float32", lambda: list(wrong))


@pytest.mark.parametrize(
    "check", [check_plain_torch, check_compiled_step, check_refused, check_hook, check_ranks_differ]
)
def test_beside_others(two: Pool, check: Callable[[], None]) -> None:
    two.run(check)


def check_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(8, 8)), mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = Muon([("0.weight", model[0].weight)])
    loss_of(model(torch.ones(2, 8))).backward()
    raises(NotImplementedError, "0.weight is placed as .*torch.optim.Muon does", optimizer.step)


def check_cut_on_columns() -> None:
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 8, bias=False))
    fully_shard(
        model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"],
        shard_placement_fn=lambda p: Shard(1),
    )  # fmt: skip
    before = [whole(p) for p in model.parameters()]
    optimizer = Muon(model.parameters(), lr=0.05)
    loss_of(model(torch.ones(2, 8))).backward()
    reference = [nn.Parameter(p) for p in before]
    for p, q in zip(model.parameters(), reference, strict=True):
        q.grad = whole(p.grad)
    with mock.patch.object(owners, "LATENCY", AT_OWNERS):
        optimizer.step()
    torch.optim.Muon(reference, lr=0.05).step()
    assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), reference, strict=True))


@pytest.mark.parametrize("check", [check_tensor_parallel, check_cut_on_columns])
def test_other_placements(four: Pool, check: Callable[[], None]) -> None:
    four.run(check)


# -- state


def state_dicts(model: Any, optimizers: Any, **options: Any) -> dict[str, Any]:
    asked = StateDictOptions(**options)
    return {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizers, options=asked),
    }


def two_steps(model: Any, optimizers: list[Any], begin: int) -> list[Any]:
    """With gradients that are the same at any number of ranks; what there is afterwards."""
    for step in (begin, begin + 1):
        for p in model.parameters():
            p.grad = torch.ones_like(p) * p.detach() + 0.1 * step
        for optimizer in optimizers:
            optimizer.step()
    return [whole(p) for p in model.parameters()] + [
        whole(optimizers[1].state[p]["momentum_buffer"]) for _, p in matrices(model)
    ]


def saved(folder: str) -> list[Any]:
    """A checkpoint after two steps; the state is described as torch.optim.Muon's. Then two more."""
    model = shard(build("odd"), Options("odd"), fully_shard)
    optimizers = two_optimizers(model)
    two_steps(model, optimizers, 0)
    dcp.save(state_dicts(model, optimizers), checkpoint_id=folder)
    ours = state_dicts(model, optimizers, full_state_dict=True)["optimizer"]
    plain = build("odd")
    theirs = state_dicts(plain, two_optimizers(plain, torch.optim.Muon), full_state_dict=True)
    if dist.get_rank() == 0:
        assert described(ours) == described(theirs["optimizer"])
    return two_steps(model, optimizers, 2)


def described(state: dict[str, Any]) -> Any:
    """The names of everything in an optimizer's state dict."""
    return (
        {name: sorted(value) for name, value in state["state"].items()},
        [sorted(group) for group in state["param_groups"]],
    )


def resumed(folder: str) -> list[Any]:
    """Two steps from the checkpoint."""
    model = shard(build("odd"), Options("odd"), fully_shard)
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizers = two_optimizers(model)
    state = state_dicts(model, optimizers)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizers, state["optimizer"])
    return two_steps(model, optimizers, 2)


def test_resume_at_another_number_of_ranks(two: Pool, four: Pool, tmp_path: Path) -> None:
    wanted = two.run(saved, str(tmp_path))[0]
    found = four.run(resumed, str(tmp_path))[0]
    check_equal(found, wanted, "four steps, and two after two at another number of ranks")
