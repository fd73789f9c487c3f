"""Whole steps as CUDA graphs, which the CPU plays (`kit/tape.py`): replays have the numbers of the
ordinary loop, bit for bit; and what would be stale in one is noticed, or refused.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from kit.compare import check_equal
from kit.harness import BACKENDS, SLOW, Options, batch_of, local
from kit.models import loss_of
from kit.overlap import Run, start
from kit.tape import taped
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim.lr_scheduler import LambdaLR, StepLR

from compiled_fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    Muon,
    compile_step,
    fully_shard,
    planned,
)
from compiled_fsdp.ir import schema
from compiled_fsdp.wire.captured import CudaGraphs, Refused, on_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool

STEPS = 6


def rate() -> Tensor:
    return torch.tensor(0.02)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=rate(), momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=rate(), capturable=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, capturable=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=rate(), foreach=True, capturable=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=rate(), fused=True, capturable=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True, capturable=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, capturable=True),
    "adamax": lambda p: torch.optim.Adamax(p, capturable=True),
    "asgd": lambda p: torch.optim.ASGD(p, capturable=True),
    "nadam": lambda p: torch.optim.NAdam(p, capturable=True),
    "radam": lambda p: torch.optim.RAdam(p, capturable=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, capturable=True),
}
SCHEDULED = ("adam", "adamw_foreach", "adamw_fused")
# Of which `test_models` and `test_fused_sgd` show that replays have the loop's numbers.
IN_OTHERS = ("sgd", "sgd_fused", "adam", "adamw", "adamw_foreach", "adamw_fused")


def loss_fn(model: Any, *batch: Any) -> Any:
    return loss_of(model(*batch))


def slower(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def whole(options: Options, optimizer: Any, **more: Any) -> tuple[Run, Any]:
    run = start(False, "eager", options, optimizer)
    if more.pop("scheduled", False):
        more["schedule"] = slower(run.optimizer)
    more = {"backend": BACKENDS["compiled"], "mode": "reduce-overhead", **more}
    return run, compile_step(run.model, run.optimizer, loss_fn, clip=options.max_norm, **more)


def looped(
    run: Any,
    options: Options,
    count: int = 1,
    *,
    scheduled: bool = False,
    reduce_once: bool = False,
) -> list[float]:
    """The plain loop, of several micro-batches each."""
    losses = []
    schedule = slower(run.optimizer) if scheduled else None
    for step in range(options.steps):
        parts = []
        for micro in range(count):
            run.model.set_requires_gradient_sync(not reduce_once or micro == count - 1)
            loss = loss_fn(run.call, *batch_of(options.model, step * count + micro)) / count
            loss.backward()
            parts.append(loss.detach())
        losses.append(sum(parts[1:], parts[0]).item())
        if options.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), options.max_norm)
        run.optimizer.step()
        run.optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return losses


def compare(
    options: Options, name: str, count: int = 1, *, reduce_once: bool = False, **more: Any
) -> None:
    """Losses, parameters, buffers and the optimizer's state, of replays and of the loop."""
    optimizer, scheduled = OPTIMIZERS[name], name in SCHEDULED
    with taped():
        loop = start(False, "eager", options, optimizer)
        wanted = looped(loop, options, count, scheduled=scheduled, reduce_once=reduce_once)
        more |= {"accumulate": count, "reduce_once": reduce_once}
        run, step = whole(options, optimizer, scheduled=scheduled, **more)
        losses = []
        for i in range(options.steps):
            batches = [batch_of(options.model, i * count + micro) for micro in range(count)]
            losses.append(step(*batches[0]) if count == 1 else step(batches))
    what = f"{name}, {options}"
    assert step.captures.num_replays == options.steps - 1, what
    assert len(set(wanted)) > 1, "the loop does not learn, so the comparison shows nothing"
    check_equal([loss.item() for loss in losses], wanted, f"losses, {what}")
    check_equal(run.state(), loop.state(), f"state, {what}")
    buffers = [dict(r.model.named_buffers()) for r in (run, loop)]
    check_equal(*buffers, f"buffers, {what}")


def compare_optimizers() -> None:
    for name in OPTIMIZERS:
        if name not in IN_OTHERS:
            compare(Options("odd", steps=STEPS), name)


