"""`compile_step`: gathers of the next step behind this one's updates, whatever a script does
between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.compare import check_equal
from kit.harness import BACKENDS, SLOW, Options, batch_of, local
from kit.models import loss_of
from kit.overlap import BF16, OPTIMIZERS, Run, load_in_place, start
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from compiled_fsdp import compile_step, fully_shard, planned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kit.pool import Pool

ODD = Options("odd", reshard=True)


def loss_fn(model: Any, *batch: Any) -> Any:
    return loss_of(model(*batch))


class Trainer:
    """The same script with the loop and with the step."""

    def __init__(self, options: Options, optimizer: str, *, is_whole: bool) -> None:
        self.run: Run = start(False, "eager", options, OPTIMIZERS[optimizer])
        self.options, self.is_whole = options, is_whole
        self.make()

    def make(self, **more: Any) -> None:
        """Compile the step, or compile it again, as a notebook does."""
        if self.is_whole:
            self.whole = compile_step(
                self.run.model,
                self.run.optimizer,
                loss_fn,
                clip=self.options.max_norm,
                backend=BACKENDS["compiled"],
                **more,
            )

    def step(self, number: int) -> float:
        if self.is_whole:
            return float(self.whole(*batch_of(self.options.model, number)))
        return self.loop(number)

    def loop(self, number: int) -> float:
        """An ordinary step."""
        loss = self.run.backward(number)
        if self.options.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.run.model.parameters(), self.options.max_norm)
        self.run.optimizer.step()
        self.run.optimizer.zero_grad()
        return loss

    def evaluate(self, number: int) -> float:
        self.run.model.eval()
        with torch.no_grad():
            loss = float(loss_fn(self.run.model, *batch_of(self.options.model, number)))
        self.run.model.train()
        return loss

    @property
    def num_ahead(self) -> int:
        return self.run.num_ahead()


def plain(trainer: Trainer) -> list[float]:
    losses = [trainer.step(i) for i in range(4)]
    if trainer.is_whole:
        assert trainer.num_ahead > 0, "nothing is gathered ahead, so the comparison shows nothing"
    return losses


def between(trainer: Trainer) -> list[float]:
    """Evaluations, writes by hand and to state dicts, loading these, ordinary steps, an average of
    the weights, a step compiled again, one after a failure, and frozen parameters.
    """
    model, losses = trainer.run.model, []
    first = next(model.parameters())
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    average = {name: value.clone() for name, value in model.state_dict().items()}
    for i in range(9):
        losses.append(trainer.step(i))
        if i in (0, 1):
            losses.append(trainer.evaluate(50 + i))
        if i == 1:
            with torch.no_grad():
                first.mul_(0.5)
        if i == 2:
            model.load_state_dict(saved)
        if i == 3:  # an optimizer's writes have no version
            losses.append(trainer.loop(100))
        with torch.no_grad():
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 0.1)
        if i == 5:
            load_in_place(model, saved)
            trainer.make()
        if i == 6:
            with pytest.raises((RuntimeError, TypeError)):
                trainer.step(i) if trainer.is_whole and trainer.whole(
                    torch.zeros(1, 1)
                ) else _fail()
        if i == 7:
            first.requires_grad_(False)
    return [*losses, *(float(value.to_local().sum()) for value in average.values())]


def _fail() -> None:
    raise RuntimeError("as a batch of a wrong shape")


def compare(
    script: Callable[[Trainer], list[float]],
    options: Options = ODD,
    optimizer: str = "adamw_foreach",
) -> None:
    loop = Trainer(options, optimizer, is_whole=False)
    wanted = script(loop)
    whole = Trainer(options, optimizer, is_whole=True)
    check_equal(script(whole), wanted, f"{script.__name__}, {options}")
    check_equal(whole.run.state(), loop.run.state(), f"{script.__name__}, {options}")


def in_turns(trainer: Trainer) -> list[float]:
    """Two steps of one model, of which one gathers less for the next."""
    steps = []
    for room in (300, 10_000):
        trainer.make(max_ahead_bytes=room)
        steps.append(trainer.step)
        if trainer.is_whole:
            steps[-1] = lambda i, step=trainer.whole: float(step(*batch_of("odd", i)))
    return [steps[turn](i) for i, turn in enumerate((0, 1, 1, 0, 0, 1, 0, 1))]


def compare_scripts() -> None:
    options = Options("odd", reshard=True, max_norm=0.05, policies=(BF16,))
    compare(plain, options, optimizer="adamw_fused")
    compare(between)
    compare(in_turns)


def test_scripts(two: Pool) -> None:
    """Bit for bit."""
    two.run(compare_scripts, timeout=SLOW)


def resumed(folder: str) -> None:
    """What is saved are the updated parameters, and what is loaded is what the next step reads."""
    trainer = Trainer(ODD, "adamw", is_whole=True)
    for i in range(2):
        trainer.step(i)
    model, optimizer = get_state_dict(trainer.run.model, trainer.run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    wanted = [trainer.step(i) for i in (2, 3)]
    again = Trainer(ODD, "adamw", is_whole=True)
    again.step(9)
    assert again.num_ahead > 0
    model, optimizer = get_state_dict(again.run.model, again.run.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(
        again.run.model,
        again.run.optimizer,
        model_state_dict=model,
        optim_state_dict=optimizer,
    )
    check_equal([again.step(i) for i in (2, 3)], wanted, "resumed")
    check_equal(again.run.state(), trainer.run.state(), "resumed")


def test_checkpoint(two: Pool, tmp_path: Path) -> None:
    two.run(resumed, str(tmp_path / "checkpoint"), timeout=SLOW)


def adversaries(*, is_whole: bool) -> list[Any]:
    """Two models, each trained against the other by an optimizer of its own."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    maker, judge = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, o)) for o in (6, 1))
    optimizers, steps = [], []
    losses: list[Callable[..., Any]] = [
        lambda judge, real, made: judge(made).mean() - judge(real).tanh().mean(),
        lambda maker, noise: -judge(maker(noise)).mean(),
    ]
    for model, loss in zip((judge, maker), losses, strict=True):
        for module in (model[0], model[2], model):
            fully_shard(module, reshard_after_forward=True)
        optimizers.append(torch.optim.Adam(model.parameters(), lr=0.01))
        whole = compile_step(model, optimizers[-1], loss, backend="compiled_fsdp_eager")

        def step(
            *batch: Any, number: int = len(steps), model: Any = model, whole: Any = whole
        ) -> Any:
            if is_whole:
                return whole(*batch)
            value = losses[number](model, *batch)
            value.backward()
            optimizers[number].step()
            optimizers[number].zero_grad()
            return value

        steps.append(step)
    found: list[Any] = []
    for i in range(4):
        torch.manual_seed(10 * i + dist.get_rank())
        noise, real = torch.randn(2, 3, 6)
        with torch.no_grad():
            made = maker(noise)
        judge.requires_grad_(True)
        found.append(steps[0](real, made).item())
        judge.requires_grad_(False)
        found.append(steps[1](noise).item())
    if is_whole:
        judge.requires_grad_(True)
        with pytest.raises(
            NotImplementedError, match="which is no part of the model that was given"
        ):
            steps[1](noise)
    return [*found, *(local(p) for model in (maker, judge) for p in model.parameters())]


