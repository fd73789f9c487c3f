"""`exchange_matrices`: no exchange is awaited where it was started."""

from __future__ import annotations

import torch
from compiled_fsdp.passes.exchange_matrices import exchange_matrices
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.place_updates import place_updates
from compiled_fsdp.passes.verify import check
from kit.passes_harness import PLAN, GraphTest, Hand, aten, ops, unit
from torch.fx import GraphModule, Node

from compiled_fsdp.compiler.matrices import updated_whole
from compiled_fsdp.ir.graph import Builder, find
from compiled_fsdp.ir.matrices import Matrix
from compiled_fsdp.ir.meta import set_captured
from compiled_fsdp.ir.schema import UPDATE
from compiled_fsdp.passes import exchange_matrices as module
from compiled_fsdp.verification.meaning import Captured


def momenta_first(gm: GraphModule, *behind: Node) -> GraphModule:
    """Each momentum directly behind one of these."""
    for node, momentum in zip(
        behind, find(gm.graph, torch.ops.fsdp.momentum_.default), strict=True
    ):
        node.append(momentum)
    return gm


def bare() -> GraphModule:
    """The ways of two flat gradients, which are inputs."""
    hand = Hand()
    nodes = [hand.input(f"{name}{i}", 4) for i in (1, 0) for name in ("g", "flat")]
    x = hand.compute(nodes[0])
    for i, (grad, flat) in zip((1, 0), (nodes[:2], nodes[2:]), strict=True):
        (spec,) = unit(f"u{i}#{i}", {f"w{i}": (4, 2)})
        owned = [(spec, Matrix(spec.unit, spec.fqn, i, torch.bfloat16, 8.0))]
        updated_whole(Builder(hand.end, hand.end), grad, flat, owned, "step0")
    return momenta_first(hand.returns(), nodes[3], x)


def step(numbers: tuple[int, ...], world: int = 2, *, is_scaled: bool = False) -> GraphModule:
    """The graph of a whole step of such units, each with a matrix and a vector, up to
    `place_updates`.
    """
    hand, grads = Hand(), []
    x = hand.input("x", 4, 2)
    for i in numbers:
        matrix, vector = unit(f"u{i}#{i}", {f"w{i}": (4, 2), f"b{i}": (4,)}, world)
        flat = hand.input(f"flat{i}", 12 // world)
        column = hand(aten.sum.dim_IntList, x, [1])
        both = hand.reduce_grad(x, flat, matrix), hand.reduce_grad(column, flat, vector)
        grads.append((hand.add(*both), flat, matrix, vector))
        x = hand.compute(x)
    if is_scaled:
        factor = hand(aten.sum.default, grads[-1][0])
        grads = [(hand(aten.mul.Tensor, grad, factor), *rest) for grad, *rest in grads]
    for number, (grad, flat, matrix, vector) in enumerate(grads):
        hand(UPDATE, grad, flat, [vector.offset], "step0")
        owned = [(matrix, Matrix(matrix.unit, matrix.fqn, number % world, torch.bfloat16, 8.0))]
        updated_whole(Builder(hand.end, hand.end), grad, flat, owned, "step0")
    gm = hand.returns()
    set_captured(gm, Captured(gm.graph))
    return place_updates(lower(gm, PLAN), PLAN)


class TestExchangeMatrices(GraphTest):
    def test_docstring(self):
        gm = bare()
        self.assertDocumented(module, "Before", gm)
        exchange_matrices(gm, PLAN)
        self.assertDocumented(module, "After", gm)

    def test_three_units(self):
        """Updates of what is no matrix stand where they were; gradients that are scaled are not all
        alive at once.
        """
        gm = exchange_matrices(step((2, 1, 0), is_scaled=True), PLAN)
        check(gm, PLAN, "exchange_matrices")
        names = ops(gm.graph)
        self.assertExpectedInline(
            "\n".join(names[names.index("mul") :]),
            """\
mul
update_
momentum_
to_owners
mul
update_
momentum_
to_owners
wait_tensor
orthogonalize
from_owners
mul
update_
momentum_
to_owners
wait_tensor
orthogonalize
from_owners
wait_tensor
update_matrices_
wait_tensor
orthogonalize
from_owners
wait_tensor
update_matrices_
wait_tensor
update_matrices_""",
        )

    def test_near_miss(self):
        """Over one rank nothing travels; a graph without matrices stays as it is."""
        gm = exchange_matrices(step((1, 0), world=1), PLAN)
        check(gm, PLAN, "exchange_matrices")
        assert not find(gm.graph, torch.ops.fsdp.to_owners.default)
        hand = Hand()
        self.assertUnchanged(exchange_matrices, hand.returns(hand.compute(hand.input("x", 4))))
