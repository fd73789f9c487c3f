"""Ranks that share a group agree before they communicate, or every one of them says within seconds
what differs.
"""

from __future__ import annotations

import threading
import time
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.harness import Options, batch_of, make
from kit.models import loss_of
from kit.pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import compiled_fsdp
from compiled_fsdp import DivergenceError, fully_shard, warmup
from compiled_fsdp.wire import absence, agreement, answers, comparison, members, parting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOON = 15.0  # seconds in which every rank has to know, on a busy machine


@pytest.fixture(scope="module")
def broken() -> Iterator[Pool]:
    """Pools that are broken by the tests: none is used twice."""
    pool = Pool(2)
    yield pool
    pool.close()


class Branchy(nn.Module):
    """Two units; which of them runs, the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        for name in way:
            x = torch.tanh(self.left(x) if name == "l" else self.right(x))
        return x


def sharded(compiled: bool = True) -> Callable[..., Any]:
    torch.manual_seed(0)
    model = Branchy()
    fully_shard(model.left)
    fully_shard(model.right)
    fully_shard(model)
    return torch.compile(model, backend="compiled_fsdp_eager") if compiled else model


def step(call: Callable[..., Any], way: str) -> None:
    call(torch.ones(2, 4), way).sum().backward()


def error_of(run: Callable[[], None]) -> tuple[str, float]:
    """What a rank is told, by an exception or by its watcher, and after how long."""
    start = time.monotonic()
    try:
        run()
    except RuntimeError as error:
        texts = [str(error), *(g.failure for g in members.members.values() if g.failure)]
        return next(
            (t for t in texts if "communicate differently" in t or "different models" in t),
            texts[0],
        ), time.monotonic() - start
    return "", time.monotonic() - start


def check_told(answers: list[tuple[str, float]], *parts: str) -> None:
    for rank, (text, seconds) in enumerate(answers):
        for part in parts:
            assert part in text, f"rank {rank}: {text}"
        assert seconds < SOON, f"rank {rank}: {seconds:.0f} s"


# -- divergence


def other_branch() -> tuple[str, float]:
    return error_of(lambda: step(sharded(), "lr" if dist.get_rank() else "rl"))


def test_another_branch_at_the_first_step(broken: Pool) -> None:
    check_told(
        broken.run(other_branch),
        "--- rank 0",
        "+++ rank 1",
        "right (right.weight, right.bias)",
    )


def other_gradients(first: str) -> tuple[str, float]:
    """Eagerly, of one unit, gathered alike, other parameters of the same sizes have gradients."""
    model = fully_shard(Branchy())
    if first:
        step(model, first)
    return error_of(lambda: step(model, "r" if dist.get_rank() else "l"))


@pytest.mark.parametrize("first", ["", "l", "lr"])
def test_gradients_of_other_parameters(broken: Pool, first: str) -> None:
    """Without an error they would be added to each other, as in stock: the experts of a mixture
    that only some ranks call.
    """
    try:
        answers = broken.run(other_gradients, first)
    finally:
        broken.close()  # its connections are broken
    check_told(
        answers,
        "-reduction of left.weight, left.bias",
        "+reduction of right.weight",
        "set_reduce_scatter_unused_params(True)",
    )


def other_units() -> tuple[str, float]:
    """Eagerly, ranks call two units of the same sizes, and only one of them leads to the loss."""
    model: Any = sharded(compiled=False)
    x = torch.ones(2, 4)
    for _ in range(2):
        (model.left(x) + model.right(x)).sum().backward()

    def run() -> None:
        both = [model.left(x), model.right(x)]
        rank = dist.get_rank()
        (both[rank] + both[1 - rank].detach()).sum().backward()

    return error_of(run)


def test_gradients_of_other_units(broken: Pool) -> None:
    """Each has reduced its own alike before."""
    try:
        answers = broken.run(other_units)
    finally:
        broken.close()  # its connections are broken
    check_told(answers, "unit left in an eager backward", "set_reduce_scatter_unused_params(True)")


def fall_back_alone() -> tuple[str, float]:
    """Both ranks have run eagerly, and in graphs; then Dynamo gives a unit up on rank 1 alone."""
    model: Any = sharded(compiled=False)
    call = torch.compile(model, backend="compiled_fsdp_eager")
    for each in (model, model, call, call):
        step(each, "lr")
    if dist.get_rank():
        forward = model.right.forward
        model.right.forward = lambda x: forward(x) if x.tolist() else x
    return error_of(lambda: step(call, "lr"))


def test_a_rank_that_falls_back_alone(broken: Pool) -> None:
    try:
        check_told(
            broken.run(fall_back_alone), "are about to communicate differently", "outside a graph"
        )
    finally:
        broken.close()  # its connections are broken


def known_branch() -> tuple[str, float]:
    """Rank 1 runs what all have run before; rank 0 something new."""
    call = sharded()
    step(call, "l")
    return error_of(lambda: step(call, "l" if dist.get_rank() else "lr"))


def test_a_new_branch_beside_a_known_one(broken: Pool) -> None:
    try:
        check_told(
            broken.run(known_branch),
            "--- rank 0",
            "+++ rank 1",
            "a forward graph of 2",
            "a forward graph of 1",
        )
    finally:
        broken.close()  # its connections are broken


def known_branches() -> tuple[str, float]:
    """All ranks have run both; now each runs another one, and asks nobody."""
    call = sharded()
    for way in ("l", "lr", "l", "lr", "l"):
        step(call, way)
    return error_of(lambda: step(call, "lr" if dist.get_rank() else "l"))


def test_two_known_branches(broken: Pool) -> None:
    """Messages that carry different things do not meet, and who waits for long asks."""
    try:
        check_told(
            broken.run(known_branches),
            "--- rank 0",
            "+++ rank 1",
            "a forward graph of 1",
            "a forward graph of 2",
        )
    finally:
        broken.close()  # its connections are broken


def parted_before(kept: int) -> tuple[str, float]:
    """Rank 1 runs what all know once more than rank 0; then something new."""
    group = group_of_world()
    for text in ("a graph", "a graph", "unit b outside a graph\ngather of b.weight", "a graph"):
        agreement.before_run(text, [group])

    def run() -> None:
        eagerly = ["unit b outside a graph\ngather of b.weight"] if dist.get_rank() else []
        for text in (*eagerly, "a graph", "a graph"):
            agreement.before_run(text, [group])
        with mock.patch.object(parting, "KEPT", kept):
            if dist.get_rank() == 0:
                agreement.before_run("a third", [group])
            wait_until(lambda: agreement.failure(group))
        raise RuntimeError(agreement.failure(group))

    return error_of(run)


def wait_until(is_so: Callable[[], object]) -> None:
    """It may come by the watcher, as it does where a rank waits in a collective."""
    begin = time.monotonic()
    while not is_so() and time.monotonic() - begin < SOON:
        time.sleep(0.05)


@pytest.mark.parametrize("kept", [parting.KEPT, 2])
def test_ranks_that_parted_before(broken: Pool, kept: int) -> None:
    """The error says where, and not only what differs when it is noticed; of ranks that parted
    before all that is looked through, by when.
    """
    try:
        answers = broken.run(parted_before, kept)
    finally:
        broken.close()  # its connections are broken
    if kept == 2:
        check_told(answers, "They parted by run 5; this is run 7.", "rank 0, runs 5 to 6")
        return
    check_told(
        answers,
        "They parted at run 5; this is run 7.",
        """
