"""Graphs of units that compute and communicate for known times, and machines that price them."""

from __future__ import annotations

from typing import Any

import torch
from compiled_fsdp.passes.bucket_all_gather import bucket_all_gather
from compiled_fsdp.passes.bucket_reduce_scatter import bucket_reduce_scatter
from compiled_fsdp.passes.delay_wait import delay_wait
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.prefetch_all_gather import prefetch_all_gather
from kit.passes_harness import PLAN, Hand, numel, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.collectives import STARTS, WAIT
from compiled_fsdp.ir.graph import is_matmul
from compiled_fsdp.ir.printer import show
from compiled_fsdp.ir.schema import EXCHANGE
from compiled_fsdp.planning.costs import Costs, Link
from compiled_fsdp.planning.plan import Plan

MM = torch.ops.aten.mm.default
WIDTH = 64
MATMUL = 2 * WIDTH**3  # operations of each matmul below
GRADIENT = WIDTH * WIDTH * 4  # bytes
BYTES = WIDTH * WIDTH * 4 / 2  # that each of two ranks sends for a weight


def costs(matmul: float, transfer: float) -> Costs:
    """A machine on which a matmul and a weight's all-gather take these times, and nothing else
    takes any.
    """
    return Costs(MATMUL / matmul, 1e30, 0.0, (("shard", Link(0.0, BYTES / transfer)),))


def chain(layers: int, matmuls: int = 4) -> GraphModule:
    """A forward of units of one weight, each used in several matmuls, lowered."""
    hand = Hand()
    x = hand.input("x", WIDTH, WIDTH)
    flats = []
    for n in range(layers):
        (spec,) = unit(f"u{n}", {"w": (WIDTH, WIDTH)})
        flats.append((hand.input(f"flat{n}", numel([spec])), spec))
    for flat, spec in flats:
        w = hand.unshard(flat, spec)
        for _ in range(matmuls):
            x = hand(MM, x, w)
    return bucket_all_gather(lower(hand.returns(x), PLAN), PLAN)


def routed(matmuls: int) -> GraphModule:
    """Two units over one group, and tokens for experts between: four matmuls, an all-to-all of
    what they yield, so many more, and one of the second unit.
    """
    hand = Hand()
    x = hand.input("x", WIDTH, WIDTH)
    (first,), (second,) = (unit(f"u{n}", {"w": (WIDTH, WIDTH)}) for n in range(2))
    flats = [hand.input(f"flat{n}", numel([spec])) for n, spec in enumerate((first, second))]
    w = hand.unshard(flats[0], first)
    for _ in range(4):
        x = hand(MM, x, w)
    x = hand(WAIT, hand(EXCHANGE, x, [WIDTH // 2] * 2, [WIDTH // 2] * 2, "shard"))
    for _ in range(matmuls):
        x = hand(MM, x, w)
    x = hand(MM, x, hand.unshard(flats[1], second))
    return bucket_all_gather(lower(hand.returns(x), PLAN), PLAN)


def backward(layers: int, matmuls: int = 4, is_kept: bool = False, **changes: Any) -> GraphModule:
    """A backward of such units, the last first, each with one reduction; `is_kept`: nothing is
    gathered again.
    """
    hand = Hand()
    x = hand.input("tangents_1", WIDTH, WIDTH)
    flats = []
    for n in reversed(range(layers)):
        (spec,) = unit(f"u{n}", {"w": (WIDTH, WIDTH)}, **changes)
        flats.append((hand.input(f"flat{n}", numel([spec])), spec))
    grads = []
    kept = hand.input("kept", WIDTH, WIDTH)
    for flat, spec in flats:
        w = kept if is_kept else hand.unshard(flat, spec)
        for _ in range(matmuls):
            x = hand(MM, x, w)
        grads.append(hand.reduce_grad(hand(MM, x, x), flat, spec))
    return bucket_reduce_scatter(bucket_all_gather(lower(hand.returns(*grads), PLAN), PLAN), PLAN)


def marks(gm: GraphModule) -> str:
    """The order of a graph: G starts a gather, R a reduction, lower case awaits it, m is a
    matmul.
    """
    letters = []
    for node in gm.graph.nodes:
        if node.target in STARTS:
            letters.append("G" if "gather" in node.name else "R")
        elif node.target is WAIT:
            letters.append("g" if "gather" in node.all_input_nodes[0].name else "r")
        elif is_matmul(node):
            letters.append("m")
    return "".join(letters)


def scheduled(gm: GraphModule, machine: Costs) -> GraphModule:
    plan = Plan(prefetch=None, backward_prefetch=None, reduces_in_flight=None, costs=machine)
    return delay_wait(prefetch_all_gather(gm, plan), plan)


def planned_backward() -> str:
    return show(scheduled(backward(6), costs(1.0, 2.5)).graph)
