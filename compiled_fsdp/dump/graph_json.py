"""A graph as JSON, and back: so that a dump can be checked and compared later, elsewhere, by
anybody.

    {"format": 2, "pass": "free", "plan": {...}, "saved": [...], "specs": [[...], ...],
     "nodes": [[name, op, target, args, kwargs, value, tag, symbols?], ...]}

The graph that is built from it is for reading, and cannot be run: it has no module, so that no code
is made of foreign names. Its values are tensors on the meta device, whose storages are shared as
they were. Ops are looked up by name in the four namespaces below; any other target becomes an
`Opaque` of the same name, which prints and compares alike. Nothing is unpickled or evaluated.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from dataclasses import astuple, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.fx import Graph, Node

from compiled_fsdp.ir import meta
from compiled_fsdp.ir.descriptors import is_for_backward, set_for_backward
from compiled_fsdp.ir.expected import at_most, hint
from compiled_fsdp.ir.graph import output
from compiled_fsdp.ir.meta import CommTag
from compiled_fsdp.ir.opaque import Opaque
from compiled_fsdp.ir.quantized import CODES, NAMES
from compiled_fsdp.ir.spec import ParamSpec
from compiled_fsdp.planning.costs import Costs, Link
from compiled_fsdp.planning.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

FORMAT = 2  # ops have a parameter's settings as one text
QUANTIZED = ("gather_quantized", "reduce_quantized")  # fields of the plan that are dtypes
NAMESPACES = ("aten", "prims", "fsdp", "_c10d_functional")
CONSTANTS: dict[type, str] = {
    torch.dtype: "dtype",
    torch.memory_format: "memory_format",
    torch.layout: "layout",
}
MAX_ELEMENTS = 1 << 50  # of a tensor; more is no graph that anybody had


class FormatError(ValueError):
    """Text that is no graph."""


# -- writing


def to_text(graph: Graph, made_by: str, plan: Plan) -> str:
    """The graph after the pass `made_by`, one node a line."""
    writer = _Writer()
    nodes = [json.dumps(writer.node(node), separators=(",", ":")) for node in graph.nodes]
    head = {
        "format": FORMAT,
        "pass": made_by,
        "plan": _plan(plan),
        "saved": is_for_backward(output(graph)),
    }
    specs = [
        json.dumps(writer.value(spec.values()), separators=(",", ":")) for spec in writer.specs
    ]
    start = json.dumps(head, separators=(",", ":"))[:-1]
    return (
        start
        + ',"specs":[\n'
        + ",\n".join(specs)
        + '\n],"nodes":[\n'
        + ",\n".join(nodes)
        + "\n]}\n"
    )


def _plan(plan: Plan) -> dict[str, Any]:
    values = {f.name: getattr(plan, f.name) for f in fields(Plan)}
    if plan.costs is not None:
        costs = {f.name: getattr(plan.costs, f.name) for f in fields(Costs)}
        values["costs"] = {
            **costs,
            "links": [[name, *astuple(link)] for name, link in plan.costs.links],
        }
    return {**values, **{name: NAMES[values[name]] for name in QUANTIZED}}


class _Writer:
    def __init__(self) -> None:
        self.specs: dict[ParamSpec, int] = {}
        self.storages: dict[int, int] = {}

    def node(self, node: Node) -> list[Any]:
        tag = meta.get_tag(node)
        shown = None if tag is None else [tag.kind, tag.region, [self._spec(s) for s in tag.specs]]
        kwargs = {name: self.value(v) for name, v in node.kwargs.items()}
        value = self.tensors(node.meta.get("val"))
        entry = [node.name, node.op, _target(node), self.value(node.args), kwargs, value, shown]
        symbols = _symbols(node)
        return [*entry, symbols] if symbols else entry

    def _spec(self, spec: ParamSpec) -> int:
        return self.specs.setdefault(spec, len(self.specs))

    def value(self, value: Any) -> Any:
        """An argument: a JSON value as it is, others as an object with one key."""
        if isinstance(value, Node):
            return {"node": value.name}
        if isinstance(value, list | tuple):
            return (
                [self.value(v) for v in value]
                if isinstance(value, list)
                else {"tuple": [self.value(v) for v in value]}
            )
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        for kind, name in CONSTANTS.items():
            if isinstance(value, kind):
                return {name: str(value).removeprefix("torch.")}
        if isinstance(value, slice):
            return {"slice": [self.value(v) for v in (value.start, value.stop, value.step)]}
        return {"text": str(value)}

    def tensors(self, value: Any) -> Any:
        """Returns what a node stands for: [dtype, shape, stride, storage, its bytes, offset], a
        list of such, or the name of a type.
        """
        if isinstance(value, list | tuple):
            return {"several": [self.tensors(v) for v in value]}
        if not isinstance(value, torch.Tensor):
            return None if value is None else getattr(value, "__name__", type(value).__name__)
        number, num_bytes, where = _storage(value, self.storages)
        dtype = str(value.dtype).removeprefix("torch.")
        return [dtype, _hints(value.shape), _hints(_stride(value)), number, num_bytes, where]


def _storage(tensor: Tensor, known: dict[int, int]) -> tuple[int, int, int]:
    if tensor.layout is not torch.strided:
        return known.setdefault(id(tensor), len(known)), 0, 0
    storage = tensor.untyped_storage()
    number = known.setdefault(storage._cdata, len(known))
    return number, at_most(storage.nbytes()), hint(tensor.storage_offset())


def _symbols(node: Node) -> list[str] | None:
    """The shape in words, where it has symbols."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or not any(
        isinstance(size, torch.SymInt) for size in val.shape
    ):
        return meta.get_symbols(node)
    return [str(size) for size in val.shape]