--- rank 0, runs 3 to 6
+++ rank 1
 unit b outside a graph: gather of b.weight
 a graph
+unit b outside a graph: gather of b.weight
 a graph
-a graph
""",
    )


def counted_slowly(text: str, seconds: float) -> None:
    """Between the moments at which a run begins and is known, rank 1's watcher is asked; or, where
    all know the text, finds itself at the same run for long.
    """
    group = group_of_world()
    for each in (*SOME_RUNS, *SOME_RUNS):
        agreement.before_run(each, [group])
    key = members.texts_of.key

    def slow(value: str) -> str:
        if value == text and threading.current_thread() is threading.main_thread():
            time.sleep(seconds)
        return key(value)

    slowly = mock.patch.object(members.texts_of, "key", slow if dist.get_rank() else key)
    with slowly, mock.patch.object(answers, "STUCK_S", 0.5):
        agreement.before_run(text, [group])
        dist.barrier()  # rank 0 waits for rank 1, as in a collective
    assert not agreement.failure(group)


SOME_RUNS = ("a graph", "unit b outside a graph\ngather of b.weight", "a graph of c")


@pytest.mark.parametrize(("text", "seconds"), [("a graph that is new", 2.5), (SOME_RUNS[0], 4.5)])
def test_a_watcher_that_looks_while_a_run_is_counted(two: Pool, text: str, seconds: float) -> None:
    """It says what this rank has run, and not the run before."""
    two.run(counted_slowly, text, seconds)


def group_of_world() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def sizes_that_one_rank_knows() -> tuple[str, float]:
    """A size is a symbol on one rank; a run that differs by that alone is the same."""
    group = group_of_world()
    for text in ("a graph\nof ?" if dist.get_rank() else "a graph\nof 4", "another"):
        agreement.before_run(text, [group])
    return error_of(lambda: agreement.before_run(f"of rank {dist.get_rank()}", [group]))


def test_ranks_that_part_now(broken: Pool) -> None:
    """A near miss: they had not parted before."""
    try:
        answers = broken.run(sizes_that_one_rank_knows)
    finally:
        broken.close()  # its connections are broken
    check_told(answers, "of rank 0")
    assert not any("They parted" in text for text, _ in answers)


# -- ranks of which some have no graph

WAYS = ("printing", "printing, a root of no parameters", "printing at first", "not compiled")
# The root reads a parameter of another unit, which is gathered first.
TIED = "printing in its own forward, tied"


class Telling(Branchy):
    """Rank 0 prints in forward, which Dynamo does not trace; at first, or always."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.num_calls = way, 0
        self.out = nn.Identity() if "no parameters" in way else nn.Linear(4, 4)
        if way == TIED:
            self.out.weight = self.left.weight
        else:
            self.left.register_forward_hook(self.tell)

    def tell(self, *_: object) -> None:
        is_due = "print" in self.way and (self.num_calls < 1 or "at first" not in self.way)
        if dist.get_rank() == 0 and is_due:
            print(end="")

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        if self.way == TIED:
            self.tell()
        x = self.out(super().forward(x, way))
        self.num_calls += 1
        return x


