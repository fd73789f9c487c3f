"""`python -m compiled_fsdp`: what it prints of a dump, what it finds, and what it says of folders
that are none.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from kit.passes_harness import fake_ranks
from kit.stems import stem
from torch import nn

import compiled_fsdp
from compiled_fsdp import fully_shard, planned
from compiled_fsdp.command.cli import main
from compiled_fsdp.inspection.dump_folder import Dumped, read

ROOT = Path(__file__).parents[2]


def dump(folder: Path, **plan: object) -> None:
    """One step of two layers, dumped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    compiled = torch.compile(fully_shard(model), backend="compiled_fsdp_eager")
    optimizer = torch.optim.SGD(compiled.parameters())
    with (
        mock.patch("compiled_fsdp.dump.writer._number", 0),
        planned(**plan),
        compiled_fsdp.dumped_to(folder),
    ):
        compiled(torch.ones(2, 4)).sum().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def dumps():
    """`dumped`, alone, and `other` in which all units share collectives."""
    with fake_ranks(2), tempfile.TemporaryDirectory() as name:
        dump(Path(name) / "dumped", bucket_bytes=0)
        torch._dynamo.reset()
        dump(Path(name) / "other", bucket_bytes=1 << 20)
        yield Path(name)


@pytest.fixture
def folder(dumps, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(dumps / "dumped", tmp_path / "dumped")


def run(capsys, *arguments: object) -> tuple[int, str]:
    status = main([str(a) for a in arguments])
    found = capsys.readouterr()
    return status, found.out + found.err


# -- looking


def test_dump_lists(dumps, capsys):
    status, text = run(capsys, "dump", dumps / "dumped")
    assert status == 0
    assert text.splitlines()[0] == (
        f"rank 0: of 2, fake; torch {torch.__version__}, compiled_fsdp "
        f"{compiled_fsdp.__version__}, python {sys.version.split()[0]}"
    )
    assert (
        f"    {stem('free')}                     2 gathers, 0 reductions; 160 bytes gathered, "
        "largest bucket 80" in text
    )
    assert (
        f"    {stem('free')}                     1 gathers, 2 reductions; 64 bytes gathered, "
        "largest bucket 64" in text
    )


def test_dump_prints_a_graph(dumps, capsys):
    """With the same printer as everywhere, and what made it above."""
    status, text = run(capsys, "dump", dumps / "dumped", "--graph", "forward", "--after", "free")
    assert status == 0
    lines = text.splitlines()
    assert lines[0] == f"# rank0/001_forward/{stem('free')}"
    assert lines[1].startswith(
        "# made by free; holds: GRADS_KEPT, NUMBERED, DEDUPED, JOINED, CHOSEN, DECIDED, MARKED, "
        "MARKED_AWAY, STATES_MARKED, HEADS_NOTED, READ_AT_ONCE, GROUPS_NAMED, LOWERED"
    )
    assert (
        "%all_gather_into_tensor_default_4: f32[20] = all_gather_into_tensor(%primals_2, 2, '0')  "
        "# 0: gather" in lines
    )
    assert "free(%wait_tensor_default_4)" in lines
    assert run(capsys, "dump", dumps / "dumped", "--graph", "forward", "--after", "last")[
        1
    ].startswith(f"# rank0/001_forward/{stem('verify')}\n")


def test_diff_of_passes(dumps, capsys):
    status, text = run(
        capsys, "diff", dumps / "dumped", "--passes", "lower", "free", "--graph", "forward"
    )
    assert status == 1
    assert text.startswith(
        f"rank0/001_forward/{stem('lower')} -> rank0/001_forward/{stem('free')}\n"
        "  all-gathers: 4 -> 2\n"
        "  frees: 0 -> 2\n"
        "  peak above rest: 144 bytes -> 240 bytes\n"
        f"--- rank0/001_forward/{stem('lower')}\n"
        f"+++ rank0/001_forward/{stem('free')}\n"
    )
    assert run(capsys, "diff", dumps / "dumped", "--passes", "free", "summarize") == (
        0,
        "no difference\n",
    )


def test_diff_of_runs(dumps, capsys):
    status, text = run(capsys, "diff", dumps / "dumped", dumps / "other")
    assert status == 1
    assert "  all-gathers: 2 -> 1\n" in text
    assert "  reductions: 2 -> 1\n" in text
    assert run(capsys, "diff", dumps / "dumped", dumps / "dumped") == (0, "no difference\n")


def test_diff_of_ranks(folder, dumps, capsys):
    shutil.copytree(dumps / "other" / "rank0", folder / "rank1")
    status, text = run(
        capsys, "diff", folder, "--ranks", 0, 1, "--graph", "backward", "--after", "free"
    )
    assert status == 1
    assert text.startswith(
        f"rank0/002_backward/{stem('free')} -> rank1/002_backward/{stem('free')}\n"
    )
    assert "  reductions: 2 -> 1\n" in text


def test_explain(dumps, capsys):
    """What `compiled_fsdp.explain` knew after the first step; also as JSON."""
    status, text = run(capsys, "explain", dumps / "dumped")
    assert status == 0
    assert text.startswith(
        "rank 0, after its first step\nSequential: 3 units, 4 parameters, 160 bytes on 2 ranks "
        "together\n"
    )
    assert "\n  2 in a graph: 0, 1\n  1 without parameters: Sequential\n" in text
    assert "  reshard_after_forward=True of 0, 1: reshard\n" in text
    status, text = run(capsys, "explain", dumps / "dumped", "--json")
    assert status == 0
    assert [u["name"] for u in json.loads(text)["units"]] == ["0", "1", "Sequential"]


def test_explain_without_a_step(folder, capsys):
    (folder / "rank0" / "explain.json").unlink()
    status, text = run(capsys, "explain", folder)
    assert status == 0
    assert "no optimizer had stepped when the run ended" in text
    assert "  001_forward: all-gathers 2, reductions 0, " in text


def test_report(dumps, tmp_path, capsys):
    status, text = run(capsys, "report", dumps / "dumped", "--out", tmp_path / "page.html")
    assert (status, text) == (0, f"{tmp_path / 'page.html'} written\n")
    assert (tmp_path / "page.html").read_text().startswith("<!")


# -- checking


def graph_file(folder: Path, graph: str, name: str) -> Path:
    """That of the last pass up to this one which changed the graph."""
    (path,) = (folder / "rank0" / graph).glob(f"*_{name}.txt")
    return Dumped(path.with_suffix("")).json_path


def text_file(path: Path) -> Path:
    return path.with_name(path.name.replace(".json.gz", ".txt"))


def write(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def tamper(path: Path, old: str, new: str) -> None:
    """Change the graph and, so that nothing else gives it away, the text beside it."""
    text = read(path)
    assert old in text, old
    write(path, text.replace(old, new))


def test_verify(dumps, capsys):
    assert run(capsys, "verify", dumps / "dumped") == (0, "2 graphs of 1 ranks: nothing wrong\n")


def test_verify_finds_another_divisor(folder, capsys):
    path = graph_file(folder, "002_backward", "verify")
    tamper(path, "2.0]},{}", "4.0]},{}")
    tamper(text_file(path), ", 2.0)", ", 4.0)")
    status, text = run(capsys, "verify", folder)
    assert status == 1
    assert text.startswith(f"rank0/002_backward/{stem('agree')}: after agree in ")
    assert "Invariant: " in text
    assert text.endswith("2 graphs of 1 ranks: 1 wrong\n")


def test_verify_finds_a_dropped_wait(folder, capsys):
    path = graph_file(folder, "001_forward", "free")
    values = json.loads(read(path))
    wait = next(n for n in values["nodes"] if n[0].startswith("wait_tensor"))
    start = wait[3]["tuple"][0]["node"]
    values["nodes"].remove(wait)
    write(path, json.dumps(values).replace(f'"{wait[0]}"', f'"{start}"'))
    status, text = run(capsys, "verify", folder)
    assert status == 1
    assert "Every collective is awaited exactly once" in text
    assert (
        "the text is not that of the graph in the .json.gz beside it; one of them was changed"
        in text
    )


def test_verify_finds_another_text(folder, capsys):
    path = text_file(graph_file(folder, "001_forward", "lower"))
    tamper(path, "all_gather_into_tensor(", "nothing_at_all(")
    status, text = run(capsys, "verify", folder)
    assert (status, text) == (
        1,
        f"rank0/001_forward/{stem('lower')}: the text is not that of the graph in the .json.gz "
        "beside it; one of them was changed\n"
        "2 graphs of 1 ranks: 1 wrong\n",
    )


def test_verify_compares_ranks(folder, dumps, capsys):
    """Two ranks of a group with other collectives would hang."""
    shutil.copytree(dumps / "other" / "rank0", folder / "rank1")
    status, text = run(capsys, "verify", folder)
    assert status == 1
    assert text.startswith(
        "ranks 0 and 1 communicate differently over group '0':\n--- rank 0\n+++ rank 1\n"
    )
    assert text.endswith("4 graphs of 2 ranks: 1 wrong\n")


# -- refusing


def test_folders_that_are_no_dump(folder, tmp_path, capsys):
    """Exit status 2, and what to do."""
    cases = {
        tmp_path / "nothing": "is no folder; give one that dumped_to or COMPILED_FSDP_DUMP wrote",
        tmp_path: "holds no graph (rank0/001_forward/00_capture.txt): compile a sharded model "
        "inside dumped_to, or with COMPILED_FSDP_DUMP",
    }
    for command in ("dump", "verify", "explain"):
        for path, words in cases.items():
            expected = f"python -m compiled_fsdp {command}: {path} {words}\n"
            assert run(capsys, command, path) == (2, expected)
    assert run(capsys, "report", tmp_path / "nothing")[0] == 2
    assert run(capsys, "dump", folder, "--rank", 3) == (
        2,
        f"python -m compiled_fsdp dump: {folder} has no rank 3; it has [0]\n",
    )
    assert (
        "has no graph '7'; it has ['000_joint', '001_forward', '002_backward']"
        in run(capsys, "dump", folder, "--graph", 7)[1]
    )
    assert (
        "holds no graph after 'x'; it has ['capture', "
        in run(capsys, "dump", folder, "--after", "x")[1]
    )
    words = (
        "python -m compiled_fsdp diff: give one of: a second folder, --passes PASS PASS, --ranks "
        "RANK RANK\n"
    )
    assert run(capsys, "diff", folder) == (2, words)


def test_damaged_files(folder, capsys):
    path = graph_file(folder, "001_forward", "verify")
    write(path, read(path)[:500])
    status, text = run(capsys, "verify", folder)
    assert status == 2
    assert text.startswith(
        f"python -m compiled_fsdp verify: {path} holds no graph that can be read: JSONDecodeError: "
    )
    (folder / "rank0" / "explain.json").write_text('{"model": 1}')
    assert run(capsys, "explain", folder)[0] == 2
    path = folder / "rank0" / "settings.json"
    path.write_text("[")
    words = (
        f"reading the dump: {path} is no JSON: Expecting value: line 1 column 2 (char 1); it is "
        "cut off or garbled: write it again\n"
    )
    assert run(capsys, "dump", folder) == (2, f"python -m compiled_fsdp dump: {words}")
    (folder / "rank0" / "001_forward" / "01_lower.txt").write_bytes(b"\xff\xfe")
    assert run(capsys, "dump", folder, "--after", "lower")[0] == 2


def test_control_characters_are_shown(folder, capsys):
    """A dump from elsewhere cannot write to the terminal but text."""
    path = text_file(graph_file(folder, "001_forward", "lower"))
    path.write_text(path.read_text().replace("# 0: gather", "# \x1b[31m: gather"))
    text = run(capsys, "dump", folder, "--graph", "forward", "--after", "lower")[1]
    assert "\x1b" not in text
    assert "# \\x1b[31m: gather" in text
    record = folder / "rank0" / "explain.json"
    values = json.loads(record.read_text())
    values["model"] = "\x1b]0;title\x07"
    record.write_text(json.dumps(values))
    assert "\x1b" not in run(capsys, "explain", folder)[1]
    assert "\x1b" not in run(capsys, "explain", folder, "--json")[1]


def test_as_a_program(dumps):
    done = subprocess.run(
        [sys.executable, "-m", "compiled_fsdp", "verify", str(dumps / "dumped")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "2 graphs of 1 ranks: nothing wrong\n"), (
        done.stderr
    )
