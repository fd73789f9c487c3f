"""What a compiled graph takes for granted of Python values and of source code, written down so that
another process can check it without Dynamo.

Dynamo guards on everything that it has looked at. Of its guards the expressions are kept
(`L['self'].scale`), and of each the value, if it is a plain one, or else its kind. What the
library's own objects hold is left out: parameters, units and settings are described one by one
(`target.py`).
"""

from __future__ import annotations

import ast
import enum
import hashlib
import re
import sys
from functools import cache
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from compiled_fsdp.torch_private.groups import common_name
from compiled_fsdp.torch_private.ranks import mesh_in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
OURS, TORCH = "compiled_fsdp", str(Path(torch.__file__).parent)
PACKAGE = str(Path(__file__).parents[1])
PASSES = str(Path(__file__).parents[2] / "passes")
READ = ("_fsdp_wrapped_module", "_fsdp_casts_to", "_fsdp_moves_to")  # of ours, as of others
NOTHING = "(nothing)"
ITEM = "dict.__getitem__"  # how Dynamo reads a dict that has a way of its own
IN_A_SET = "___set_getitem"  # from 2.14 on, how it names what a set holds
WITH_CODE = re.compile(r"\S+ \S+ [0-9a-f]{16}")  # a function of Python's, in words (`_text`)
IMPORTED = "__import_"  # how Dynamo calls modules among the globals of a frame


def facts(names: Iterable[str], model: Any) -> tuple[dict[str, str], list[str]]:
    """By expression, the value of what can be looked up again from the model, or from a module; and
    expressions of something else, which nobody can check.
    """
    found, unknown = {}, []
    for name in names:
        if "_compiled_call_impl" in name:  # where what is loaded is put
            continue
        try:
            value = _value(ast.parse(name, mode="eval").body, model)
        except _LeftOutError:
            continue
        except _UnknownError:
            unknown.append(name)
            continue
        except (AttributeError, KeyError, IndexError, TypeError):
            found[name] = NOTHING
            continue
        # Of a dict, what was looked at is another fact.
        if not isinstance(value, torch.Tensor | dict):
            found[name] = _text(value)
    return found, unknown


def current(names: Iterable[str], model: Any) -> dict[str, str]:
    """The values of expressions that `facts` has found, as they are now."""
    found, _ = facts(names, model)
    return {name: found.get(name, NOTHING) for name in names}