def test_optimizers(two: Pool) -> None:
    two.run(compare_optimizers, timeout=SLOW)


def compare_models() -> None:
    compare(Options("frozen", steps=STEPS, max_norm=0.05), "adamw")
    compare(Options("tied", steps=STEPS, max_norm=0.1), "adamw_foreach")
    compare(Options("conv", steps=STEPS), "sgd")  # with buffers that a step writes to
    compare(Options("odd", steps=STEPS, reshard=True, max_norm=0.05), "adam", count=2)
    compare(Options("odd", steps=STEPS), "adamw_fused", count=2, reduce_once=True)
    with planned(gather_quantized=torch.int8, reduce_quantized=torch.int8):
        compare(Options("odd", steps=STEPS), "adamw")


def test_models(two: Pool) -> None:
    two.run(compare_models, timeout=SLOW)


def compare_meshes() -> None:
    compare(Options("odd", mesh="hsdp", steps=STEPS, max_norm=0.05), "adamw")


def test_meshes(four: Pool) -> None:
    four.run(compare_meshes, timeout=SLOW)


# -- FSDP1, Inductor


class Layer(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, wide)
        self.back = nn.Linear(wide, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(F.gelu(self.linear(x)))


def layers(front: str) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Layer(9), Layer(7), nn.Dropout(0.25), nn.Linear(6, 3))
    if front == "fsdp2":
        for unit in (model[0], model[1], model):
            fully_shard(unit)
        return model
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        use_orig_params=front == "fsdp1_originals",
        device_id=torch.device("cpu"),
    )


def mse(model: Any, x: Tensor, y: Tensor) -> Any:
    predicted = model(x)
    return F.mse_loss(predicted, y), {"mean": predicted.detach().mean(), "shape": x.shape[0]}


def batch(i: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * i + torch.distributed.get_rank())
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)


class Trained:
    """A model under training: by replays (or steps that are not captured), or by the loop."""

    def __init__(
        self,
        kind: str,
        front: str = "fsdp2",
        optimizer: str = "adamw_foreach",
        backend: str = "compiled",
    ) -> None:
        self.model = layers(front)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.found: list[Any] = []
        self.step: Any = self._loop
        if kind != "loop":
            self.step = compile_step(
                self.model,
                self.optimizer,
                mse,
                mode="reduce-overhead" if kind == "captured" else None,
                backend=BACKENDS[backend].replace("inductor", "compiled_fsdp"),
            )

    def _loop(self, *given: Tensor) -> Any:
        loss, more = mse(self.model, *given)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), more

    def __call__(self, *given: Tensor) -> None:
        torch.manual_seed(len(self.found))
        self.found.append(list(self.step(*given)))  # none of which changes later

    @property
    def num_replays(self) -> int:
        return int(self.step.captures.num_replays)

    def state(self) -> list[Any]:
        params = list(self.model.parameters())
        found = [[local(value) for value in self.optimizer.state[p].values()] for p in params]
        return [self.found, [local(p) for p in params], found]


def compare_fronts() -> None:
    for front in ("fsdp2", "fsdp1", "fsdp1_originals"):
        states = []
        for kind in ("loop", "captured"):
            with taped():
                this = Trained(kind, front)
                for i in range(STEPS):
                    this(*batch(i))
            states.append(this.state())
        assert this.num_replays == STEPS - 1
        check_equal(*states, front)


def test_fronts(two: Pool) -> None:
    """And dropout, metrics, and losses that are kept."""
    two.run(compare_fronts, timeout=SLOW)


def compare_fused_sgd() -> None:
    """A rate that is a tensor, which torch's own step takes for no DTensor."""
    states = []
    for kind in ("plain", "captured"):
        with taped():
            this = Trained(kind, optimizer="sgd_fused")
            for i in range(STEPS):
                this.optimizer.param_groups[0]["lr"].fill_(0.1 / (1 + i))
                this(*batch(i))
        states.append(this.state())
    assert this.num_replays == STEPS - 1
    check_equal(*states, "fused SGD")


def test_fused_sgd(two: Pool) -> None:
    two.run(compare_fused_sgd, timeout=SLOW)


