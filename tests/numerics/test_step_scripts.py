"""Scripts that people write around `compile_step`: the numbers of the eager loop, bit for bit, and
no more compilations than there are kinds of steps.
"""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from kit.compare import check_equal, plain
from kit.harness import BACKENDS, IS_2_11, SLOW
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from compiled_fsdp import compile_step, fully_shard
from compiled_fsdp.frontend.step_values import with_loss
from compiled_fsdp.torch_private.compiled import recompiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool

LossFn = Any


def layers(*sizes: int) -> nn.Sequential:
    torch.manual_seed(sum(sizes))
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairs))


def mse(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def batch(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * i + dist.get_rank())
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


class Trained:
    """A sharded model, and its training step: compiled, or the loop."""

    def __init__(
        self, whole: bool, model: nn.Module | None = None, loss_fn: LossFn = mse, **options: Any
    ) -> None:
        self.model: Any = layers(6, 9, 7, 3) if model is None else model
        for unit in (*self.model, self.model):
            fully_shard(unit)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.loss_fn, self.losses = loss_fn, list[Any]()
        self.step = (
            compile_step(
                self.model, self.optimizer, loss_fn, backend=BACKENDS["compiled"], **options
            )
            if whole
            else self.loop
        )

    def loop(self, *args: Any, **more: Any) -> Any:
        found = self.loss_fn(self.model, *args, **more)
        loss, *others = found if isinstance(found, tuple) else (found,)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if hasattr(found, "_fields"):
            return found._replace(loss=loss.detach())
        return (loss.detach(), *others) if isinstance(found, tuple) else loss.detach()

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.losses.append(plain(found := self.step(*args, **more)))
        return found

    def state(self) -> list[Any]:
        params = self.optimizer.param_groups[0]["params"]
        return [self.losses, plain(params), [plain(self.optimizer.state.get(p)) for p in params]]


def frozen_in_turn(whole: bool) -> tuple[list[Any], int]:
    """The same two kinds of steps come again and again."""
    this = Trained(whole)
    for i in range(6):
        this.model[0].requires_grad_(i % 2 == 0)
        this.model[2].requires_grad_(i % 2 == 1)
        this(*batch(i))
    return this.state(), 2


def two_that_oppose(whole: bool) -> tuple[list[Any], int]:
    """As a GAN is trained: an optimizer for each, and one is frozen in the step of the other."""
    first, second = layers(6, 8, 6), layers(6, 8, 1)
    ours = Trained(whole, first, lambda m, x, _: F.softplus(-second(m(x))).mean())
    theirs = Trained(
        whole,
        second,
        lambda m, x, _: F.softplus(-m(x)).mean() + F.softplus(m(first(x).detach())).mean(),
    )
    for i in range(4):
        theirs(*batch(i))
        second.requires_grad_(False)
        ours(*batch(i))
        second.requires_grad_(True)
    return [*ours.state(), *theirs.state()], 2


def kept_in_a_list(whole: bool) -> tuple[list[Any], int]:
    """A list that grows makes each step another kind: it is compiled on, and said."""
    seen: list[Tensor] = []

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        seen.append(loss.detach())
        return loss

    this = Trained(whole, loss_fn=loss_fn)
    with (
        torch._dynamo.config.patch(recompile_limit=3),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        for i in range(5):
            this(*batch(i))
    said = [str(each.message) for each in told if "return loss, metrics" in str(each.message)]
    assert len(said) == whole, said
    assert all("was compiled 3 times" in text and "seen.append" in text for text in said), said
    return [*this.state(), plain(seen)], 5


def with_metrics(whole: bool) -> tuple[list[Any], int]:
    """What else the loss function returns comes back as it is; numbers by hand change."""
    this = Trained(
        whole,
        loss_fn=lambda m, x, y, *, weight: (
            weight * mse(m, x, y),
            {"size": x.abs().mean(), "rows": x.shape[0], "weight": weight},
            x[0],
        ),
    )
    for i in range(5):
        loss, metrics, row = this(*batch(i), weight=1 / (i + 1))
        assert not loss.requires_grad
        check_equal(row, batch(i)[0][0], "row")
        assert metrics["rows"] == 4
    return this.state(), 2


class Found(NamedTuple):
    loss: Tensor
    size: Tensor
    rows: int = 0


def with_names(whole: bool) -> tuple[list[Any], int]:
    """A named tuple comes back as one."""
    this = Trained(whole, loss_fn=lambda m, x, y: Found(mse(m, x, y), x.abs().mean(), x.shape[0]))
    for i in range(3):
        found = this(*batch(i))
        assert type(found) is Found
        assert not found.loss.requires_grad
        check_equal(found.size, batch(i)[0].abs().mean(), "size")
        assert found.rows == 4
    return this.state(), 1


def test_what_several_micro_batches_return() -> None:
    mean, sizes = torch.ones(()), [torch.ones(1), torch.ones(2)]
    named: Any = [Found(None, size, i) for i, size in enumerate(sizes)]  # type: ignore[arg-type]
    found = with_loss(mean, named)
    assert type(found) is Found
    assert (found.loss, found.size, found.rows) == (mean, sizes, [0, 1])
    assert with_loss(mean, [(1,), (2,)]) == (mean, [1, 2])
    assert with_loss(mean, [(), ()]) == (mean,)
    assert with_loss(mean, [None, None]) is mean


def alone_in_a_tuple(whole: bool) -> tuple[list[Any], int]:
    this = Trained(whole, loss_fn=lambda m, x, y: (mse(m, x, y),))
    for i in range(3):
        (loss,) = this(*batch(i))
        assert not loss.requires_grad
    return this.state(), 1


class Skip(Exception):
    pass


def that_raises(whole: bool) -> tuple[list[Any], int]:
    """Exceptions come out as what they are, and the next step is as if there had been none."""

    def loss_fn(m: Any, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise Skip("short batch", 3)
        if x.shape[0] == 2:
            raise Skip(f"a batch of {x.mean().detach()}")
        assert x.shape[0] > 1, "one row"
        return mse(m, x, y)

    this = Trained(whole, loss_fn=loss_fn)
    for i in range(4):
        this(*batch(i))
        for rows in (3, 2):
            with pytest.raises(Skip) as caught:
                this(*(each[:rows] for each in batch(i)))
            if rows == 3 and (not whole or not IS_2_11):
                assert caught.value.args == ("short batch", 3)
        with pytest.raises(AssertionError):
            this(*(each[:1] for each in batch(i)))
    return this.state(), 4  # kinds of batches


def behind_accumulation(whole: bool) -> tuple[list[Any], int]:
    """Steps of two micro-batches by hand, the first without communication, before and between."""
    this = Trained(whole)
    for i in range(4):
        if i in (0, 2):
            for last in (False, True):
                this.model.set_requires_gradient_sync(last)
                mse(this.model, *batch(20 + 2 * i + last)).backward()
            this.optimizer.step()
            this.optimizer.zero_grad()
        this(*batch(i))
    return this.state(), 1


SCRIPTS = (
    *(frozen_in_turn, two_that_oppose, kept_in_a_list, with_metrics, with_names, alone_in_a_tuple),
    *(that_raises, behind_accumulation),
)


def compare(script: Callable[[bool], tuple[list[Any], int]]) -> None:
    wanted, _ = script(False)
    torch._dynamo.reset()
    found, kinds = script(True)
    check_equal(found, wanted, script.__name__)
    failed = {(name, why.partition(":")[0]) for name, why in recompiles()}
    assert len(failed) < kinds, recompiles()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_scripts(two: Pool, script: Callable[..., Any]) -> None:
    two.run(compare, script, timeout=SLOW)


def kept_gradients() -> None:
    """Of a backward that has not reduced them; `zero_grad` leaves them, as in stock."""
    this = Trained(True)
    this(*batch(0))
    this.model.set_requires_gradient_sync(False)
    mse(this.model, *batch(1)).backward()
    this.model.set_requires_gradient_sync(True)
    this.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="compile_step: 0 keeps gradients of a backward without"):
        this(*batch(2))
    this.model.reset_iter_state()
    this(*batch(2))
    this.model.set_requires_gradient_sync(False)
    with pytest.raises(NotImplementedError, match="are not reduced in every backward"):
        this(*batch(3))


def test_kept_gradients(two: Pool) -> None:
    two.run(kept_gradients)


def metrics_of_batches() -> None:
    """Of several micro-batches, lists; with a scaler, behind the inverse of its scale."""

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Any:
        loss = mse(model, x, y)
        return loss, loss.detach() * 2, {"x": x}

    batches = [batch(0), batch(1)]
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=64.0)):
        this = Trained(True, loss_fn=loss_fn, accumulate=2, scaler=scaler)
        loss, doubled, given = this(batches)
        check_equal(sum(doubled[1:], doubled[0]) / 4, loss, "mean")
        check_equal([each["x"] for each in given], [x for x, _ in batches], "given")
        found.append(plain(list(this.model.parameters())))
    check_equal(*found, "with a scaler")


