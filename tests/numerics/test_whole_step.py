"""`compile_step`: a whole training step as one graph, with the numbers of the ordinary loop."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.compare import check_equal
from kit.harness import BACKENDS, ROUNDING, SLOW, Options, batch_of, compiled, local
from kit.models import loss_of
from kit.overlap import BF16, OPTIMIZERS, Run, oracle_of, start, with_groups
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import compiled_fsdp
from compiled_fsdp import compile_step, explain, fully_shard, overlap_optimizer, planned
from compiled_fsdp.planning.memory import profile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kit.pool import Pool
    from torch.fx import GraphModule


def loss_fn(model: Any, *batch: Any) -> Any:
    return loss_of(model(*batch))


def whole(
    options: Options, optimizer: Any = OPTIMIZERS["adamw"], kind: str = "compiled"
) -> tuple[Run, Any]:
    """A model, and its step."""
    run = start(False, "eager", options, optimizer)
    backend = BACKENDS[kind].replace("inductor", "compiled_fsdp")
    return run, compile_step(
        run.model, run.optimizer, loss_fn, clip=options.max_norm, backend=backend
    )


def looped(run: Run, options: Options) -> list[float]:
    losses = []
    for step in range(options.steps):
        losses.append(run.backward(step))
        if options.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), options.max_norm)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return losses


def compare(
    options: Options,
    optimizer: Any = OPTIMIZERS["adamw"],
    kind: str = "compiled",
    oracle: str | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Losses, parameters, buffers and the optimizer's state, of the step and of the loop."""
    loop = start(False, oracle or oracle_of(kind, options), options, optimizer)
    run, step = whole(options, optimizer, kind)
    wanted = looped(loop, options)
    losses = [step(*batch_of(options.model, i)).item() for i in range(options.steps)]
    assert len(set(wanted)) > 1, "the loop does not learn, so the comparison shows nothing"
    assert all(p.grad is None for p in run.model.parameters())
    check_equal(losses, wanted, f"losses, {kind}, {options}", rtol, atol)
    check_equal(run.state(), loop.state(), f"state, {kind}, {options}", rtol, atol)
    buffers = [dict(r.model.named_buffers()) for r in (run, loop)]
    check_equal(*buffers, f"buffers, {kind}, {options}", rtol, atol)


def compare_models() -> None:
    compare(Options("frozen", steps=3, max_norm=0.05), OPTIMIZERS["sgd"])
    compare(Options("unused", steps=3, policies=(BF16,)), OPTIMIZERS["adamw_fused"])
    compare(Options("tied", steps=3, max_norm=0.1), OPTIMIZERS["adamw_foreach"])
    compare(Options("equal_units", steps=3, max_norm=0.05))  # parameters of one name
    compare(Options("two_dtypes", steps=3, max_norm=0.05), OPTIMIZERS["sgd"])
    for model in ("called_twice", "conv"):
        compare(Options(model, steps=3))


def test_models(two: Pool) -> None:
    """Bit for bit: uneven shards, mixed precision, clipping (also where gradients have several
    dtypes), buffers, tied, frozen and unused parameters, units that are called twice.
    """
    two.run(compare_models, timeout=SLOW)


def compare_meshes() -> None:
    compare(Options("odd", mesh="hsdp", max_norm=0.05))
    compare(Options("gpt_of_one_layer", reshard=2, max_norm=0.1))


def test_meshes(four: Pool) -> None:
    four.run(compare_meshes, timeout=SLOW)


