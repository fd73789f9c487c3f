"""The page: data as JSON, packed, inside a template; what shows them is JavaScript, which only
ever sets text.

The page's own policy forbids it to load anything, so that names in it can do no harm even if one
were taken for markup.
"""

from __future__ import annotations

import base64
import gzip
import json
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_fsdp.inspection.dump_folder import read_finished
from compiled_fsdp.ir.printer import printable

from .headline import headline
from .trace import chrome_trace

if TYPE_CHECKING:
    from compiled_fsdp.inspection.dump_folder import Dumped, DumpedGraph, DumpedRank

SCRIPTS = (
    "dom.js",
    "axis.js",
    "drawing.js",
    "step.js",
    "timeline.js",
    "memory.js",
    "tables.js",
    "page.js",
)


def write_report(dump_dir: Path, out: Path) -> None:
    """Write the page for a folder of dumps to `out`: timelines, memory, buckets, what each pass
    changed, settings.

    Raises:
        DumpError: there is no dump, or a file of it is garbled; names the file.
    """
    ranks = read_finished(Path(dump_dir))
    Path(out).write_text(
        page(ranks, "/".join(Path(dump_dir).resolve().parts[-2:])), encoding="utf-8"
    )


def page(ranks: list[DumpedRank], title: str) -> str:
    """The HTML."""
    data = {"title": title, "ranks": [_rank(rank) for rank in ranks], "trace": chrome_trace(ranks)}
    parts = {
        "/*css*/": _file("page.css"),
        "/*js*/": "\n".join(map(_file, SCRIPTS)),
        "/*data*/": packed(_printable(data)),
    }
    html = _file("page.html")
    for mark, text in parts.items():
        before, after = html.split(mark)
        html = before + text + after
    return html


def packed(data: object) -> str:
    """JSON by gzip, in letters that cannot end the element that they stand in: a tenth of the text,
    and unpacked by every browser since 2023.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def unpacked(text: str) -> Any:
    """From `packed`."""
    return json.loads(gzip.decompress(base64.b64decode(text)))


def _rank(rank: DumpedRank) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "graphs": [_graph(rank, graph) for graph in rank.finished],
        "joint": [(g.name, [*map(_pass, g.passes)]) for g in rank.graphs if not g.is_finished],
        "step": rank.step,
        "headline": headline(rank.step),
    }


def _graph(rank: DumpedRank, graph: DumpedGraph) -> dict[str, Any]:
    return {
        "name": graph.name,
        "timeline": graph.timeline,
        "memory": graph.memory,
        "passes": [*map(_pass, graph.passes)],
        "text": graph.after(None).text,
        "measured": rank.measured(graph),
    }


def _pass(entry: Dumped) -> dict[str, str]:
    return {
        "name": entry.path.name,
        "provenance": entry.provenance.removeprefix("# "),
        "diff": entry.diff.strip("\n"),
    }


def _printable(value: Any) -> Any:
    """Control characters in names are shown as such, line breaks in texts kept."""
    if isinstance(value, str):
        return "\n".join(map(printable, value.split("\n")))
    if isinstance(value, dict):
        return {_printable(key): _printable(entry) for key, entry in value.items()}
    return [_printable(entry) for entry in value] if isinstance(value, list | tuple) else value


def _file(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
