"""`read_at_once`: numbers that a router counts on a device come to the host together."""

from __future__ import annotations

import operator

import torch
from compiled_fsdp.passes.read_at_once import MOST, READ, read_at_once
from kit.passes_harness import PLAN, GraphTest, Hand, aten
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compiled_fsdp.passes import read_at_once as module


def read(hand: Hand, source: Node, i: int) -> Node:
    """The i-th number of a tensor, which only data decides."""
    return reads(hand, hand(aten.select.int, source, 0, i))


def reads(hand: Hand, selected: Node) -> Node:
    with hand.graph.inserting_before(hand.end):
        node = hand.graph.call_function(READ, (selected,))
    node.meta["val"] = ShapeEnv().create_unbacked_symint()
    return node


def counted(*, device: str = "cuda", num_read: int = 2, numel: int = 2) -> GraphModule:
    hand = Hand()
    tokens = hand.input("tokens", numel, 4, dtype=torch.int64)
    with hand.mode:
        tokens.meta["val"] = torch.empty(numel, 4, dtype=torch.int64, device=device)
    counts = hand(aten.sum.dim_IntList, tokens, [1])
    return hand.returns(*[read(hand, counts, i) for i in range(num_read)])


class TestReadAtOnce(GraphTest):
    def test_graph(self):
        gm = read_at_once(counted(), PLAN)
        self.assertDocumented(module, "After", gm)
        self.assertDocumented(module, "Before", counted())
        self.assertGraph(
            gm,
            """\
%tokens: i64[2,4]
%sum_dim_int_list: i64[2] = sum(%tokens, [1])
%device_put_default: i64[2] = device_put(%sum_dim_int_list, cpu)
%select_int_2: i64[] = select(%device_put_default, 0, 0)
%_local_scalar_dense_default: SymInt = _local_scalar_dense(%select_int_2)
%select_int_3: i64[] = select(%device_put_default, 0, 1)
%_local_scalar_dense_default_1: SymInt = _local_scalar_dense(%select_int_3)
return [%_local_scalar_dense_default, %_local_scalar_dense_default_1]""",
        )

    def test_near_miss(self):
        """On the host; one number alone, or no few; numbers of two tensors."""
        self.assertUnchanged(read_at_once, counted(device="cpu"))
        self.assertUnchanged(read_at_once, counted(num_read=1))
        self.assertUnchanged(read_at_once, counted(numel=MOST + 1))
        hand = Hand()
        found = []
        for name in "ab":
            each = hand.input(name, 2, dtype=torch.int64)
            with hand.mode:
                each.meta["val"] = torch.empty(2, dtype=torch.int64, device="cuda")
            found.append(read(hand, each, 0))
        self.assertUnchanged(read_at_once, hand.returns(*found))

    def test_what_is_written_to(self):
        """Between two reads, say."""
        hand = Hand()
        counts = hand.input("counts", 2, dtype=torch.int64)
        with hand.mode:
            counts.meta["val"] = torch.empty(2, dtype=torch.int64, device="cuda")
        first = read(hand, counts, 0)
        hand(aten.add_.Tensor, hand(aten.select.int, counts, 0, 1), 1)
        self.assertUnchanged(read_at_once, hand.returns(first, read(hand, counts, 1)))

    def test_the_same_numbers(self):
        """Of one that is selected for others, too, they get the device's."""
        gm = counted()
        (counts,) = gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
        selected = next(iter(counts.users))
        with gm.graph.inserting_after(selected):
            doubled = gm.graph.call_function(operator.mul, (selected, 2))
        end = gm.graph.output_node()
        end.args = ([*end.args[0], doubled],)
        read_at_once(gm, PLAN)
        gm.recompile()
        self.assertIs(doubled.args[0], selected)
        tokens = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 5]])
        self.assertEqual(Interpreter(gm).run(tokens), [10, 5, torch.tensor(20)])