def parallel(is_whole: bool) -> list[Any]:
    """Four steps with tensor parallelism: a bias that one axis alone cuts, clipping, a scaler that
    once meets an inf on a rank.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loss_fn(model: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean() * factor
        return loss

    step = made(model, optimizer, loss_fn, clip=0.05, scaler=scaler)
    losses = []
    for i in range(4):
        row = mesh.get_local_rank("dp")
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * i + row))
        factor = torch.tensor(float("inf") if i == 1 and row == 1 else 1.0)
        if is_whole:
            losses.append(str(float(step(x, factor))))
            continue
        loss = loss_fn(model, x, factor)
        losses.append(str(float(loss.detach())))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = [[local(v) for v in optimizer.state[p].values()] for p in model.parameters()]
    return [losses, [local(p) for p in model.parameters()], state, scaler.state_dict()]


def clipped_once(is_parallel: bool) -> list[Any]:
    """One step; the last layer is cut by the data-parallel axis alone, where stock cannot clip."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 4))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))  # the same on all ranks
    if is_parallel:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        made(model, torch.optim.SGD(model.parameters(), lr=1.0), clip=0.05)(x)
        return [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    model(x).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return list(model.parameters())


def compare_parallel() -> None:
    check_equal(parallel(True), parallel(False), "tensor parallel")
    rtol, atol = ROUNDING  # the unsharded matmuls add in another order
    check_equal(clipped_once(True), clipped_once(False), "two meshes", rtol, atol)


def test_tensor_parallel(four: Pool) -> None:
    """Bit for bit: the norm over both axes, and a check that all ranks agree on. And close to the
    unsharded model, where a parameter is cut by one axis of the two.
    """
    four.run(compare_parallel, timeout=SLOW)


def compare_inductor() -> None:
    rtol, atol = ROUNDING  # a graph of both halves is fused otherwise than each for itself
    options = Options("odd", steps=3, max_norm=0.1)
    compare(options, OPTIMIZERS["sgd"], "inductor", "eager", rtol, atol)


def test_inductor(two: Pool) -> None:
    two.run(compare_inductor, timeout=SLOW)


# -- what scripts do between


def scheduled(run: Run, step: Callable[..., Any] | None) -> list[float]:
    """A schedule, groups, evaluation, a write by hand, frozen and thawed parameters, and ordinary
    steps in between.
    """
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.5)
    first = next(run.model.parameters())
    losses = []
    for i in range(8):
        if i == 4:
            with torch.no_grad():
                first.mul_(0.5)
        if i in (5, 6):
            first.requires_grad_(i == 6)
        if step is None or i == 3:
            losses.append(run.step(i))
        else:
            losses.append(step(*batch_of(run.name, i)).item())
        schedule.step()
        if i % 3 == 0:
            run.model.eval()
            with torch.no_grad():
                losses.append(float(loss_of(run.model(*batch_of(run.name, 50 + i)))))
            run.model.train()
    return losses


def compare_scripts() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        plain = start(False, "eager", Options("odd"), with_groups)
        wanted = scheduled(plain, None)
        ours, step = whole(Options("odd"), with_groups)
        check_equal(scheduled(ours, step), wanted, "scheduled")
        check_equal(ours.state(), plain.state(), "scheduled")


def test_scripts(two: Pool) -> None:
    two.run(compare_scripts, timeout=SLOW)


def count_recompiles() -> int:
    """Learning rates, also as tensors, make no graph anew."""
    run, step = whole(Options("odd"))
    step(*batch_of("odd", 0))
    before = len(compiled_fsdp.torch_private.compiled.recompiles())
    for lr in (0.1, 0.2, torch.tensor(0.3)):
        run.optimizer.param_groups[0]["lr"] = lr
        step(*batch_of("odd", 1))
    return len(compiled_fsdp.torch_private.compiled.recompiles()) - before


def test_no_recompile(two: Pool) -> None:
    assert two.run(count_recompiles) == [0, 0]


def resumed(folder: str) -> None:
    """State dicts through `torch.distributed.checkpoint`, into a loop and into a step again."""
    options = Options("odd")
    run, step = whole(options)
    for i in range(2):
        step(*batch_of("odd", i))
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    wanted = [step(*batch_of("odd", i)).item() for i in (2, 3)]
    for is_loop in (True, False):
        again, other = whole(options)
        other(*batch_of("odd", 9))
        model, optimizer = get_state_dict(again.model, again.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(
            again.model, again.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        losses = [again.step(i) if is_loop else other(*batch_of("odd", i)).item() for i in (2, 3)]
        check_equal(losses, wanted, f"resumed, loop {is_loop}")
        check_equal(again.state(), run.state(), f"resumed, loop {is_loop}")


def test_checkpoint(two: Pool, tmp_path: Path) -> None:
    two.run(resumed, str(tmp_path / "checkpoint"), timeout=SLOW)


def two_at_once() -> None:
    """Two models, and two steps of one model that share its optimizer."""
    plain = [start(False, "eager", Options(name)) for name in ("odd", "odd", "unused")]
    wanted = [looped(run, Options(run.name, steps=2)) for run in plain]
    runs = [whole(Options(name)) for name in ("odd", "unused")]
    other = compile_step(
        runs[0][0].model, runs[0][0].optimizer, loss_fn, backend="compiled_fsdp_eager"
    )
    found: list[list[float]] = [[], []]
    for i in range(2):
        found[0].append((other if i else runs[0][1])(*batch_of("odd", i)).item())
        found[1].append(runs[1][1](*batch_of("unused", i)).item())
    check_equal(found, [wanted[0], wanted[2]], "two at once")
    check_equal(runs[0][0].state(), plain[0].state(), "two at once")


def test_two_at_once(two: Pool) -> None:
    two.run(two_at_once, timeout=SLOW)


def failed_halfway() -> list[str]:
    """An update raises when another unit has been updated: that is said, once, and the step can be
    taken again.
    """
    run, step = whole(Options("odd"))
    done = []

    def fail(flat: Any, *rest: Any) -> None:
        if done:
            raise ZeroDivisionError("in the middle")
        done.append(flat)
        step._update(flat, *rest)

    for unit in step._units:
        unit.on_update[step.name] = fail
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ZeroDivisionError):
            step(*batch_of("odd", 0))
    for unit in step._units:
        unit.on_update[step.name] = step._update
    before = run.state()
    step(*batch_of("odd", 1))
    with pytest.raises(AssertionError):
        check_equal(run.state(), before, "it trains on")
    return [str(entry.message) for entry in caught if "updated" in str(entry.message)]


def test_failed_halfway(two: Pool) -> None:
    told, _ = two.run(failed_halfway)
    assert len(told) == 1
    assert "some units were updated and others were not. Load a checkpoint" in told[0]


def kept() -> None:
    """Gradients as the updates used them, clipped, until the next step; others are not dropped."""
    options = Options("odd", max_norm=0.05)
    loop, (run, _) = start(False, "eager", options), whole(options)
    step = compile_step(
        run.model,
        run.optimizer,
        loss_fn,
        clip=0.05,
        keep_grads=True,
        backend="compiled_fsdp_eager",
    )
    for i in range(3):
        loop.optimizer.zero_grad()
        loop.backward(i)
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.05)
        loop.optimizer.step()
        step(*batch_of("odd", i))
        grads = [[local(p.grad) for p in r.model.parameters()] for r in (run, loop)]
        check_equal(*grads, f"gradients of step {i}")
    check_equal(run.state(), loop.state(), "state")
    run.backward(9)
    with pytest.raises(RuntimeError, match="has a gradient of an earlier backward"):
        step(*batch_of("odd", 3))


