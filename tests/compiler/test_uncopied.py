"""Torch compiles graphs of ours without a copy, unless somebody wants errors shown again."""

from __future__ import annotations

import copy

import pytest
from torch._dynamo import config
from torch._dynamo.repro import after_aot
from torch.fx import Graph

from compiled_fsdp.torch_private.graphs import keep_uncopied


def is_ours(graph: Graph) -> bool:
    return any(node.name == "ours" for node in graph.nodes)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> object:
    """What torch finds under `copy` where it compiles graphs."""
    monkeypatch.setattr(after_aot, "copy", copy)
    keep_uncopied(is_ours)
    keep_uncopied(is_ours)
    return after_aot.copy


def named(name: str) -> Graph:
    graph = Graph()
    graph.output(graph.placeholder(name))
    return graph


def test_ours_alone(copies: object) -> None:
    ours, other, values = named("ours"), named("other"), [1, [2]]
    assert copies.deepcopy(ours) is ours
    made = copies.deepcopy(other)
    assert made is not other
    assert str(made) == str(other)
    assert copies.deepcopy(values) == values
    assert copies.deepcopy(values) is not values


def test_not_where_errors_are_shown_again(copies: object) -> None:
    ours = named("ours")
    with config.patch(repro_after="aot"):
        assert copies.deepcopy(ours) is not ours
