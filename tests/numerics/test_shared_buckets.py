"""Small units that share collectives: the same numbers as when each has its own, and fewer
collectives.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.graphs import captured
from kit.harness import ROUNDING, SLOW, Options, batch_of, check_parity, make, train
from kit.models import loss_of
from kit.oracle import communications
from kit.pool import Pool
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy
from torch.distributed.fsdp import fully_shard as stock_fully_shard

from compiled_fsdp import fully_shard, planned
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.planning.plan import BUCKET_BYTES

ALL = 1 << 30


def shared(
    options: Options,
    limit: int,
    kinds: tuple[str, ...] = ("compiled",),
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    with planned(bucket_bytes=limit):
        check_parity(options, kinds=kinds, against=("stock",), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (Options("gpt", steps=4), 300_000),  # the others have fewer bytes than that
        (Options("gpt_of_one_layer", steps=4, evaluate=True), ALL),
        (Options("moe", reshard=False), ALL),
        (
            Options("llama", steps=4, policies=(Policy(torch.bfloat16, torch.float32), Policy())),
            ALL,
        ),
    ],
    ids=lambda value: value.model if isinstance(value, Options) else str(value),
)
def test_same_as_stock(two: Pool, options: Options, limit: int) -> None:
    two.run(shared, options, limit)


@pytest.mark.parametrize("mesh", ["1d", "hsdp"])
def test_four_ranks(four: Pool, mesh: str) -> None:
    options = Options(
        "odd", steps=3, optimizer="sgd", mesh=mesh, reshard=2 if mesh == "1d" else True
    )
    four.run(
        shared, options, ALL, ("compiled",), *ROUNDING
    )  # four ranks' gradients are summed in another order


def test_inductor(two: Pool) -> None:
    two.run(
        shared,
        Options("odd", steps=3, optimizer="sgd"),
        ALL,
        ("inductor",),
        *ROUNDING,
        timeout=SLOW,
    )


def counted(limit: int) -> tuple[int, int, list[float]]:
    """Gathers and reductions of a step, and losses."""
    with planned(bucket_bytes=limit), captured() as halves:
        model, call, _ = make("compiled", Options("deep"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = train(call, optimizer, [batch_of("deep", number) for number in range(3)])
        seen = communications(lambda: loss_of(call(*batch_of("deep", 0))).backward())
    assert len(halves) == 2
    inside = [
        len([r for r in find_regions(half, kind) if r.starts])
        for kind in ("gather", "reduce")
        for half in halves
    ]
    assert (seen["gather"], seen["reduce"]) == (sum(inside[:2]), sum(inside[2:])), (
        "what the graphs say is what happens"
    )
    return seen["gather"], seen["reduce"], losses


def test_fewer_collectives(two: Pool) -> None:
    alone, some, whole = (two.run(counted, limit)[0] for limit in (0, 400, ALL))
    assert alone[2] == some[2] == whole[2]
    assert alone[0] > some[0] > whole[0] == 3, (
        "in forward what is kept and what is not, and one in backward"
    )
    assert alone[1] > some[1] > whole[1] == 1


class Block(torch.nn.Module):
    """A linear layer of 400 KB behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(320), torch.nn.Linear(320, 320)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.norm(x)))


def norms_in_fp32(norms: bool) -> tuple[int, int]:
    """Gathers and reductions of a step of three bf16 blocks;
    `norms`: with their norms as fp32 units of their own.
    """
    low = Policy(torch.bfloat16, torch.float32)
    found = []
    for apply, compiled in ((stock_fully_shard, False), (fully_shard, True)):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(*(Block() for _ in range(3)))
        for block in model:
            if norms:
                apply(block.norm, mp_policy=Policy(output_dtype=torch.bfloat16))
            apply(block, mp_policy=low)
        apply(model, mp_policy=low)
        call = (
            torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
            if compiled
            else model
        )
        x = torch.randn(4, 320)
        call(x).float().square().mean().backward()
        found.append([p.grad.to_local().clone() for p in model.parameters()])
        model.zero_grad()
        seen = communications(lambda call=call, x=x: call(x).float().square().mean().backward())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return seen["gather"], seen["reduce"]


def in_small_buckets(norms: bool) -> tuple[int, int]:
    with planned(
        bucket_bytes=BUCKET_BYTES // 4
    ):  # the blocks stay alone, and their norms are together
        return norms_in_fp32(norms)


def test_norms_in_fp32_cost_a_collective_for_the_whole_model(two: Pool) -> None:
    """And not one for each, as in stock."""
    without, with_norms = (two.run(in_small_buckets, norms)[0] for norms in (False, True))
    assert with_norms == (without[0] + 2, without[1] + 1), (
        "gathered in forward and in backward, reduced"
    )
