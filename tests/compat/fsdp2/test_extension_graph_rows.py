"""Chapter 4c of the specification in graphs: the methods of a subclass are traced, and its
all-gathers are nodes as any.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.extensions import Codes, Quantised, Wrapped, two_layers
from kit.oracle import Api, inductor_same, mesh_of, rows, same
from kit.passes_harness import GraphTest, body, fake_ranks, trace
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import compiled_fsdp

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool


class Block(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = two_layers(Quantised)
        self.back = nn.Linear(4, 6)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed:
            return checkpoint(self.body, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        return x + self.back(self.layers(x))


class Model(nn.Module):
    def __init__(self, num_blocks: int = 2, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Block(**options) for _ in range(num_blocks)])
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WithCodes(nn.Module):
    """A frozen matrix of codes, read twice, with a low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(Codes.of(torch.randn(6, 6)), requires_grad=False)
        self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, self.weight) + self.b(self.a(x))
        return torch.tanh(y) @ self.weight


def units(api: Api, model: nn.Module, **options: Any) -> Any:
    names = [f"blocks.{i}" for i in range(len(model.blocks))] if isinstance(model, Model) else []
    return api.units(model, *names, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, foreach=False)


def batch(step: int, rows: int = 5) -> Tensor:
    seed = 10 * step + torch.distributed.get_rank()
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def state(model: nn.Module) -> list[Tensor | None]:
    """Gradients and shards, without what is around them."""
    found: list[Any] = []
    for param in model.parameters():
        local: Any = param.to_local()  # type: ignore[operator]
        inside = local.data_inside if isinstance(local, Wrapped) else local
        shard = inside.codes if isinstance(inside, Codes) else inside
        grad = None if param.grad is None else param.grad.to_local().clone()  # type: ignore[operator]
        found += [shard.clone(), grad]
    return found


