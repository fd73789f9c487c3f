"""`in_chunks(fn, "auto", ...)`: in how many chunks tokens travel, by costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.graphs import captured
from kit.passes_harness import Hand, aten
from moe import Mixture, MoEConfig, MoEGPT, share_experts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import set_block
from compiled_fsdp.ir.schema import EXCHANGE
from compiled_fsdp.planning.chunks import cheapest, prices
from compiled_fsdp.planning.costs import Costs, Link
from compiled_fsdp.planning.plan import planned

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool
    from torch.fx import Graph, Node

N, C = 1024, 64
FLOPS, BANDWIDTH = 1e12, 1e12
MATMUL = 2 * N * C * C / FLOPS  # seconds of one of the experts' matmuls, of all rows


def block(shared: int = 0, matmuls: int = 4) -> Graph:
    """Rows there, `matmuls` of experts, and back; then so many of a shared expert."""
    hand = Hand()
    x, weight = hand.input("x", N, C), hand.input("weight", C, C)
    rows = hand(aten.tanh.default, x)
    inside: list[Node] = []

    def marked(op: Any, *args: Any) -> Node:
        inside.append(hand(op, *args))
        return inside[-1]

    def exchange(y: Node) -> Node:
        return marked(WAIT, marked(EXCHANGE, y, [N // 2] * 2, [N // 2] * 2, "ep"))

    y = exchange(rows)
    for _ in range(matmuls):
        y = marked(aten.mm.default, y, weight)
    y = exchange(y)
    z = rows
    for _ in range(shared):
        z = hand(aten.mm.default, z, weight)
    for node in inside:
        set_block(node, 0)
    return hand.returns(hand.add(y, z)).graph


def costs(*, wire: float, latency: float = 0.0, overhead: float = 0.0) -> Costs:
    """wire: seconds of an exchange, which sends half of the rows."""
    link = Link(latency, N * C * 4 / 2 / wire)
    return Costs(FLOPS, BANDWIDTH, overhead, (("", link),))


def chosen(graph: Graph, by: Costs) -> int:
    return cheapest(prices(graph, by)[0])


def test_prices() -> None:
    """In one piece all is one after another; in two, half of each exchange and half of the experts
    lie under something else. Weights and what is launched do not get less.
    """
    wire, whole = 3 * MATMUL, 4 * MATMUL
    found = prices(block(), costs(wire=wire))[0]
    assert found[1] == pytest.approx(2 * wire + whole)
    assert found[2] == pytest.approx(wire / 2 + max(wire / 2, whole / 2) + whole / 2 + wire / 2)
    late = prices(block(), costs(wire=wire, latency=MATMUL))[0]
    assert late[1] == pytest.approx(found[1] + 2 * MATMUL)
    slow = prices(block(), costs(wire=wire, overhead=MATMUL))[0]
    assert slow[1] == pytest.approx(found[1] + 4 * MATMUL)  # starts lie under what they start
    assert slow[2] == pytest.approx(3 * MATMUL + 2 * (whole / 2 + 4 * MATMUL) + wire / 2)


@pytest.mark.parametrize(
    ("near", "far", "numbers"),
    [
        # half of an exchange is hidden by two chunks, for two more latencies
        ({"wire": 4 * MATMUL, "latency": 1.9 * MATMUL}, {"latency": 2.1 * MATMUL}, (2, 1)),
        ({"wire": MATMUL, "overhead": 0.03 * MATMUL}, {"overhead": 0.06 * MATMUL}, (4, 2)),
        # four hide more of a fast wire, and launch twice as much; two are launched once more
        ({"wire": 4 * MATMUL, "overhead": 0.3 * MATMUL}, {"overhead": 3 * MATMUL}, (2, 1)),
    ],
)
def test_costs_flip_the_number(
    near: dict[str, float], far: dict[str, float], numbers: tuple[int, int]
) -> None:
    graph = block()
    found = tuple(chosen(graph, costs(**given)) for given in (near, {**near, **far}))
    assert found == numbers, [prices(graph, costs(**g))[0] for g in (near, {**near, **far})]


def test_a_shared_expert_leaves_less_to_hide() -> None:
    by = costs(wire=2 * MATMUL, latency=0.3 * MATMUL)
    assert [chosen(block(shared), by) for shared in (0, 8)] == [4, 1]


def test_near_miss() -> None:
    """What sends nothing has no price, and no number but 1 is taken for a gain that is none."""
    hand = Hand()
    y = hand(aten.tanh.default, hand.input("x", N, C))
    set_block(y, 0)
    assert prices(hand.returns(y).graph, costs(wire=1.0)) == {}
    assert cheapest({1: 1.0, 2: 0.9995, 4: 1.0}) == 1
    assert cheapest({1: 1.0, 2: 0.99, 4: 0.99}) == 2


CONFIG = MoEConfig(
    num_layers=1, width=16, num_heads=2, hidden=16, max_length=16, vocab=32, num_experts=4,
    expert_hidden=8,
)  # fmt: skip
# A slow core, and a wire that is no faster: two chunks pay, and four are too many launches.
WORTHWHILE = Costs(1e7, 1e9, 1e-5, (("", Link(1e-4, 1e6)),))
# Messages so dear that two chunks pay for sequences of 16, and not for those of 4.
DEAR = Costs(1e7, 1e9, 3e-6, (("", Link(1e-3, 1e6)),))


def built(shard: Callable[..., Any], chunks: int | str) -> MoEGPT:
    torch.manual_seed(0)
    model = MoEGPT(CONFIG)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    experts = share_experts(model, mesh)
    for mixture in [m for m in model.modules() if isinstance(m, Mixture)]:
        mixture.router.weight.data.mul_(8.0)
        mixture.chunks = chunks  # type: ignore[assignment]
    for layer in model.layers:
        shard(layer, mesh=mesh, ignored_params=experts)
    shard(model, mesh=mesh, ignored_params=experts)
    return model


def tokens(step: int, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    data = torch.randint(CONFIG.vocab, (2, length + 1), generator=generator)
    return data[:, :-1], data[:, 1:]


def train(model: MoEGPT, call: Callable[..., Any]) -> list[float]:
    """Losses of two steps, each of two batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)  # type: ignore[operator]
        loss = call(*tokens(step))
        loss.backward()
        losses.append(loss.item())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def compiled(model: MoEGPT) -> Any:
    return torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)


