"""Parameters and gradients as codes on the wire: beside the unsharded model that computes with the
same rounded values, coded here in plain torch, bit for bit; and what cannot be combined with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import check_equal
from kit.graphs import captured
from kit.harness import (
    ROUNDING,
    SLOW,
    Options,
    batch_of,
    build,
    local,
    make,
    mesh_of,
    observed,
    optimizer_of,
    shard_of,
    trace_of,
)
from kit.models import loss_of
from kit.rounded import BLOCK, coded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from compiled_fsdp import (
    explain,
    fully_shard,
    planned,
)
from compiled_fsdp.ir.regions import find_regions

if TYPE_CHECKING:
    from kit.pool import Pool
    from torch import Tensor

INT8, FP8 = torch.int8, torch.float8_e4m3fn
BOTH: dict[str, Any] = {"gather_quantized": INT8, "reduce_quantized": INT8}
LEAST_NUMEL = 256


def by_rank(x: Tensor, codes: torch.dtype | None) -> Tensor:
    """The same of each rank's padded rows by themselves; what is to be exact, as it is."""
    world = dist.get_world_size()
    rows = -(-x.shape[0] // world)
    padded = torch.zeros(rows * world, *x.shape[1:])
    padded[: x.shape[0]] = x
    if codes is None or x.dim() < 2 or padded[:rows].numel() < LEAST_NUMEL:
        return x.clone()
    return torch.cat([coded(p, codes) for p in padded.split(rows)])[: x.shape[0]]


def unsharded(options: Options, gathers: torch.dtype | None, reduces: torch.dtype | None) -> Any:
    """Losses, and shards of gradients and parameters after each step, of the model on one rank."""
    model = build(options.model)
    params = dict(model.named_parameters())
    optimizer = optimizer_of(options.optimizer, params.values())
    losses, grads, after = [], [], []
    for step in range(options.steps):
        full = {
            name: by_rank(p.detach(), gathers).requires_grad_(p.requires_grad)
            for name, p in params.items()
        }
        batch = batch_of(options.model, step)
        loss = loss_of(torch.func.functional_call(model, full, batch))
        loss.backward()
        for name, p in params.items():
            grad = full[name].grad
            if grad is not None:
                pieces = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
                dist.all_gather(pieces, by_rank(grad, reduces).contiguous())
                p.grad = sum(pieces[1:], pieces[0]) / len(pieces)
        losses.append(loss.item())
        grads.append(shards(params, "grad"))
        optimizer.step()
        optimizer.zero_grad()
        after.append(shards(params))
    return losses, grads, after


def shards(params: dict[str, Any], attribute: str = "data") -> dict[str, Tensor | None]:
    found = {name: getattr(p, attribute) for name, p in params.items()}
    mesh = mesh_of("1d")
    return {n: None if t is None else shard_of(t, mesh).clone() for n, t in found.items()}


def beside_unsharded(options: Options, plan: dict[str, Any]) -> None:
    codes = plan.get("gather_quantized"), plan.get("reduce_quantized")
    losses, grads, params = unsharded(options, *codes)
    plain = trace_of("eager", options)
    assert plain.losses != losses, "nothing was rounded, so the comparison shows nothing"
    with planned(**plan):
        for kind in ("eager", "compiled"):
            ours = trace_of(kind, options)
            found = (ours.losses, ours.grads, ours.params)
            check_equal(list(found), [losses, grads, params], f"{kind}, {options.model}, {plan}")


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("equal_units", BOTH),
        ("equal_units", {"gather_quantized": FP8}),
        ("equal_units", {"reduce_quantized": FP8}),
    ],
    ids=["both", "gathers in fp8", "gradients in fp8"],
)
def test_as_the_unsharded_model_with_the_same_codes(
    two: Pool, model: str, plan: dict[str, Any]
) -> None:
    two.run(beside_unsharded, Options(model, steps=2), plan)


