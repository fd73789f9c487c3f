"""The printed graph: one printer for dumps, errors, docstrings and tests.

One node a line: name, dtype and shape, short op name, arguments, and the parameters it
communicates:

    %all_gather_into_tensor: f32[16] = all_gather_into_tensor(%flat, 2, '0')  # layers.0: gather
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import meta
from .collectives import CONVERT, WAIT
from .graph import op_name, starts
from .opaque import Opaque
from .quantized import gathered_bytes
from .regions import find_regions
from .schema import FREE, param_spec, traits_of

if TYPE_CHECKING:
    from torch.fx import Graph, Node

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.float8_e4m3fn: "f8e4m3fn",
}
MOST_CHARACTERS, BEGIN = 200, 40  # of a text among the arguments


def show(graph: Graph) -> str:
    """The whole graph as text, one line a node."""
    return "\n".join(_line(node) for node in graph.nodes)


def around(node: Node, num_nodes: int = 10) -> str:
    """The nodes next to one, which is marked."""
    nodes = list(node.graph.nodes)
    at = nodes.index(node)
    near = nodes[max(0, at - num_nodes) : at + num_nodes + 1]
    return "\n".join(("-> " if n is node else "   ") + _line(n) for n in near)


def _line(node: Node) -> str:
    return printable(_text_of(node))


def printable(text: str) -> str:
    """Names come from users: control characters in them are shown, not sent to a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _text_of(node: Node) -> str:
    if node.op == "output":
        return f"return {_text(node.args[0])}"
    if node.op == "placeholder":
        return f"%{node.name}: {_type(node)}"
    if node.op == "get_attr":
        return f"%{node.name} = @{node.target}"
    name = op_name(node.target)
    arguments = ", ".join(
        [*map(_text, _arguments(node)), *(f"{k}={_text(v)}" for k, v in node.kwargs.items())]
    )
    kind = _type(node)
    assigned = f"%{node.name}: {kind} = " if kind else ""
    return f"{assigned}{name}({arguments}){_note(node)}"


def _arguments(node: Node) -> list[object]:
    """An fsdp op's constants are named by the parameter; the reshard class is what else matters."""
    count = traits_of(node.target).spec_at
    if not count:
        return list(node.args)
    spec = param_spec(node)
    batch = [f"batch={spec.batch}"] if spec.batch else []
    return [*node.args[:count], spec.fqn, f"reshard={spec.reshard}", *batch]


def _note(node: Node) -> str:
    tag = meta.get_tag(node)
    if tag is None:
        return ""
    unit, batch = tag.unit.split("#")[0], tag.specs[0].batch
    return f"  # {unit}: {tag.kind}" + (f", batch {batch}" if batch else "")


def _text(value: object) -> str:
    if isinstance(value, torch.fx.Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, torch.dtype):
        return _DTYPES.get(value, str(value))
    if isinstance(value, str) and "=" not in value.partition("\n")[0]:
        return _quoted(value)
    return str(value)


def _quoted(text: str) -> str:
    """A text that fits on a line; of a longer one, how it begins."""
    line = text.partition("\n")[0]
    begin = line if len(line) <= MOST_CHARACTERS else line[:BEGIN]
    return repr(begin) if begin == text else f"{begin!r}..."


def _type(node: Node) -> str:
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        shape = meta.get_symbols(node) or map(str, val.shape)
        return f"{_DTYPES.get(val.dtype, str(val.dtype))}[{','.join(shape)}]"
    if isinstance(val, Opaque):
        return val.__name__
    if isinstance(val, list | tuple):
        return "tuple"
    return "" if val is None else type(val).__name__


def collectives(graph: Graph) -> list[str]:
    """The collectives, casts of parameters and frees, in order, in the printed form."""
    kept = {*starts(graph)}
    lines = []
    for node in graph.nodes:
        is_ours = node.op == "call_function" and (
            traits_of(node.target).spec_at > 0 or node.target in (WAIT, FREE)
        )
        is_cast = node.target is CONVERT and meta.get_tag(node) is not None
        if node in kept or is_ours or is_cast:
            lines.append(_line(node))
    return lines


def provenance(graph: Graph, made_by: str, held: list[str]) -> str:
    """The first line of a dump: what made it, what holds of it, and what it communicates."""
    gathers, reduces = find_regions(graph, "gather"), find_regions(graph, "reduce")
    moved = [gathered_bytes(r.tag.specs) for r in gathers if r.starts]
    count = (
        f"{sum(bool(r.starts) for r in gathers)} gathers, "
        f"{sum(bool(r.starts) for r in reduces)} reductions"
    )
    size = f"{sum(moved)} bytes gathered, largest bucket {max(moved, default=0)}"
    return f"# made by {made_by}; holds: {', '.join(held) or 'nothing yet'}; {count}; {size}"
