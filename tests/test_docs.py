"""The documents: what they link to is there, what they print is what comes out, and the first one
stays short.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from kit.passes_harness import body, fake_ranks, trace
from torch import nn

import compiled_fsdp
from compiled_fsdp import fully_shard, planned

ROOT = Path(__file__).parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("passes/*.md"),
    *ROOT.glob("benchmarks/**/*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()]
    assert missing == []


def test_the_first_page_is_read_in_a_minute() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_the_reference_has_every_name_of_ours() -> None:
    """`docs/site/api.md`: what the package hands on, besides torch's own names; from 2.15 on our
    `MixedPrecisionPolicy` is torch's.
    """
    things = {name: value for name, value in vars(compiled_fsdp).items() if name[0] != "_"}
    ours = {
        name
        for name, value in things.items()
        if callable(value) and value.__module__.startswith("compiled_fsdp.")
    }
    page = (ROOT / "docs/site/api.md").read_text()
    listed = set(re.findall(r"^\.\. auto\w+:: (\w+)$", page, re.MULTILINE))
    assert listed == ours | {"MixedPrecisionPolicy"}


def test_each_hop_of_the_walk_is_there() -> None:
    hops = re.findall(r"`([\w/]+\.py):([\w.]+)`", (ROOT / "docs/architecture.md").read_text())
    assert len(hops) > 25
    for file, function in hops:
        folder = ROOT if file.startswith("passes/") else ROOT / "compiled_fsdp"
        body = ast.parse((folder / file).read_text()).body
        for name in function.split("."):
            found = [n for n in body if getattr(n, "name", "") == name]
            assert found, f"{file}:{function}"
            body = getattr(found[-1], "body", [])


def test_the_site_lists_each_document() -> None:
    pages = next(
        node.value
        for node in ast.parse((ROOT / "docs/site/conf.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAGES"
    )
    listed = {name for names in ast.literal_eval(pages).values() for name in names}
    assert listed == {"site/api"} | {page.stem for page in ROOT.glob("docs/*.md")}


def test_each_document_is_reached_from_the_first_page() -> None:
    """In at most two steps."""
    first = (ROOT / "README.md").read_text()
    second = "".join(page.read_text() for page in ROOT.glob("docs/*.md") if page.name in first)
    names = {page.name for page in ROOT.glob("docs/*.md")}
    assert {name for name in names if name not in first and name not in second} == set()


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x))


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="names of nodes are those of the page's torch"
)
def test_how_it_works_shows_what_the_passes_make(tmp_path: Path) -> None:
    with fake_ranks(2), planned(bucket_bytes=0):
        model = nn.Sequential(Up(), nn.Linear(8, 4, bias=False))
        for module in (*model, model):
            fully_shard(module)
        made = trace(model, (torch.randn(2, 4),), tmp_path)
    shown = re.findall(r"^```\n(%.*?)```", (ROOT / "docs/how_it_works.md").read_text(), re.S | re.M)
    before, after = ([line for line in block.splitlines()] for block in shown)
    captured = next(text for name, text in made.items() if name.startswith("forward/00_"))
    freed = next(text for name, text in made.items() if re.search(r"^forward/\d+_free$", name))
    assert after == [line for line in body(freed).splitlines() if " = " in line or "free" in line]
    assert set(before) <= set(captured.splitlines())
