"""What the compiled graphs look like from outside: how many, how often compiled, what they
communicate and what they keep.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.graphs import captured
from kit.harness import Options, batch_of, make, train
from kit.models import loss_of
from kit.oracle import communications
from kit.pool import Pool

from compiled_fsdp.ir.collectives import GATHERS, STARTS
from compiled_fsdp.ir.regions import find_regions

if TYPE_CHECKING:
    from torch.fx import Graph, Node

GRAPH_MODELS = ("gpt", "llama_tied_unit", "moe", "conv")


# -- graphs and recompiles


@pytest.mark.parametrize("model", GRAPH_MODELS)
def test_one_forward_and_one_backward_graph_and_no_recompiles(two: Pool, model: str) -> None:
    """And nothing gathered is saved for backward: see
    `test_nothing_gathered_is_saved_for_backward`.
    """
    two.run(one_graph_each, model)


def one_graph_each(name: str) -> None:
    torch._dynamo.utils.counters.clear()  # this process has run other tests
    with captured() as halves:
        model, call, graphs = make("compiled", Options(name, reshard=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        batches = [batch_of(name, number) for number in range(5)]
        train(call, optimizer, batches[:2])
        with torch._dynamo.config.patch(error_on_recompile=True):
            losses = train(call, optimizer, batches[2:])
    assert len(set(losses)) == 3
    assert graphs == [1]
    assert len(halves) == 2, "one forward and one backward"
    assert not torch._dynamo.utils.counters["graph_break"]
    assert any(n.target in STARTS for n in halves[0].nodes)
    assert saved_from_weights(halves[0]) == 0


def test_two_models_of_one_class(two: Pool) -> None:
    """Dynamo must not take what differs between them (sizes, offsets, ranks) for dynamic shapes."""
    two.run(different_sizes)


def different_sizes() -> None:
    from compiled_fsdp import fully_shard

    for width in (4, 6, 8, 11):
        torch.manual_seed(0)
        model = fully_shard(
            torch.nn.Sequential(torch.nn.Linear(width, width + 1), torch.nn.Linear(width + 1, 3))
        )
        call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
        x = torch.randn(3, width)
        loss_of(call(x)).backward()
        compiled = [p.grad.to_local().clone() for p in model.parameters()]
        model.zero_grad()
        loss_of(model(x)).backward()
        assert all(
            torch.equal(a, p.grad.to_local())
            for a, p in zip(compiled, model.parameters(), strict=True)
        )


@pytest.mark.usefixtures("fake_world")
def test_set_reshard_recompiles_once_and_changes_the_graph() -> None:
    with captured() as halves:
        model, call, graphs = make("compiled", Options("deep", reshard=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(4):
            if number == 2:
                model.set_reshard_after_forward(False)
            train(call, optimizer, [batch_of("deep", number)])
    assert graphs == [2]
    gathers = [sum(n.target in GATHERS for n in graph.nodes) for graph in halves]
    # 4 units gather in forward; backward needs all weights but the first unit's (nobody wants the
    # gradient of the input)
    assert gathers == [4, 3, 4, 0]


# -- collectives per step


# Units, and those whose weights backward does not need: in `deep` the first
# layer (its input needs no gradient).
COUNTED: dict[str, tuple[int, set[str]]] = {
    "deep": (4, {"first"}),
    "list_units": (2, set()),
    "llama_tied_unit": (2, set()),
}


@pytest.mark.parametrize(
    ("model", "reshard"),
    [("deep", True), ("list_units", None), ("deep", None), ("llama_tied_unit", False)],
)
def test_collectives_per_step(two: Pool, model: str, reshard: bool | None) -> None:
    """Units times 2 gathers and 1 reduction, minus what is not gathered again."""
    num_units, gradless = COUNTED[model]
    counts = two.run(count_step, model, reshard)
    assert counts[0] == counts[1]
    stock, eager, compiled = counts[0]
    assert eager == stock
    has_root = model not in (
        "list_units",
        "llama_tied_unit",
    )  # there every parameter is in a unit below the root
    kept_root = reshard is None and has_root
    again = (
        0
        if reshard is False
        else num_units - len(gradless) - (kept_root and "root" not in gradless)
    )
    assert compiled == {"gather": num_units + again, "reduce": num_units, "all_reduce": 0}


def count_step(name: str, reshard: bool | None) -> list[dict[str, int]]:
    counts = []
    for kind in ("stock", "eager", "compiled"):
        model, call, _ = make(kind, Options(name, reshard=reshard))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        train(call, optimizer, [batch_of(name, number) for number in range(2)])
        counts.append(communications(lambda: train(call, optimizer, [batch_of(name, 2)])))  # noqa: B023
    return counts


def test_collectives_of_hsdp_and_int(four: Pool) -> None:
    counts = four.run(count_meshes)
    assert all(c == counts[0] for c in counts)
    for eager, compiled in counts[0]:
        assert eager["reduce"] == compiled["reduce"] == 3
    (hsdp_eager, hsdp), (int_eager, ints) = counts[0]
    assert hsdp_eager == {"gather": 3 + 2, "reduce": 3, "all_reduce": 3}
    assert hsdp == {"gather": 3 + 2 - 1, "reduce": 3, "all_reduce": 3}
    assert int_eager["gather"] == 3 + 3
    assert ints["gather"] == 3 + 2


def count_meshes() -> list[tuple[dict[str, int], ...]]:
    counts = []
    for options in (Options("odd", mesh="hsdp"), Options("odd", reshard=2)):
        pair = []
        torch._dynamo.reset()
        for kind in ("eager", "compiled"):
            model, call, _ = make(kind, options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            train(call, optimizer, [batch_of("odd", 0)])
            pair.append(communications(lambda: train(call, optimizer, [batch_of("odd", 2)])))  # noqa: B023
        counts.append(tuple(pair))
    return counts


def test_evaluation_gathers_each_unit_once(two: Pool) -> None:
    assert two.run(count_evaluation) == [{"gather": 4, "reduce": 0, "all_reduce": 0}] * 2


def count_evaluation() -> dict[str, int]:
    model, call, _ = make("compiled", Options("deep"))
    model.eval()
    with torch.no_grad():
        call(*batch_of("deep", 0))
        return communications(lambda: call(*batch_of("deep", 1)))


# -- what users decide about the schedule


@pytest.mark.usefixtures("fake_world")
def test_explicit_prefetch_lists() -> None:
    """Where a unit's list begins, what it names is started and nothing else; the outermost's begins
    with the graph.
    """
    assert schedule(lambda model: None) == ["0> 1> 2> 0 root> 1 2 root", "2> 1> 2 1"], (
        "two ahead in forward, one in backward"
    )

    def next_only(model: Any) -> None:
        chain = [model, *model.layers]
        for unit, following in itertools.pairwise(chain):
            unit.set_modules_to_forward_prefetch([following])
        for unit, following in itertools.pairwise([model, model.layers[2], model.layers[1]]):
            unit.set_modules_to_backward_prefetch([following])

    assert schedule(next_only) == ["0> 1> 0 2> 1 root> 2 root", "2> 1> 2 1"]

    def two_at_the_second(model: Any) -> None:
        next_only(model)
        model.layers[1].set_modules_to_forward_prefetch([model.layers[2], model])
        model.set_modules_to_backward_prefetch([model.layers[2], model.layers[1]])

    assert schedule(two_at_the_second) == ["0> 1> 0 2> root> 1 2 root", "2> 1> 2 1"]

    def not_ahead(model: Any) -> None:
        model.layers[1].set_modules_to_forward_prefetch([model.layers[2]])
        model.layers[2].set_modules_to_forward_prefetch([model.layers[2]])
        model.layers[2].set_modules_to_backward_prefetch([model.layers[2]])

    assert schedule(not_ahead) == ["0> 1> 2> 0 1 2 root> root", "2> 2 1> 1"]


def schedule(prepare: Any) -> list[str]:
    """Starts (`0>`) and waits (`0`) of gathers in both graphs, after a check that a new list makes
    a new graph.
    """
    with captured() as halves:
        model, call, graphs = make("compiled", Options("deep"))
        prepare(model)
        for number in (0, 1):
            loss_of(call(*batch_of("deep", number))).backward()
        assert graphs == [1]
        if model.layers[0]._get_fsdp_state().runtime.prefetch["forward"]:
            model.layers[0].set_modules_to_forward_prefetch([])
            loss_of(call(*batch_of("deep", 0))).backward()
            assert graphs == [2]
    shown = []
    for graph in halves[:2]:
        marks = {}
        for region in find_regions(graph, "gather"):
            name = (
                region.tag.unit.partition("#")[0].removeprefix("layers.").replace("OddMLP", "root")
            )
            marks |= {region.starts[0]: f"{name}>", region.waits[0]: name}
        shown.append(" ".join(marks[n] for n in graph.nodes if n in marks))
    return shown


@pytest.mark.usefixtures("fake_world")
def test_max_input_buffers() -> None:
    """As many reductions under way at once as the user says; without a word, as many as are
    planned.
    """
    most = {}
    for number in (0, 1, 3):
        with captured() as halves:
            model, call, _ = make("compiled", Options("deep"))
            if number:
                model.set_reduce_scatter_max_input_buffers(number)
            loss_of(call(*batch_of("deep", 0))).backward()
        regions = find_regions(halves[1], "reduce")
        change = {r.starts[0]: 1 for r in regions} | {r.waits[0]: -1 for r in regions}
        most[number] = max(itertools.accumulate(change.get(n, 0) for n in halves[1].nodes))
    assert most == {0: 1, 1: 1, 3: 3}


# -- memory between forward and backward


def saved_from_weights(graph: Graph) -> int:
    """Bytes that forward hands to backward and that were computed from gathered parameters alone,
    views and copies included.
    """
    derived: set[Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.target in GATHERS or (
            inputs and node.op == "call_function" and all(n in derived for n in inputs)
        ):
            derived.add(node)
    (output,) = (n for n in graph.nodes if n.op == "output")
    saved = [n for n in output.all_input_nodes if n in derived]
    return sum(n.meta["val"].numel() * n.meta["val"].itemsize for n in saved)


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("model", ["moe", "frozen", "read_twice", "called_twice"])
def test_nothing_gathered_is_saved_for_backward(model: str) -> None:
    """Of the larger models, `one_graph_each` looks at the graph that must save nothing."""
    if model not in GRAPH_MODELS:
        assert saved_bytes(model, reshard=True) == 0
    assert saved_bytes(model, reshard=False) > 0, (
        "with reshard False something is saved, so the count can see it"
    )


def saved_bytes(name: str, *, reshard: bool) -> int:
    torch._dynamo.reset()
    with captured() as halves:
        _, call, _ = make("compiled", Options(name, reshard=reshard))
        loss_of(call(*batch_of(name, 0))).backward()
    assert len(halves) == 2
    assert any(n.target in STARTS for n in halves[0].nodes)
    return saved_from_weights(halves[0])


def test_int_reshard_saves_slices(four: Pool) -> None:
    """An int of 2 keeps half of every padded parameter that backward needs: 1/2 of ceil(rows / 2) *
    2 rows.
    """
    slices, _ = four.run(saved_slices)[0]
    layers = ((7, 5), (5, 3), (3, 1))  # the first layer's weight is not needed; biases neither
    rows = [-(-out // 2) for _, out in layers]
    assert slices == 4 * sum(r * width for r, (width, _) in zip(rows, layers, strict=True))


def saved_slices() -> tuple[int, int]:
    with captured() as halves:
        _, call, _ = make("compiled", Options("deep", reshard=2))
        loss_of(call(*batch_of("deep", 0))).backward()
    return saved_from_weights(halves[0]), len(halves)


def test_dumps_tell_the_same(two: Pool, tmp_path: Any) -> None:
    """The folder of `dumped_to` holds the last forward graph, and its provenance line counts what
    the graph has.
    """
    two.run(dump_step, str(tmp_path))
    forward = sorted(tmp_path.glob("rank0/*_forward/[0-9]*.txt"))
    assert forward
    text = forward[-1].read_text()
    assert "4 gathers, 0 reductions" in text.splitlines()[0]
    backward = sorted(tmp_path.glob("rank0/*_backward/[0-9]*.txt"))
    assert "4 reductions" in backward[-1].read_text().splitlines()[0]


def dump_step(folder: str) -> None:
    from compiled_fsdp import dumped_to

    with dumped_to(folder):
        _, call, _ = make("compiled", Options("deep"))
        loss_of(call(*batch_of("deep", 0))).backward()
