"""Rules about the source itself: who imports whom, what is public, who owns `node.meta`, where
private torch is used.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import unittest
from importlib import import_module
from pathlib import Path

from kit.rooms import (
    LEAVES,
    MAY_IMPORT,
    PUBLIC,
    ROOT,
    STARTERS,
    against_the_table,
    arrows,
    circles,
    files,
    imports,
    name_of,
    tree,
)

import compiled_fsdp
from compiled_fsdp.compiler.inductor import sources

FILES = files()
PASSES = [path for path in FILES if path.parent.name == "passes"]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
FOLDERS = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
# The folders of tests/ from which test files import, and what of it these import themselves.
SHARED = {
    "kit": {"kit"},
    "programs": {"kit", "programs"},
    "pairs": {"kit", "pairs"},
    "jobs": {"kit", "jobs"},
}
# Of what users read: what it imports, and what it says of the package by name.
IMPORTED = re.compile(r"^from (compiled_fsdp(?:\.\w+)*) import ([\w, ]+)", re.MULTILINE)
NAMED = re.compile(r"`compiled_fsdp\.(\w+(?:\.\w+)*)\b(?!/)")


class TestRooms(unittest.TestCase):
    def test_every_file_is_in_a_room(self):
        top = {p.stem for p in (ROOT / "compiled_fsdp").glob("*.py")}
        self.assertEqual(top, PUBLIC | STARTERS | LEAVES - {"torch_private"})
        folders = {p.parent.name for p in (ROOT / "compiled_fsdp").glob("*/__init__.py")} | {
            "passes"
        }
        self.assertEqual(folders, {*MAY_IMPORT} - {"leaves"} | {"torch_private"})

    def test_imports_keep_to_the_table(self):
        self.assertEqual(against_the_table(), [])

    def test_the_table_allows_no_circle_and_nothing_above(self):
        rooms = [*MAY_IMPORT]
        for i, name in enumerate(rooms):
            self.assertLessEqual({*MAY_IMPORT[name].split()}, {*rooms[:i]}, name)

    def test_the_table_is_told_as_it_is(self):
        rows = re.findall(
            r"^\| `(\w+)` \| ([\w, ]+) \|",
            (ROOT / "docs" / "architecture.md").read_text(),
            re.MULTILINE,
        )
        told = {
            name: "" if allowed == "nothing" else allowed.replace(",", "") for name, allowed in rows
        }
        self.assertEqual(told, MAY_IMPORT)

    def test_modules_import_each_other_in_no_circle(self):
        self.assertEqual(circles(arrows(at_run_time=True)), [])

    def test_imports_are_relative_inside_a_room(self):
        for path in FILES:
            package = name_of(path).rpartition(".")[0]
            if path.parent.name != "compiled_fsdp":
                absolute = [
                    n.module
                    for n in ast.walk(tree(path))
                    if isinstance(n, ast.ImportFrom) and not n.level
                ]
                inside = [
                    m
                    for m in absolute
                    if m is not None and (m == package or m.rpartition(".")[0] == package)
                ]
                self.assertEqual(inside, [], path)


class TestPublic(unittest.TestCase):
    def test_only_the_root_hands_names_on(self):
        """Elsewhere a name is imported from where it is made, and a room's `__init__` says what the
        room is for.
        """
        for path in FILES:
            if path.parent.name == "compiled_fsdp":
                continue
            body = tree(path).body
            if path.stem == "__init__" and path.parent.name != "passes":
                self.assertEqual([type(node) for node in body], [ast.Expr], path)
            ours = [
                n
                for n in ast.walk(tree(path))
                if isinstance(n, ast.ImportFrom) and (n.level or "compiled_fsdp" in str(n.module))
            ]
            self.assertEqual(
                [a.name for n in ours for a in n.names if a.name == a.asname], [], path
            )

    def test_public_files_say_what_they_hold(self):
        for name in PUBLIC - {"__init__"}:
            module = import_module(f"compiled_fsdp.{name}")
            self.assertTrue(all(hasattr(module, entry) for entry in module.__all__), name)

    def test_users_are_told_of_public_names_only(self):
        for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")):
            text = path.read_text()
            for module, names in IMPORTED.findall(text):
                told = {name.split(" as ")[0].strip() for name in names.split(",")}
                self.assertLessEqual(told, set(import_module(module).__all__), path)
                self.assertIn(module.partition(".")[2] or "__init__", PUBLIC, path)
            for name in NAMED.findall(text):
                part = name.partition(".")[0]
                self.assertTrue(
                    part in compiled_fsdp.__all__ or part in PUBLIC, f"{path}: compiled_fsdp.{name}"
                )


class TestTests(unittest.TestCase):
    """What test files share stands in `tests/kit`; what they start, in `tests/jobs`; random
    programs, in `tests/programs`.
    """

    def test_only_shared_folders_hold_other_files_than_tests(self):
        for path in TESTS:
            is_test = path.name.startswith("test_") or path.name == "conftest.py"
            self.assertTrue(is_test or folder_of(path) in SHARED, path)

    def test_tests_import_no_tests(self):
        for path in TESTS:
            for name in imports(path):
                parts = name.split(".")
                self.assertFalse([p for p in parts if p.startswith("test_")], f"{path}: {name}")
                if parts[0] in FOLDERS:
                    is_test = path.name.startswith("test_") or path.name == "conftest.py"
                    allowed = {*SHARED} if is_test else SHARED[folder_of(path)]
                    self.assertIn(parts[0], allowed, f"{path} imports {name}")


class TestProject(unittest.TestCase):
    def test_passes_do_not_know_each_other(self):
        """Only the list knows them all."""
        names = {p.stem for p in PASSES} - {"base", "__init__"}
        for path in (p for p in PASSES if p.stem != "pipeline"):
            parts = {
                part for name in imports(path) for part in name.split(".")[:3] if "passes" in name
            }
            self.assertEqual(parts & names, set(), path)

    def test_only_meta_touches_node_meta(self):
        """Elsewhere: the key "val", and in `graph.Builder` the keys of torch that a new node takes
        over.
        """
        wrong = []
        for path in FILES:
            if path.name == "meta.py":
                continue
            for node in ast.walk(tree(path)):
                is_meta = isinstance(node, ast.Attribute) and node.attr == "meta"
                if is_meta and not is_allowed(path, node):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
        self.assertEqual(wrong, [])

    def test_the_key_of_compile_caches_covers_every_file(self):
        self.assertEqual(sources(), FILES)

    def test_files_and_functions_are_short(self):
        """Files in lines; functions in lines without their docstrings."""
        for path in FILES:
            self.assertLessEqual(len(path.read_text().splitlines()), 450, path)
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.FunctionDef):
                    first = node.body[1] if ast.get_docstring(node) and node.body[1:] else node
                    length = node.end_lineno - first.lineno + 1
                    self.assertLessEqual(length, 70, f"{path}: {node.name}")

    def test_private_torch_is_said(self):
        """A file that imports a private module of torch says so, with the version on which it was
        tried.
        """
        for path in FILES:
            private = [
                n
                for n in imports(path, at_run_time=True)
                if n.startswith("torch.") and "._" in n.replace("__", "")
            ]
            doc = ast.get_docstring(tree(path)) or ""
            if private:
                self.assertIn("rivate torch", doc, f"{path.relative_to(ROOT)} imports {private}")
                self.assertIn("ried on", doc, path)

    def test_no_environment_inside_passes(self):
        for path in PASSES:
            self.assertNotIn("os", [n.split(".")[0] for n in imports(path)], path)

    def test_passes_is_no_top_level_package(self):
        """In a checkout `import passes` would find the folder, and make every class a second
        time.
        """
        for path in FILES:
            self.assertFalse([n for n in imports(path) if n.split(".")[0] == "passes"], path)
        done = subprocess.run(
            [sys.executable, "-c", "import passes"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertIn("ImportError: import compiled_fsdp.passes, not passes", done.stderr)

    def test_every_room_is_in_the_wheel(self):
        """An editable install, which all other tests run in, has them all."""
        text = (ROOT / "pyproject.toml").read_text()
        listed = re.findall(r'^    "(compiled_fsdp[\w.]*)",$', text, re.MULTILINE)
        self.assertEqual({*listed}, {name_of(path).rpartition(".")[0] for path in FILES})

    def test_one_test_file_for_each_pass(self):
        passes = {p.stem for p in PASSES} - {"__init__", "base", "verify"}
        tests = {
            p.stem.removeprefix("test_") for p in (ROOT / "tests" / "passes").glob("test_*.py")
        }
        self.assertEqual(passes, tests)


def folder_of(path: Path) -> str:
    """The folder of tests/ in which a file is; "" for those that stand in none."""
    return "".join(path.relative_to(ROOT / "tests").parts[:-1][:1])


def is_allowed(path: Path, attribute: ast.Attribute) -> bool:
    """Whether this `x.meta` is read or written under "val", or under a variable key in
    `graph.py`.
    """
    for node in ast.walk(tree(path)):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and node.value is attribute:
            key = node.slice
        elif isinstance(node, ast.Compare) and attribute in node.comparators:
            key = node.left
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.value is attribute
        ):
            key = node.args[0]
        if key is not None:
            is_val = isinstance(key, ast.Constant) and key.value == "val"
            return is_val or (path.name == "graph.py" and isinstance(key, ast.Name))
    return False
