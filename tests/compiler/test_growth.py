"""What passes and the memory model do once for a graph, and what they do once for a node: counted,
with few units and with many.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from compiled_fsdp.passes.base import Context, Pass, Property, Stage, run_pipeline
from compiled_fsdp.passes.pipeline import HALF
from kit.passes_harness import PLAN, Hand, aten, unit
from torch.fx import Graph, Node

from compiled_fsdp.ir import regions
from compiled_fsdp.ir.graph import find, is_backward, placeholders
from compiled_fsdp.ir.origins import source_of
from compiled_fsdp.planning.lifetimes import Curve
from compiled_fsdp.planning.memory import profile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import GraphModule


def units(num: int) -> GraphModule:
    """So many units in a row; the graph returns what each yields, as one that saves it does."""
    hand = Hand()
    x, found = hand.input("x", 4, 2), []
    flats = [hand.input(f"flat_{i}", 4) for i in range(num)]
    for i, flat in enumerate(flats):
        (w,) = unit(f"u{i}", {"w": (4, 2)})
        x = hand.compute(hand.add(x, hand.unshard(flat, w)))
        found.append(x)
    return hand.returns(*found)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often the peak is looked for, a graph is looked through for tangents, or a list is made
    of all that its output reads.
    """
    seen: Counter[str] = Counter()
    where, inputs = Curve.where.fget, Node.all_input_nodes.fget  # type: ignore[attr-defined]

    def peak(curve: Curve) -> int:
        seen["peak"] += 1
        return int(where(curve))

    def half(graph: Graph) -> bool:
        seen["half"] += 1
        return is_backward(graph)

    def read(node: Node) -> Any:
        seen["output"] += node.op == "output"
        return inputs(node)

    with (
        mock.patch.object(Curve, "where", property(peak)),
        mock.patch.object(regions, "is_backward", half),
        mock.patch.object(Node, "all_input_nodes", property(read)),
    ):
        yield seen


@pytest.mark.parametrize("is_fused", [False, True])
def test_what_is_done_once_does_not_grow_with_units(*, is_fused: bool) -> None:
    """All passes of a half, `verify` among them, and the memory model."""
    found = []
    for num in (4, 8):
        with counted() as seen:
            gm = run_pipeline(units(num), PLAN, HALF, context=Context(is_fused=is_fused))
            profile(gm.graph, is_fused)
        found.append(seen)
        assert seen["peak"] <= 4  # what is moved (`flatten_peak`), and what is left, are few
        assert seen["half"]
    assert found[0] == found[1]


def test_lint_after_what_has_changed() -> None:
    """A pass that changes nothing is not linted after, nor is one that a lint would find nothing
    new in; each kind of change is.
    """
    neg = torch.ops.aten.neg.default
    gm = units(2)
    first, *_, last = find(gm.graph, neg)
    changes: list[tuple[int, Any]] = [
        (1, lambda: None),
        (0, lambda: None),
        (0, lambda: first.meta.update(seen=True)),
        (1, lambda: setattr(first, "args", first.args)),
        (1, lambda: setattr(first, "target", aten.exp.default)),
        (1, lambda: setattr(first, "name", "renamed")),
        (1, lambda: first.update_kwarg("more", None)),
        (1, lambda: last.replace_all_uses_with(first)),
        (1, lambda: gm.graph.erase_node(last)),
        (1, lambda: gm.graph.output_node().prepend(first.next)),
        (0, lambda: None),
    ]
    lint, counts = Graph.lint, []
    pending = [change for _, change in changes]

    def apply(gm: GraphModule, plan: object) -> None:
        counts.append(0)
        pending.pop(0)()

    def linted(graph: Graph) -> None:
        counts[-1] += 1
        if len(counts) != 10:  # what this one moves is read before
            lint(graph)

    entries = [Pass(apply, Stage.HALF, (), Property.LOWERED)] * len(changes)  # type: ignore[arg-type]
    with mock.patch.object(Graph, "lint", linted):
        run_pipeline(gm, PLAN, entries)
    # A graph that has been set to what it was looks changed: arguments are compared by identity.
    assert counts == [num for num, _ in changes]


def test_lint_whatever_reads_a_modules_attributes() -> None:
    hand = Hand()
    x = hand.input("x", 2)
    gm = hand.returns(hand.compute(x))
    gm.weight = torch.nn.Parameter(torch.ones(2))
    with gm.graph.inserting_before(hand.end):
        gm.graph.get_attr("weight")

    def nothing(gm: GraphModule, plan: object) -> None:
        pass

    def removes(gm: GraphModule, plan: object) -> None:
        del gm.weight

    entries = [Pass(f, Stage.HALF, (), None) for f in (nothing, removes)]  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="references nonexistent attribute weight"):
        run_pipeline(gm, PLAN, entries)


def test_nodes_are_found_where_they_are() -> None:
    """As by a walk over the graph: after nodes were moved, made, erased and turned into others."""
    hand = Hand()
    x = hand.input("x", 4)
    made = [hand((aten.neg.default, aten.exp.default)[i % 2], x) for i in range(40)]
    gm = hand.returns(*made)
    targets = (aten.exp.default, aten.neg.default, aten.abs.default)

    def walk(*targets: object) -> list[Node]:
        return [n for n in gm.graph.nodes if n.op == "call_function" and n.target in targets]

    for i in range(0, 40, 3):
        made[(7 * i) % 40].prepend(made[i])
        made[i].target = targets[i % 3]
        with gm.graph.inserting_before(made[(7 * i) % 40]):
            gm.graph.call_function(targets[2], (x,))
    for node in made[1::5]:
        node.replace_all_uses_with(x)
        gm.graph.erase_node(node)
    for some in (targets, targets[:1], targets[2:], ()):
        assert find(gm.graph, *some) == walk(*some)
    assert find(gm.graph, *targets, *targets) == walk(*targets)
    assert list(placeholders(gm.graph)) == [x]
    # an input that was made last, and stands first
    with gm.graph.inserting_before(x):
        y = gm.graph.placeholder("tangents_1")
    assert list(placeholders(gm.graph)) == [y, x]
    assert is_backward(gm.graph)


def test_an_ops_aliases_are_looked_up_once() -> None:
    hand = Hand()
    y = hand.compute(hand.input("x", 4, 2))
    pieces, t = hand(aten.split.Tensor, y, 2), hand(aten.t.default, y)
    assert source_of(t, 0) == source_of(pieces, 0) == (y, 0)
    assert source_of(y, 0) is None
    assert source_of(hand(aten.reshape.default, t, [8]), 0) is None, "a copy"
    assert source_of(hand(aten.reshape.default, y, [8]), 0) == (y, 0)
