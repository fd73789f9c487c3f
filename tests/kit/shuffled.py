"""Sets whose order is another on every rank.

Python orders a set by its items' hashes: of text by a seed, of objects by where they lie in memory.
Processes that torchrun starts differ in both; workers of a `Pool` are forked from one process, so
that they would order every set alike, and a decision that follows the order of a set, and so should
have been sorted, would be the same on all of them by luck. So the sets that our modules make, and
all `WeakSet`s, are shuffled at each iteration, once `shuffle` has been told how.

Imported before `compiled_fsdp`, whose source is changed as it is imported: `{...}`, `set(...)` and
`frozenset(...)` make sets of the classes below.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import random
import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import CodeType, ModuleType

_random: random.Random | None = None
_of_weak_sets = weakref.WeakSet.__iter__


def shuffle(seed: int) -> None:
    """From now on, in this process, shuffle sets by this seed."""
    global _random
    _random = random.Random(seed)


def _shuffled(items: Iterator[Any]) -> Iterator[Any]:
    if _random is None:
        return items
    found = list(items)
    _random.shuffle(found)
    return iter(found)


class Shuffled(set):  # type: ignore[type-arg]
    """A set without an order of its own."""

    def __iter__(self) -> Iterator[Any]:
        return _shuffled(super().__iter__())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return set, (list(self),)


class ShuffledFrozen(frozenset):  # type: ignore[type-arg]
    """A frozenset without an order of its own."""

    def __iter__(self) -> Iterator[Any]:
        return _shuffled(super().__iter__())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return frozenset, (list(self),)


def _returning(kind: type, base: type, name: str) -> Any:
    method = getattr(base, name)

    def call(self: Any, *args: Any) -> Any:
        found = method(self, *args)
        return kind(found) if type(found) is base else found

    call.__name__ = name
    return call


for _kind, _base in ((Shuffled, set), (ShuffledFrozen, frozenset)):
    for _name in (
        *("__and__", "__or__", "__sub__", "__xor__", "__rand__", "__ror__", "__rsub__", "__rxor__"),
        *("copy", "difference", "intersection", "symmetric_difference", "union"),
    ):
        setattr(_kind, _name, _returning(_kind, _base, _name))


class _Changed(ast.NodeTransformer):
    """`{a, b}`, `{a for ...}`, `set(...)` and `frozenset(...)` of our own classes."""

    def visit_Set(self, node: ast.Set) -> ast.AST:
        return self._made("Shuffled", node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        return self._made("Shuffled", node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset"):
            kind = "Shuffled" if node.func.id == "set" else "ShuffledFrozen"
            node.func = ast.copy_location(_name_of(kind), node.func)
        return node

    def _made(self, kind: str, node: ast.expr) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(ast.Call(_name_of(kind), [node], []), node)


def _name_of(kind: str) -> ast.expr:
    return ast.Name(f"__{kind}__", ast.Load())


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.fix_missing_locations(_Changed().visit(ast.parse(self.get_data(path))))
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__Shuffled__"] = Shuffled
        module.__dict__["__ShuffledFrozen__"] = ShuffledFrozen
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "compiled_fsdp":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


if "compiled_fsdp" not in sys.modules:
    sys.meta_path.insert(0, _Finder())
weakref.WeakSet.__iter__ = lambda self: _shuffled(_of_weak_sets(self))  # type: ignore[method-assign]
