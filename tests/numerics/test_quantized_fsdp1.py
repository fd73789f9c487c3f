"""FSDP1's flat parameters as codes on the wire: beside the unsharded model that computes with the
same rounded values, bit for bit; what is exact all the same, and what is refused.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import check_equal
from kit.harness import compiled
from kit.oracle_fsdp1 import hybrid_mesh
from kit.rounded import coded
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import StateDictType as Kind

from compiled_fsdp import FullyShardedDataParallel, compile_step, explain, planned

if TYPE_CHECKING:
    from kit.pool import Pool
    from torch import Tensor

INT8, FP8 = torch.int8, torch.float8_e4m3fn
BOTH: dict[str, Any] = {"gather_quantized": INT8, "reduce_quantized": INT8}
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NUM_STEPS = 2


def net() -> nn.Sequential:
    """Flat parameters of 2,535 and 1,326 elements: blocks that hold parts of two originals, and
    shards that begin inside of one.
    """
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(25, 50), nn.LayerNorm(50), nn.Linear(50, 23))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(23, 51), nn.LayerNorm(51))


def batch(step: int) -> Tensor:
    return torch.randn(6, 25, generator=torch.Generator().manual_seed(7 * step + dist.get_rank()))


def wrapped(**options: Any) -> Any:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NO_SHARD
        model[0] = FullyShardedDataParallel(model[0], device_id="cpu", **options)
        return FullyShardedDataParallel(model, device_id="cpu", **options)


def made(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def trained(kind: str, *, syncs: bool = True, norm: float = 0.0, **options: Any) -> list[Any]:
    """Losses, and at the end the shards of all flat parameters and gradients."""
    torch._dynamo.reset()
    model = wrapped(**options)
    call = compiled(model) if kind == "compiled" else model
    optimizer = made(model.parameters())
    losses, grads = [], []
    for step in range(NUM_STEPS):
        for micro in range(1 if syncs else 2):
            with nullcontext() if syncs or micro else model.no_sync():
                loss = call(batch(step + 10 * micro)).float().square().mean()
                loss.backward()
                losses.append(loss.item())
        if norm:
            losses.append(model.clip_grad_norm_(norm).item())
        grads += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [losses, grads, [p.detach().clone() for p in model.parameters()]]


# -- beside the unsharded model


def by_rank(flat: Tensor, codes: torch.dtype | None) -> Tensor:
    """A flat parameter, of which each rank's shard was coded by itself."""
    world = dist.get_world_size()
    padded = torch.zeros(-(-flat.numel() // world) * world)
    padded[: flat.numel()] = flat
    return torch.cat([coded(p, codes) for p in padded.chunk(world)]) if codes else padded


def unsharded(gathers: torch.dtype | None, reduces: torch.dtype | None) -> list[Any]:
    """As `trained`: each unit's parameters as one flat one, coded as a rank holds it; of a
    gradient, what FSDP1 sends: divided by the world size of two before.
    """
    model, world, rank = net(), dist.get_world_size(), dist.get_rank()
    names = [name for name, _ in model.named_parameters()]
    units = [[n for n in names if not n.startswith("0.")], [n for n in names if n[:2] == "0."]]
    params = dict(model.named_parameters())
    flats = [torch.cat([params[n].detach().flatten() for n in names]) for names in units]
    shards = [nn.Parameter(by_rank(f, None).chunk(world)[rank].clone()) for f in flats]
    optimizer = made(shards)
    losses, grads = [], []
    for step in range(NUM_STEPS):
        leaves, given = [], {}
        for shard, flat, its_names in zip(shards, flats, units, strict=True):
            pieces = [torch.empty_like(shard) for _ in range(world)]
            dist.all_gather(pieces, shard.detach())
            whole = by_rank(torch.cat(pieces)[: flat.numel()], gathers)
            leaves.append(whole.requires_grad_())
            ends = [0]
            for name in its_names:
                ends.append(ends[-1] + params[name].numel())
            for name, (start, end) in zip(its_names, pairwise(ends), strict=True):
                given[name] = whole[start:end].view(params[name].shape)
        loss = torch.func.functional_call(model, given, (batch(step),)).square().mean()
        loss.backward()
        losses.append(loss.item())
        for shard, leaf, flat in zip(shards, leaves, flats, strict=True):
            sent = by_rank(leaf.grad[: flat.numel()] / world, reduces)
            pieces = [torch.empty_like(sent) for _ in range(world)]
            dist.all_gather(pieces, sent)
            shard.grad = sum(pieces[1:], pieces[0]).chunk(world)[rank].clone()
        grads += [shard.grad.clone() for shard in shards]
        optimizer.step()
        optimizer.zero_grad()
    return [losses, grads, [s.detach().clone() for s in shards]]


def beside_unsharded() -> None:
    plain = trained("eager")
    for plan in (BOTH, {"gather_quantized": FP8}):
        wanted = unsharded(plan["gather_quantized"], plan.get("reduce_quantized"))
        assert plain[0][0] != wanted[0][0], "nothing was rounded, so the comparison shows nothing"
        with planned(**plan):
            for kind in ("eager", "compiled"):
                check_equal(trained(kind), wanted, f"{kind}, {plan}")


def test_as_the_unsharded_model_with_the_same_codes(two: Pool) -> None:
    two.run(beside_unsharded)


# -- beside our eager mode


def compiled_as_eager(options: dict[str, Any]) -> None:
    plain = trained("eager", **options)
    with planned(**BOTH):
        eager, ours = (trained(kind, **options) for kind in ("eager", "compiled"))
    check_equal(ours, eager, str(options))
    assert plain[0][0] != eager[0][0], "nothing was rounded, so the comparison shows nothing"


CASES: dict[str, dict[str, Any]] = {
    "bf16, originals": {"mixed_precision": BF16, "use_orig_params": True},
    "kept, no_sync": {
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        "syncs": False,
        "norm": 0.1,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_graphs_as_eager(two: Pool, case: str) -> None:
    two.run(compiled_as_eager, CASES[case])


def hybrid() -> None:
    strategy = ShardingStrategy.HYBRID_SHARD
    compiled_as_eager({"sharding_strategy": strategy, "device_mesh": hybrid_mesh(), "norm": 0.1})


def test_hybrid(four: Pool) -> None:
    four.run(hybrid)


def whole_step() -> None:
    with planned(**BOTH):
        losses, _, params = trained("eager")
        model = wrapped()
        step = compile_step(
            model,
            made(model.parameters()),
            lambda model, x: model(x).square().mean(),
            backend="compiled_fsdp_eager",
        )
        ours = [step(batch(i)).item() for i in range(NUM_STEPS)]
    check_equal([ours, [p.detach() for p in model.parameters()]], [losses, params], "whole step")


def test_whole_step(two: Pool) -> None:
    two.run(whole_step)


# -- what stays exact


def at_rest() -> None:
    """What the optimizer steps is what users read, save and write, not what codes stand for."""
    before = {name: p.detach().clone() for name, p in net().named_parameters()}
    with planned(**BOTH):
        model = wrapped(use_orig_params=True)
        model(batch(0)).sum().backward()
        with FullyShardedDataParallel.summon_full_params(model):
            shown = {
                name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                for name, p in model.named_parameters()
            }
        with FullyShardedDataParallel.state_dict_type(
            model, Kind.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)
        ):
            saved = model.state_dict()
    check_equal(shown, before, "summoned")
    check_equal(dict(saved), before, "saved")


def test_at_rest(two: Pool) -> None:
    two.run(at_rest)


def exact_all_the_same() -> None:
    """A flat parameter is exact as a whole if an original is named; so is one of norms and biases
    alone, and what NO_SHARD does not cut.
    """
    plain = trained("eager")
    with planned(**BOTH, exact=("0.1.*", "3.weight")):
        check_equal(trained("eager"), plain, "named")
        text = str(explain(wrapped()))
    assert "nothing travels as codes" in text
    assert "gathered as int8" not in text
    with planned(**BOTH, exact=("0.1.*",)):
        model = wrapped()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model(batch(0))
        text = str(explain(model))
    assert not [w for w in said if "no parameter of the model matches" in str(w.message)]
    assert text.count("gathered as int8: 1 of 1 parameters") == 1
    with planned(**BOTH):
        norm = FullyShardedDataParallel(nn.LayerNorm(2000), device_id="cpu")
        assert "gathered as int8" not in str(explain(norm))
    options = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    plain = trained("eager", **options)
    with planned(**BOTH):
        check_equal(trained("eager", **options), plain, "NO_SHARD")


def test_exact_all_the_same(two: Pool) -> None:
    two.run(exact_all_the_same)


# -- what is refused


def refused() -> str:
    model = wrapped()
    model.register_comm_hook(None, lambda state, grad, out: None)
    with planned(gather_quantized=INT8):
        model(batch(0))  # the hook reduces; gathers are ours
    with planned(**BOTH), pytest.raises(NotImplementedError) as error:
        model(batch(0))
    return str(error.value)


def test_communication_hooks_are_refused(two: Pool) -> None:
    text = two.run(refused)[0]
    assert "uses a communication hook (register_comm_hook), which is not supported" in text
