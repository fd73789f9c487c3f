"""One graph for every rank of a small world, executed in one process.

Collectives match in the order in which each rank starts them; results of collectives that are not
awaited, and freed buffers, hold NaN; what a unit kept of earlier backwards is a constant.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT
from compiled_fsdp.ir.schema import (
    ADD_RETAINED,
    AGREE,
    FREE,
    KEEP_SLICE,
    MARK_GRADS,
    RETAIN,
    WATCH_HEADS,
)
from compiled_fsdp.ir.spec import ParamSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.fx import Graph, Node

KEPT = 2.0  # every element of what earlier backwards left


class Hang(Exception):
    """Every rank that is not done waits for another."""


@dataclass
class Simulation:
    """`groups`: for each group name of the graph, the ranks of each of its instances."""

    world: int
    groups: dict[str, list[tuple[int, ...]]]
    posted: dict[tuple[str, tuple[int, ...], int], dict[int, tuple[str, Tensor, Tensor]]] = field(
        default_factory=dict
    )
    moved: Counter[str] = field(default_factory=Counter)

    def run(
        self, graphs: list[Graph], inputs: list[dict[str, Tensor]]
    ) -> list[tuple[list[Any], list[Any]]]:
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
    def __init__(
        self, wire: Simulation, rank: int, graph: Graph, inputs: dict[str, Tensor]
    ) -> None:
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
                op, arguments, _ = comm.as_in_torch(node)
                arguments = torch.fx.node.map_arg(arguments, lambda n: values[n])
                values[node] = self._start(op, *arguments)
            else:
                values[node] = self._compute(node.target, args, kwargs)

    def _compute(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is FREE:
            args[0].fill_(float("nan"))
        elif target in (AGREE, WATCH_HEADS):
            pass  # all ranks have one graph, and backward comes in by all outputs
        elif target in (MARK_GRADS, RETAIN, ADD_RETAINED):
            self.effects.append((str(target), args[0].clone(), *args[2:]))
            if target is ADD_RETAINED:
                args[0].add_(KEPT)
        elif target is KEEP_SLICE:
            spec = ParamSpec.of(args[1:]).over_post_group()
            rank = self.wire.members(spec.group, self.rank).index(self.rank)
            kept = args[0].new_zeros(spec.shard_shape)
            rows = args[0].narrow(
                spec.dim, min(rank * spec.rows, spec.shape[spec.dim]), _rows(spec, rank)
            )
            kept.narrow(spec.dim, 0, rows.shape[spec.dim]).copy_(rows)
            return kept.flatten()
        else:
            return target(*args, **kwargs)
        return None

    def _start(self, target: Any, source: Tensor, *rest: Any) -> Tensor:
        name = rest[-1]
        members = self.wire.members(name, self.rank)
        size = len(members)
        kind = (
            f"{target} {source.dtype} {source.numel()} "
            f"{[a for a in rest if isinstance(a, str | int)]}"
        )
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
    return max(
        0, min(spec.rows, spec.shape[spec.dim] - min(rank * spec.rows, spec.shape[spec.dim]))
    )