class Odd(nn.Module):
    """One weight in two places, one frozen, one cut unevenly, and one expanded gradient."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(30, 30), nn.Linear(30, 30)
        if is_tied:
            self.tied.weight = self.first.weight
        self.frozen, self.last = nn.Linear(30, 41), nn.Linear(41, 25)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.frozen(self.tied(torch.tanh(self.first(x))))))


def tied_and_frozen(plan: dict[str, Any]) -> None:
    """Eager, compiled and unlowered ops give the same numbers; these last without tied weights,
    whose gradients are reduced one by one without our passes, and so coded one by one.
    """
    for is_tied, backend in ((True, "compiled_fsdp_eager"), (False, "aot_eager")):
        eager, ours = (trained_odd(plan, each, is_tied=is_tied) for each in ("", backend))
        check_equal(ours, eager, backend)


def trained_odd(plan: dict[str, Any], backend: str, *, is_tied: bool) -> list[Any]:
    with planned(**plan):
        torch.manual_seed(0)
        model = Odd(is_tied=is_tied)
        fully_shard(model.last)
        fully_shard(model)
        call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        losses = []
        for step in range(2):
            torch.manual_seed(10 * step + dist.get_rank())
            loss = call(torch.randn(5, 30)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    torch.compiler.reset()
    return [losses, [local(p) for p in model.parameters()]]


def test_tied_frozen_and_uneven(two: Pool) -> None:
    two.run(tied_and_frozen, BOTH)


def within_the_bound(codes: torch.dtype) -> float:
    """Returns the largest error of a gathered parameter, as a share of what is allowed; its rows
    and blocks are uneven.
    """
    torch.manual_seed(0)
    model = nn.Linear(60, 51, bias=False)
    whole = model.weight.detach().clone()
    fully_shard(model)
    with planned(gather_quantized=codes):
        model.unshard()
        full = model.weight.detach().clone()
        model.reshard()
    assert torch.equal(full, by_rank(whole, codes)), (
        "exactly what the codes stand for, on all ranks"
    )
    allowed = {INT8: 1 / 254, FP8: 1 / 28}[codes]
    worst = 0.0
    for rows, errors in zip(whole.split(26), (full - whole).abs().split(26), strict=True):
        blocks = zip(rows.flatten().split(BLOCK), errors.flatten().split(BLOCK), strict=True)
        ratios = [(wrong.max() / (block.abs().max() * allowed)).item() for block, wrong in blocks]
        worst = max(worst, *ratios)
    return worst


@pytest.mark.parametrize("codes", [INT8, FP8], ids=str)
def test_errors_are_within_the_bound_and_near_it(two: Pool, codes: torch.dtype) -> None:
    for worst in two.run(within_the_bound, codes):
        assert 0.5 < worst < 1 + 1e-4  # scales are rounded in fp32


# -- beside our eager mode: what is coded alike


CASES = {
    "bf16": Options("equal_units", steps=2, policies=(Policy(torch.bfloat16, torch.float32),)),
    "bf16 gradients": Options("equal_units", steps=2, policies=(Policy(torch.bfloat16),)),
    "fp16 gradients": Options(
        "equal_units", steps=2, policies=(Policy(reduce_dtype=torch.float16),)
    ),
    "kept": Options("equal_units", steps=2, reshard=False),
    "evaluated, added up": Options("equal_units", steps=2, num_backwards=2, evaluate=True),
}


def compiled_as_eager(options: Options, plan: dict[str, Any]) -> None:
    with planned(**plan):
        eager, graph = (trace_of(kind, options) for kind in ("eager", "compiled"))
    check_equal(observed(graph), observed(eager), f"{options}, {plan}")
    assert len(set(eager.losses)) > 1
    assert eager.losses != trace_of("eager", options).losses, "nothing was rounded"


@pytest.mark.parametrize("case", CASES)
def test_graphs_as_eager(two: Pool, case: str) -> None:
    two.run(compiled_as_eager, CASES[case], BOTH)


@pytest.mark.parametrize(
    "plan",
    [
        {"split_bytes": 1},
        {"bucket_bytes": 1 << 30, "own_message": 0, "prefetch": None, "reduces_in_flight": None},
    ],
    ids=["parts", "shared, from costs"],
)
def test_codes_do_not_depend_on_buckets(two: Pool, plan: dict[str, Any]) -> None:
    two.run(compiled_as_eager, Options("equal_units", steps=2), {**BOTH, **plan})


def test_hsdp(four: Pool) -> None:
    four.run(compiled_as_eager, Options("equal_units", steps=2, mesh="hsdp"), BOTH)


def gathered_again_from_slices() -> None:
    """Backward computes with what forward's codes stand for, so that the numbers are those of a
    unit that is gathered again as a whole, or not at all.
    """
    with planned(**BOTH):
        whole, *sliced = (
            trace_of(kind, Options("equal_units", steps=2, reshard=reshard))
            for kind, reshard in (("eager", True), ("eager", 2), ("compiled", 2))
        )
        model, _, _ = make("eager", Options("equal_units", reshard=2))
        said = str(explain(model))
    for ours in sliced:
        check_equal(observed(ours), observed(whole), "slices")
    coded, again = 3 * (1024 + 4 * 4 + 16 * 4), (2048 + 32) * 4
    exact = 3 * (1024 + 16) * 4
    assert (
        f"sends {coded + again} bytes a step instead of {exact + again} ({again} of them for "
        "backward, of slices, which travel as they are)" in said
    )
    plain = trace_of("eager", Options("equal_units", steps=2, reshard=2))
    assert plain.losses != whole.losses, "nothing was rounded"


def test_int_reshard(four: Pool) -> None:
    four.run(gathered_again_from_slices)


def under_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results = []
    for backend in ("", "compiled_fsdp_eager"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 40))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        with planned(**BOTH):
            fully_shard(model, mesh=mesh["dp"])
            call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
            torch.manual_seed(mesh["dp"].get_local_rank())
            loss = call(torch.randn(3, 40)).square().sum()
            loss.backward()
            text = str(explain(model))
        assert "gathered as int8: 2 of 4 parameters" in text
        results.append([loss.item(), [local(p.grad) for p in model.parameters()]])
    check_equal(results[1], results[0], "compiled")


def test_tensor_parallelism(four: Pool) -> None:
    four.run(under_tensor_parallelism)


def without_synchronization() -> None:
    """What is kept is exact: two backwards reduce the codes of their sum, once."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(4, 64, generator=generator) for _ in range(2)]
    found = {}
    for kind in ("eager", "compiled"):
        with planned(reduce_quantized=INT8):
            model, call, _ = make(kind, Options("equal_units"))
            for syncs, batch in zip((False, True), batches, strict=True):
                for layer in model:
                    layer.set_requires_gradient_sync(syncs)
                call(batch).square().sum().backward()
        found[kind] = {n: local(p.grad) for n, p in model.named_parameters()}
    plain = build("equal_units")
    for batch in batches:
        plain(batch).square().sum().backward()
    expected = {}
    for name, p in plain.named_parameters():
        assert p.grad is not None
        pieces = [torch.empty_like(p.grad) for _ in range(2)]
        dist.all_gather(pieces, by_rank(p.grad, INT8))
        expected[name] = shard_of((pieces[0] + pieces[1]) / 2, mesh_of("1d"))
    check_equal(found["compiled"], found["eager"], "compiled beside eager")
    check_equal(found["eager"], expected, "beside the unsharded model", 0.0, 1e-4)


