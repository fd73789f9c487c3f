"""Graphs broken on purpose, and what becomes of them: the mutation test of `verify`.

`Simulation` executes one lowered graph for every rank of a small world in one process: collectives match in the order in which
each rank starts them; results of collectives that are not awaited, and freed buffers, hold NaN. A mutant is harmful if some
rank's results or effects differ from those of the correct graph, if it cannot run, hangs, or communicates other things.

    python tests/mutants.py --count 5000        # prints the rates, and each harmful mutant that nothing saw
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
from compiled_fsdp.passes.base import run_pipeline
from compiled_fsdp.passes.pipeline import HALF
from compiled_fsdp.passes.verify import check
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput
from torch.distributed.fsdp import MixedPrecisionPolicy

from compiled_fsdp import collectives as comm
from compiled_fsdp import fully_shard
from compiled_fsdp.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, WAIT
from compiled_fsdp.errors import GraphInvariantError
from compiled_fsdp.graph import aliases, find, output, starts
from compiled_fsdp.meta import get_captured, get_tag, set_captured
from compiled_fsdp.plan import Plan
from compiled_fsdp.schema import ADD_RETAINED, FREE, KEEP_SLICE, MARK_GRADS, RETAIN
from compiled_fsdp.spec import ParamSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.fx import Graph, GraphModule, Node

    from compiled_fsdp.meaning import Captured

aten = torch.ops.aten


# -- execution


class Hang(Exception):
    """Every rank that is not done waits for another."""


@dataclass
class Simulation:
    """`groups`: for each group name of the graph, the ranks of each of its instances."""

    world: int
    groups: dict[str, list[tuple[int, ...]]]
    posted: dict[tuple[str, tuple[int, ...], int], dict[int, tuple[str, Tensor, Tensor]]] = field(default_factory=dict)
    moved: Counter[str] = field(default_factory=Counter)

    def run(self, graphs: list[Graph], inputs: list[dict[str, Tensor]]) -> list[tuple[list[Any], list[Any]]]:
        """(outputs, effects) of each rank."""
        ranks = [_Rank(self, rank, graph, inputs[rank]) for rank, graph in enumerate(graphs)]
        running = {rank.rank: rank.steps() for rank in ranks}
        while running:
            before = [rank.done for rank in ranks]
            for number in list(running):
                try:
                    next(running[number])
                except StopIteration:
                    del running[number]
            if running and before == [rank.done for rank in ranks]:
                raise Hang
        return [(rank.outputs, rank.effects) for rank in ranks]

    def members(self, name: str, rank: int) -> tuple[int, ...]:
        if name not in self.groups:
            raise Hang(f"no group {name!r}")
        return next(ranks for ranks in self.groups[name] if rank in ranks)


class _Rank:
    def __init__(self, wire: Simulation, rank: int, graph: Graph, inputs: dict[str, Tensor]) -> None:
        self.wire, self.rank, self.graph, self.inputs = wire, rank, graph, inputs
        self.outputs: list[Any] = []
        self.effects: list[Any] = []
        self.done = 0
        self._count: Counter[str] = Counter()
        self._waiting: dict[int, tuple[Any, Tensor]] = {}  # by data pointer of the result

    def steps(self) -> Iterator[None]:
        values: dict[Node, Any] = {}
        for node in self.graph.nodes:
            self.done += 1
            if node.op == "placeholder":
                values[node] = self.inputs[node.name].clone()
                continue
            args = torch.fx.node.map_arg(node.args, lambda n: values[n])
            kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: values[n])
            if node.op == "output":
                self.outputs = list(args[0])
            elif node.target is WAIT:
                key = self._waiting.pop(args[0].untyped_storage().data_ptr(), None)
                while key is not None and not self._finish(key[0], key[1]):
                    yield
                values[node] = args[0]
            elif node.target in comm.STARTS:
                values[node] = self._start(node.target, *args)
            else:
                values[node] = self._compute(node.target, args, kwargs)

    def _compute(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is FREE:
            args[0].fill_(float("nan"))
        elif target in (MARK_GRADS, RETAIN, ADD_RETAINED):
            self.effects.append((str(target), args[0].clone(), *args[2:]))
        elif target is KEEP_SLICE:
            spec = ParamSpec.of(args[1:]).over_post_group()
            rank = self.wire.members(spec.group, self.rank).index(self.rank)
            kept = args[0].new_zeros(spec.shard_shape)
            rows = args[0].narrow(spec.dim, min(rank * spec.rows, spec.shape[spec.dim]), _rows(spec, rank))
            kept.narrow(spec.dim, 0, rows.shape[spec.dim]).copy_(rows)
            return kept.flatten()
        else:
            return target(*args, **kwargs)
        return None

    def _start(self, target: Any, source: Tensor, *rest: Any) -> Tensor:
        name = rest[-1]
        members = self.wire.members(name, self.rank)
        size = len(members)
        kind = f"{target} {source.dtype} {source.numel()} {[a for a in rest if isinstance(a, str | int)]}"
        sizes = {ALL_GATHER: source.numel() * size, REDUCE_SCATTER: source.numel() // size}
        out = (
            source.new_full((sizes.get(target, 0),), float("nan"))
            if target in sizes
            else torch.full_like(source, float("nan"))
        )
        number = self._count[name]
        self._count[name] += 1
        self.wire.moved[kind] += 1
        post = self.wire.posted.setdefault((name, members, number), {})
        post[self.rank] = kind, source, out
        self._waiting[out.untyped_storage().data_ptr()] = (name, members, number), out
        return out

    def _finish(self, key: Any, out: Tensor) -> bool:
        post = self.wire.posted[key]
        members = key[1]
        if any(rank not in post for rank in members):
            return False
        if len({post[rank][0] for rank in members}) > 1:
            raise Hang(f"{[post[rank][0] for rank in members]}")
        inputs = [post[rank][1] for rank in members]
        place = members.index(self.rank)
        op = post[self.rank][0].split(" ")[0]
        if op == str(ALL_GATHER):
            out.copy_(torch.cat([x.flatten() for x in inputs]))
        elif op == str(ALL_REDUCE):
            out.copy_(sum(inputs[1:], inputs[0]))
        elif op == str(REDUCE_SCATTER):
            out.copy_(sum(inputs[1:], inputs[0]).chunk(len(members))[place])
        else:
            out.copy_(torch.cat([x.chunk(len(members))[place] for x in inputs]))
        return True


def _rows(spec: ParamSpec, rank: int) -> int:
    return max(0, min(spec.rows, spec.shape[spec.dim] - min(rank * spec.rows, spec.shape[spec.dim])))


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_is_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


# -- correct graphs


@dataclass(frozen=True)
class Subject:
    """A correct graph: as captured, and the plan; how its groups lie in a world."""

    name: str
    captured: GraphModule
    plan: Plan
    world: int
    groups: dict[str, list[tuple[int, ...]]]

    def compiled(self, change: Callable[[GraphModule, Plan], GraphModule] | None = None) -> GraphModule:
        """The final graph, changed just before `verify` would look at it; the captured meaning stays with it."""
        final, meaning = self._final
        gm = copy.deepcopy(final)
        if change is not None:
            set_captured(gm, meaning)
            gm = change(gm, self.plan)
            gm.graph.lint()
        return gm

    @cached_property
    def _final(self) -> tuple[GraphModule, Captured | None]:
        """Made once for all mutants."""
        kept: list[Captured | None] = []
        passes = [entry for entry in HALF if entry.name != "verify"]
        gm = run_pipeline(copy.deepcopy(self.captured), self.plan, passes, lambda gm, _: kept.append(get_captured(gm)))
        return gm, kept[-1]

    def caught(self, change: Callable[[GraphModule, Plan], GraphModule]) -> str | None:
        """The rule that the changed graph breaks, if `verify` sees one."""

        def then_verify(gm: GraphModule, plan: Plan) -> GraphModule:
            check(change(gm, plan), plan, "a mutation")
            return gm

        try:
            self.compiled(then_verify)
        except GraphInvariantError as error:
            return error.invariant
        return None

    def inputs(self) -> list[dict[str, Tensor]]:
        """Random values for every rank, without zeros and of small integers: sums are exact in any order."""
        found = []
        for rank in range(self.world):
            generator = torch.Generator().manual_seed(rank)
            values = {}
            for node in self.captured.graph.nodes:
                if node.op == "placeholder":
                    val = node.meta["val"]
                    values[node.name] = (torch.rand(val.shape, generator=generator) + 0.5).to(val.dtype)
            found.append(values)
        return found

    def execute(self, *graphs: Graph) -> tuple[Any, Counter[str]]:
        """What every rank gets, and what was communicated; one graph for all ranks, or one for each."""
        wire = Simulation(self.world, self.groups)
        each = list(graphs) if len(graphs) > 1 else [*graphs] * self.world
        return wire.run(each, self.inputs()), wire.moved


class Net(torch.nn.Module):
    """Three units of two parameters and one; odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList((torch.nn.Linear(4, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 5)))
        self.scale = torch.nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "fp16": {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)},
    "keep": {"reshard_after_forward": False},
    "hsdp": {"mesh": 2},
}
PLANS = (Plan(1, 1, 1, 0), Plan(2, 1, 2, 0), Plan(0, 0, 0, 0), Plan(1, 1, 1))


