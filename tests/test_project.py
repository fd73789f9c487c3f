"""Rules about the source itself: who imports whom, who owns `node.meta`, where private torch is used."""

from __future__ import annotations

import ast
import subprocess
import sys
import unittest
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("passes", "report", "fsdp1")
FSDP1 = sorted((ROOT / "compiled_fsdp" / "fsdp1").glob("*.py"))
REPORT = sorted((ROOT / "compiled_fsdp" / "report").glob("*.py"))
FILES = sorted([*(ROOT / "compiled_fsdp").glob("*.py"), *(ROOT / "passes").glob("*.py"), *REPORT, *FSDP1])
# Each line may import the lines above it, and within a line what stands further left. `passes` and `report` are the folders' files.
ORDER = """
    version options torch_private ranges log spec layout keys errors precision plan
    meeting ablation watcher agreement runs gloo schema views mesh tensor_parallel collectives extension handles
    optimizer_steps resident reads registered meta writes left_out ops
    graph heads regions meaning costs consensus choices planner
    fusion origins lifetimes halves memory
    records graph_json graph_record
    dump sequence
    report
    passes
    partition trial splitting budget pin_order inductor backend
    arguments calibrate deferred in_flight gathers flat unit clock finalization tree
    full_params runtime stock_state entry fallback together first_call
    state limits fsdp_module module api warmup kernel_times overlap
    measured explanation explain dump_folder
    fsdp1 replacement cli __main__ fully_sharded_data_parallel wrap sharded_grad_scaler
""".split()
# Calls at run time against the order, each inside a function: errors show nodes with the printer, the first step is summed up.
AGAINST = {("errors", "dump"), ("first_call", "explain")}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def layer(path: Path) -> str:
    return path.parent.name if path.parent.name in FOLDERS else path.stem


def is_typing_only(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(path: Path) -> list[str]:
    """Full names of what a file imports when it runs: imports for annotations are left out."""
    found: list[str] = []
    stack: list[ast.AST] = [tree(path)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = "compiled_fsdp" + (f".{path.parent.name}" if path.parent.name in FOLDERS else "")
            above = f"{package}." if node.level else ""
            module = f"{above}{node.module or ''}".rstrip(".")
            found.extend(f"{module}.{alias.name}" for alias in node.names)
        else:
            stack.extend(n for n in ast.iter_child_nodes(node) if not (isinstance(n, ast.If) and is_typing_only(n)))
    return found


def layers_imported(path: Path) -> set[str]:
    names = (name.split(".") for name in imports(path))
    return {parts[1] for parts in names if parts[0] == "compiled_fsdp" and len(parts) > 1 and parts[1] in ORDER}


class TestProject(unittest.TestCase):
    def test_every_file_has_a_place(self):
        self.assertEqual({layer(p) for p in FILES} - {"__init__"}, set(ORDER))

    def test_imports_point_one_way(self):
        wrong = [
            f"{path.relative_to(ROOT)} imports {name}"
            for path in FILES
            if path.stem != "__init__"
            for name in sorted(layers_imported(path))
            if name != layer(path) and ORDER.index(name) > ORDER.index(layer(path)) and (layer(path), name) not in AGAINST
        ]
        self.assertEqual(wrong, [])

    def test_passes_do_not_know_each_other(self):
        """Only the list knows them all."""
        names = {p.stem for p in FILES if p.parent.name == "passes"} - {"base", "__init__"}
        for path in (p for p in FILES if p.parent.name == "passes" and p.stem != "pipeline"):
            parts = {part for name in imports(path) for part in name.split(".")[:3] if "passes" in name}
            self.assertEqual(parts & names, set(), path)

    def test_only_meta_touches_node_meta(self):
        """Elsewhere: the key "val", and in `graph.Builder` the keys of torch that a new node takes over."""
        wrong = []
        for path in FILES:
            if path.name == "meta.py":
                continue
            for node in ast.walk(tree(path)):
                is_meta = isinstance(node, ast.Attribute) and node.attr == "meta"
                if is_meta and not is_allowed(path, node):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
        self.assertEqual(wrong, [])

    def test_private_torch_is_said(self):
        """A file that imports a private module of torch says so, with the version on which it was tried."""
        for path in FILES:
            private = [n for n in imports(path) if n.startswith("torch.") and "._" in n.replace("__", "")]
            doc = ast.get_docstring(tree(path)) or ""
            if private:
                self.assertIn("rivate torch", doc, f"{path.relative_to(ROOT)} imports {private}")
                self.assertIn("ried on", doc, path)

    def test_no_environment_inside_passes(self):
        for path in (p for p in FILES if p.parent.name == "passes"):
            self.assertNotIn("os", [n.split(".")[0] for n in imports(path)], path)

    def test_passes_is_no_top_level_package(self):
        """In a checkout `import passes` would find the folder, and make every class a second time."""
        for path in FILES:
            self.assertFalse([n for n in imports(path) if n.split(".")[0] == "passes"], path)
        done = subprocess.run([sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True, check=False)
        self.assertIn("ImportError: import compiled_fsdp.passes, not passes", done.stderr)

    def test_one_test_file_for_each_pass(self):
        passes = {p.stem for p in FILES if p.parent.name == "passes"} - {"__init__", "base", "pipeline", "verify"}
        tests = {p.stem.removeprefix("test_") for p in (ROOT / "tests" / "passes").glob("test_*.py")}
        self.assertEqual(passes, tests)


def is_allowed(path: Path, attribute: ast.Attribute) -> bool:
    """Whether this `x.meta` is read or written under "val", or under a variable key in `graph.py`."""
    for node in ast.walk(tree(path)):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and node.value is attribute:
            key = node.slice
        elif isinstance(node, ast.Compare) and attribute in node.comparators:
            key = node.left
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.value is attribute:
            key = node.args[0]
        if key is not None:
            is_val = isinstance(key, ast.Constant) and key.value == "val"
            return is_val or (path.name == "graph.py" and isinstance(key, ast.Name))
    return False