def run_inductor() -> None:
    """Without a double, since the CPU has no CUDA graphs: the mode reaches Inductor."""
    states = []
    for kind in ("plain", "captured"):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            this = Trained(kind, optimizer="sgd", backend="inductor")
            for i in range(2):
                this(*batch(i))
        states.append(this.state())
    assert this.step.captures is None
    said = [str(each.message) for each in told if "no CUDA graphs" in str(each.message)]
    assert len(said) == 1
    check_equal(*states, "inductor")


def test_inductor(two: Pool) -> None:
    two.run(run_inductor, timeout=SLOW)


# -- what changes between steps


def rate_by_hand(this: Trained, i: int) -> None:
    if i == 4:
        this.optimizer.param_groups[0]["lr"].fill_(0.5)


def decay_by_hand(this: Trained, i: int) -> None:
    if i == 4:
        this.optimizer.param_groups[0]["weight_decay"] = 0.5


def state_dict(this: Trained, i: int) -> None:
    """Of the optimizer, whose state is at other addresses then."""
    if i == 4:
        state = this.optimizer.state_dict()
        this.optimizer.load_state_dict(state)


def parameters(this: Trained, i: int) -> None:
    if i == 4:
        this.model.load_state_dict({k: v * 0.5 for k, v in this.model.state_dict().items()})


def written(this: Trained, i: int) -> None:
    if i == 4:
        with torch.no_grad():
            for p in this.model.parameters():
                p.mul_(0.5)


def frozen(this: Trained, i: int) -> None:
    if i in (4, 8):
        for p in this.model[1].parameters():
            p.requires_grad_(i == 8)


def ordinary(this: Trained, i: int) -> None:
    """A step of the loop in between, and one that only evaluates."""
    if i == 4:
        torch.manual_seed(i)
        loss, _ = mse(this.model, *batch(i))
        loss.backward()
        this.optimizer.step()
        this.optimizer.zero_grad()
        this.model.eval()
        with torch.no_grad():
            this.found.append(mse(this.model, *batch(i))[0])
        this.model.train()


def evaluated(this: Trained, i: int) -> None:
    """No dropout, in a training step: what Dynamo guards."""
    this.model[2].train(i != 5)


def groups(this: Trained, i: int) -> None:
    if i == 4:
        (group,) = this.optimizer.param_groups
        last = [group["params"].pop()]
        this.optimizer.add_param_group({**group, "params": last, "weight_decay": 0.3})


# Of one step what needs no other graph, each two steps behind the one before.
CHANGES = {
    (rate_by_hand, parameters, written, ordinary): 11,  # replays of twelve steps
    (decay_by_hand,): 10,
    (state_dict,): 10,
    (frozen,): 10,  # back to what was captured first
    (evaluated,): 10,
    (groups,): 10,
}


def compare_changes() -> None:
    for changes, replays in CHANGES.items():
        states = []
        for kind in ("loop", "captured"):
            with taped():
                this = Trained(kind)
                for i in range(12):
                    for behind, change in enumerate(changes):
                        change(this, i - 2 * behind)
                    this(*batch(i))
            states.append(this.state())
        names = [change.__name__ for change in changes]
        check_equal(*states, ", ".join(names))
        assert this.num_replays == replays, (names, this.num_replays)


def test_changes(two: Pool) -> None:
    two.run(compare_changes, timeout=SLOW)