def train(way: str, shard: Callable[[nn.Module], None], *, compiles: bool) -> list[float]:
    torch.manual_seed(0)
    model: Any = Telling(way)
    for module in (model.left, model.right, model):
        shard(module)
    call = torch.compile(model, backend="compiled_fsdp_eager") if compiles else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(4):
        loss = call(torch.randn(2, 4), "rlr").square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def some_ranks_have_no_graph(way: str) -> None:
    """What runs eagerly before is known to all ranks; of ties over units stock cannot say what is
    right.
    """
    shard = fully_shard if way == TIED else torch.distributed.fsdp.fully_shard
    expected = train(way, shard, compiles=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = train(way, fully_shard, compiles=way != "not compiled" or dist.get_rank() > 0)
    # Of a parameter that two units read, each reads and reduces by itself in a graph.
    assert found == (pytest.approx(expected, rel=1e-5) if way == TIED else expected)
    texts = [str(warning.message) for warning in told]
    if dist.get_rank() > 0:  # has left its graph
        assert any("runs eagerly from now on, on all ranks: " in text for text in texts), texts


@pytest.mark.parametrize("way", [*WAYS, TIED])
def test_some_ranks_have_no_graph(two: Pool, way: str) -> None:
    """They have not begun theirs when they find out, leave it, and train on as stock does."""
    two.run(some_ranks_have_no_graph, way)


def flat_parameters(wrapper: Any, *, compiles: bool) -> list[float]:
    """The same of the other front end; the first call is made under no_grad."""
    torch.manual_seed(0)
    device = torch.device("cpu")
    model = wrapper(Telling("printing"), device_id=device, use_orig_params=True)
    call = torch.compile(model, backend="compiled_fsdp_eager") if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        x = torch.full((2, 4), 1.0 + dist.get_rank() + step)
        with torch.no_grad():
            call(x, "rl")
        loss = call(x, "rl").square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def flat_parameters_as_stocks() -> None:
    expected = flat_parameters(torch.distributed.fsdp.FullyShardedDataParallel, compiles=False)
    with pytest.warns(UserWarning, match="runs eagerly from now on, on all ranks: "):
        found = flat_parameters(compiled_fsdp.FullyShardedDataParallel, compiles=True)
    assert found == expected


def test_some_ranks_have_no_graph_of_flat_parameters(two: Pool) -> None:
    two.run(flat_parameters_as_stocks)


def leaves_at_the_first_call(names: list[str]) -> None:
    """Three of four ranks leave; where replicas have it too, nobody can, and all raise."""
    mesh = init_device_mesh(
        "cpu", (2,) * len(names) if len(names) > 1 else (4,), mesh_dim_names=names
    )

    def shard(module: nn.Module) -> None:
        fully_shard(module, mesh=mesh)

    if len(names) == 1:
        train("printing", shard, compiles=True)
        return
    text, seconds = error_of(lambda: train("printing", shard, compiles=True) and None)
    assert "communicate differently" in text, text
    assert seconds < SOON


def test_three_ranks_leave(four: Pool) -> None:
    four.run(leaves_at_the_first_call, ["shard"])


def inside_a_larger_function() -> tuple[str, float]:
    """Nobody could call it again: others would do twice what it does."""
    torch.manual_seed(0)
    model: Any = Telling("printing")
    fully_shard(model)
    loss = torch.compile(lambda x: model(x, "l").sum(), backend="compiled_fsdp_eager")
    return error_of(lambda: loss(torch.ones(2, 4)).backward())


def test_a_graph_that_cannot_be_left(broken: Pool) -> None:
    check_told(
        broken.run(inside_a_larger_function),
        "ranks [0]: unit ",
        "outside a graph",
        "ranks [1]: a forward graph of 1 collectives",
        "rank 0 is outside: ",
        "rank 1 cannot leave its graph: its graph is of a larger function around the model",
    )


def other_model() -> tuple[str, float]:
    def run() -> None:
        model = nn.Linear(4, 4 + dist.get_rank())
        fully_shard(model)(torch.ones(2, 4)).sum().backward()

    return error_of(run)


def test_different_models(broken: Pool) -> None:
    check_told(
        broken.run(other_model),
        "the ranks of a shard group have different models",
        "weight: (5, 4)",
        "weight: (4, 4)",
    )


def stopped() -> tuple[str, float]:
    """Rank 1 never comes, and the group's patience is short."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    assert group is not None
    if dist.get_rank() == 1:
        time.sleep(8)
        return "", 0.0
    return error_of(lambda: agreement.before_run("anything", [group.group_name]))


def test_a_rank_that_never_comes(broken: Pool) -> None:
    (text, _), _ = broken.run(stopped)
    assert "ranks [1] of process group" in text
    assert "raise the timeout of init_process_group, or call compiled_fsdp.warmup first" in text


def raised_alone() -> str:
    """Rank 1 says that a call has raised, and comes back; then a call of it does raise, and it does
    not.
    """
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(absence, "RAISED_S", 1.0):
        agreement.before_run("at first", [group.group_name])
        if dist.get_rank() == 1:
            absence.note_raised(ValueError("as asked"))
            time.sleep(0.3)
            absence.note_goes_on()
            time.sleep(1.5)
        agreement.before_run("then", [group.group_name])
        model = sharded(compiled=False)
        if dist.get_rank() == 0:
            return error_of(lambda: step(model, "lr"))[0]
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 5), "lr")
        time.sleep(4.0)
        return ""


def test_a_rank_that_raises_alone(broken: Pool) -> None:
    """The others would wait for it until the timeout of the group."""
    try:
        text, _ = broken.run(raised_alone)
        assert "rank 1 of process group" in text
        assert "raised RuntimeError: " in text
        assert "mat1 and mat2 shapes cannot be multiplied" in text
        assert "has called none for 1 s since" in text
    finally:
        broken.close()


# -- what must not be an error


def skewed(seconds: float) -> float:
    """Rank 1 compiles for much longer; the watchers beat meanwhile."""
    call = sharded()
    backend = torch._dynamo.lookup_backend("compiled_fsdp_eager")

    def slow(gm: Any, inputs: Any) -> Any:
        time.sleep(seconds * dist.get_rank())
        return backend(gm, inputs)

    call = torch.compile(call._orig_mod, backend=slow)
    start = time.monotonic()
    step(call, "lr")
    return time.monotonic() - start


def test_a_rank_that_compiles_for_longer(two: Pool) -> None:
    assert all(waited >= 4.0 for waited in two.run(skewed, 4.0))


def other_shapes() -> int:
    """Each rank recompiles at another step, for another shape: the structure is the same."""
    call = sharded()
    for number in range(4):
        rows = 3 if number == 1 + dist.get_rank() else 2
        call(torch.ones(rows, 4), "lr").sum().backward()
    return 1


def test_recompiles_for_other_shapes_at_other_times(two: Pool) -> None:
    assert two.run(other_shapes) == [1, 1]


def stages() -> int:
    """Two groups, as two pipeline stages: each runs its own model, compiled or not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + stage)))
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    call = torch.compile(model, backend="compiled_fsdp_eager") if stage else model
    for _ in range(2):
        call(torch.ones(2, 4)).sum().backward()
    return 1