@cache
def subjects() -> list[Subject]:
    """Forward and backward of every setting, under every plan."""
    from passes_harness import fake_ranks
    from torch.distributed.device_mesh import init_device_mesh

    found = []
    for name, settings in SETTINGS.items():
        captured: list[GraphModule] = []
        world = 4 if "mesh" in settings else 2
        with fake_ranks(world), tempfile.TemporaryDirectory():
            mesh = init_device_mesh("cpu", (world,))
            if "mesh" in settings:
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            model = Net()
            arguments = {**settings, "mesh": mesh}
            for layer in model.layers:
                fully_shard(layer, **arguments)
            _capture(fully_shard(model, **arguments), captured)
            groups = _groups(mesh)
        for kind, gm in zip(("forward", "backward"), captured, strict=True):
            found += [Subject(f"{name} {kind} {plan}", gm, plan, world, groups) for plan in PLANS]
    return found


def _capture(model: Any, captured: list[GraphModule]) -> None:
    import compiled_fsdp.backend as backend_module

    original = backend_module.run_half

    def run_half(gm: GraphModule) -> GraphModule:
        captured.append(copy.deepcopy(gm))
        return original(gm)

    backend_module.run_half = run_half
    try:
        call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True, dynamic=False)  # whatever ran before
        call(torch.ones(3, 4)).float().sum().backward()
    finally:
        backend_module.run_half = original