def test_accumulation_without_synchronization(two: Pool) -> None:
    two.run(without_synchronization)


def loud() -> None:
    """An inf in one rank's shard makes its block nan on all ranks, and no other."""
    torch.manual_seed(0)
    model = nn.Linear(64, 16, bias=False)
    with torch.no_grad():
        model.weight[9, 5] = torch.inf
    with planned(**BOTH):
        fully_shard(model)
        model.unshard()
        wrong = model.weight.detach().isnan().flatten()
        expected = torch.zeros(1024, dtype=torch.bool)
        expected[512:768] = True
        assert torch.equal(wrong, expected)
        model.reshard()
        assert model(torch.ones(2, 64)).isnan().any()


def test_infinities_are_loud(two: Pool) -> None:
    two.run(loud)


# -- what travels


def what_travels(plan: dict[str, Any]) -> list[tuple[int, str]]:
    """Bytes and dtypes of the first collective of each communication, forward and backward."""
    with planned(bucket_bytes=1 << 30, **plan), captured() as halves:
        _, call, _ = make("compiled", Options("equal_units"))
        loss_of(call(*batch_of("equal_units", 0))).backward()
    return [
        (r.sent_bytes, str(r.starts[0].all_input_nodes[0].meta["val"].dtype))
        for half in halves
        for kind in ("gather", "reduce")
        for r in find_regions(half, kind)
        if r.starts
    ]


