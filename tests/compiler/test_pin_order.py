"""What Inductor's scheduler is told of buffers that a collective still reads, and of which nodes
anything is told.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from kit.passes_harness import unit
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from compiled_fsdp.compiler.pin_order import (
    _follow,
    _is_computed,
    _is_ours,
    _keep_inputs,
    _note_ancestors,
)
from compiled_fsdp.ir.meta import CommTag, set_tag

REDUCE = torch.ops._c10d_functional.reduce_scatter_tensor.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
SCHEDULER = SimpleNamespace(name_to_buf={"sent": SimpleNamespace(users=[])})


class Node:
    """As much of a scheduler's node as is looked at."""

    def __init__(self, op: Any, name: str, *reads: Any) -> None:
        self.node, self.name = SimpleNamespace(op_overload=op), name
        self.read_writes, self.scheduler = SimpleNamespace(reads=reads), SCHEDULER
        self.added: list[str] = []

    def get_buffer_names(self) -> list[str]:
        return [self.name]

    def get_nodes(self) -> list[Node]:
        return [self]

    def add_fake_dep(self, dep: Any) -> None:
        self.added.append(dep.name)


def after(name: str) -> WeakDep:
    """Nothing is read, but `name` comes first."""
    return WeakDep(name, mutating_buf=name, is_fake=True)


def kept_by(*nodes: Node) -> set[str]:
    """What is never reused, behind dependencies that waits have got."""
    graph = SimpleNamespace(never_reuse_buffers=set())
    with V.set_graph_handler(graph):  # type: ignore[arg-type]
        _keep_inputs(list(nodes))  # type: ignore[arg-type]
    return graph.never_reuse_buffers


def test_a_wait_reads_what_travels_and_nothing_else() -> None:
    """A reduction that has to follow an earlier wait does not read what that one waited for."""
    wait = Node(WAIT, "awaited", StarDep("reduced"))
    assert kept_by(Node(REDUCE, "reduced", StarDep("sent"), after("gathered")), wait) == set()
    assert wait.added == ["sent"]


def test_who_comes_later_takes_nothing_over() -> None:
    """What is ordered behind a collective has not its result, so that its wait is still to come."""
    wait = Node(WAIT, "awaited", StarDep("reduced"))
    later = Node(None, "other", after("reduced"))
    assert kept_by(Node(REDUCE, "reduced", StarDep("sent")), later, wait) == set()
    assert wait.added == ["sent"]


def test_what_no_wait_follows_is_never_reused() -> None:
    assert kept_by(Node(REDUCE, "reduced", StarDep("sent"), after("gathered"))) == {"sent"}


class Kernel:
    """As much of a scheduler's node as is looked at where it is to follow another."""

    def __init__(self, name: str, *reads: Any) -> None:
        self.name, self.ancestors = name, OrderedSet[str]()
        self.read_writes = SimpleNamespace(
            reads=OrderedSet(reads), writes=OrderedSet([StarDep(name)])
        )

    def get_buffer_names(self) -> list[str]:
        return [self.name]

    def get_operation_names(self) -> list[str]:
        return [self.name]

    def add_fake_dep(self, dep: Any) -> None:
        self.read_writes.reads.add(dep)

    def used_buffer_names(self) -> Any:
        raise AssertionError("torch's counts what is followed")


def test_what_a_kernel_follows_is_nothing_that_it_uses() -> None:
    """Else all kernels behind a product would share it, and Inductor try to fuse any two."""
    kernel: Any = Kernel("mine", StarDep("read"), after("mutated"))
    _follow(kernel, Kernel("product"))  # type: ignore[arg-type]
    assert after("product") in kernel.read_writes.reads
    assert [*kernel.used_buffer_names()] == ["read", "mine"]


class Origins:
    """A scheduler's node, as far as it says what it computes."""

    def __init__(self, op: Any, *origins: torch.fx.Node) -> None:
        self.node = SimpleNamespace(op_overload=op, get_origins=lambda: origins)

    def get_nodes(self) -> list[Origins]:
        return [self]


def test_what_a_call_reads_is_nothing_that_its_region_computes() -> None:
    """Inductor counts what a call of a region reads to all that is computed inside: else all of it
    would be copies out of buckets, and kept in order.
    """
    outer, region = torch.fx.Graph(), torch.fx.Graph()
    copied, computed = outer.placeholder("weight"), region.placeholder("x")
    set_tag(copied, CommTag("gather", 0, tuple(unit("layer", {"w": (2, 2)}))))
    with V.set_graph_handler(SimpleNamespace(graph=region)):  # type: ignore[arg-type]
        assert not _is_ours(Origins(None, copied, computed))  # type: ignore[arg-type]
    with V.set_graph_handler(SimpleNamespace(graph=outer)):  # type: ignore[arg-type]
        assert _is_ours(Origins(None, copied, computed))  # type: ignore[arg-type]


def test_a_copy_that_returns_several_is_no_product() -> None:
    """The nodes that take its results apart have no op; nothing of backward waits for them."""
    graph = torch.fx.Graph()
    copied, computed = graph.placeholder("weight"), graph.placeholder("x")
    set_tag(copied, CommTag("gather", 0, tuple(unit("layer", {"w": (2, 2)}))))
    with V.set_graph_handler(SimpleNamespace(graph=graph)):  # type: ignore[arg-type]
        assert not _is_computed(Origins(None, copied))  # type: ignore[arg-type]
        assert _is_computed(Origins(None, copied, computed))  # type: ignore[arg-type]
        assert _is_computed(Origins(torch.ops.aten.mm.out, computed))  # type: ignore[arg-type]
        assert not _is_computed(Origins(REDUCE, computed))  # type: ignore[arg-type]


class Group:
    """As much of a scheduler's node of several operations as is looked at."""

    def __init__(self, scheduler: Any, operations: list[str], *behind: str) -> None:
        self.scheduler, self.operations = scheduler, operations
        self.unmet_dependencies = [SimpleNamespace(name=name) for name in behind]
        self.ancestors: set[str] = set()
        self.parts = [SimpleNamespace(name=name) for name in operations]
        self.min_order = self.max_order = -1

    def get_operation_names(self) -> list[str]:
        return self.operations

    def get_nodes(self) -> list[Any]:
        return self.parts if len(self.operations) > 1 else [self]


def test_ancestors_of_nodes_of_several_operations() -> None:
    """Torch's `compute_ancestors` knows these by the name of the whole alone: a KeyError."""
    buffers = {f"buf{i}": SimpleNamespace(defining_op_name=lambda i=i: f"op{i}") for i in range(5)}
    scheduler = SimpleNamespace(name_to_buf=buffers, topological_sort_schedule=lambda nodes: nodes)
    first = Group(scheduler, ["op0"])
    several = Group(scheduler, ["op1", "op2"], "buf0", "buf1")  # one reads what another writes
    reader = Group(scheduler, ["op3"], "buf2")
    last = Group(scheduler, ["op4"], "buf3", "buf0")
    _note_ancestors([first, several, reader, last])  # type: ignore[list-item]
    assert [set(node.ancestors) for node in (first, several, reader, last)] == [
        set(),
        {"op0"},
        {"op0", "op2"},
        {"op0", "op2", "op3"},
    ]
    assert [part.ancestors for part in several.parts] == [several.ancestors] * 2
    assert [node.min_order for node in (first, several.parts[1], reader, last)] == [0, 1, 2, 3]