def test_stages_of_a_pipeline_differ(four: Pool) -> None:
    assert four.run(stages) == [1] * 4


def hsdp() -> int:
    step_of("compiled", Options("odd", mesh="hsdp"), 2)
    return 1


def test_hsdp(four: Pool) -> None:
    assert four.run(hsdp) == [1] * 4


def step_of(kind: str, options: Options, count: int) -> None:
    _, call, _ = make(kind, options)
    for number in range(count):
        loss_of(call(*batch_of(options.model, number))).backward()


def accesses() -> list[int]:
    """Uses of the store by the main thread, step by step."""
    counts, original = [0], comparison.exchange
    for group in members.members.values():
        group.agreed.clear()  # other tests of this pool may have run the same graphs

    def counted(*args: Any) -> Any:
        counts[-1] += 1
        return original(*args)

    comparison.exchange = counted
    try:
        _, call, _ = make("compiled", Options("odd"))
        for number in range(4):
            loss_of(call(*batch_of("odd", number))).backward()
            counts.append(0)
    finally:
        comparison.exchange = original
    return counts[:-1]


def test_nothing_after_the_second_step(two: Pool) -> None:
    """The model, its ranks, forward and backward; then forward after backward, which is new; then
    nothing.
    """
    assert two.run(accesses) == [[4, 1, 0, 0]] * 2