def test_one_message_of_codes_and_scales(two: Pool) -> None:
    """Per rank and unit: 2,048 of the weight's elements, 8 scales, and 32 of the bias, exact."""
    part = 4 * (2048 + 8 * 4 + 32 * 4)
    found = two.run(what_travels, BOTH)[0]
    assert found == [(part, "torch.uint8"), (2 * part, "torch.uint8")]


def test_names_stay_exact(two: Pool) -> None:
    """Units are outermost here, so the names of their parameters are short."""
    plain = 4 * (2048 + 32) * 4
    found = two.run(what_travels, {**BOTH, "exact": ("w*",)})[0]
    assert found == [(plain, "torch.float32"), (2 * plain, "torch.float32")]


def explained(kind: str) -> str:
    with planned(**BOTH):
        model, call, _ = make(kind, Options("equal_units"))
        loss_of(call(*batch_of("equal_units", 0))).backward()
        return str(explain(model, strict=kind != "eager"))  # eagerly, the plan's others do nothing


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_explain_says_what_travels(two: Pool, kind: str) -> None:
    text = two.run(explained, kind)[0]
    assert (
        "gathered as int8: 1 of 2 parameters, with a scale for each 256 elements; a rank sends "
        "2208 bytes a step instead of 8320; an element is off by at most 1/254 of the largest in "
        "its block" in text
    )
    assert "reduced as int8: 1 of 2 parameters" in text
    who = {"eager": "eager runtime", "compiled": "lower"}[kind]
    assert f"gather_quantized=torch.int8 of Linear, Linear, Linear, Linear: {who}" in text


# -- the plan changes


def plan_changes() -> list[float]:
    """Of one model: without codes, with, after an exception in between, and without again."""
    model, call, graphs = make("compiled", Options("equal_units"))
    (x,) = batch_of("equal_units", 0)
    other = nn.Linear(64, 64)
    losses = [call(x).sum().item()]

    def interrupted() -> None:
        with planned(**BOTH):
            fully_shard(other)
            assert other._get_fsdp_state().unit.settings.gather_quantized is INT8
            losses.append(call(x).sum().item())
            losses.append(model(x).sum().item())
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    state = model.state_dict()
    model.load_state_dict(state)
    losses.append(call(x).sum().item())
    other(x)
    assert other._get_fsdp_state().unit.settings.gather_quantized is None
    assert graphs[0] == 2, "coming back finds what was compiled"
    return losses


def test_graphs_follow_the_plan(two: Pool) -> None:
    before, coded_, eager, after = two.run(plan_changes)[0]
    assert before == after
    assert coded_ == eager != before


# -- what it is not combined with


def refused(what: str) -> str:
    """The text of the error."""
    torch.manual_seed(0)
    model: Any = nn.Linear(64, 64)

    class Comm:
        def allocate(self, size: Any, **kind: Any) -> Tensor:
            return torch.empty(size, **kind)

        def __call__(self, **_: Any) -> None: ...

    fully_shard(model)
    if what == "gather":
        model.set_custom_all_gather(Comm())
    elif what == "reduce":
        model.set_custom_reduce_scatter(Comm())
    with planned(**BOTH), pytest.raises(NotImplementedError) as error:
        model(torch.ones(2, 64))
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("gather", "set_custom_all_gather"),
        ("reduce", "set_custom_reduce_scatter"),
    ],
)
def test_what_is_refused(two: Pool, what: str, named: str) -> None:
    text = two.run(refused, what)[0]
    assert named in text
    assert "Plan(gather_quantized=torch.int8)" in text


def under_inductor() -> None:
    options = Options("equal_units", steps=2)
    with planned(**BOTH):
        eager, ours = (trace_of(kind, options) for kind in ("eager", "inductor"))
    check_equal(observed(ours), observed(eager), "Inductor", *ROUNDING)


def test_inductor(two: Pool) -> None:
    """Codes of gradients that differ in their last bits may be neighbours."""
    two.run(under_inductor, timeout=SLOW)
