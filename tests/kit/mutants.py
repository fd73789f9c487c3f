"""Graphs broken on purpose, and what becomes of them: the mutation test of `verify`.

A correct graph of `subjects.py` is changed, and executed by `simulation.py`. A mutant is harmful if
some rank's results or effects differ from those of the correct graph, if it cannot run, hangs, or
communicates other things.

    # the rates, and each harmful mutant that nothing saw
    PYTHONPATH=tests python tests/kit/mutants.py --count 5000
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kit.compare import is_same
from kit.simulation import Hang
from kit.subjects import Subject, subjects
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.collectives import ALL_REDUCE, ALL_TO_ALL, WAIT
from compiled_fsdp.ir.graph import aliases, find, output, starts
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.schema import ADD_RETAINED, FREE, MARK_GRADS, RETAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import Graph, GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

aten = torch.ops.aten


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
    cast.args = (
        cast.args[0],
        rng.choice(
            [d for d in (torch.bfloat16, torch.float16, torch.float64) if d != cast.args[1]]
        ),
    )


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
        n
        for n in graph.nodes
        if (tag := get_tag(n)) is not None and tag.kind == "gather" and n.target not in comm.STARTS
    ]
    end = output(graph)
    end.args = ((*end.args[0], rng.choice(full)),)
    end.meta["desc"] = [*end.meta["desc"], SavedForBackwardsAOTOutput(len(end.meta["desc"]))]


def save_gathered_instead(graph: Graph, rng: random.Random) -> None:
    full = [
        n
        for n in graph.nodes
        if (tag := get_tag(n)) is not None and tag.kind == "gather" and n.target not in comm.STARTS
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


def shift_view(graph: Graph, rng: random.Random) -> None:
    """Other elements of a gathered flat parameter."""
    node = rng.choice(
        [n for n in find(graph, aten.slice.Tensor) if get_tag(n) is None and n.args[1] == 0]
    )
    shift = rng.choice([-1, 1])
    node.args = (*node.args[:2], max(0, node.args[2] + shift), node.args[3] + shift)


def swap_pieces(graph: Graph, rng: random.Random) -> None:
    """Another order of a flat gradient's pieces, which `join_grads` has put together."""
    node = rng.choice([n for n in find(graph, aten.cat.default) if get_tag(n) is None])
    pieces = list(node.args[0])
    i, j = rng.sample(range(len(pieces)), 2)
    pieces[i], pieces[j] = pieces[j], pieces[i]
    node.args = (pieces, *node.args[1:])


def pad_elsewhere(graph: Graph, rng: random.Random) -> None:
    """A piece of a flat gradient begins one element later."""
    node = rng.choice([n for n in find(graph, aten.constant_pad_nd.default) if get_tag(n) is None])
    before, after = node.args[1]
    step = 1 if after else -1
    node.args = (node.args[0], [before + step, after - step])


def drop_retained(graph: Graph, rng: random.Random) -> None:
    """What the unit kept is not added, or the gradient is not kept."""
    graph.erase_node(rng.choice(find(graph, ADD_RETAINED, RETAIN)))


def retain_late(graph: Graph, rng: random.Random) -> None:
    """What the unit kept is added once the gradient is under way."""
    add = rng.choice(find(graph, ADD_RETAINED))
    later = [n for n in starts(graph) if add < n]
    rng.choice(later).append(add)


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
    nodes = [
        n
        for n in graph.nodes
        if n.op == "call_function" and n.all_input_nodes and n.target is not FREE
    ]
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
    drop_wait, duplicate_wait, swap_collectives, swap_results, reorder_starts, move_free_up,
    move_use_past_free, duplicate_free, drop_free, duplicate_collective, reduce_twice,
    change_group, change_dtype, change_cast, change_divisor, drop_divisor,
    save_gathered, save_gathered_instead, change_columns, swap_members, shift_view, swap_pieces,
    pad_elsewhere, drop_retained, retain_late, drop_mark, change_mark, swap_outputs, other_operand,
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


def harm_of(subject: Subject, graph: Graph) -> str:
    """What the mutant does differently, by execution."""
    try:
        results, moved = subject.execute(graph)
    except Hang:
        return "hangs"
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
        return f"fails: {type(error).__name__}"
    expected, moved_by_correct = subject.executed
    if not is_same(results, expected):
        return "other results"
    return "communicates otherwise" if moved != moved_by_correct else ""


def trial(subject: Subject, mutation: Callable[..., None], seed: int) -> Mutant | None:
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
    harm = harm_of(subject, graphs[0])
    return Mutant(mutation.__name__, subject.name, seed, harm, rule)


def trials(count: int, seed: int = 0) -> list[Mutant]:
    """`count` mutants: every mutation in turn, each on a graph at random to which it can be
    done.
    """
    found: list[Mutant] = []
    numbers = iter(range(seed, sys.maxsize))
    hopeless: set[tuple[str, str]] = set()  # a graph is copied for each try
    while len(found) < count:
        for mutation in MUTATIONS:
            number = next(numbers)
            for subject in random.Random(number).sample(subjects(), len(subjects())):
                pair = mutation.__name__, subject.name
                mutant = None if pair in hopeless else trial(subject, mutation, number)
                if mutant is not None:
                    found.append(mutant)
                    break
                hopeless.add(pair)
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
    lines.append(
        f"{len(mutants)} mutants, {harmful} harmful, {harmful - len(missed)} of these caught; "
        "missed:"
    )
    lines += [f"  {m.name} of {m.subject}, seed {m.seed}: {m.harm}" for m in missed]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(report(trials(options.count, options.seed)))
