"""What optimizers remember, on the host between the updates of a whole step: the same numbers, bit
for bit, for fewer bytes on the device.

The CPU plays a device beside the host (`kit.offload`): what rests there has the other sign, a copy
is NaN until it is awaited, and reads its source only then.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.harness import SLOW, local
from kit.offload import beside_host
from kit.overlap import OPTIMIZERS, with_groups
from kit.written_out import WrittenOut
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from compiled_fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    Muon,
    compile_step,
    errors,
    explain,
    fully_shard,
    planned,
)
from compiled_fsdp.frontend.states_at_rest import is_at_rest
from compiled_fsdp.planning import consensus
from compiled_fsdp.planning.costs import Costs, Link

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kit.pool import Pool

WIDTH, ROWS, LAYERS, NUM_PARAMS = 16, 32, 2, 6  # parameters of a layer
EAGER = "compiled_fsdp_eager"
FAST = Costs(1e9, 1e9, 1e-6, (("", Link(1e-6, 1e9)),), host=1e10)
LEAST: dict[str, Any] = {"memory_budget": 0.0, "costs": FAST}
HOSTED: dict[str, Any] = {**LEAST, "optimizer_state": "budget"}
ALL: dict[str, Any] = {**HOSTED, "offload": "budget", "recompute": "budget"}


class Block(nn.Module):
    """Parameters of odd sizes, so that shards are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH + 1), nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def fresh() -> None:
    torch._dynamo.reset()
    consensus._settled.clear()  # by the structure of parameters, which most tests share
    errors._said.clear()
    torch.manual_seed(0)


