"""Where tokens went, and what it cost: in the report of a mixture of experts,
beside the gathers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.reported import data_of
from moe import MoEConfig, MoEGPT, share_experts
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile

from compiled_fsdp import dumped_to, explain, fully_shard, planned
from compiled_fsdp.inspection.dump_checks import totals, violations
from compiled_fsdp.inspection.dump_folder import read_folder
from compiled_fsdp.inspection.profiles import Event, _pieces
from compiled_fsdp.inspection.routing import with_counts
from compiled_fsdp.report import add_profile, write_report

if TYPE_CHECKING:
    from kit.pool import Pool

    from compiled_fsdp.inspection.routing import Table

CONFIG = MoEConfig(
    num_layers=1, width=16, num_heads=2, hidden=16, max_length=8, vocab=32, num_experts=4,
    expert_hidden=8,
)  # fmt: skip
ROUTED = 2 * 8 * CONFIG.top  # rows of one rank


def record(folder: str) -> None:
    """A profile with arguments on rank 0, one without on rank 1; both read back as texts."""
    with planned(record_routing=True):
        _record(folder)


def _record(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = MoEGPT(CONFIG)
    experts = share_experts(model, mesh)
    model.layers[0].mixture.bias[0] = 10.0  # every token goes to the first expert, and one more
    fully_shard(model.layers[0], mesh=mesh, ignored_params=experts)
    fully_shard(model, mesh=mesh, ignored_params=experts)
    call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    tokens = torch.randint(CONFIG.vocab, (2, 8))
    with dumped_to(folder):
        call(tokens, tokens).backward()
    rank = dist.get_rank()
    with profile(record_shapes=rank == 0) as found:
        call(tokens, tokens).backward()
    told = explain(call, profile=found)
    assert bool(told.step.routing) is (rank == 0), told.step
    if rank == 0:
        assert f"{ROUTED} rows from here to 4 experts" in str(told)
        assert "Plan.record_routing=True: note_routing" in str(told)
    path = Path(folder) / f"{rank}.json"
    found.export_chrome_trace(str(path))
    add_profile(Path(folder), path if rank == 0 else found, rank)


def test_rows_by_rank(two: Pool, tmp_path: Path) -> None:
    two.run(record, str(tmp_path))
    write_report(tmp_path, tmp_path / "page.html")
    first, second = data_of(tmp_path / "page.html")["ranks"]
    forward, backward = first["graphs"]
    counts, there, back = forward["measured"]["routed"]
    kinds = [c["kind"] for c in forward["timeline"]["collectives"]]
    assert [kinds[routed["collective"]] for routed in (counts, there, back)] == ["exchange"] * 3
    assert kinds.count("exchange") == 3
    assert counts["sent"] == counts["received"] == [2, 2]  # of each rank's two experts
    assert sum(there["sent"]) == ROUTED
    assert there["sent"][0] > ROUTED // 2  # where the favoured expert lives
    assert (back["sent"], back["received"]) == (there["received"], there["sent"])
    assert [r["sent"] for r in backward["measured"]["routed"]] == [there["sent"], back["sent"]]
    assert there["bytes"] == there["sent"][1] * CONFIG.width * 4
    assert [sum(row) for row in there["to"]] == there["sent"]
    assert [sum(row) for row in there["of"]] == there["received"]
    assert there["to"][0][0] == ROUTED // 2  # every token's first choice
    assert counts["to"] == back["to"] == []
    expected = forward["timeline"]["collectives"][there["collective"]]["sent"]
    assert expected == ROUTED * CONFIG.width * 4 // 2  # half of the rows stay
    assert second["graphs"][0]["measured"]["routed"] == []
    assert "Routing" in (tmp_path / "page.html").read_text()
    ranks = read_folder(tmp_path)
    assert not [*violations(ranks)]
    final = ranks[0].finished[0].after(None).gm
    assert int(dict(totals(final))["bytes put into collectives"]) > 2 * ROUTED * CONFIG.width * 4


@pytest.mark.parametrize(
    ("given", "pieces"),
    [
        (["", "[3, 9]", "[6, 6]", ""], ((3, 9), (6, 6))),
        ([None, [3], [0], None], ((3,), (0,))),
        (["", "[3, 9, ...]", "[6, 6]", ""], ()),  # cut short
        (["", "", "", ""], ()),
        ([], ()),
        (None, ()),
    ],
)
def test_arguments_of_a_profile(given: Any, pieces: tuple[tuple[int, ...], ...]) -> None:
    assert _pieces("_c10d_functional::all_to_all_single", json.loads(json.dumps(given))) == pieces


@pytest.mark.parametrize(
    ("counts", "exchange", "experts"),
    [
        ("3 0 1 2 | 3 1 0 2", (((4, 2), (3, 3)), 6), (((3, 0), (1, 2)), ((3, 1), (0, 2)))),
        # told by an all-gather: what rank 1 sent, and of all, what is for its experts
        ("1 0 0 2 | 9 9 9 8 1 0 0 2", (((17, 2), (1, 2)), 3), (((1, 0), (0, 2)), ((9, 8), (0, 2)))),
        ("3 0 1 2 | 3 1 0 2", (((4, 3), (3, 3)), 6), None),  # it received others
        ("3 0 1 2 | 3 1 0 2", (((4, 2), (3, 4)), 7), None),  # it sent others
        ("3 0 1 | 3 1 0", (((3, 1), (3, 1)), 4), None),  # experts that two ranks cannot share
        ("3 0 1 2 | 3 1 0 2", ((), 6), (((3, 0, 1, 2),), ((3, 1, 0, 2),))),  # lists cut short
        ("3 0 1 2 | 3 1 0 2", ((), 5), None),
        ("3 0 1 2 | 3 1 0 2", (((), ()), 6), None),  # as many to each rank
        ("3 0 nine", (((4, 2), (3, 3)), 6), None),
    ],
)
def test_counts_that_add_up(
    counts: str, exchange: Any, experts: tuple[Table, Table] | None
) -> None:
    """Only an exchange that moved just as many rows is taken for the one that was counted, once."""
    told = Event(f"compiled_fsdp counts {counts}", 0.0, 0.0, 1)
    moved = [Event("_c10d_functional::all_to_all_single", n, n, 1, *exchange) for n in (1.0, 2.0)]
    first, second = with_counts([told, *moved])
    assert first.experts == experts
    assert second == moved[1]
    assert with_counts([*moved, told]) == moved  # what comes later counts something else