def compare_shapes() -> None:
    """Each kind of batch is captured; a rate that is a number, and changes, is announced."""
    states = []
    for kind in ("loop", "captured"):
        with taped():
            this = Trained(kind)
            for i in range(12):
                this(*batch(i, rows=4 + i % 3))
        states.append(this.state())
    check_equal(*states, "shapes")
    assert this.num_replays == 8  # the first shape was in a graph of its own, first
    states = []
    for kind in ("loop", "captured"):
        with taped(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            this = Trained(kind, optimizer="sgd")
            for i in range(12):
                this.optimizer.param_groups[0]["lr"] = 0.1 / (1 + i)
                this(*batch(i))
        states.append(this.state())
    check_equal(*states, "a rate that is a number")
    assert not this.num_replays
    (text,) = [str(each.message) for each in told if "not replayed" in str(each.message)]
    assert "because lr of group 0 of the SGD changed from 0.01" in text


def test_shapes(two: Pool) -> None:
    two.run(compare_shapes, timeout=SLOW)


# -- what the double finds


def with_counter(kind: str) -> list[Any]:
    """An update with a counter on the host, of which nothing else knows."""
    with taped():
        this = Trained(kind, optimizer="sgd")
        part, calls = this.step.optimizers.step_part, [0]

        def step_part(params: set[int], told: Any) -> None:
            part(params, told)
            calls[0] += 1
            with torch.no_grad():
                for p in this.model.parameters():
                    if id(p) in params:
                        p.add_(calls[0] * 1e-3)

        this.step.optimizers.step_part = step_part
        for i in range(STEPS):
            this(*batch(i))
    return this.state()


def planted() -> None:
    states = [with_counter(kind) for kind in ("plain", "captured")]
    with pytest.raises(AssertionError):
        check_equal(*states, "planted")
    for state in states:
        del state[0][2:]  # two steps, of which the second is captured
    check_equal(states[0][0], states[1][0], "the losses of two steps")


def test_the_double_finds_what_is_stale(two: Pool) -> None:
    two.run(planted, timeout=SLOW)


# -- what is refused


def refused_when_made() -> None:
    model = layers("fsdp2")
    params = list(model.parameters())
    sgd = torch.optim.SGD(params, lr=0.1)
    matrices = [p for p in params if p.ndim == 2]
    pair = [Muon(matrices), torch.optim.SGD([p for p in params if p.ndim == 1], lr=0.1)]
    scaler: Any = torch.amp.GradScaler("cpu")
    for optimizer, error, words, more in (
        (sgd, ValueError, "mode='fast'; should be None, or one of", {"mode": "fast"}),
        (sgd, NotImplementedError, "keep_grads does something on the host", {"keep_grads": True}),
        (sgd, NotImplementedError, "scaler does something on the host", {"scaler": scaler}),
        (pair, NotImplementedError, "a Muon exchanges matrices", {}),
        (
            sgd,
            ValueError,
            "schedule=StepLR, and the SGD has a learning rate that is a number",
            {"schedule": StepLR(sgd, 3)},
        ),
    ):
        with pytest.raises(error, match=words):
            compile_step(model, optimizer, mse, **{"mode": "reduce-overhead", **more})


NOT_CAPTURABLE: dict[str, tuple[Callable[..., torch.optim.Optimizer], str]] = {
    "Adam": (torch.optim.Adam, "it has capturable=False"),
    "AdamW": (lambda p: torch.optim.AdamW(p, fused=True), "it has capturable=False"),
    "SGD": (lambda p: torch.optim.SGD(p, lr=rate()), "reads a value on the host"),
    "Adagrad": (torch.optim.Adagrad, "reads a value on the host"),
}


def refused_when_called() -> None:
    for name, (optimizer, words) in NOT_CAPTURABLE.items():
        model = layers("fsdp2")
        step = made(model, optimizer(model.parameters()))
        before = [local(p) for p in model.parameters()]
        with taped(), pytest.raises(ValueError, match=f"the {name} cannot be captured .*{words}"):
            step(*batch(0))
        check_equal([local(p) for p in model.parameters()], before, "nothing is updated")
    for words, prepare in (
        ("set_all_reduce_hook", lambda unit: unit.set_all_reduce_hook(lambda grads: None)),
        ("set_custom_all_gather", lambda unit: unit.set_custom_all_gather(Gather())),
    ):
        model = layers("fsdp2")
        prepare(model[0])
        step = made(model, OPTIMIZERS["sgd"](model.parameters()))
        with taped(), pytest.raises(NotImplementedError, match=words):
            step(*batch(0))
    model = nn.Sequential(Layer(9))
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    step = made(model, OPTIMIZERS["sgd"](model.parameters()))
    with taped(), pytest.raises(NotImplementedError, match="parameters that rest on the host"):
        step(torch.randn(4, 6), torch.randn(4, 6))
    with planned(check="checksums"):
        model = layers("fsdp2")
        step = made(model, OPTIMIZERS["sgd"](model.parameters()))
        with taped(), pytest.raises(NotImplementedError, match=r"Plan\(check=...\)"):
            step(*batch(0))


class Gather:
    """Never called."""

    def allocate(self, *_: Any, **__: Any) -> Tensor:
        raise AssertionError

    def __call__(self, *_: Any, **__: Any) -> None:
        raise AssertionError


def made(model: Any, optimizer: Any, fn: Any = mse) -> Any:
    with taped():
        return compile_step(
            model, optimizer, fn, mode="reduce-overhead", backend=BACKENDS["compiled"]
        )


def refused_when_captured() -> None:
    """What only the graph has: the step that would be captured raises, and updates nothing."""

    def reads(model: Any, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(model(x), y) + torch.zeros((y > 0).sum().item()).sum()

    with torch._dynamo.config.patch(capture_scalar_outputs=True), taped():
        model = layers("fsdp2")
        step = made(model, OPTIMIZERS["sgd"](model.parameters()), reads)
        step(*batch(0))
        before = [local(p) for p in model.parameters()]
        with pytest.raises(
            NotImplementedError,
            match=r"the step cannot be a CUDA graph .* reads a value on the host",
        ):
            step(*batch(1))
        check_equal([local(p) for p in model.parameters()], before, "nothing is updated")


def written_arguments() -> None:
    """A step that writes to an argument is not captured, which is said."""

    def writes(model: Any, x: Tensor, y: Tensor) -> Any:
        x.mul_(0.5)
        return F.mse_loss(model(x), y)

    states = []
    for mode in (None, "reduce-overhead"):
        with taped(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = layers("fsdp2")
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            step = compile_step(model, optimizer, writes, mode=mode, backend=BACKENDS["compiled"])
            given = [list(batch(i)) for i in range(10)]
            for i, each in enumerate(given):
                torch.manual_seed(i)
                step(*each)
        states.append([given, [local(p) for p in model.parameters()]])
    check_equal(*states, "written arguments")
    assert not step.captures.num_replays
    assert any("writes to an argument" in str(each.message) for each in told)


def test_refused(two: Pool) -> None:
    for worker in (
        refused_when_made,
        refused_when_called,
        refused_when_captured,
        written_arguments,
    ):
        two.run(worker, timeout=SLOW)


def test_ops_that_no_graph_may_hold() -> None:
    x = torch.ones(2)
    for words, do in (
        ("aten._local_scalar_dense.default reads a value on the host", lambda: x.sum().item()),
        ("takes a tensor of shape .* on meta", lambda: torch.ones(2, device="meta").add(1)),
        ("fsdp.copy_to.default calls the host", lambda: schema.COPY_TO(x, "cpu", False)),
    ):
        with on_device(torch.device("cpu")), pytest.raises(Refused, match=words):
            do()
    with on_device(torch.device("cpu")):
        x.add_(1)
    assert x.tolist() == [2.0, 2.0]


def test_modes() -> None:
    """Inductor gets what torch's mode says, but for its own CUDA graphs."""
    from compiled_fsdp.frontend.captures import MODES, patches_of

    for mode in MODES:
        wanted = dict(torch._inductor.list_mode_options(mode))
        asked = wanted.pop("triton.cudagraphs", False)
        patches, captures = patches_of(mode, None)
        assert captures == asked
        assert patches == wanted | ({"triton.cudagraphs": False} if asked else {})
    assert patches_of(None, None) == ({}, False)


def test_what_captures_is_called_as_torch_has_it() -> None:
    made = {
        "graph": mock.create_autospec(torch.cuda.graph),
        "CUDAGraph": mock.Mock(),
        "graph_pool_handle": mock.create_autospec(torch.cuda.graph_pool_handle),
    }
    with mock.patch.multiple(torch.cuda, **made):
        graphs = CudaGraphs()
        found, replay = graphs.capture(lambda: 7)
        replay()
    assert found == 7
    pool = made["graph_pool_handle"].return_value
    made["graph"].assert_called_once_with(
        made["CUDAGraph"].return_value, pool=pool, capture_error_mode="thread_local"
    )
    made["CUDAGraph"].return_value.replay.assert_called_once_with()
