"""What a forward inside of `FullyShardedDataParallel` reads is what Python would read: substituted,
deleted, iterated over, changed by hand; with and without `use_orig_params`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.beside import WIDTH, Net, Side, beside
from kit.oracle import each
from kit.oracle_fsdp1 import Api, same
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.func import functional_call

if TYPE_CHECKING:
    from kit.pool import Pool


class Generated(Net):
    """A layer computes with weights that another generates, and once with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Linear(WIDTH, WIDTH * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.g(x.mean(0)).view(WIDTH, WIDTH)
        return super().forward(functional_call(self.b, {"weight": weight}, (x,)))


class Halved(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional_call(self.b, {"weight": self.b.weight * 0.5}, (x,)))


class Deleted(Net):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.b.weight
        del self.b.weight
        self.b.weight = weight * 2
        return super().forward(x)


class Hidden(Net):
    """An attribute of the instance comes before the parameter of its name."""

    def forward(self, x: Tensor) -> Tensor:
        object.__setattr__(self.b, "weight", self.a.weight * 0.5)
        return super().forward(x)


class Numbered(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (sum(p.numel() for p in self.parameters()) / 100)


class Normed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * sum(p.square().sum() for p in self.b.parameters())


class Named(Net):
    def forward(self, x: Tensor) -> Tensor:
        weights = [p for n, p in self.b.named_parameters() if n == "weight" and p.ndim == 2]
        return super().forward(x) * len(weights) * weights[0].sum()


class Momentum(nn.Module):
    """The units of both are not in their forward while they are read and written to."""

    def __init__(self, *, first: bool = False) -> None:
        super().__init__()
        self.fast, self.slow, self.first = Net(), Net().requires_grad_(False), first

    def follow(self) -> None:
        with torch.no_grad():
            for p, q in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.follow()
        result: Tensor = self.fast(x) - self.slow(x * 0.9)
        if not self.first:
            self.follow()
        return result


class MomentumFirst(Momentum):
    def __init__(self) -> None:
        super().__init__(first=True)


# With one flat parameter, a layer has none that could be iterated over, as in stock.
ORIGINALS_ALONE = (Normed, Named)
CHANGED_FOR_GOOD = (Deleted, Hidden)
KINDS = (Generated, Halved, Deleted, Hidden, Numbered, Normed, Named, Momentum, MomentumFirst)


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_python_reads(two: Pool, kind: Any, use_orig_params: bool) -> None:
    if kind in ORIGINALS_ALONE and not use_orig_params:
        pytest.skip("stock's layers have no parameters then")
    two.run(beside, script, kind, use_orig_params)


def script(side: Side, kind: Any, use_orig_params: bool) -> None:
    units = ("fast", "slow") if issubclass(kind, Momentum) else ("a",) if kind is Halved else ()
    model = side.wrap(kind(), *units, use_orig_params=use_orig_params)
    call = side.compile(model)
    optimizer = side.sgd(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # breaks are announced
        for step in range(1 if kind in CHANGED_FOR_GOOD else 3):
            loss = call(side.batch(step)).square().mean()
            side.note("loss", loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


class Afterwards(nn.Module):
    """Iterates over parameters of a unit that is inside, and whose forward has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Net(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        result: Tensor = self.last(y) * (sum(p.numel() for p in self.inner.parameters()) / 50)
        return result


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_after_a_forward(two: Pool, strategy: str, use_orig_params: bool) -> None:
    """What is registered then depends on the strategy."""
    two.run(same, after_a_forward, strategy, use_orig_params)


def after_a_forward(api: Api, strategy: str, use_orig_params: bool) -> Any:
    torch.manual_seed(0)
    options = {
        "use_orig_params": use_orig_params,
        "sharding_strategy": getattr(ShardingStrategy, strategy),
    }
    model = Afterwards()
    model.inner = api.wrap(model.inner, **options)
    model = api.wrap(model, **options)
    call = torch.compile(model, backend="compiled_fsdp_eager") if api.is_compiled else model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = call(torch.ones(2, WIDTH)).square().sum()
        loss.backward()
    return loss


def test_a_write_that_no_graph_shows_is_announced(two: Pool) -> None:
    two.run(announced)


def announced() -> None:
    side = Side("compiled")
    model = side.wrap(Momentum(), "fast", "slow")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        side.compile(model)(side.batch(0))
    texts = [str(warning.message) for warning in said]
    if torch.distributed.get_rank() == 0:
        assert any("writes in place to sharded parameters of a Fully" in t for t in texts), texts


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])
def test_dtype_of_what_is_iterated_over(two: Pool, use_orig_params: bool) -> None:
    """That of the computation, as in stock."""
    two.run(each_dtype, use_orig_params)


def each_dtype(use_orig_params: bool) -> None:
    each(dtypes, use_orig_params, of=Api)


class Asking(Net):
    def forward(self, x: Tensor) -> Tensor:
        is_low = next(self.parameters()).dtype is torch.bfloat16
        return super().forward(x * 0 if is_low else x) * 0 + float(is_low)


def dtypes(api: Api, use_orig_params: bool) -> None:
    model = api.wrap(
        Asking(),
        use_orig_params=use_orig_params,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
    )
    call = torch.compile(model, backend="compiled_fsdp_eager") if api.is_compiled else model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = call(torch.ones(2, WIDTH))
    assert out.float().eq(1).all(), out
    assert next(model.parameters()).dtype is torch.float32
