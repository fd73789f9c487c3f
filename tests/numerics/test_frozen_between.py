"""Between two calls: parameters are frozen or unfrozen, in whichever form is registered; a forward
has raised.
"""

from __future__ import annotations

import os
import warnings
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from kit.compare import check_equal, whole
from kit.harness import mesh_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import fully_shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool

KINDS = ("eager", "compiled")


class Model(nn.Module):
    """Two units, and a layer of the outermost."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).tanh()).tanh()
        if self.fails:
            raise ValueError("as asked")
        out: Tensor = self.head(x)
        return out


class Training:
    """The model, unsharded, eager or compiled; every rank has the same batches, so that averages
    are what one rank computes.
    """

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.model: Any = Model()
        if kind != "unsharded":
            for module in (self.model.a, self.model.b, self.model):
                fully_shard(module, mesh=mesh_of("1d"))
        is_compiled = kind == "compiled"
        self.loss: Any = (
            torch.compile(self._loss, backend="compiled_fsdp_eager") if is_compiled else self._loss
        )
        self.call: Any = (
            torch.compile(self.model, backend="compiled_fsdp_eager") if is_compiled else self.model
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.is_sharded = kind != "unsharded"
        self.values: list[Tensor | None] = []

    def _loss(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        return loss

    def setting(self, name: str, *values: object) -> None:
        if self.is_sharded:
            getattr(self.model, name)(*values)

    def backward(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.call(torch.randn(4, 4)).square().mean().backward()

    def step(self) -> None:
        """The optimizer's own parameters: the module's may be full ones."""
        params = self.optimizer.param_groups[0]["params"]
        self.values += [None if p.grad is None else whole(p.grad) for p in params]
        self.optimizer.step()
        self.values += [whole(p) for p in params]
        self.optimizer.zero_grad()


def freeze_with_gradients_kept(this: Training) -> None:
    """A backward without a reduction, and then one that does not come to some of these parameters,
    or to a whole unit.
    """
    for frozen in (this.model.a, this.model.b.bias, this.model.head.weight):
        this.setting("set_requires_gradient_sync", False)
        this.backward(1)
        this.setting("set_requires_gradient_sync", True)
        frozen.requires_grad_(False)
        this.backward(2)
        this.step()
        frozen.requires_grad_(True)


def freeze_what_is_kept(this: Training) -> None:
    """Full parameters stay registered after backward: those are what `module.requires_grad_` comes
    to.
    """
    this.setting("set_reshard_after_backward", False)
    this.backward(0)
    this.step()
    for is_trained in (False, True):
        this.model.a.requires_grad_(is_trained)
        this.model.head.bias.requires_grad_(is_trained)
        this.backward(1)
        this.step()


def freeze_what_was_gathered(this: Training) -> None:
    """The same of `unshard()`; and the optimizer's own, which are sharded, count as well."""
    for is_trained in (False, True, False):
        if this.is_sharded:
            this.model.a.unshard()
        this.model.a.requires_grad_(is_trained)
        this.optimizer.param_groups[0]["params"][2].requires_grad_(is_trained)
        this.backward(1)
        this.step()


def call_again_after_an_error(this: Training) -> None:
    """The model itself runs eagerly and raises; then a compiled function calls it."""
    this.model.fails = True
    with pytest.raises(ValueError, match="as asked"):
        this.model(torch.randn(4, 4))
    this.model.fails = False
    torch.manual_seed(1)
    this.loss(torch.randn(4, 4)).backward()
    this.step()


def write_in_a_forward_that_is_no_graph(this: Training) -> None:
    """Once Dynamo has given up a forward, what it reads of another unit is the sharded parameter,
    and a write to that stays.
    """
    this.model.forward = MethodType(_forward_that_writes, this.model)
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            this.values.append(this.call(torch.randn(4, 4)))
    this.values += [whole(p) for p in this.optimizer.param_groups[0]["params"]]


def _forward_that_writes(self: Model, x: Tensor) -> Tensor:
    """The write is read both inside and outside of a region that is captured by itself, which no
    graph of ours can show.
    """
    x = checkpoint(self.a, x, use_reentrant=False).tanh()
    with torch.no_grad():
        self.a.weight.clamp_(-0.2, 0.2)
    out: Tensor = self.head(self.a(x).tanh())
    return out


