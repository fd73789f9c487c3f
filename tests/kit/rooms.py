"""The rooms of the source: who may import whom, and what imports whom. `python tests/kit/rooms.py
[TREE]` prints the numbers.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEAVES = {"errors", "log", "options", "progress", "torch_private", "version"}
# What users import.
PUBLIC = {
    "__init__",
    "api",
    "fully_sharded_data_parallel",
    "memory",
    "report",
    "sharded_grad_scaler",
    "wrap",
}
STARTERS = {
    "__main__",
    "passes",
}  # `python -m compiled_fsdp`, and what finds `passes/` in a checkout
MAY_IMPORT = {
    "leaves": "",
    "ir": "leaves",
    "wire": "leaves ir",
    "units": "leaves ir wire",
    "eager": "leaves ir wire units",
    "planning": "leaves ir wire",
    "verification": "leaves ir",
    "passes": "leaves ir planning verification",
    "dump": "leaves ir planning",
    "compiler": "leaves ir wire planning passes dump",
    "inspection": "leaves ir wire units eager planning verification passes dump",
    "optim": "leaves ir wire planning",
    "frontend": "leaves ir wire units eager planning dump inspection optim",
    "ahead": "leaves ir wire units planning passes compiler frontend",
    "fsdp1": "leaves ir wire units eager compiler frontend",
    "fsdp2": "leaves ir wire units eager compiler frontend",
    "command": "leaves ir wire eager planning dump compiler inspection fsdp1 fsdp2",
}


def name_of(path: Path, root: Path = ROOT) -> str:
    """The module's full name; `passes/` is the package `compiled_fsdp.passes`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join([*(["compiled_fsdp"] if parts[0] == "passes" else []), *parts])


def files(root: Path = ROOT) -> list[Path]:
    return sorted([*(root / "compiled_fsdp").rglob("*.py"), *(root / "passes").rglob("*.py")])


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room(name: str) -> str:
    """The room of a module, by its full name; "public" for what users import."""
    part = [*name.split("."), "__init__"][1]
    return "leaves" if part in LEAVES else part if part in MAY_IMPORT else "public"


def is_typing_only(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def imports(path: Path, *, at_run_time: bool = False, root: Path = ROOT) -> list[str]:
    """Full names of what a file imports, inside functions too; those for annotations alone only
    without `at_run_time`.
    """
    package = name_of(path, root).rpartition(".")[0]
    found: list[str] = []
    stack: list[ast.AST] = [tree(path)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = f"{package}." if node.level else ""
            module = f"{above}{node.module or ''}".rstrip(".")
            found.extend(f"{module}.{alias.name}" for alias in node.names)
        else:
            stack.extend(
                n for n in ast.iter_child_nodes(node) if not (at_run_time and is_typing_only(n))
            )
    return found


def arrows(root: Path = ROOT, *, at_run_time: bool = False) -> dict[str, set[str]]:
    """For each module, the modules that it imports. The root's `__init__` imports all, and is left
    out.
    """
    names = {name_of(path, root).removesuffix(".__init__"): path for path in files(root)}
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        if name != "compiled_fsdp":
            targets = imports(path, at_run_time=at_run_time, root=root)
            known = {t if t in names else t.rpartition(".")[0] for t in targets}
            found[name] = (known & names.keys()) - {name, "compiled_fsdp"}
    return found


def against_the_table(root: Path = ROOT) -> list[str]:
    """Arrows from one room to another that the table does not allow."""
    return [
        f"{name} imports {target}"
        for name, targets in arrows(root).items()
        for target in sorted(targets)
        if room(name) not in ("public", room(target))
        and room(target) not in MAY_IMPORT[room(name)].split()
    ]


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, over however many others: those that reach themselves,
    together with whom they meet.
    """

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        stack = [*graph[name]]
        while stack:
            here = stack.pop()
            if here not in seen:
                seen.add(here)
                stack.extend(graph[here])
        return seen

    below = {name: reached(name) for name in graph}
    found = {
        tuple(sorted(n for n in below[name] if name in below[n]))
        for name in graph
        if name in below[name]
    }
    return [list(circle) for circle in sorted(found)]


def main(root: Path) -> None:
    """The numbers of `docs/architecture.md`."""
    lengths = {name_of(path, root): len(path.read_text().splitlines()) for path in files(root)}
    largest = max(lengths, key=lengths.__getitem__)
    at_root = [*(root / "compiled_fsdp").glob("*.py")]
    run_time, all_imports = arrows(root, at_run_time=True), arrows(root)
    print(f"modules at the root        {len(at_root)} of {len(lengths)}")
    print(
        f"arrows                     {sum(map(len, all_imports.values()))}, at run time "
        f"{sum(map(len, run_time.values()))}"
    )
    print(f"arrows against the table   {len(against_the_table(root))}")
    print(f"circles at run time        {[len(c) for c in circles(run_time)] or 'none'}")
    print(f"circles with annotations   {[len(c) for c in circles(all_imports)] or 'none'}")
    print(f"largest file               {largest}, {lengths[largest]} lines")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