def test_metrics_of_batches(two: Pool) -> None:
    two.run(metrics_of_batches, timeout=SLOW)


# -- refused, with the reason, and gone on with


def _prints(model: Any, x: Tensor, y: Tensor) -> Tensor:
    print("in the middle")
    return mse(model, x, y)


def _asks(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    return loss * 2 if loss.item() > 100 else loss


def _raises(model: Any, x: Tensor, y: Tensor) -> Tensor:
    raise ValueError("a bad batch")


REFUSED: tuple[tuple[type[Exception], str, LossFn], ...] = (
    (TypeError, r"returns a dict; should be", lambda m, x, y: {"loss": mse(m, x, y)}),
    (TypeError, r"returns a list; should be", lambda m, x, y: [mse(m, x, y)]),
    (TypeError, r"returns a NoneType; should be", lambda m, x, y: None),
    (TypeError, r"a tuple in which others than the first", lambda m, x, y: (mse(m, x, y), m(x))),
    (NotImplementedError, r"builtin operator `print` .*test_step_scripts.py:\d+, print", _prints),
    (NotImplementedError, r"data-dependent .*test_step_scripts.py:\d+", _asks),
    (ValueError, r"a bad batch", _raises),
)


def refused() -> None:
    for error, words, loss_fn in REFUSED:
        this = Trained(True, loss_fn=loss_fn)
        before = plain(list(this.model.parameters()))
        with pytest.raises(error, match=words):
            this(*batch(0))
        check_equal(plain(list(this.model.parameters())), before, words)
    this = Trained(True)
    handle = register_optimizer_step_post_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"_post_hook: .*refused.<locals>.<lambda>\)"):
        this(*batch(0))
    handle.remove()
    this(*batch(0))
    for hooked in (this.model[1].register_full_backward_hook, register_module_full_backward_hook):
        handle = hooked(lambda *_: None)
        with pytest.raises(NotImplementedError, match="hooks on the backward of"):
            this(*batch(0))
        handle.remove()
    this.loss_fn(this.model, *batch(1)).backward()
    this.optimizer.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match=r"zeros, of set_to_none=False, are gradients too"):
        this(*batch(1))