CASES = (
    freeze_with_gradients_kept,
    freeze_what_is_kept,
    freeze_what_was_gathered,
    call_again_after_an_error,
    write_in_a_forward_that_is_no_graph,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_between_calls(two: Pool, case: Callable[[Training], None]) -> None:
    two.run(check, case)


def check(case: Callable[[Training], None]) -> None:
    found = {}
    for kind in ("unsharded", *KINDS):
        this = Training(kind)
        case(this)
        found[kind] = this.values
    for kind in KINDS:
        check_equal(found[kind], found["unsharded"], kind, 1e-4, 1e-6)


def _halve_other(layer: nn.Linear, *_: object) -> None:
    layer.weight.data.mul_(0.5)


def test_a_write_between_a_graph_and_its_backward_is_announced(two: Pool) -> None:
    """Which no graph sees, and no version counts; with COMPILED_FSDP_VERIFY alone."""
    two.run(check_written_between)


def check_written_between() -> None:
    for writes in (True, False):
        this = Training("eager")
        this.model.a.compile(backend="compiled_fsdp_eager")
        if writes:
            this.model.b.register_forward_pre_hook(partial(_halve_other, this.model.a))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            this.backward(0)
            this.step()  # an optimizer's write comes after backward
            this.backward(1)
        said = [str(w.message) for w in caught if "and its backward" in str(w.message)]
        assert len(said) == writes, said
        assert all("parameters of a were written to" in text for text in said)


@pytest.mark.parametrize("what", ["write", "step", "neither", "submodule", "around"])
def test_a_write_that_a_version_counts_is_announced_always(two: Pool, what: str) -> None:
    two.run(check_counted, what)


def check_counted(what: str) -> None:
    this = Training("compiled")
    model = this.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = torch.compile(model.a if what == "submodule" else model, backend="compiled_fsdp_eager")
    around = torch.compile(lambda x: call(x) * 2, backend="compiled_fsdp_eager")
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.dict(os.environ, {"COMPILED_FSDP_VERIFY": ""}),
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            loss = (around if what == "around" else call)(torch.ones(2, 4)).square().sum()
            if what == "write":
                with torch.no_grad():
                    model.a.weight.mul_(0.5)
            loss.backward(retain_graph=what == "step")
            if what == "around":  # a forward that no backward comes to, and then a step
                call(torch.ones(2, 4))
            optimizer.step()
            optimizer.zero_grad()
            if what == "step":
                loss.backward()
    said = [str(w.message) for w in caught if "and its backward" in str(w.message)]
    assert bool(said) is (what in ("write", "step")), said


@pytest.mark.parametrize("case", ["kept", "written", "tied"])
def test_what_differs_is_announced(two: Pool, case: str) -> None:
    two.run(check_announced, case)


ANNOUNCED = {
    "kept": "keeps its full parameters after a backward .* whose .grad is None",
    "written": "parameter head.weight is written to in place while it is gathered",
    "tied": "parameter a.weight is tied, and load_state_dict.* Sharded weights stay tied",
}


def check_announced(case: str) -> None:
    this = Training("eager")
    with pytest.warns(UserWarning, match=ANNOUNCED[case]):
        announce(this, case)


def _halve(module: nn.Linear, _: object) -> None:
    module.weight.data.mul_(0.5)


def announce(this: Training, case: str) -> None:
    """In eager mode, where torch's FSDP2 says nothing; a write through `.data` with
    COMPILED_FSDP_VERIFY alone.
    """
    if case == "kept":
        this.setting("set_reshard_after_backward", False)
    if case == "written":
        this.model.head.register_forward_pre_hook(_halve)
    if case == "tied":
        tied: Any = Model()
        tied.b.weight = tied.a.weight
        fully_shard(tied, mesh=mesh_of("1d"))
        tied.load_state_dict(
            {name: value.clone() for name, value in tied.state_dict().items()}, assign=True
        )
    this.backward(0)
    this.setting("reshard")
