"""Every order of sharding and compiling gives the same graphs, every unit its own, and the numbers
of eager mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.harness import mean_over_ranks, mesh_of, quiet, train
from kit.models import Block
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from compiled_fsdp import FallbackError, Plan, fully_shard, planned, set_fallback
from compiled_fsdp.frontend.state import states_below
from compiled_fsdp.planning.costs import Costs, Link

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool

NUM_BLOCKS = 2


class Tagged(Block):
    def forward(self, x: Tensor, tag: str = "") -> Tensor:
        return x + self.second(torch.tanh(self.first(x))) * (1 + len(tag))


class Model(nn.Module):
    """breaks: whether the graph breaks between two blocks."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Tagged(6, 8) for _ in range(num_blocks))
        self.head = nn.Linear(6, 2)
        self.breaks = breaks

    def forward(self, x: Tensor, tag: str = "") -> Tensor:
        for layer in self.layers:
            x = layer(x, tag)
            if self.breaks:
                torch._dynamo.graph_break()
        return self.head(x)


def build(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def shard(model: Model) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def losses_of(
    model: nn.Module, call: Callable[..., Tensor], dtype: torch.dtype = torch.float32
) -> list[float]:
    """Of two steps."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [(torch.randn(4, 6, generator=generator).to(dtype),) for _ in range(2)]
    return train(call, torch.optim.SGD(model.parameters(), lr=0.1), batches)


class Counted:
    """A backend, with the number of graphs that Dynamo gave it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, gm: Any, inputs: Any) -> Any:
        self.count += 1
        return torch._dynamo.lookup_backend("compiled_fsdp_eager")(gm, inputs)


# -- orders


def each(modules: Any, options: dict[str, Any]) -> None:
    for module in modules:
        module.compile(**options)


def arrange(order: str, model: Model, options: dict[str, Any]) -> Callable[..., Tensor]:
    """Shard and compile in this order; what to call."""
    before, _, after = order.partition("shard")
    if "function" in order:
        shard(model)
        return torch.compile(lambda x: model(x), **options)
    call: Any = model
    for step in (before, "shard", after):
        if step == "shard":
            call = shard(model) if call is model else fully_shard_compiled(model, call)
        if "blocks" in step:
            each(model.layers, options)
        if "model.compile" in step:
            model.compile(**options)
        if "torch.compile" in step:
            call = torch.compile(call, **options)
    return call