def model_of(kind: str = "") -> nn.Module:
    fresh()
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    if kind == "fsdp1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    given: dict[str, Any] = {}
    if kind == "replicated":
        given["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if kind == "offloaded":
        given["offload_policy"] = CPUOffloadPolicy()
    for block in model:
        fully_shard(block, **given)
    return fully_shard(model, **given)


def batch(step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank() + 10 * step)
    return torch.randn(ROWS, WIDTH, generator=generator)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def remembered(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[Any]:
    """All state, as the device would have it."""
    found: list[Any] = []
    for param in model.parameters():
        for optimizer in optimizers:
            for name, value in sorted(optimizer.state.get(param, {}).items()):
                if isinstance(value, Tensor):
                    own = local(value)
                    is_there = is_at_rest(getattr(value, "_local_tensor", value))
                    found.append((name, -own if is_there else own.clone()))
    return found


def at_rest(*optimizers: torch.optim.Optimizer) -> int:
    """How many tensors rest on the host."""
    return sum(
        is_at_rest(getattr(value, "_local_tensor", value))
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def hosted(model: nn.Module) -> list[dict[str, Any]]:
    choices = [choice for graph in explain(model).graphs for choice in graph.choices]
    return [c for c in choices if c["what"] == "state" and not c["is_kept"]]


class Run:
    """A model, its step, and what came of it; without a backend, the step is the loop that it
    stands for.
    """

    def __init__(
        self,
        plan: dict[str, Any],
        optimizer: Callable[[Any], Any] = OPTIMIZERS["adamw"],
        kind: str = "",
        backend: str = EAGER,
        **step: Any,
    ) -> None:
        self.plan, self.losses, self.backend = plan, list[Tensor](), backend
        self.model = model_of(kind)
        made = optimizer([*self.model.parameters()])
        self.optimizers = made if isinstance(made, list) else [made]
        self.step = self.made(**step)
        self.count = step.get("accumulate", 1)

    def made(self, **step: Any) -> Callable[..., Tensor]:
        """A step of these optimizers."""
        made: Any = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        if not self.backend:
            return WrittenOut(self.model, made, loss_fn, syncs=True, **step)
        return compile_step(self.model, made, loss_fn, backend=self.backend, **step)

    def train(self, steps: int = 3, first: int = 0) -> Run:
        with planned(**self.plan):
            for i in range(first, first + steps):
                given = [batch(i * self.count + n) for n in range(self.count)]
                self.losses.append(self.step(given) if self.count > 1 else self.step(*given))
        return self

    def loop(self, i: int) -> None:
        """An ordinary step."""
        loss = loss_fn(self.model, batch(i))
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.detach())

    def values(self) -> list[Any]:
        params = [("", local(p).clone()) for p in self.model.parameters()]
        losses = [("", loss) for loss in self.losses]
        return [*losses, *params, *remembered(self.model, *self.optimizers)]


def check_same(found: list[Any], expected: list[Any]) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, a), (_, b) in zip(found, expected, strict=True):
        assert torch.equal(a, b), (name, (a - b).abs().max())


def as_without(
    optimizer: Callable[[Any], Any] = OPTIMIZERS["adamw"],
    plan: dict[str, Any] = HOSTED,
    without: dict[str, Any] = LEAST,
    script: Callable[[Run], Any] = Run.train,
    **given: Any,
) -> tuple[int, int, int]:
    """The same with all that may be there on the host as in the ordinary loop; how many units'
    states are, how many copies were begun, and were under way at once.
    """
    expected = Run(without, optimizer, backend="", **given)
    script(expected)
    wanted = expected.values()
    with beside_host() as copies:
        run = Run(plan, optimizer, **given)
        script(run)
    check_same(run.values(), wanted)
    return len(hosted(run.model)), copies.num_begun, copies.most_under_way


def same(names: list[str]) -> None:
    for name in names:
        count, num_begun, _ = as_without(OPTIMIZERS[name])
        assert count == LAYERS, name
        is_there_before = name == "adagrad"  # which makes its state when it is made
        num_taken = NUM_PARAMS * LAYERS if is_there_before else 0
        num_fetched = 3 if is_there_before else 2
        assert num_begun == (3 + num_fetched) * LAYERS + num_taken, name


@pytest.mark.parametrize("names", [["adamw", "sgd"], ["adamw_foreach", "adamw_fused"]])
def test_same_numbers(two: Pool, names: list[str]) -> None:
    """State goes to the host behind the first update, and is there and back in each after it."""
    two.run(same, names)


def test_other_optimizers(two: Pool) -> None:
    two.run(same, ["adamw_amsgrad", "adagrad", "adamax"], timeout=SLOW)


def test_every_optimizer(two: Pool) -> None:
    two.run(same, ["adadelta", "asgd", "nadam", "radam", "rmsprop"], timeout=SLOW)


def clipped_and_accumulated() -> None:
    count, _, most_under_way = as_without(clip=0.1, accumulate=2)
    assert count == LAYERS
    assert most_under_way <= 4


def test_clipped_and_accumulated(two: Pool) -> None:
    """Behind a clipped norm updates follow each other faster than copies."""
    two.run(clipped_and_accumulated)


def scaled() -> None:
    """A step that an inf leaves out, the first one, leaves no state."""
    found = []
    for plan in (LEAST, HOSTED):
        with beside_host() as copies:
            made = torch.amp.GradScaler("cpu", init_scale=float(2**127), growth_interval=2)
            run = Run(plan, scaler=made).train(4)
            assert bool(copies.num_begun) == (plan is HOSTED)
            assert len(hosted(run.model)) == (LAYERS if plan is HOSTED else 0)
            found.append(run.values())
    check_same(found[1], found[0])


def test_scaled(two: Pool) -> None:
    two.run(scaled)


def test_several_groups(two: Pool) -> None:
    for count, *_ in two.run(as_without, with_groups):
        assert count == LAYERS


def both(params: list[Any]) -> list[torch.optim.Optimizer]:
    """Biases are another optimizer's, which remembers something else."""
    matrices = [p for p in params if p.ndim == 2]
    others = [p for p in params if p.ndim != 2]
    return [torch.optim.AdamW(matrices, lr=0.02), torch.optim.SGD(others, lr=0.1, momentum=0.9)]


def test_several_optimizers(two: Pool) -> None:
    for count, *_ in two.run(as_without, both):
        assert count == LAYERS


def with_muon(params: list[Any]) -> list[torch.optim.Optimizer]:
    matrices = [p for p in params if p.ndim == 2]
    others = [p for p in params if p.ndim != 2]
    return [torch.optim.AdamW(others, lr=0.02), Muon(matrices, lr=0.02)]


def beside_muon() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count, *_ = as_without(with_muon)
    assert count == LAYERS
    return [str(w.message) for w in caught if "stays on the device" in str(w.message)]


def test_beside_muon(two: Pool) -> None:
    """Its momentum stays, which is said."""
    for (said,) in two.run(beside_muon):
        assert "what the optimizer remembers of 0.up.weight, 0.down.weight, " in said
        assert "a Muon's matrices are updated whole" in said


def replicated() -> None:
    count, *_ = as_without(kind="replicated")
    assert count == LAYERS


def test_replicated(four: Pool) -> None:
    four.run(replicated)


def beside_others() -> None:
    count, num_begun, _ = as_without(plan=ALL)
    assert count == LAYERS
    assert num_begun > 5 * LAYERS, "activations too"


def test_beside_all_other_choices(two: Pool) -> None:
    two.run(beside_others)


def checked() -> None:
    plan, without = ({**plan, "check": "checksums"} for plan in (HOSTED, LEAST))
    count, *_ = as_without(plan=plan, without=without)
    assert count == LAYERS


def test_checked(two: Pool) -> None:
    """What rests on the host between steps is summed up like what rests on the device."""
    two.run(checked)


def inductor() -> None:
    found = []
    for plan in (LEAST, HOSTED):
        with beside_host():
            run = Run(plan, backend="compiled_fsdp", clip=0.1).train()
            assert len(hosted(run.model)) == (LAYERS if plan is HOSTED else 0)
            found.append(run.values())
    for (name, a), (_, b) in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_inductor(two: Pool) -> None:
    two.run(inductor, timeout=SLOW)


# -- how much


@pytest.mark.usefixtures("fake_world")
def test_peaks() -> None:
    """With the state in it, the peak is lower by what is on the host; a budget in between has some
    there, and a host's budget bounds it.
    """
    found: dict[Any, tuple[int, int]] = {}
    budgets = {budget: {**HOSTED, "memory_budget": budget} for budget in (0.0, 0.4, 0.9, 1.0)}
    with beside_host():
        state = 2 * 4 * sum(local(p).numel() for p in model_of().parameters())
        for name, plan in {**budgets, "host": {**HOSTED, "host_budget": state // 2}}.items():
            run = Run(plan).train(2)
            (graph,) = explain(run.model).graphs
            found[name] = sum(c["num_bytes"] for c in hosted(run.model)), graph.peak
            kept = found[name][0] < state
            assert (graph.peak_kinds.get("optimizer state", 0) > state / 4) == kept
            assert (at_rest(*run.optimizers) > 0) == (found[name][0] > 0)
    most = found[0.0][0]
    assert state <= most <= 1.1 * state, "padding alone is more"
    assert found[1.0][0] == 0
    assert 0 < found["host"][0] <= state // 2
    assert found[0.0][1] < found["host"][1] < found[1.0][1]
    assert found[1.0][1] - found[0.0][1] >= most / 4, "a few units' are there at the peak"
    assert most >= found[0.4][0] >= found[0.9][0] >= 0
    assert found[0.0][1] <= found[0.4][1] <= found[0.9][1] <= found[1.0][1]


def chosen() -> list[list[Any]]:
    with beside_host():
        run = Run({**HOSTED, "memory_budget": 0.5}).train(1)
        return [[c["of"], c["name"], c["num_bytes"]] for c in hosted(run.model)]


def test_all_ranks_choose_the_same(two: Pool) -> None:
    first, second = two.run(chosen)
    assert first == second


# -- state dicts


def saved(folder: str) -> None:
    """Through a checkpoint, into another model, and on."""
    with beside_host():
        whole = Run(LEAST, backend="").train(4)
        run = Run(HOSTED).train(2)
        state = get_optimizer_state_dict(run.model, run.optimizers[0])
        assert any(is_at_rest(v._local_tensor) for v in _tensors(state))
        dcp.save({"state": state, "model": run.model.state_dict()}, checkpoint_id=folder)
        again = Run(HOSTED).train(1, first=7)  # so that there is something to be loaded into
        into = {
            "state": get_optimizer_state_dict(again.model, again.optimizers[0]),
            "model": again.model.state_dict(),
        }
        dcp.load(into, checkpoint_id=folder)
        assert at_rest(again.optimizers[0]) == 2 * NUM_PARAMS * LAYERS
        set_optimizer_state_dict(again.model, again.optimizers[0], into["state"])
        again.losses = run.losses
        again.train(2, first=2)
    check_same(again.values(), whole.values())


def _tensors(state: dict[str, Any]) -> list[Any]:
    values = [value for each in state["state"].values() for value in each.values()]
    return [value for value in values if hasattr(value, "placements")]


def test_checkpoint(two: Pool, tmp_path: Path) -> None:
    two.run(saved, str(tmp_path / "checkpoint"))


def loaded() -> None:
    """State of a run without, by `load_state_dict`: on the device until the next step."""
    with beside_host():
        whole = Run(LEAST, backend="").train(4)
        run = Run(LEAST).train(2)
        state = run.optimizers[0].state_dict()
        values = [p.detach().clone() for p in run.model.parameters()]
        again = Run(HOSTED).train(1, first=7)
        again.optimizers[0].load_state_dict(state)
        assert at_rest(again.optimizers[0]) == 0
        with torch.no_grad():
            for param, value in zip(again.model.parameters(), values, strict=True):
                param.copy_(value)
        again.losses = run.losses
        again.train(2, first=2)
        assert at_rest(again.optimizers[0]) == 2 * NUM_PARAMS * LAYERS
    check_same(again.values(), whole.values())


def test_load_state_dict(two: Pool) -> None:
    two.run(loaded)


# -- what scripts do between


def mixed(run: Run) -> None:
    """Ordinary steps, on the device, between compiled ones."""
    run.train(2)
    run.loop(2)
    assert at_rest(*run.optimizers) == 0
    run.train(2, first=3)


def frozen(run: Run) -> None:
    """A parameter that is frozen keeps its state where it is, and trains on; a schedule."""
    first = next(run.model.parameters())
    run.train(2)
    first.requires_grad_(False)
    run.train(2, first=2)
    first.requires_grad_(True)
    for group in run.optimizers[0].param_groups:
        group["lr"] = 0.1
    run.train(2, first=4)


def two_steps(run: Run) -> None:
    """Another compiled step of the same optimizer, that clips, and one without the option."""
    run.train(2)
    first, run.step = run.step, run.made(clip=0.1)
    run.train(2, first=2)
    run.step = first
    run.train(1, first=4)
    run.plan, run.step = LEAST, run.made(clip=0.2)
    run.train(1, first=5)
    assert at_rest(*run.optimizers) == 0


def grouped(run: Run) -> None:
    """A group that is added, of what was frozen until then."""
    (optimizer,) = run.optimizers
    *_, last = run.model.parameters()
    (group,) = optimizer.param_groups
    group["params"] = [p for p in group["params"] if p is not last]
    last.requires_grad_(False)
    run.train(2)
    last.requires_grad_(True)
    optimizer.add_param_group({"params": [last], "lr": 0.1})
    run.train(2, first=2)


def momentum_later(run: Run) -> None:
    """Momentum that is switched on."""
    run.train(2)
    for group in run.optimizers[0].param_groups:
        group["momentum"] = 0.9
    run.train(2, first=2)


def plain_sgd(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


SCRIPTS = {each.__name__: each for each in (mixed, frozen, two_steps, grouped, momentum_later)}


def scripted(name: str) -> None:
    as_without(plain_sgd if name == "momentum_later" else OPTIMIZERS["adamw"], script=SCRIPTS[name])


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(two: Pool, name: str) -> None:
    two.run(scripted, name)


# -- what is said


def said(kind: str, plan: dict[str, Any], plays_device: bool) -> tuple[str, list[str], int]:
    with (
        warnings.catch_warnings(record=True) as caught,
        beside_host() if plays_device else nullcontext(),
    ):
        warnings.simplefilter("always")
        run = Run(plan, kind=kind).train(2)
        with planned(**plan):
            text = str(explain(run.model))
    warned = [str(w.message) for w in caught if "optimizer_state" in str(w.message)]
    return text, warned, at_rest(*run.optimizers)


@pytest.mark.usefixtures("fake_world")
def test_explain() -> None:
    text, warned, _ = said("", HOSTED, True)
    (line,) = (line for line in text.splitlines() if "on the host between updates" in line)
    assert f"budget: {LAYERS} optimizer states on the host between updates" in line
    assert "costs" in line
    assert "exp_avg, exp_avg_sq of" in line
    assert "Plan.optimizer_state='budget': fit_budget" in text
    assert not warned


@pytest.mark.usefixtures("fake_world")
def test_on_a_cpu() -> None:
    _, (warned,), num = said("", HOSTED, False)
    assert "host and device are the same memory, so that no optimizer state is copied" in warned
    assert num == 0


@pytest.mark.usefixtures("fake_world")
def test_the_wrapper() -> None:
    """FSDP1's parts of parameters stay, which is said."""
    _, (warned,), num = said("fsdp1", HOSTED, True)
    assert "FullyShardedDataParallel's parameters are parts" in warned
    assert num == 0


def without_its_optimizer() -> list[str]:
    model = model_of()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with (
        warnings.catch_warnings(record=True) as caught,
        beside_host() as copies,
        planned(**HOSTED),
    ):
        warnings.simplefilter("always")
        torch.compile(model, backend=EAGER, fullgraph=True)(batch()).square().mean().backward()
        optimizer.step()
    assert copies.num_begun == 0
    return [str(w.message) for w in caught if "optimizer_state" in str(w.message)]


@pytest.mark.usefixtures("fake_world")
def test_a_loop() -> None:
    """Its optimizer's step is no graph."""
    (warned,) = without_its_optimizer()
    assert "Write step = compile_step(model, optimizer, loss_fn)" in warned