# -- warmup


def warm(compiled: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    fully_shard(model[0])
    fully_shard(model)
    call = (
        torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True) if compiled else model
    )
    call(torch.randn(3, 4)).sum().backward()
    before = {
        **{n: p.full_tensor().clone() for n, p in model.named_parameters()},
        **{n: b.clone() for n, b in model.named_buffers()},
    }
    grads = [p.grad.full_tensor().clone() for p in model.parameters()]
    held = [p.grad for p in model.parameters()]
    example = torch.randn(5, 4)
    random = torch.get_rng_state()
    torch._dynamo.utils.counters.clear()
    warmup(call, example)
    assert torch.equal(torch.get_rng_state(), random)
    after = {
        **{n: p.full_tensor() for n, p in model.named_parameters()},
        **dict(model.named_buffers()),
    }
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
    assert all(torch.equal(g.full_tensor(), b) for g, b in zip(held, grads, strict=True))


@pytest.mark.parametrize("compiled", [True, False])
def test_warmup_leaves_no_trace(two: Pool, compiled: bool) -> None:
    two.run(warm, compiled)


def warm_then_count() -> int:
    call = sharded()
    warmup(call, torch.ones(2, 4), "lr")
    done = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    step(call, "lr")
    return torch._dynamo.utils.counters["stats"]["unique_graphs"] - done


def test_warmup_compiles_both_phases(two: Pool) -> None:
    assert two.run(warm_then_count) == [0, 0]


def test_warmup_of_what_is_not_sharded() -> None:
    with pytest.raises(
        TypeError, match=r"^warmup: Linear .* has no sharded module. Call fully_shard on it first$"
    ):
        compiled_fsdp.warmup(nn.Linear(2, 2), torch.ones(1, 2))
    assert issubclass(DivergenceError, RuntimeError)