def compare_adversaries() -> None:
    check_equal(adversaries(is_whole=True), adversaries(is_whole=False), "adversaries")


def test_two_optimizers(two: Pool) -> None:
    """And a model that should have been frozen is refused before anything is updated."""
    two.run(compare_adversaries, timeout=SLOW)


def limited() -> None:
    """None where it was not asked for, or does not fit; a write that nothing counts is an error."""
    trainer = Trainer(ODD, "sgd", is_whole=True)
    trainer.make(max_ahead_bytes=0)
    trainer.step(0)
    assert trainer.num_ahead == 0
    trainer.make(max_ahead_bytes=300)  # the first unit has 224 bytes, the second 192
    trainer.step(1)
    assert trainer.num_ahead == 1
    next(trainer.run.model.parameters()).data.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"max_ahead_bytes=0 to .*compile_step"):
        trainer.step(2)
    with pytest.raises(ValueError, match="compile_step: max_ahead_bytes=-1; should be"):
        trainer.make(max_ahead_bytes=-1)
    with planned(memory_budget=0.5):
        trainer = Trainer(ODD, "sgd", is_whole=True)
        trainer.step(0)
        assert trainer.num_ahead == 0
    with planned(bucket_bytes=1 << 20):  # all units share one gather
        trainer = Trainer(ODD, "sgd", is_whole=True)
        trainer.step(0)
    assert trainer.num_ahead == 0


def test_limited(two: Pool) -> None:
    two.run(limited, timeout=SLOW)


def first_units(widths: tuple[int, ...], *, is_frozen: bool) -> list[bool]:
    """Which units are gathered for the next step; the numbers are the loop's."""
    found: list[list[Any]] = []
    for is_whole in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        pairs = zip((4, *widths), (*widths, 4), strict=True)
        model = nn.Sequential(*(nn.Linear(given, made) for given, made in pairs))
        model[0].requires_grad_(not is_frozen)
        for module in (*model, model):
            fully_shard(module, reshard_after_forward=True)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        whole = compile_step(
            model, optimizer, lambda m, x: m(x).square().mean(), backend="compiled_fsdp_eager"
        )
        losses = []
        for i in range(3):
            torch.manual_seed(10 * i + dist.get_rank())
            x = torch.randn(3, 4)
            if is_whole:
                losses.append(whole(x))
                continue
            losses.append(model(x).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([*losses, *(local(p) for p in model.parameters())])
    check_equal(found[1], found[0], f"{widths}")
    units: list[Any] = [module._get_fsdp_state().unit for module in model]
    return [any(flat.ahead for flat in unit.flats) for unit in units]


def which_come_first() -> None:
    with planned(bucket_bytes=500):
        # The first unit has 40 bytes of parameters, and the second too much to share a gather.
        assert first_units((2, 80, 80), is_frozen=False)[:2] == [True, True]
        assert first_units((2, 80, 80), is_frozen=True)[:2] == [True, True]
        # What the third is gathered for would wait for the one gather of the first two.
        assert not any(first_units((2, 2, 80, 80), is_frozen=False))


def test_what_forward_gathers_first_goes_first(two: Pool) -> None:
    """Nothing goes ahead of a unit that forward needs before, however small that is."""
    two.run(which_come_first, timeout=SLOW)


def moved_between(check: str | None) -> None:
    """The first parameter's values change places, by eight bytes, in a way that no version
    counts.
    """
    with planned(check=check):
        trainer = Trainer(ODD, "sgd", is_whole=True)
        trainer.step(0)
        assert trainer.num_ahead
        shard = next(trainer.run.model.parameters()).detach().to_local().numpy().reshape(-1)
        words = shard[: len(shard) // 2 * 2].reshape(-1, 2)
        words[...] = words[::-1].copy()
        with pytest.raises(RuntimeError, match=r"written to through \.data, or by a"):
            trainer.step(1)


@pytest.mark.parametrize("check", [None, "checksums"])
def test_values_that_only_change_places(two: Pool, check: str | None) -> None:
    two.run(moved_between, check)
