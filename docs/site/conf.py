"""The site of `make docs`: README, docs/, results and passes where they stand, and the API from the
docstrings.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "compiled_fsdp"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/site/*.md",
    "docs/*.png",
    "passes/README.md",
    "benchmarks/results/*",
]
html_theme = "furo"
html_title = "compiled_fsdp"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
default_role = "code"
nitpicky = False
suppress_warnings = ["myst.header", "toc.not_included", "misc.highlighting_failure"]

FIELD = re.compile(r"[a-z_][a-z_0-9, ]*: ")
PAGES = {
    "Use": [
        "guide",
        "migrate_fsdp1",
        "planning",
        "memory",
        "compile_step",
        "optimizers",
        "precompile",
        "supported",
        "limits",
        "torch_versions",
    ],
    "Look inside": [
        "debugging",
        "report",
        "failures",
        "how_it_works",
        "architecture",
        "benchmarks",
    ],
    "Reference": ["site/api", "fsdp2", "fsdp1"],
}


def contents() -> str:
    """The tables of contents, which README has no place for."""
    trees = [
        "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", *pages, "```"])
        for caption, names in PAGES.items()
        for pages in [[f"docs/{name}" for name in names]]
    ]
    more = ["passes/README", "CONTRIBUTING", "CHANGELOG"]
    rest = "\n".join(["```{toctree}", ":hidden:", ":caption: Project", *more, "```"])
    return "\n\n".join([*trees, rest])


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Into README, as Sphinx reads it."""
    if name == root_doc:
        source[0] += "\n\n" + contents() + "\n"


def list_fields(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Attributes, one a line as `name: text`, as a list of fields."""
    block: list[int] = []
    for index, line in enumerate([*lines, ""]):
        if line:
            block.append(index)
            continue
        heads = [i for i in block if not lines[i].startswith(" ")]
        if all(FIELD.match(lines[i]) for i in heads):
            for i in heads:
                lines[i] = f":{lines[i]}"
        block = []


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", list_fields)
