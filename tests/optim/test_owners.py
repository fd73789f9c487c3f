"""Who owns which matrix, what travels together, and when every rank does all."""

from __future__ import annotations

import torch

from compiled_fsdp.optim.cut import Cut
from compiled_fsdp.optim.newton_schulz import flops
from compiled_fsdp.optim.owners import EVERYONE, Bucket, Item, balance, schedule
from compiled_fsdp.planning.costs import Costs, Link


def item(shape: tuple[int, ...], group: str = "g", size: int = 2, work: float = 1e9) -> Item:
    cut = Cut(shape, torch.bfloat16, torch.device("cpu"), 0, group, 0, size)
    return Item(f"w{list(shape)}", (cut,), work)


def test_the_most_work_goes_first_to_the_rank_with_the_least() -> None:
    assert balance([3.0, 5.0, 3.0, 4.0], 2) == [1, 0, 0, 1]


def test_equal_layers_alternate() -> None:
    assert balance([7.0] * 5, 3) == [0, 1, 2, 0, 1]


def test_layers_are_about_balanced() -> None:
    shapes = [(1536, 512), (512, 512), (1408, 512), (1408, 512), (512, 1408)] * 9
    works = [flops(shape, 5) for shape in shapes]
    for size in (2, 4, 8):
        loads = [0.0] * size
        for work, owner in zip(works, balance(works, size), strict=True):
            loads[owner] += work
        assert max(loads) <= (1.04 if size < 8 else 1.1) * sum(works) / size


def test_neighbours_share_buckets_up_to_their_bytes() -> None:
    items = [item((16, 8)), item((16, 8)), item((64, 64)), item((8, 8))]
    found = schedule(items, 512)
    assert found == (Bucket("g", (0, 1), (0, 1)), Bucket("g", (2,), (0,)), Bucket("g", (3,), (1,)))


def test_groups_have_buckets_of_their_own_in_order() -> None:
    items = [item((8, 8), "a"), item((8, 8), "b"), item((8, 8), "a"), item((8, 8), "", 1)]
    found = schedule(items, 1 << 20)
    assert [(bucket.group, bucket.numbers) for bucket in found] == [
        ("a", (0, 2)),
        ("b", (1,)),
        ("", (3,)),
    ]


def test_little_work_is_done_everywhere() -> None:
    """As long as what a rank does for the others takes less than the exchange that it saves."""
    costs = Costs(1e9, 1e9, 0.0, (("g", Link(1e-3, 1e9)),))
    for work, owners in ((1.9e6, (EVERYONE,)), (2.1e6, (0,))):
        assert schedule([item((8, 8), work=work)], 1 << 20, costs)[0].owners == owners


def test_pieces_are_those_of_chunk() -> None:
    for rows, size in ((7, 4), (2, 4), (8, 4), (5, 3)):
        whole = torch.randn(rows, 3)
        cut = Cut((rows, 3), torch.float32, torch.device("cpu"), 0, "g", 0, size)
        pieces = [cut.piece(whole, rank) for rank in range(size)]
        chunks = whole.chunk(size)
        assert [tuple(p.shape) for p in pieces] == [cut.piece_shape(rank) for rank in range(size)]
        assert all(torch.equal(p, c) for p, c in zip(pieces, chunks, strict=False))
        assert sum(len(p) for p in pieces) == rows
        assert torch.equal(cut.join(pieces), whole)