def test_refused(two: Pool) -> None:
    two.run(refused, timeout=SLOW)


def interrupted() -> list[str]:
    """Ctrl-C between two updates is no Exception."""
    this = Trained(True)
    part, calls = this.step.optimizers.step_part, []

    def step_part(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        part(*args)

    this.step.optimizers.step_part = step_part
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            this(*batch(0))
    this.step.optimizers.step_part = part
    this(*batch(1))
    return [str(each.message) for each in told if "others were not" in str(each.message)]


def test_interrupted(two: Pool) -> None:
    for told in two.run(interrupted)[:1]:
        assert len(told) == 1


class Scaled(nn.Sequential):
    """The outermost module has a parameter, which a forward leaves gathered for its backward."""

    def __init__(self) -> None:
        super().__init__(*layers(6, 7, 3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x) * self.scale
        return result


def left_over(whole: bool) -> tuple[list[Any], list[str]]:
    """A forward that no backward follows, before the step is made and later; ordinary steps of a
    compiled model between. What parameters() gives after each, and what was said.
    """
    this, found = Trained(False, Scaled()), []
    call = torch.compile(this.model, backend=BACKENDS["compiled"])
    this.model(batch(9)[0])
    if whole:
        this.step = compile_step(this.model, this.optimizer, mse, backend=BACKENDS["compiled"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(5):
            if i in (1, 2):
                mse(call, *batch(i)).backward()
                this.optimizer.step()
                this.optimizer.zero_grad()
            else:
                this.losses.append(plain(this.step(*batch(i))))
            found.append(plain(dict(this.model.named_parameters())))
            if i == 3:
                this.model(batch(9)[0])
    return [*this.state(), found], [str(each.message) for each in told]


def compare_left_over() -> None:
    wanted, _ = left_over(False)
    found, told = left_over(True)
    check_equal(found, wanted, "left over")
    assert not told, told


def test_a_forward_without_a_backward(two: Pool) -> None:
    two.run(compare_left_over, timeout=SLOW)


def gone() -> tuple[list[bool], list[int]]:
    this = Trained(True)
    this(*batch(0))
    model, seen = this.model, [weakref.ref(this.step), weakref.ref(this.optimizer)]
    del this
    gc.collect()
    units = [each._fsdp_state.unit for each in (*model, model)]
    return [each() is None for each in seen], [len(unit.on_update) for unit in units]


def test_a_step_and_its_optimizer_go_with_the_last_reference(two: Pool) -> None:
    """As where a cell of a notebook is run again; units do not keep them."""
    assert two.run(gone) == [([True, True], [0, 0, 0, 0])] * 2