def train(model: nn.Module, call: Any, optimizer: Any, steps: int = 2, rows: int = 5) -> list[Any]:
    found = []
    for step in range(steps):
        loss = call(batch(step, rows)).square().mean()
        loss.backward()
        found.append((loss.detach(), state(model)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def simple(api: Api, model: nn.Module, **options: Any) -> Any:
    model = units(api, model, **options)
    return train(model, api.compile(model), sgd(model), 3)


def as_it_is(api: Api) -> Any:
    return simple(api, Model())


def kept(api: Api) -> Any:
    return simple(api, Model(), reshard_after_forward=False)


def checkpointed(api: Api) -> Any:
    return simple(api, Model(is_checkpointed=True))


def low_precision(api: Api) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return simple(api, Model(), mp_policy=policy)


def codes(api: Api) -> Any:
    return simple(api, WithCodes())


def replicated(api: Api) -> Any:
    return simple(api, Model(), mesh=mesh_of(2, 2, names=("r", "s")))


def accumulated(api: Api) -> Any:
    """Without synchronization, then with."""
    model = units(api, Model())
    call, optimizer, found = api.compile(model), sgd(model), []
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        call(batch(step)).square().mean().backward()
        if step % 2:
            found.append(state(model))
            optimizer.step()
            optimizer.zero_grad()
    return found


def accumulated_often(api: Api) -> Any:
    """Settings of before find the graphs that were made for them, instead of more and more."""
    model = units(api, two_layers(Quantised))
    call, found = api.compile(model), []
    torch._dynamo.utils.counters.clear()
    for step in range(20):
        model.set_requires_gradient_sync(step % 2 == 1)
        call(batch(step)).square().mean().backward()
        if step % 2:
            found.append(state(model))
    if api.is_compiled:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    return found


class Normed(nn.Module):
    """Its weight is read without a gradient first, then with one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = two_layers(Quantised)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.layers[0].weight.abs().max()
        return self.layers(x) / scale


def read_without_gradient_first(api: Api) -> Any:
    return simple(api, Normed())


def taught_by_itself(api: Api) -> Any:
    """A forward without gradients before one with, in one graph."""
    model = units(api, Model())

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = model(x)
        return model(x) - target / 2  # type: ignore[no-any-return]

    return train(model, api.compile(step), sgd(model))


def frozen_between(api: Api) -> Any:
    model = units(api, Model())
    call, optimizer = api.compile(model), sgd(model)
    found = train(model, call, optimizer)
    for is_trained in (False, True):
        for param in model.blocks[1].parameters():
            param.requires_grad_(is_trained)
        found += train(model, call, optimizer)
    return found


def evaluated_between(api: Api) -> Any:
    model = units(api, Model())
    call, optimizer, found = api.compile(model), sgd(model), []
    for mode in (torch.no_grad, torch.inference_mode):
        found += train(model, call, optimizer)
        with mode():
            found.append(call(batch(7)).clone())
    return found


def lengths(api: Api) -> Any:
    model = units(api, Model())
    call, optimizer = api.compile(model, dynamic=True), sgd(model)
    return [train(model, call, optimizer, rows=rows) for rows in (5, 7, 9)]


def loaded(api: Api) -> Any:
    """Back to the weights of before: by value, then with parameters of their own."""
    model = units(api, Model())
    call, optimizer = api.compile(model), sgd(model)
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    found = train(model, call, optimizer)
    model.load_state_dict(before)
    found += train(model, call, optimizer)
    model.load_state_dict(before, assign=True)
    return found + train(model, call, sgd(model))


def eager_between(api: Api) -> Any:
    model = units(api, Model())
    call, optimizer = api.compile(model), sgd(model)
    found = train(model, call, optimizer)
    model.blocks[0].unshard()
    model.blocks[0].reshard()
    return found + train(model, model, optimizer) + train(model, call, optimizer)


def a_function(api: Api) -> Any:
    model = units(api, Model())
    optimizer = sgd(model)
    return train(model, api.compile(lambda x: model(x)), optimizer)


def overlapping(api: Api) -> Any:
    model = units(api, Model())
    optimizer = sgd(model)
    if not api.is_stock:
        compiled_fsdp.overlap_optimizer(model, optimizer)
    return train(model, api.compile(model), optimizer, 3)


CASES = {
    function.__name__: function
    for function in (
        as_it_is,
        kept,
        checkpointed,
        low_precision,
        codes,
        accumulated,
        accumulated_often,
        read_without_gradient_first,
        taught_by_itself,
        frozen_between,
        evaluated_between,
        lengths,
        loaded,
        eager_between,
        a_function,
        overlapping,
    )
}


@pytest.mark.parametrize("case", CASES)
@rows("4c.1", "4c.3", "4c.5", "4c.7", "4c.8")
def test_one_graph(two: Pool, case: str) -> None:
    """Losses, gradients and shards are stock's bit for bit; `fullgraph=True` is part of it."""
    two.run(same, CASES[case])


@rows("4c.1")
def test_replicated(four: Pool) -> None:
    four.run(same, replicated)


@rows("4c.1")
@pytest.mark.parametrize("observe", [as_it_is, codes], ids=lambda f: f.__name__)
def test_inductor(two: Pool, observe: Any) -> None:
    two.run(inductor_same, observe)


PLANS: dict[str, dict[str, Any]] = {
    "budget": {"memory_budget": 0.5},
    "recompute": {"memory_budget": 0.0, "recompute": "budget"},
    "costs": {"prefetch": "auto"},
    "parts": {"split_bytes": 64},
    "units": {"regions": "units"},
}


@pytest.mark.parametrize("plan", PLANS)
def test_plans(two: Pool, plan: str) -> None:
    two.run(compiled_same, under_plan, PLANS[plan])


def compiled_same(observe: Callable[..., Any], *args: Any) -> None:
    same(observe, *args, kinds=("compiled",))


def under_plan(api: Api, changes: dict[str, Any]) -> Any:
    with compiled_fsdp.planned(**changes):  # of three blocks that are alike, one is compiled
        return simple(api, Model(num_blocks=3 if "regions" in changes else 2))


# -- what is in the graphs


class TestGraphs(GraphTest):
    def test_gathers(self) -> None:
        """Codes, and scales with what is no extension, are a message each. Backward gathers those
        of the layer whose input needs a gradient: it is handed shards of codes, nothing gathered.
        """
        with fake_ranks(2), tempfile.TemporaryDirectory() as folder:
            model = compiled_fsdp.fully_shard(two_layers(Quantised))
            model.set_reshard_after_forward(True)
            found = trace(model, (torch.ones(5, 6),), Path(folder))
        self.assertExpectedInline(
            messages(found["forward/02_bucket_all_gather"]),
            """\
%all_gather_into_tensor_default_6: i8[80] = all_gather(%cat_default, 2, '0')
%all_gather_into_tensor_default_7: f32[16] = all_gather(%cat_default_1, 2, '0')
return [%addmm_1, %primals_1, %primals_3, %primals_4, %tanh, %view_7, %view_8]""",
        )
        self.assertExpectedInline(
            messages(found["backward/02_bucket_all_gather"]),
            """\
%all_gather_into_tensor_default: i8[32] = all_gather(%view_7, 2, '0')
%all_gather_into_tensor_default_1: f32[2] = all_gather(%view_8, 2, '0')
return [None, None, %add_1, %add, None]""",
        )

    def test_read_twice(self) -> None:
        with fake_ranks(2), tempfile.TemporaryDirectory() as folder:
            model = compiled_fsdp.fully_shard(WithCodes())
            found = trace(model, (torch.ones(5, 6),), Path(folder))
        joint = found["joint/00_capture"]
        self.assertEqual(joint.count("'weight:0'"), 1, joint)
        self.assertEqual(joint.count("'weight:1'"), 1, joint)


def messages(text: str) -> str:
    """The lines that start a collective, and what a graph returns."""
    lines = [line.split("  #")[0] for line in body(text).splitlines()]
    kept = [line for line in lines if " all_gather_into_tensor(" in line or "return" in line]
    return "\n".join(kept).replace(" all_gather_into_tensor(", " all_gather(")


# -- what is not in any graph


def test_refused(two: Pool) -> None:
    two.run(refused)


def refused() -> None:
    model = units(Api("compiled"), Model())
    with pytest.raises(
        NotImplementedError, match=r"compile_step: blocks\.0: all-gather extensions"
    ):
        compiled_fsdp.compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    with pytest.raises(NotImplementedError, match=r"precompile: parameter .* all-gather ext"):
        compiled_fsdp.precompile(model, (batch(0),), "out")


def test_written_while_gathered(two: Pool) -> None:
    two.run(written_while_gathered)


def written_while_gathered() -> None:
    """Announced as of a plain parameter, of whose write as little remains."""
    model = units(Api("compiled"), Halved())
    with pytest.warns(UserWarning, match=r"layers\.0\.weight is written to in place while"):
        Api("compiled").compile(model)(batch(0))


class Halved(Normed):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers[0].weight.mul_(0.5)
        return self.layers(x)  # type: ignore[no-any-return]


def test_replaced_inside_below_a_function(two: Pool) -> None:
    two.run(replaced_inside_below_a_function)


def replaced_inside_below_a_function() -> None:
    """The graph of a larger function never computes with the old tensor; it is made again, and a
    warning says what to compile.
    """
    model = units(Api("compiled"), two_layers(Quantised))
    call = Api("compiled").compile(lambda x: model(x))
    before = call(batch(0)).detach()
    local: Any = model[0].weight._local_tensor
    local.data_inside = local.data_inside.clone() / 2
    with pytest.warns(UserWarning, match="Compile the sharded module itself"):
        after = call(batch(0)).detach()
    assert torch.equal(after, model(batch(0)))
    assert not torch.equal(after, before)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Scaled(Quantised):
    """What it multiplies with is no tensor inside."""

    factor = 1.0

    def __tensor_flatten__(self) -> Any:
        return ["data_inside"], self.factor

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        made = cls(inner["data_inside"])
        made.factor = context
        return made

    def inputs(self, data: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return data, scale * self.factor


def test_what_a_shard_says_of_itself_changes(two: Pool) -> None:
    two.run(same, changed)


def changed(api: Api) -> Any:
    """Another context, then another tensor inside: graphs follow, without a new one for the
    tensor.
    """
    model = api.units(two_layers(Scaled), "0", "2")
    call, found = api.compile(model), []
    torch._dynamo.utils.counters.clear()
    for change in ("", "factor", "tensor"):
        local: Any = model[0].weight._local_tensor
        if change == "factor":
            local.factor = 2.0
        elif change == "tensor":
            local.data_inside = local.data_inside.clone() / 2
        found.append(call(batch(0)).detach())
    if api.is_compiled:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    return found


def test_not_kept_after_backward(two: Pool) -> None:
    two.run(not_kept)


def not_kept() -> None:
    """An option that changes nothing for such parameters in a graph says so, once."""
    model = Api("compiled").units(two_layers(Quantised), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    call = Api("compiled").compile(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            call(batch(step)).sum().backward()
    assert sum("does not keep parameters with an" in str(w.message) for w in caught) == 1