def _stride(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()


def _hints(sizes: Any) -> list[int]:
    return [hint(size) for size in sizes]


def _target(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}.{target._overloadname}"
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


# -- reading


def of_text(text: str) -> tuple[GraphModule, Plan, str]:
    """The graph, the plan that its passes got, and the pass that made it.

    Raises:
        FormatError: the text is something else, or damaged.
    """
    try:
        return _read(json.loads(text))
    except FormatError:
        raise
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RuntimeError,
        OverflowError,
    ) as error:
        raise FormatError(
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error


def _read(values: Any) -> tuple[GraphModule, Plan, str]:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise FormatError(f'no graph of format {FORMAT}: the key "format" is missing or another')
    reader = _Reader()
    reader.specs = [ParamSpec.of_values(reader.value(spec)) for spec in values["specs"]]
    for entry in values["nodes"]:
        reader.node(*entry)
    if not any(node.op == "output" for node in reader.graph.nodes):
        raise FormatError("the graph has no output: the text is cut off")
    set_for_backward(output(reader.graph), values["saved"])
    reader.graph.lint()
    module = SimpleNamespace(graph=reader.graph, meta={})  # what passes that only read look at
    return cast("GraphModule", module), _plan_of(values["plan"]), str(values["pass"])


def _plan_of(values: dict[str, Any]) -> Plan:
    costs = values["costs"]
    if costs is not None:
        links = tuple((str(name), Link(*fields)) for name, *fields in costs["links"])
        kernels = tuple((str(key), float(seconds)) for key, seconds in costs.get("kernels", ()))
        costs = Costs(**{**costs, "links": links, "kernels": kernels})
    regions = values.get("regions", "auto")
    return Plan(
        **{
            **values,
            "costs": costs,
            "regions": tuple(map(str, regions)) if isinstance(regions, list) else regions,
            **{
                name: tuple((unit, fqn) for unit, fqn in values.get(name, ()))
                for name in ("kept", "dropped", "states_on_host")
            },
            **{name: CODES[values.get(name, "")] for name in QUANTIZED},
            **{
                name: tuple(str(each) for each in values.get(name, ()))
                for name in ("exact", "recomputed", "offloaded")
            },
        }
    )


class _Reader:
    def __init__(self) -> None:
        self.graph = Graph()
        self.nodes: dict[str, Node] = {}
        self.specs: list[ParamSpec] = []
        self.storages: dict[int, Tensor] = {}

    def node(
        self,
        name: str,
        op: str,
        target: str,
        args: Any,
        kwargs: Any,
        value: Any,
        tag: Any,
        symbols: Any = None,
    ) -> None:
        if op not in ("placeholder", "call_function", "output", "get_attr"):
            raise FormatError(f"node {name!r} is a {op!r}")
        if name in self.nodes:
            raise FormatError(f"two nodes are called {name!r}")
        what = _op(target) if op == "call_function" else target
        named = {str(k): self.value(v) for k, v in kwargs.items()}
        node = self.graph.create_node(op, what, self.value(args), named, name)
        if node.name != name:
            raise FormatError(f"node {name!r} has a name that no graph has")
        self.nodes[name] = node
        if value is not None:
            node.meta["val"] = self.tensors(value)
        if symbols is not None:
            meta.set_symbols(node, [str(size) for size in symbols])
        if tag is not None:
            kind, region, specs = tag
            meta.set_tag(node, CommTag(str(kind), int(region), tuple(self.specs[n] for n in specs)))

    def value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.value(v) for v in value]
        if not isinstance(value, dict):
            return value
        ((kind, inner),) = value.items()
        return self._kinds[kind](self, inner)

    def _node(self, name: str) -> Node:
        if name not in self.nodes:
            raise FormatError(f"%{name} is read before it is computed")
        return self.nodes[name]

    def _tuple(self, inner: list[Any]) -> tuple[Any, ...]:
        return tuple(self.value(v) for v in inner)

    def _slice(self, inner: list[Any]) -> slice:
        return slice(*self._tuple(inner))

    _kinds: dict[str, Callable[[_Reader, Any], Any]] = {  # noqa: RUF012  # a constant
        "node": _node,
        "tuple": _tuple,
        "slice": _slice,
        "float": lambda self, inner: float(inner),
        "dtype": lambda self, inner: _constant(torch.dtype, inner),
        "memory_format": lambda self, inner: _constant(torch.memory_format, inner),
        "layout": lambda self, inner: _constant(torch.layout, inner),
        "text": lambda self, inner: Opaque.named(str(inner)),
    }

    def tensors(self, value: Any) -> Any:
        if isinstance(value, str):
            return Opaque.named(value)
        if isinstance(value, dict):
            return [self.tensors(v) for v in value["several"]]
        if value is None:
            return None
        dtype, shape, stride, number, num_bytes, where = value
        if (
            any(not isinstance(n, int) or n < 0 for n in (*shape, *stride, num_bytes, where))
            or math.prod(shape) > MAX_ELEMENTS
        ):
            raise FormatError(f"{value} is no tensor")
        if number not in self.storages:
            self.storages[number] = torch.empty(
                min(num_bytes, MAX_ELEMENTS), dtype=torch.uint8, device="meta"
            )
        empty = torch.empty(0, dtype=_constant(torch.dtype, dtype), device="meta")
        if len(stride) != len(shape):  # not strided
            return empty.new_empty(shape)
        return empty.set_(self.storages[number].untyped_storage(), where, shape, stride)


def _constant(kind: type, name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, kind):
        raise FormatError(f"{name!r} is no {kind.__name__}")
    return found


def _op(name: str) -> Any:
    """An op of a known namespace, `getitem`, or an `Opaque`."""
    if name == "getitem":
        return operator.getitem
    namespace, _, rest = name.partition(".")
    if namespace not in NAMESPACES:
        return Opaque.named(name)
    op, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), op), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise FormatError(f"{name!r} is no op")
    return found
