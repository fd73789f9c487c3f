"""Outputs of a compiled model that the loss does not use: their parameters have no gradient, and no
optimizer moves them.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import CLOSE, check_equal, whole
from kit.harness import mesh_of
from torch import Tensor, nn

from compiled_fsdp import errors, fully_shard, overlap_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool


class Heads(nn.Module):
    """A body, two heads of it, and one that reads the input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.first, self.second, self.third = nn.Linear(5, 3), nn.Linear(5, 4), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.first(hidden), self.second(hidden).transpose(0, 1), self.third(x)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "first": lambda a, b, c: a.square().mean(),
    "second": lambda a, b, c: b.square().mean(),
    "third": lambda a, b, c: c.square().mean(),
    "two": lambda a, b, c: a.square().mean() + c.square().mean(),
    "zero": lambda a, b, c: a.square().mean() + 0 * b.sum(),
}


class Training:
    """The model, unsharded or compiled, the heads as units of their own or not, and its
    optimizer.
    """

    def __init__(
        self, backend: str = "", *, own_units: bool = True, wrapped: bool = False, overlap: str = ""
    ) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.model: Any = Heads()
        self.call: Any = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.1)
        self.is_sharded = bool(backend)
        if backend:
            for module in (self.model.first, self.model.second) if own_units else ():
                fully_shard(module, mesh=mesh_of("1d"))
            fully_shard(self.model, mesh=mesh_of("1d"))
            function = (lambda x: self.model(x)) if wrapped else self.model
            self.call = torch.compile(function, backend=backend, fullgraph=True)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.1)
            if overlap:
                overlap_optimizer(self.model, self.optimizer, in_backward=overlap == "in_backward")

    def backward(self, seed: int, loss: str) -> None:
        torch.manual_seed(seed)
        LOSSES[loss](*self.call(torch.randn(4, 6))).backward()

    def sync(self, value: bool) -> None:
        if self.is_sharded:
            self.model.set_requires_gradient_sync(value)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def grads(self) -> list[Tensor | None]:
        return [None if p.grad is None else whole(p.grad) for p in self.model.parameters()]

    def params(self) -> list[Tensor | None]:
        return [whole(p) for p in self.model.parameters()]


def one_after_the_other(training: Training) -> list[list[Tensor | None]]:
    """A loss of another head in each step."""
    seen = []
    for seed, loss in enumerate(LOSSES):
        training.backward(seed, loss)
        seen.append(training.grads())
        training.step()
    return [*seen, training.params()]


def steps(training: Training) -> list[list[Tensor | None]]:
    """The same where gradients are not to be seen."""
    for seed, loss in enumerate(LOSSES):
        training.backward(seed, loss)
        training.step()
    return [training.params()]


def accumulated(training: Training) -> list[list[Tensor | None]]:
    """What an earlier backward kept of a head is delivered by one that does not use it."""
    training.sync(False)
    training.backward(0, "second")
    training.backward(1, "first")
    training.sync(True)
    training.backward(2, "first")
    return [training.grads()]


@pytest.mark.parametrize("own_units", [True, False])
def test_unused_heads(two: Pool, own_units: bool) -> None:
    two.run(compare, one_after_the_other, {"own_units": own_units})


def test_unused_heads_of_a_larger_function(two: Pool) -> None:
    two.run(compare, one_after_the_other, {"wrapped": True})


def test_unused_heads_with_inductor(two: Pool) -> None:
    two.run(compare, one_after_the_other, {"backend": "inductor"})


@pytest.mark.parametrize("own_units", [True, False])
def test_accumulation(two: Pool, own_units: bool) -> None:
    two.run(compare, accumulated, {"own_units": own_units})


@pytest.mark.parametrize("overlap", ["step", "in_backward"])
def test_overlap(two: Pool, overlap: str) -> None:
    two.run(compare, steps, {"overlap": overlap})


def compare(scenario: Any, options: dict[str, Any]) -> None:
    ours = Training(**{"backend": "compiled_fsdp_eager", **options})
    check_equal(scenario(ours), scenario(Training()), "ours against unsharded", *CLOSE)


def test_unused_heads_unlowered(two: Pool) -> None:
    two.run(unlowered)


def unlowered() -> None:
    """Where our passes do not run, zeros are announced."""
    errors._said.clear()
    training = Training("aot_eager")
    with pytest.warns(
        UserWarning,
        match="Parameters that only they lead to get zeros for gradients instead of None",
    ):
        training.backward(0, "first")


class NestedHeads(Heads):
    """Returns a tensor whose class wraps values and offsets, and a plain one."""

    def forward(self, x: Tensor) -> Any:
        a, _, c = super().forward(x)
        return torch.nested.nested_tensor_from_jagged(a, torch.tensor([0, 1, 4])), c


def test_an_output_that_is_nested(two: Pool) -> None:
    two.run(nested)


def nested() -> None:
    model, reference = NestedHeads(), NestedHeads()
    reference.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh_of("1d"))
    call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    x = torch.ones(4, 6)
    for place in range(2):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="compiled_fsdp")
            call(x)[place].sum().backward()
        reference(x)[place].sum().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
        model.zero_grad()
        reference.zero_grad()


def test_ranks_use_different_heads(two: Pool) -> None:
    two.run(different_heads)


def different_heads() -> None:
    """A head counts as used where any rank uses it: its gradient is the mean over all."""
    training = Training("compiled_fsdp_eager")
    training.backward(0, "first" if dist.get_rank() == 0 else "second")
    reference = Training()
    _both(reference)
    check_equal(training.grads()[:6], reference.grads()[:6], "the mean over ranks", *CLOSE)
    assert training.grads()[6:] == [None, None]


def _both(reference: Training) -> None:
    torch.manual_seed(0)
    a, b, _ = reference.call(torch.randn(4, 6))
    ((a.square().mean() + b.square().mean()) / 2).backward()