def test_kept_gradients(two: Pool) -> None:
    two.run(kept, timeout=SLOW)


# -- what is seen


def seen(folder: str) -> tuple[str, list[str]]:
    with compiled_fsdp.dumped_to(folder), planned(bucket_bytes=0):
        run, step = whole(Options("odd", reshard=True, max_norm=1.0))
        step(*batch_of("odd", 0))
    return str(explain(run.model)), [path.name for path in sorted(_rank_folder(folder).iterdir())]


def _rank_folder(folder: str) -> Path:
    from pathlib import Path

    return Path(folder) / f"rank{dist.get_rank()}"


def test_seen(two: Pool, tmp_path: Path) -> None:
    """One graph, called step, in dumps and in `explain`."""
    text, names = two.run(seen, str(tmp_path / "dump"))[0]
    graphs = [name.partition("_")[2] for name in names if name[0].isdigit()]
    assert graphs == ["joint", "step"]  # their numbers go on from those of other tests
    assert "step: 4 all-gathers" in text  # of three units: neither the last nor a gradient's again
    assert "backward:" not in text


def gathers(**plan: Any) -> tuple[str, int]:
    """What a step of four units gathers, and its peak without the gathers for the next step."""
    peaks: list[int] = []

    def measure(gm: GraphModule, _: Any) -> None:
        peaks.append(profile(gm.graph).peak)

    with (
        compiled_fsdp.pipeline(measure, before="gather_next"),
        planned(bucket_bytes=0, prefetch=0, **plan),
    ):
        run, step = whole(Options("deep", reshard=True, max_norm=1.0))
        step(*batch_of("deep", 0))
    return str(explain(run.model)), peaks[-1]


def gathered_last() -> None:
    usual, peak = gathers()
    late, peak_of_late = gathers(backward_prefetch=0)
    assert "step: 5 all-gathers" in usual
    assert "step: 6 all-gathers" in late
    assert peak == peak_of_late


def test_what_forward_gathers_last_but_one_is_kept(two: Pool) -> None:
    """Backward would gather it while forward computes with the last, so that dropping it frees
    nothing; without gathers ahead it is dropped.
    """
    two.run(gathered_last)


# -- what is refused


class Deep(nn.Module):
    """Layers with dropout, computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


def deep(is_whole: bool, **options: Any) -> list[Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Deep()
    for unit in (*model.layers, model):
        fully_shard(unit, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    call = (
        compile_step(model, optimizer, backend=BACKENDS["compiled"])
        if is_whole
        else compiled(model)
    )
    losses = []
    for i in range(3):
        torch.manual_seed(i)
        loss = call(torch.randn(4, 8))
        losses.append(loss.item())
        if not is_whole:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [losses, [local(p) for p in model.parameters()]]


def compare_deep() -> None:
    for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        check_equal(deep(True, **options), deep(False, **options), f"deep, {options}")


def test_checkpointing_and_offload(two: Pool) -> None:
    two.run(compare_deep, timeout=SLOW)


def train(way: str, optimizer: Callable[..., torch.optim.Optimizer]) -> list[Any]:
    """Both ranks see the same, so that the mean of their gradients is the unsharded model's."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh())
    if way != "unsharded":
        fully_shard(model[0])
        fully_shard(model)
    made = optimizer(model.parameters())
    if way == "overlap":
        overlap_optimizer(model, made)
    step = None
    if way == "whole":
        step = compile_step(model, made, _square, backend=BACKENDS["compiled"])
    losses = []
    for i in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(i))
        loss = _square(model, x) if step is None else step(x)
        losses.append(loss.item())
        if step is None:
            loss.backward()
            made.step()
            made.zero_grad()
    return [losses, [p.full_tensor() if way != "unsharded" else p for p in model.parameters()]]