def shown(model: MoEGPT) -> list[list[dict[str, Any]]]:
    """What `explain` has of the blocks of each forward graph."""
    return [graph.chunks for graph in explain(model).graphs if graph.kind == "forward"]


def test_trained_in_as_many_as_costs_say(two: Pool) -> None:
    two.run(as_many_as_costs_say)


def as_many_as_costs_say() -> None:
    """The numbers are those of chunks that were asked for, and stock's."""
    stock = built(stock_fully_shard, 1)
    expected = train(stock, stock)
    model = built(fully_shard, "auto")
    assert train(model, model) == expected  # eager, in one piece
    found = {}
    for chunks in ("auto", 2):
        torch._dynamo.reset()
        with planned(costs=WORTHWHILE), captured() as graphs:
            model = built(fully_shard, chunks)
            found[chunks] = train(model, compiled(model))
        exchanges = {len(find(graph, EXCHANGE)) for graph in graphs}
        assert exchanges == {3 * 2, 2 * 2}, exchanges  # counts, there and back
        numbers = [[block["number"] for block in blocks] for blocks in shown(model)]
        assert numbers
        assert all(n == ([2] if chunks == "auto" else []) for n in numbers), numbers
        text = "tokens of 1 block in 2 chunks (predicted, both ways, in 1: "
        assert (text in str(explain(model))) == (chunks == "auto"), explain(model)
    assert found["auto"] == found[2]
    # fp32: gradients of weights are added by chunk
    torch.testing.assert_close(found["auto"], expected, rtol=2e-4, atol=2e-6)


def test_ranks_decide_together(two: Pool) -> None:
    two.run(disagreeing)


def disagreeing() -> None:
    """Where ranks have other lengths, and would take other numbers, all take the smallest."""
    rank = dist.get_rank()
    for costs, cheapest_of_rank, number in ((DEAR, (1, 2), 1), (WORTHWHILE, (2, 2), 2)):
        torch._dynamo.reset()
        with planned(costs=costs), captured() as graphs:
            model = built(fully_shard, "auto")
            compiled(model)(*tokens(0, (4, 16)[rank]))
        ((block,),) = shown(model)
        mine = {int(chunks): seconds for chunks, seconds in block["seconds"].items()}
        assert cheapest(mine) == cheapest_of_rank[rank], mine
        assert block["number"] == number
        assert len(find(graphs[0], EXCHANGE)) == 3 * number  # counts, there and back
