"""`docs/fsdp2.md` and `docs/fsdp1.md`: every row of the specifications and what pins it, from the
marks in the tests.

    python tests/kit/table.py  # writes both; `test_table.py` fails if one is out of date

A row's status comes from the tests that carry it (`rows(..., status=...)`): both, eager, improved;
"differs" where such a test is expected to fail. Rows without a test are "not on this hardware" (tag
C), or stand with a reason in `absent.tsv`.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Front:
    """A front end: the name of its tests' folder and of its document, and what it is compared
    with.
    """

    name: str
    stock: str

    @property
    def folder(self) -> Path:
        """Where its tests and lists stand."""
        return ROOT / "tests" / "compat" / self.name

    @property
    def document(self) -> Path:
        """What is made."""
        return ROOT / "docs" / f"{self.name}.md"


FSDP2 = Front("fsdp2", "torch.distributed.fsdp.fully_shard")
FSDP1 = Front("fsdp1", "torch.distributed.fsdp.FullyShardedDataParallel")
FRONTS = (FSDP2, FSDP1)
MEANINGS = {
    "both": "as stock, eager and compiled",
    "eager": "as stock in eager mode; means nothing inside a graph",
    "improved": "differs from stock on purpose; the test says how",
    "differs": "differs from stock; the test is expected to fail",
    "not there": "not supported yet, or nothing to compare; the reason stands in the row",
    "not on this hardware": "needs an accelerator; not run",
}


def specification(front: Front) -> list[tuple[str, str, str, str]]:
    """(id, chapter, condition, tags) of every row."""
    lines = (front.folder / "rows.tsv").read_text().splitlines()
    return [tuple(line.split("\t")) for line in lines]  # type: ignore[misc]


def absent(front: Front) -> dict[str, str]:
    """Rows without a test, and why."""
    lines = (front.folder / "absent.tsv").read_text().splitlines()
    return dict(line.split("\t") for line in lines)  # type: ignore[misc]


def marks(front: Front) -> dict[str, list[tuple[str, str]]]:
    """Row -> (status, test) of every mark; where ours is improved, with the test's first line,
    which says how.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(front.folder.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            fails = any("xfail" in ast.unparse(d) for d in node.decorator_list)
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "rows":
                    status = next(
                        (ast.literal_eval(k.value) for k in call.keywords if k.arg == "status"),
                        "both",
                    )
                    test = f"`{path.stem}::{node.name}`"
                    if status == "improved":
                        said = (ast.get_docstring(node) or "").partition("\n\n")[0]
                        test += f" ({' '.join(said.split()).rstrip('.')})"
                    for row in map(ast.literal_eval, call.args):
                        found.setdefault(row, []).append(("differs" if fails else status, test))
    return found


def statuses(front: Front) -> dict[str, tuple[str, list[str], str]]:
    """Row -> (status, tests, remark)."""
    marked, reasons = marks(front), absent(front)
    result = {}
    for row, _, _, tags in specification(front):
        entries = marked.get(row, [])
        given = [status for status, _ in entries]
        status = next(
            (s for s in ("differs", "improved", "both", "eager", "compiled") if s in given), ""
        )
        if not status:
            status = (
                "not there"
                if row in reasons
                else "not on this hardware"
                if "C" in tags.split()
                else "untested"
            )
        result[row] = status, [test for _, test in entries], reasons.get(row, "")
    return result


def text(front: Front) -> str:
    """The document."""
    found = statuses(front)
    counts = Counter(status for status, _, _ in found.values())
    lines = [
        f"# Compatibility with `{front.stock}`",
        "",
        "Made from the tests by `python tests/kit/table.py`; do not edit. A row is one "
        f"observable behaviour of stock {front.name.upper()} (torch 2.13, or 2.15 where the row "
        "says so). Its tests run stock and ours side by side and compare what they return bit for "
        "bit (at four ranks within a tolerance, where gloo adds in another order).",
        "",
        "| status | rows | means |",
        "|---|---|---|",
        *(f"| {status} | {counts[status]} | {meaning} |" for status, meaning in MEANINGS.items()),
    ]
    chapter = ""
    for row, heading, condition, _ in specification(front):
        if heading != chapter:
            chapter = heading
            lines += [
                "",
                f"## {chapter}",
                "",
                "| row | condition | status | tests |",
                "|---|---|---|---|",
            ]
        status, tests, remark = found[row]
        shown = ", ".join(dict.fromkeys(tests)) or remark
        lines.append(f"| {row} | {condition} | {status} | {shown} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for front in FRONTS:
        front.document.write_text(text(front))