def _groups(mesh: Any) -> dict[str, list[tuple[int, ...]]]:
    if mesh.ndim == 1:
        return {mesh.get_group().group_name: [(0, 1)]}
    names = [mesh.get_group(axis).group_name for axis in (0, 1)]
    return dict(zip(names, ([(0, 2), (1, 3)], [(0, 1), (2, 3)]), strict=True))


# -- mutations


def refresh(gm: GraphModule) -> GraphModule:
    """Values of the nodes again, since arguments changed."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and "val" in node.meta:
            fake = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            mode = next((v.fake_mode for v in _tensors(fake) if hasattr(v, "fake_mode")), None)
            if mode is not None:
                with mode, torch.no_grad():
                    node.meta["val"] = node.target(*fake[0], **fake[1])
    return gm


def _tensors(values: Any) -> Iterator[Any]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, list | tuple | dict):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def drop_wait(graph: Graph, rng: random.Random) -> None:
    wait = rng.choice(find(graph, WAIT))
    wait.replace_all_uses_with(wait.args[0])
    graph.erase_node(wait)


def duplicate_wait(graph: Graph, rng: random.Random) -> None:
    _copy(rng.choice(find(graph, WAIT)))


def swap_collectives(graph: Graph, rng: random.Random) -> None:
    """Exchange what two collectives send."""
    pairs = [
        pair
        for pair in itertools.combinations(starts(graph), 2)
        if all(n.op == "placeholder" or n < min(pair) for start in pair for n in start.args[:1])
    ]
    one, two = rng.choice(pairs)
    (a, *rest), (b, *others) = one.args, two.args
    one.args, two.args = (b, *rest), (a, *others)


def swap_results(graph: Graph, rng: random.Random) -> None:
    """Exchange what reads the results of two collectives."""
    one, two = rng.sample(find(graph, WAIT), 2)
    one.args, two.args = two.args, one.args


def reorder_starts(graph: Graph, rng: random.Random) -> None:
    """Move one collective ahead of another, with what prepares it."""
    one, two = rng.sample(starts(graph), 2)
    first, second = min(one, two), max(one, two)
    first.prepend(second)


def move_free_up(graph: Graph, rng: random.Random) -> None:
    """Before a use of the buffer or a view."""
    free = rng.choice(find(graph, FREE))
    users = [u for alias in aliases(free.args[0]) for u in alias.users if u is not free]
    rng.choice(users).prepend(free)


def move_use_past_free(graph: Graph, rng: random.Random) -> None:
    free = rng.choice(find(graph, FREE))
    users = [u for alias in aliases(free.args[0]) for u in alias.users if u is not free]
    free.append(rng.choice(users))


def duplicate_free(graph: Graph, rng: random.Random) -> None:
    _copy(rng.choice(find(graph, FREE)))


def drop_free(graph: Graph, rng: random.Random) -> None:
    graph.erase_node(rng.choice(find(graph, FREE)))


def duplicate_collective(graph: Graph, rng: random.Random) -> None:
    """Send again, and wait for it; tagged as the first or not at all."""
    start = rng.choice(starts(graph))
    (wait,) = start.users
    again = _copy(start)
    with graph.inserting_after(again):
        more = graph.call_function(WAIT, (again,))
    more.meta = dict(wait.meta) if rng.random() < 0.5 else {"val": wait.meta["val"]}


def reduce_twice(graph: Graph, rng: random.Random) -> None:
    """The result of a reduction goes through the same collective again."""
    start = rng.choice([n for n in starts(graph) if n.target in (ALL_REDUCE, ALL_TO_ALL)])
    (wait,) = start.users
    again, more = _copy(start), _copy(wait)
    wait.append(again)
    again.append(more)
    wait.replace_all_uses_with(more)
    again.args, more.args = (wait, *start.args[1:]), (again,)


def change_group(graph: Graph, rng: random.Random) -> None:
    start = rng.choice(starts(graph))
    others = sorted({n.args[-1] for n in starts(graph)} | {"another"}, key=str)
    start.args = (*start.args[:-1], rng.choice([g for g in others if g != start.args[-1]]))


def change_dtype(graph: Graph, rng: random.Random) -> None:
    """What a collective sends is narrowed, and its result widened again."""
    start = rng.choice(starts(graph))
    (wait,) = start.users
    source, before = start.args[0], start.args[0].meta["val"].dtype
    narrow = rng.choice([d for d in (torch.bfloat16, torch.float16, torch.float32) if d != before])
    with graph.inserting_before(start):
        cast = graph.call_function(comm.CONVERT, (source, narrow))
    with graph.inserting_after(wait):
        back = graph.call_function(comm.CONVERT, (wait, before))
    wait.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    start.args = (cast, *start.args[1:])
    for node, like in ((cast, start), (back, wait)):
        node.meta = dict(like.meta)


def change_cast(graph: Graph, rng: random.Random) -> None:
    cast = rng.choice(find(graph, comm.CONVERT))
    cast.args = (cast.args[0], rng.choice([d for d in (torch.bfloat16, torch.float16, torch.float64) if d != cast.args[1]]))


def change_divisor(graph: Graph, rng: random.Random) -> None:
    node = rng.choice(find(graph, aten.div.Tensor))
    node.args = (node.args[0], rng.choice([1.0, 3.0, 4.0, 8.0]))


def drop_divisor(graph: Graph, rng: random.Random) -> None:
    node = rng.choice(find(graph, aten.div.Tensor))
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def save_gathered(graph: Graph, rng: random.Random) -> None:
    """One more value for backward: a gathered buffer, a view or a copy of it."""
    full = [
        n for n in graph.nodes if (tag := get_tag(n)) is not None and tag.kind == "gather" and n.target not in comm.STARTS
    ]
    end = output(graph)
    end.args = ((*end.args[0], rng.choice(full)),)
    end.meta["desc"] = [*end.meta["desc"], SavedForBackwardsAOTOutput(len(end.meta["desc"]))]


def save_gathered_instead(graph: Graph, rng: random.Random) -> None:
    full = [
        n for n in graph.nodes if (tag := get_tag(n)) is not None and tag.kind == "gather" and n.target not in comm.STARTS
    ]
    end = output(graph)
    values = list(end.args[0])
    values[rng.randrange(len(values))] = rng.choice(full)
    end.args = (tuple(values),)


def change_columns(graph: Graph, rng: random.Random) -> None:
    """Another part of a bucket."""
    node = rng.choice([n for n in find(graph, aten.slice.Tensor) if get_tag(n) is not None])
    shift = rng.choice([-1, 1])
    node.args = (*node.args[:2], max(0, node.args[2] + shift), node.args[3] + shift)


def swap_members(graph: Graph, rng: random.Random) -> None:
    """Another order inside a bucket."""
    node = rng.choice([n for n in find(graph, aten.cat.default) if get_tag(n) is not None])
    node.args = (list(reversed(node.args[0])), *node.args[1:])


def drop_mark(graph: Graph, rng: random.Random) -> None:
    graph.erase_node(rng.choice(find(graph, MARK_GRADS)))


def change_mark(graph: Graph, rng: random.Random) -> None:
    mark = rng.choice(find(graph, MARK_GRADS))
    mark.args = (*mark.args[:2], [o + 1 for o in mark.args[2]])


def swap_outputs(graph: Graph, rng: random.Random) -> None:
    end = output(graph)
    values = list(end.args[0])
    i, j = rng.sample(range(len(values)), 2)
    values[i], values[j] = values[j], values[i]
    end.args = (tuple(values),)


def other_operand(graph: Graph, rng: random.Random) -> None:
    """A node reads another value of the same shape and dtype."""
    nodes = [n for n in graph.nodes if n.op == "call_function" and n.all_input_nodes and n.target is not FREE]
    node = rng.choice(nodes)
    before = rng.choice(node.all_input_nodes)
    like = before.meta["val"]
    others = [
        n
        for n in graph.nodes
        if n is not before
        and n < node
        and isinstance(v := n.meta.get("val"), torch.Tensor)
        and (v.shape, v.dtype) == (like.shape, like.dtype)
    ]
    node.replace_input_with(before, rng.choice(others))


MUTATIONS = (
    drop_wait, duplicate_wait, swap_collectives, swap_results, reorder_starts, move_free_up, move_use_past_free, duplicate_free,
    drop_free, duplicate_collective, reduce_twice, change_group, change_dtype, change_cast, change_divisor, drop_divisor,
    save_gathered, save_gathered_instead, change_columns, swap_members, drop_mark, change_mark, swap_outputs, other_operand,
)  # fmt: skip


def _copy(node: Node) -> Node:
    with node.graph.inserting_after(node):
        return node.graph.node_copy(node)


# -- the trial


@dataclass(frozen=True)
class Mutant:
    """One broken graph: harm in words ("" for none), and the rule that saw it (None for none)."""

    name: str
    subject: str
    seed: int
    harm: str
    rule: str | None


def harm_of(subject: Subject, good: tuple[Any, Counter[str]], graph: Graph) -> str:
    """What the mutant does differently, by execution."""
    try:
        results, moved = subject.execute(graph)
    except Hang:
        return "hangs"
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
        return f"fails: {type(error).__name__}"
    if not _is_same(results, good[0]):
        return "other results"
    return "communicates otherwise" if moved != good[1] else ""


def trial(subject: Subject, good: tuple[Any, Counter[str]], mutation: Callable[..., None], seed: int) -> Mutant | None:
    """One mutant; None where the mutation does not apply, or gives no graph at all."""
    graphs: list[Graph] = []

    def change(gm: GraphModule, plan: Plan) -> GraphModule:
        mutation(gm.graph, random.Random(seed))
        gm.graph.lint()
        refresh(gm)
        graphs.append(gm.graph)
        return gm

    try:
        rule = subject.caught(change)
    except (IndexError, ValueError, RuntimeError, TypeError):
        if not graphs:
            return None
        raise
    return Mutant(mutation.__name__, subject.name, seed, harm_of(subject, good, graphs[0]), rule)


def trials(count: int, seed: int = 0) -> list[Mutant]:
    """`count` mutants: every mutation on every graph in turn."""
    found: list[Mutant] = []
    everything = [(s, s.execute(s.compiled().graph)) for s in subjects()]
    numbers = iter(range(seed, sys.maxsize))
    while len(found) < count:
        for mutation in MUTATIONS:
            number = next(numbers)
            subject, good = everything[random.Random(number).randrange(len(everything))]
            mutant = trial(subject, good, mutation, number)
            if mutant is not None:
                found.append(mutant)
    return found[:count]


def report(mutants: list[Mutant]) -> str:
    """Rates by mutation, and the harmful ones that were missed."""
    lines = [f"{'mutation':24}{'mutants':>8}{'harmful':>8}{'caught':>8}{'harmless, refused':>19}"]
    for name in [m.__name__ for m in MUTATIONS]:
        mine = [m for m in mutants if m.name == name]
        harmful = [m for m in mine if m.harm]
        caught = sum(m.rule is not None for m in harmful)
        refused = sum(m.rule is not None for m in mine if not m.harm)
        lines.append(f"{name:24}{len(mine):8}{len(harmful):8}{caught:8}{refused:19}")
    missed = [m for m in mutants if m.harm and m.rule is None]
    harmful = sum(bool(m.harm) for m in mutants)
    lines.append(f"{len(mutants)} mutants, {harmful} harmful, {harmful - len(missed)} of these caught; missed:")
    lines += [f"  {m.name} of {m.subject}, seed {m.seed}: {m.harm}" for m in missed]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(report(trials(options.count, options.seed)))
