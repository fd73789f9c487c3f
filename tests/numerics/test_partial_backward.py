"""Backwards that were not asked for the parameters' gradients: `autograd.grad(loss, x)`,
`backward(inputs=[x])`, failed ones.

They leave no trace: `.grad`, what accumulation keeps, the optimizer and the next backward are as if
they had not been.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.compare import CLOSE, check_equal, whole
from kit.harness import mesh_of
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from compiled_fsdp import errors, fully_shard, overlap_optimizer
from compiled_fsdp.frontend.state import states_below

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool

KINDS = ("unsharded", "eager", "compiled")
BACKENDS = {"compiled": "compiled_fsdp_eager", "aot_eager": "aot_eager"}
PARTIAL: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "grad": lambda loss, x: torch.autograd.grad(loss, x, retain_graph=True),
    "inputs": lambda loss, x: loss.backward(inputs=[x], retain_graph=True),
    "create_graph": lambda loss, x: torch.autograd.grad(loss, x, create_graph=True),
}


class Setup:
    """A model of three units, how it is called, and its optimizer."""

    def __init__(self, kind: str, *, overlap: str = "", mesh: str = "1d") -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.model: Any = nn.Sequential(
            nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)
        )
        if kind != "unsharded":
            for module in (self.model[0], self.model[2], self.model):
                fully_shard(module, mesh=mesh_of(mesh))
        self.is_sharded = kind != "unsharded"
        self.call = (
            torch.compile(self.model, backend=BACKENDS[kind], fullgraph=True)
            if kind in BACKENDS
            else self.model
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.1)
        if overlap and self.is_sharded:
            overlap_optimizer(self.model, self.optimizer, in_backward=overlap == "in_backward")

    def loss(self, seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        x = torch.randn(4, 6, requires_grad=True)
        return self.call(x).square().mean(), x

    def sync(self, value: bool) -> None:
        if self.is_sharded:
            self.model.set_requires_gradient_sync(value)

    def grads(self) -> list[Tensor | None]:
        return [None if p.grad is None else whole(p.grad) for p in self.model.parameters()]

    def params(self) -> list[Tensor]:
        return [whole(p) for p in self.model.parameters()]


def observe(scenario: Callable[..., list[Any]], kinds: tuple[str, ...], **options: Any) -> None:
    """Each kind sees what the unsharded model sees; all ranks compute on the same batch."""
    expected = scenario(Setup("unsharded", **options))
    with functorch_config.patch(
        donated_buffer=False
    ):  # which torch wants where a graph is retained
        for kind in kinds:
            check_equal(scenario(Setup(kind, **options)), expected, kind, *CLOSE)


def alone(setup: Setup, how: str) -> list[Any]:
    """No gradient before, none after; and the whole backward after it is right."""
    loss, x = setup.loss(1)
    PARTIAL[how](loss, x)
    seen = [setup.grads()]
    loss.backward()
    return [*seen, setup.grads()]


def accumulated(setup: Setup, how: str) -> list[Any]:
    """Between two backwards that accumulate: nothing kept is lost or added twice."""
    setup.sync(False)
    setup.loss(1)[0].backward()
    PARTIAL[how](*setup.loss(2))
    setup.sync(True)
    PARTIAL[how](*setup.loss(3))
    setup.loss(4)[0].backward()
    return [setup.grads()]


def trained(setup: Setup, how: str) -> list[Any]:
    """Steps of an optimizer with a partial backward in each."""
    seen = []
    for step in range(3):
        loss, x = setup.loss(step)
        PARTIAL[how](loss, x)
        seen.append(setup.params())
        loss.backward()
        setup.optimizer.step()
        seen.append(setup.params())
        setup.optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("how", PARTIAL)
@pytest.mark.parametrize("scenario", [accumulated, trained], ids=lambda s: s.__name__)
def test_partial_backward(two: Pool, scenario: Any, how: str) -> None:
    two.run(partial, scenario, how)


def partial(scenario: Any, how: str) -> None:
    kinds = ("eager", "compiled", "aot_eager") if how == "grad" else ("eager", "compiled")
    observe(lambda setup: scenario(setup, how), kinds)


@pytest.mark.parametrize("overlap", ["step", "in_backward"])
def test_partial_backward_with_overlap(two: Pool, overlap: str) -> None:
    two.run(partial_with_overlap, overlap)


def partial_with_overlap(overlap: str) -> None:
    for scenario in (alone, accumulated) if overlap == "step" else (stepped, trained):
        observe(
            lambda setup, scenario=scenario: scenario(setup, "grad"),
            ("eager", "compiled"),
            overlap=overlap,
        )


def stepped(setup: Setup, how: str) -> list[Any]:
    """Gradients are used up inside backward: what accumulates and what steps shows in the
    parameters.
    """
    setup.sync(False)
    setup.loss(1)[0].backward()
    PARTIAL[how](*setup.loss(2))
    seen = [setup.params()]
    setup.sync(True)
    PARTIAL[how](*setup.loss(3))
    seen.append(setup.params())
    setup.loss(4)[0].backward()
    setup.optimizer.step()
    return [*seen, setup.params()]


def test_partial_backward_on_hsdp(four: Pool) -> None:
    four.run(partial_on_hsdp)


def partial_on_hsdp() -> None:
    observe(lambda setup: accumulated(setup, "grad"), ("eager", "compiled"), mesh="hsdp")


def penalised(setup: Setup, how: str) -> list[Any]:
    """A gradient penalty, alone or with the loss: a backward through a backward."""
    seen = []
    for step in range(2):
        loss, x = setup.loss(step)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = (grad.norm(dim=1) - 1).square().mean()
        (penalty if how == "alone" else penalty + loss + setup.loss(step + 5)[0]).backward()
        seen.append(setup.grads())
        setup.optimizer.step()
        setup.optimizer.zero_grad()
    return [*seen, setup.params()]


def test_gradient_penalty(two: Pool) -> None:
    two.run(gradient_penalty)


def gradient_penalty() -> None:
    """Eager mode has it; a compiled graph says that it has no second backward."""
    for how in ("alone", "together"):
        observe(lambda setup, how=how: penalised(setup, how), ("eager",))
    setup = Setup("eager")
    penalised(setup, "alone")
    assert not full_bytes(setup.model), "full parameters stay after it"
    setup.loss(1)[0].backward(create_graph=True)
    assert all(p.grad is not None for p in setup.model.parameters())
    setup.optimizer.step()
    setup.loss(2)
    assert not full_bytes(setup.model[0]), "they stay for a backward that cannot come"
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        penalised(Setup("compiled"), "alone")


def full_bytes(model: Any) -> int:
    params = [
        p for state in states_below(model) for p in state.unit.params if p.unsharded is not None
    ]
    return sum(p.unsharded.untyped_storage().nbytes() for p in params)


def test_a_step_without_gradients_says_so(two: Pool) -> None:
    two.run(step_without_gradients)


def step_without_gradients() -> None:
    """`backward(inputs=parameters)` asks for those of tensors that no graph has seen. A step
    without a forward in grad mode (which makes an optimizer's state), one of what is frozen, and
    one with gradients are nobody's mistake.
    """
    setup = Setup("compiled")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        setup.optimizer.step()
        with torch.no_grad():
            setup.loss(0)
        setup.optimizer.step()
        setup.model.requires_grad_(False)
        setup.loss(1)
        setup.optimizer.step()
        setup.model.requires_grad_(True)
    setup.loss(2)[0].backward(inputs=list(setup.model.parameters()))
    with pytest.warns(UserWarning, match=r"no gradient has come to its parameters \(0.weight"):
        setup.optimizer.step()
    assert setup.grads() == [None] * 6
    errors._said.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        setup.loss(3)[0].backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        setup.optimizer.step()


class Branches(nn.Module):
    """Which layer computes is the caller's choice: a graph for each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, is_one: bool) -> Tensor:
        return (self.one if is_one else self.other)(x)


def test_other_branch(two: Pool) -> None:
    two.run(other_branch)


def other_branch() -> None:
    """What a partial backward passed through is not delivered by the whole one that takes another
    way.
    """
    model: Any = fully_shard(Branches(), mesh=mesh_of("1d"))
    call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    x = torch.randn(2, 4, requires_grad=True)
    torch.autograd.grad(call(x, True).sum(), x)
    call(x, False).sum().backward()
    assert model.one.weight.grad is None
    assert model.other.weight.grad is not None
