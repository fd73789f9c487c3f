"""`outline` where only data decides sizes: layers with other symbols share a subgraph, which has
symbols of its own. Numbers are in `tests/numerics/test_unknown_sizes.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from compiled_fsdp.passes.base import Context
from compiled_fsdp.passes.outline import outline
from kit.passes_harness import PLAN, Hand, aten
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compiled_fsdp.ir.expected import _share, hint
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import set_context
from compiled_fsdp.ir.printer import show
from compiled_fsdp.ir.repeats import find_repeats
from compiled_fsdp.ir.storage import num_bytes
from compiled_fsdp.ir.subgraphs import INVOKE, called_by
from compiled_fsdp.verification.meaning import Captured

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 16  # a row is 64 bytes


class Routed:
    """Four layers: rows of a size that only data decides, by a weight, and back to what went in."""

    def __init__(self, rows: Callable[[ShapeEnv], Any], asks: str = "") -> None:
        self.env = ShapeEnv()
        self.hand = hand = Hand()
        hand.mode = FakeTensorMode(shape_env=self.env)
        token = hand.input("token", 1)
        weights = [hand.input(f"w{i}", WIDTH, WIDTH) for i in range(4)]
        self.results: list[Node] = []
        for i, weight in enumerate(weights):
            size, sent = rows(self.env), hand.input(f"sent{i}", 1)
            with hand.mode:
                sent.meta["val"] = torch.empty(size, WIDTH)
            hand(aten.add_.Tensor, token, 1)
            self.results.append(self.layer(sent, weight, asks))
        self.gm = hand.returns(*self.results)

    def layer(self, given: Node, weight: Node, asks: str = "") -> Node:
        hand, x = self.hand, given
        if asks:
            x = hand.compute(given)
            with hand.graph.inserting_before(hand.end):
                asked = given if asks == "input" else x
                size = hand.graph.call_function(aten.sym_size.int, (asked, 0))
            size.meta["val"] = x.meta["val"].shape[0]
            x = hand.add(x, hand(aten.new_ones.default, x, [size, 1]))
        for _ in range(4):
            x = hand(aten.sin.default, hand(aten.mm.default, x, weight))
        return hand(aten.cat.default, [x, x])


def one(env: ShapeEnv) -> Any:
    size = env.create_unbacked_symint()
    torch._check(size >= 0)
    return size


def total(env: ShapeEnv) -> Any:
    """Rows that come from three ranks."""
    return one(env) + one(env) + one(env)


def outlined(gm: GraphModule) -> GraphModule:
    set_context(gm, Context(is_fused=True, inline=""))
    result = outline(gm, PLAN)
    set_context(gm, None)
    result.graph.lint()
    return result


@pytest.mark.parametrize("rows", [one, total])
def test_layers_of_other_symbols_share_a_subgraph(rows: Callable[[ShapeEnv], Any]) -> None:
    """Of which as much is expected as of the first; outside, sizes stay what they were."""
    routed = Routed(rows)
    sizes = [node.meta["val"].shape[0] for node in routed.results]
    for size in [
        node.meta["val"].shape[0] for node in routed.gm.graph.find_nodes(op="placeholder")
    ]:
        symbols = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
        _share(30, [routed.env.create_symintnode(symbol, hint=None) for symbol in symbols])
    captured = Captured(routed.gm.graph)
    gm = outlined(routed.gm)
    assert list(captured.differences(gm.graph)) == []
    calls = find(gm.graph, INVOKE)
    assert len(calls) == 4
    assert {call.args[1] for call in calls} == {"fsdp_region_0"}
    for call, size in zip(calls, sizes, strict=True):
        (made,) = call.meta["val"]
        assert made.shape[0].node.expr == size.node.expr
    body = called_by(calls[0])
    assert body is not None
    (given,) = (
        n.meta["val"].shape[0] for n in body.find_nodes(op="placeholder") if n.name == "arg0_1"
    )
    assert given.node.expr.is_Symbol
    assert given.node.expr not in sizes[0].node.expr.free_symbols
    assert hint(given) == 30
    assert str(given) in show(body)
    assert {*re.findall(r"u\d+", show(body))} == {str(given)}


def test_its_bytes_are_those_expected() -> None:
    """A number, that passes compare: to compare a symbol would fix it, or raise."""
    routed = Routed(one)
    (sent, *_) = (n for n in routed.gm.graph.find_nodes(op="placeholder") if n.name == "sent0")
    _share(30, [sent.meta["val"].shape[0]])
    assert num_bytes(sent) == 30 * WIDTH * 4
    assert type(num_bytes(sent)) is int


def test_a_size_that_is_asserted_is_a_number() -> None:
    def rows(env: ShapeEnv) -> Any:
        found = total(env)
        torch._check(found == 24)
        return found

    (call, *_) = find(outlined(Routed(rows).gm).graph, INVOKE)
    body = called_by(call)
    assert body is not None
    assert {type(s) for n in body.nodes for s in getattr(n.meta["val"], "shape", ())} == {int}
    assert "f32[24,16]" in show(body)


# -- near misses


def test_sizes_within_other_bounds() -> None:
    """Compiled for one, a subgraph may know less of the others, or more."""
    bounds = iter(range(10, 14))

    def rows(env: ShapeEnv) -> Any:
        size = one(env)
        torch._check(size <= next(bounds))
        return size

    assert not find_repeats(Routed(rows).gm.graph).groups


def test_sizes_that_torch_has_a_value_of() -> None:
    """Those of a program with dynamic shapes."""

    def rows(env: ShapeEnv) -> Any:
        number = len(env.var_to_range)
        return env.create_symintnode(
            env.create_symbol(7 + number, ConstantSource(f"rows{number}")), hint=7 + number
        )

    found = find_repeats(Routed(rows).gm.graph)
    assert not found.groups
    assert found.is_dynamic


def test_rows_that_begin_where_vectors_may_not() -> None:
    routed = Routed(one)
    for node in routed.gm.graph.find_nodes(op="placeholder"):
        if node.name.startswith("sent"):
            with routed.hand.mode:
                wide = torch.empty(node.meta["val"].shape[0], 2 * WIDTH)
                node.meta["val"] = wide[:, 1 : WIDTH + 1]
    assert not find_repeats(routed.gm.graph).groups


def test_columns_as_many_as_data_decides() -> None:
    """Inductor would yield rows where strides are unknown; what is read of them would be wrong."""
    for is_given in (False, True):
        routed = Routed(one)
        for node in routed.gm.graph.find_nodes(op="placeholder") if is_given else routed.results:
            value = node.meta["val"]
            if node.name.startswith("sent") or not is_given:
                with routed.hand.mode:
                    node.meta["val"] = torch.empty(value.shape[1], value.shape[0]).T
        assert not find_repeats(routed.gm.graph).groups


def test_a_size_of_what_a_span_computes_ends_it() -> None:
    """One of what it is given does not, and goes in."""
    for of_input in (True, False):
        routed = Routed(one, asks="input" if of_input else "computed")
        groups = find_repeats(routed.gm.graph).groups
        nodes = [len(span.nodes) for group in groups for span in group]
        assert nodes == [12] * 4 if of_input else max(nodes) < 12


def test_what_a_write_is_made_of_is_left_out() -> None:
    """It stands behind the call then; but not what something else reads, too."""
    for is_read in (False, True):
        hand = Hand()
        token, weight = hand.input("token", 1), hand.input("w", WIDTH, WIDTH)
        places = hand.input("places", 8, dtype=torch.int64)
        x = hand.input("x", 8, WIDTH)
        for _ in range(3):
            hand(aten.add_.Tensor, token, 1)
            y = x
            for _ in range(4):
                y = hand(aten.sin.default, hand(aten.mm.default, y, weight))
            part = hand(aten.cos.default, hand(aten.mm.default, y, weight))
            z = hand(aten.sin.default, hand(aten.mm.default, y, weight))
            x = hand(aten.index_put.default, x, [places], part)
            x = hand.add(x, hand.add(z, part) if is_read else z)
        gm = hand.returns(x)
        captured = Captured(gm.graph)
        gm = outlined(gm)
        assert list(captured.differences(gm.graph)) == []
        outside = [n for n in gm.graph.nodes if n.target is aten.cos.default]
        assert len(find(gm.graph, INVOKE)) == 3
        assert len(outside) == (0 if is_read else 3)