def _square(model: Any, x: Any) -> Any:
    return model(x).square().mean()


def compare_without_dtensors() -> None:
    for optimizer in (
        lambda p: torch.optim.Rprop(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    ):
        wanted = train("unsharded", optimizer)
        for way in ("overlap", "whole"):
            check_equal(train(way, optimizer), wanted, way)


def test_optimizers_that_step_no_dtensors(two: Pool) -> None:
    """Torch, at 2.13, has no rule for what these do to DTensors; local tensors they can step."""
    two.run(compare_without_dtensors, timeout=SLOW)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.layer(x)


def plain_model() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def made(model: nn.Module, optimizer: Any, fn: Any = None, **more: Any) -> Any:
    mean = fn or (lambda model, x: model(x).square().mean())
    return compile_step(model, optimizer, mean, backend="compiled_fsdp_eager", **more)


def refused_when_made() -> None:
    model, optimizer = plain_model()
    plain = nn.Linear(2, 2)
    for error, words, arguments in (
        (ValueError, "clip=0; should be None", {"clip": 0}),
        (ValueError, "backend='inductors'; should be one of", {"backend": "inductors"}),
    ):
        with pytest.raises(error, match=words):
            compile_step(model, optimizer, **arguments)
    with pytest.raises(TypeError, match="has no sharded module"):
        compile_step(plain, torch.optim.SGD(plain.parameters()))
    with pytest.raises(TypeError, match=r"torch.optim.lbfgs.LBFGS is not an optimizer"):
        compile_step(model, torch.optim.LBFGS(model.parameters()))
    compiled_fsdp.overlap_optimizer(model, optimizer)
    with pytest.raises(ValueError, match="overlaps already"):
        compile_step(model, optimizer)


def refused_when_called() -> None:
    x = torch.randn(3, 6)
    for error, words, loss in (
        (TypeError, r"a tuple in which others than the first require a gradient", _two_outputs),
        (NotImplementedError, r"values of the shapes \[\[3, 4\]\]", lambda model, x: model(x)),
        (RuntimeError, "depends on no parameter that is trained", lambda model, x: x.sum()),
    ):
        model, optimizer = plain_model()
        with pytest.raises(error, match=words):
            made(model, optimizer, loss)(x)
    model, optimizer = plain_model()
    with pytest.raises(
        NotImplementedError, match=r"gradient of shape .* of no parameter of the model"
    ):
        made(model, optimizer)(x.clone().requires_grad_())
    model, optimizer = plain_model()
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    with pytest.raises(NotImplementedError, match="not reduced in every backward"):
        made(model, optimizer)(x)
    broken = Broken()
    fully_shard(broken)
    with pytest.raises(NotImplementedError, match="the model with its loss is not one graph"):
        made(broken, torch.optim.SGD(broken.parameters()))(x)


def _two_outputs(model: Any, x: Any) -> Any:
    y = model(x)
    return y.square().mean(), y


def refused_between() -> None:
    """And after each, the step goes on as if nothing had been."""
    model, optimizer = plain_model()
    step, x, first = made(model, optimizer), torch.randn(3, 6), next(model.parameters())
    step(x)
    with pytest.raises(RuntimeError, match="inference mode"), torch.inference_mode():
        step(x)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"0.weight has a gradient of an earlier backward"):
        step(x)
    optimizer.zero_grad()
    handle = first.register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match=r"0.weight has hooks on its gradient"):
        step(x)
    handle.remove()
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="hooks on its step"):
        step(x)
    handle.remove()
    other = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [other]})
    with pytest.raises(ValueError, match="holds 1 parameters that the model does not have"):
        step(x)
    optimizer.param_groups.pop()
    held = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ValueError, match=r"does not hold 1.bias, which the model trains"):
        step(x)
    optimizer.param_groups[0]["params"].append(held)
    assert step(x) > step(x)


def test_refused(two: Pool) -> None:
    for worker in (refused_when_made, refused_when_called, refused_between):
        two.run(worker, timeout=SLOW)