def reader(made_for: dict[str, str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that reads from a model, and from modules, all plain values among facts, what sets
    hold, functions, the classes of other values, and which attributes are there that were not;
    fast, since it runs in each call.
    """
    parts, modules = [], {}
    for name, value in made_for.items():
        tree = ast.parse(name, mode="eval").body
        _check(tree)
        try:
            modules.update({root: _module(root) for root in re.findall(r"\bG\['(\w+)'\]", name)})
        except _LeftOutError:
            continue  # not imported here: what follows of it was compared when it was loaded
        tree = _Uncopied().visit(tree)
        if value.startswith("{"):
            parts.append(f"frozenset({ast.unparse(tree)}), ")
        elif WITH_CODE.fullmatch(value):
            parts.append(f"{ast.unparse(tree)}.__code__, ")
        elif value.startswith(("=", "[")) or " " in value:  # of a builtin function, two words
            parts.append(f"{ast.unparse(tree)}, ")
        elif value != NOTHING:
            parts.append(f"type({ast.unparse(tree)}), ")
        elif isinstance(tree, ast.Subscript):
            parts.append(f"{ast.unparse(tree.slice)} in {ast.unparse(tree.value)}, ")
    code = compile(f"lambda L, G: ({''.join(parts)})", "<facts>", "eval")
    read: Callable[..., tuple[Any, ...]] = eval(code, {"__builtins__": _CALLS})  # checked above
    return lambda model: read({"self": model}, modules)


class _Uncopied(ast.NodeTransformer):
    """`dict(X)[name]` as `X[name]`."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """One place."""
        self.generic_visit(node)
        match node.value:
            case ast.Call(func=ast.Name(id="dict"), args=[of]):
                node.value = of
        return node


def in_words(name: str) -> str:
    """An expression for people: `model.layers.0.scale`."""
    short = name.replace("L['self']", "model").replace("_dot_", ".")
    short = re.sub(r"\._modules\['(\w+)'\]", r".\1", short)
    short = re.sub(
        r"(?:dict\()?type\(([\w.]+)\)(?:\.__mro__\[\d+\])?\.__dict__\)?", r"\1.__dict__", short
    )
    short = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", short)
    return re.sub(r"G\['__import_([\w.]+)'\]", r"module \1", short)


_CALLS: dict[str, Any] = {
    "list": list,
    "dict": dict,
    "type": type,
    "len": len,
    "frozenset": frozenset,
}


class _LeftOutError(Exception):
    """Of torch or this library: known by version, or described otherwise."""


class _UnknownError(Exception):
    """An expression of a kind that is not followed."""


class _Keys(tuple[Any, ...]):
    """Those of a dict, in order."""

    __slots__ = ()


def _check(tree: ast.expr) -> None:
    """Only attributes and places are followed, and nothing is called but `_CALLS`.

    Raises:
        ValueError: the expression is of another kind.
    """
    while not isinstance(tree, ast.Name | ast.Constant):
        match tree:
            case _ if (keys := _key_of(tree)) is not None:
                tree = keys
            case ast.Subscript(value=of, slice=ast.Constant()) | ast.Attribute(value=of):
                tree = of
            case ast.Subscript(value=of, slice=key) if (keys := _key_of(key)) is not None:
                _check(keys)
                tree = of
            case ast.Call(
                func=ast.Name(id="type" | "dict" | "len" | "list"), args=[of], keywords=[]
            ):
                tree = of
            case ast.Call(func=func, args=[of, key]) if ast.unparse(func) == ITEM:
                _check(key)
                tree = of
            case ast.Compare(left=key, ops=[ast.In()], comparators=[of]):
                ast.literal_eval(key)
                tree = of
            case ast.Compare(left=one, ops=[ast.Is()], comparators=[of]):
                _check(one)
                tree = of
            case _:
                raise ValueError(
                    f"a fact of a precompiled model is {ast.unparse(tree)!r}; should be an "
                    "attribute or a place in a container"
                )


def _key_of(tree: ast.expr) -> ast.expr | None:
    """Of `list(dict.keys(X))[n]`, which is how Dynamo names a key: X."""
    match tree:
        case ast.Subscript(
            value=ast.Call(
                func=ast.Name(id="list"),
                args=[
                    ast.Call(func=ast.Attribute(value=ast.Name(id="dict"), attr="keys"), args=[of])
                ],
            ),
            slice=ast.Constant(),
        ):
            return of
    return None


def _value(tree: ast.expr, model: Any) -> Any:
    match tree:
        case ast.Subscript(value=ast.Name(id="L" | "G" as where), slice=ast.Constant(value=name)):
            return _root(where, name, model)
        case ast.Constant(value=value):
            return value
        case ast.Attribute(value=of, attr=attr):
            if attr.startswith("_fsdp_") and attr not in READ:
                raise _LeftOutError
            owner = _entered(_value(of, model))
            if isinstance(owner, ProcessGroup) and attr == "group_name":
                return common_name(owner.group_name)
            return getattr(owner, attr)
        case ast.Call():
            return _called(tree, model)
        case ast.Compare(left=one, ops=[ast.Is()], comparators=[of]):
            return _value(one, model) is _value(of, model)
        case ast.Compare(left=key, comparators=[of]):
            return ast.literal_eval(key) in _value(of, model)
        case ast.Subscript():
            return _at_place(tree, model)
    raise _UnknownError


def _called(tree: ast.Call, model: Any) -> Any:
    match tree:
        case ast.Call(
            func=ast.Name(id="type" | "dict" | "len" | "list" as name), args=[of], keywords=[]
        ):
            return (_Keys if name == "list" else _CALLS[name])(_value(of, model))
        case ast.Call(func=func, args=[of, key]) if ast.unparse(func) == ITEM:
            return dict.__getitem__(_value(of, model), _value(key, model))
        case ast.Call(func=ast.Name(id=name), args=[of, ast.Constant(value=n)]) if name == IN_A_SET:
            if _is_said(list(_value(of, model))[n]):  # type: ignore[index]  # Dynamo writes a number
                raise _LeftOutError  # with all that the set holds
        case ast.Call(func=ast.Attribute(value=of), args=[], keywords=[]):
            _value(of, model)  # torch's, as in 2.15 the settings that it reads, is left out
    raise _UnknownError


def _is_said(key: object) -> bool:
    """Whether the text of a set says all of this item."""
    if isinstance(key, tuple):
        return all(map(_is_said, key))
    return isinstance(key, PLAIN) or isinstance(key, type)


def _at_place(tree: ast.Subscript, model: Any) -> Any:
    match tree.slice:
        case ast.Constant(value=place) if (keys := _key_of(tree)) is not None:
            return list(_value(keys, model))[place]  # type: ignore[index]  # Dynamo writes a number
        case ast.Constant(value=place):
            return _entered(_value(tree.value, model))[place]
        case key if _key_of(key) is not None:
            return _entered(_value(tree.value, model))[_value(key, model)]
    raise _UnknownError


def _root(where: str, name: Any, model: Any) -> Any:
    """What an expression begins with."""
    if where == "G":
        return _module(name)
    if name == "self":
        return model
    raise _LeftOutError  # arguments are compared leaf by leaf


def _entered(value: Any) -> Any:
    """What may be looked into: modules of the user's and plain containers, but no object of the
    library's own.
    """
    is_ours = type(value).__module__.split(".")[0] == OURS
    if is_ours and not isinstance(value, torch.nn.Module):
        raise _LeftOutError
    return value


def _module(name: str) -> Any:
    """A module that Dynamo found among the globals of a frame; torch and this library are known by
    their versions.
    """
    wanted = name.removeprefix(IMPORTED)
    if wanted == name or wanted.split("_dot_")[0] in ("torch", OURS):
        raise _LeftOutError
    for known, module in list(sys.modules.items()):
        if known.replace(".", "_dot_") == wanted:
            return module
    raise _LeftOutError


def _text(value: Any) -> str:
    """Plain values as Python writes them, after "=", sets of them, and the keys of a dict; meshes
    and placements in words; of functions their names, and a hash of what they do; of everything
    else its class.
    """
    if isinstance(value, PLAIN):
        return f"={value!r}"
    if isinstance(value, _Keys):
        return f"[{', '.join(map(_text_of_key, value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text_of_key, value)))}}}"
    if isinstance(value, DeviceMesh):
        return f"DeviceMesh {mesh_in_words(value)}"
    if isinstance(value, Placement):
        return repr(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if callable(value) and hasattr(value, "__qualname__"):
        code = getattr(value, "__code__", None)
        does = f" {_hash_of_code(code)}" if isinstance(code, CodeType) else ""
        return f"{kind} {value.__qualname__}{does}"
    return kind


def _text_of_key(key: object) -> str:
    if isinstance(key, tuple):
        return f"({', '.join(map(_text_of_key, key))})"
    return _text(key).removeprefix("=")


# -- source code


@cache
def _hash_of_code(code: CodeType) -> str:
    """A hash of what compiled code does: the same wherever it stands in a file, in one version of
    Python.
    """
    consts = [
        _hash_of_code(each) if isinstance(each, CodeType) else _in_order(each)
        for each in code.co_consts
    ]
    takes = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    does = (code.co_code.hex(), consts, takes, names)
    return hashlib.sha256(repr(does).encode()).hexdigest()[:16]


def _in_order(value: object) -> object:
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def sources(codes: Iterable[CodeType]) -> dict[str, str]:
    """The hashes of every function that Dynamo has traced, torch and this library apart, by its
    file's name and its own, which several functions may have.
    """
    found: dict[str, str] = {}
    for code in codes:
        path = Path(code.co_filename)
        if not str(path).startswith((TORCH, PACKAGE, PASSES)) and path.is_file():
            name = f"{path.name}: {_qualname(code)}"
            line = code.co_firstlineno if code.co_name.isidentifier() else 0  # a lambda has no name
            found = together(found, {name: _hash_of(path, line)})
    return dict(sorted(found.items()))


def together(some: dict[str, str], others: dict[str, str]) -> dict[str, str]:
    """The hashes of the functions of both."""
    names = some | others
    return {
        name: " ".join(sorted({*some.get(name, "").split(), *others.get(name, "").split()}))
        for name in names
    }


def sources_now(made_for: dict[str, str]) -> dict[str, str]:
    """The hashes of these functions in the files that this process has imported them from; of
    several functions of one name those that agree, if all of them are there.
    """
    files: dict[str, dict[Path, None]] = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path and Path(path).suffix == ".py":
            files.setdefault(Path(path).name, {})[Path(path)] = None
    found = {}
    for name, wanted in made_for.items():
        file, _, function = name.partition(": ")
        hashes = {h for path in files.get(file, {}) for h in _hashes_of_named(path, function)}
        agrees = hashes.issuperset(wanted.split())
        found[name] = wanted if agrees else " ".join(sorted(hashes)) or "(not imported)"
    return found


def _qualname(code: CodeType) -> str:
    named: str = getattr(code, "co_qualname", code.co_name)  # before Python 3.11, the name alone
    return named


@cache
def _functions(text: str) -> tuple[tuple[str, int, str], ...]:
    """Of every function in a file's text: its qualified name, its first line, and a hash of what it
    does; comments and layout do not count.
    """
    found: list[tuple[str, int, str]] = []
    stack: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    while stack:
        prefix, node = stack.pop()
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}."
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                digest = hashlib.sha256(ast.dump(child).encode()).hexdigest()[:16]
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                found.append((name.removesuffix("."), first, digest))
                name += "<locals>."
            stack.append((name, child))
    return tuple(found)


def _hash_of(path: Path, line: int) -> str:
    """That of the function which begins there; of the whole file, where none does (a lambda)."""
    for _, first, digest in _functions(path.read_text()):
        if first == line:
            return digest
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _hashes_of_named(path: Path, function: str) -> list[str]:
    found = [
        digest
        for name, _, digest in _functions(path.read_text())
        if function in (name, name.rpartition(".")[2])
    ]
    if not found and "<" in function:
        return [hashlib.sha256(path.read_bytes()).hexdigest()[:16]]
    return found