def fully_shard_compiled(model: Model, call: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(call)


@pytest.mark.parametrize(
    ("order", "num_graphs", "fullgraph"),
    [
        ("shard torch.compile", 1, False),
        ("torch.compile shard", 1, True),
        ("shard model.compile", 1, True),
        ("model.compile shard", 1, False),
        ("shard blocks model.compile", 1, False),
        ("shard blocks", NUM_BLOCKS, False),
        ("blocks shard", NUM_BLOCKS, True),
        ("function", 1, False),
    ],
)
def test_orders(two: Pool, order: str, num_graphs: int, fullgraph: bool) -> None:
    assert two.run(graphs_of, order, fullgraph) == [num_graphs] * 2


def graphs_of(order: str, fullgraph: bool) -> int:
    eager = shard(build())
    expected = losses_of(eager, eager)
    model, backend = build(), Counted()
    assert (
        losses_of(model, arrange(order, model, {"backend": backend, "fullgraph": fullgraph}))
        == expected
    )
    compiled = (
        list(model.layers) if "blocks" in order and "model" not in order else [*model.layers, model]
    )
    assert not any(
        s.unit.num_eager_forwards
        for module in compiled
        for s in states_below(module, recurse=False)
    )
    return backend.count


# -- parameters that were moved


@pytest.mark.parametrize("how", ["to_empty", "assign", "double"])
def test_larger_functions_after_a_move(two: Pool, how: str) -> None:
    two.run(move_and_compile, how)


def move_and_compile(how: str) -> None:
    plain = build()
    values = plain.state_dict()
    dtype = torch.float64 if how == "double" else torch.float32

    def moved() -> Any:
        with torch.device("cpu" if how == "double" else "meta"):
            model = shard(build())
        if how == "double":
            return model.double()
        if how == "to_empty":
            model.to_empty(device="cpu")
        placed = {
            n: distribute_tensor(values[n], p.device_mesh, p.placements)
            for n, p in model.named_parameters()
        }
        model.load_state_dict(placed, assign=how == "assign")
        return model

    eager, model = moved(), moved()
    loss = torch.compile(lambda x: model(x).sin(), backend="compiled_fsdp_eager", fullgraph=True)
    assert losses_of(model, loss, dtype) == losses_of(eager, lambda x: eager(x).sin(), dtype)


# -- units of their own


def test_more_units_than_the_recompile_limit(two: Pool) -> None:
    assert two.run(many_units, 3) == [0, 0]


def many_units(num_blocks: int) -> int:
    """Forwards of blocks outside graphs."""
    torch._dynamo.config.recompile_limit = num_blocks - 1  # the pool takes settings back
    eager, model = (
        shard(build(num_blocks=num_blocks)),
        shard(build(num_blocks=num_blocks, breaks=True)),
    )
    with quiet():
        assert losses_of(model, torch.compile(model, backend="compiled_fsdp_eager")) == losses_of(
            eager, eager
        )
    return sum(s.unit.num_eager_forwards for layer in model.layers for s in states_below(layer))


def refused() -> None:
    model = shard(build(breaks=True))
    compiled = torch.compile(model.layers[0], backend="compiled_fsdp_eager")
    set_fallback("error")
    try:
        with quiet(), torch._dynamo.config.patch(recompile_limit=2):
            for number in range(2):
                compiled(torch.ones(4, 6), "x" * number)
            with pytest.raises(FallbackError, match=r"unit 'layers.0' was compiled 2 times"):
                compiled(torch.ones(4, 6), "x" * 2)
    finally:
        set_fallback("warn")


def test_the_limit_as_an_error(two: Pool) -> None:
    two.run(refused)


class Experts(nn.Module):
    """Each expert is a unit, which gets the rows that are routed to it: none, one or many."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3)
        )

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        for number, expert in enumerate(self.experts):
            rows = (route == number).nonzero().flatten()
            x = x.index_add(0, rows, expert(x[rows]))
        return x


ROUTES = ([0, 0, 1, 2], [0, 1, 1, 1], [2, 2, 2, 2], [1, 1, 2, 2], [0, 0, 0, 2], [1, 1, 1, 1])


def route_differently() -> None:
    torch.manual_seed(0)
    reference, model = Experts(), Experts()
    model.load_state_dict(reference.state_dict())
    for expert in model.experts:
        fully_shard(expert)
    fully_shard(model)
    compiled = torch.compile(model, backend="compiled_fsdp_eager")
    for number in range(len(ROUTES)):
        route = torch.tensor(ROUTES[(number + 3 * dist.get_rank()) % len(ROUTES)])
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        with quiet():
            compiled(x, route).square().sum().backward()
        reference(x, route).square().sum().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(p.grad.full_tensor(), mean_over_ranks(q.grad, mesh_of("1d")))
            p.grad = q.grad = None


def test_experts_with_other_numbers_of_rows(two: Pool) -> None:
    two.run(route_differently)


# -- other shapes on other ranks


FROM_COSTS = {
    "prefetch": None,
    "backward_prefetch": None,
    "reduces_in_flight": None,
    "split_bytes": None,
}


@pytest.mark.parametrize(
    "plan", [{"memory_budget": 0.5}, {**FROM_COSTS, "memory_budget": 0.5}], ids=str
)
def test_decisions_with_other_batches(two: Pool, plan: dict[str, Any]) -> None:
    kept = two.run(decide, {**plan, "bucket_bytes": 0})
    assert kept[0] == kept[1]


def decide(plan: dict[str, Any]) -> list[float]:
    """The losses of both ranks, which agree with those of eager mode; the batches differ by far."""
    rows = 512 if dist.get_rank() else 2
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))
    eager, model = shard(build(num_blocks=5)), shard(build(num_blocks=5))
    with planned(**plan), quiet():
        compiled = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
        for call in (eager, compiled):
            call(x).square().mean().backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    for ours, theirs in zip(grads, eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad.full_tensor())
    return [g.sum().item() for g in grads]


def test_a_rank_that_compiles_again_for_another_batch(two: Pool) -> None:
    two.run(compile_again)


def compile_again() -> None:
    """Rank 1 alone gets another batch, for which its own costs would start collectives
    elsewhere.
    """
    costs = Costs(1e8, 1e10, 1e-6, (("0", Link(1e-6, 1e8)),))
    eager, model = shard(build(num_blocks=5)), shard(build(num_blocks=5))
    with planned(**FROM_COSTS, bucket_bytes=0, costs=costs), quiet():
        compiled = torch.compile(
            model, backend="compiled_fsdp_eager", fullgraph=True, dynamic=False
        )
        for number in range(2):
            x = torch.randn(
                2 + number * 1000 * dist.get_rank(), 6, generator=torch.Generator().manual_seed(0)
            )
            for call in (eager, compiled):
                call(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad.full_tensor())


def test_plan_default_asks_nobody() -> None:
    from compiled_fsdp.planning.consensus import depends_on_shapes

    assert not depends_on_shapes(Plan())
    assert not depends_on_shapes(Plan(memory_budget=1.0))
    assert depends_on_shapes(Plan(memory_budget=0.5))
    assert depends_on_shapes(Plan(split_bytes=None))
