"""The printed graph: one printer for dumps, errors, docstrings and tests; and the folder of dumps, one file a pass.

One node a line: name, dtype and shape, short op name, arguments, and the parameters it communicates:

    %all_gather_into_tensor: f32[16] = all_gather_into_tensor(%flat, 2, '0')  # layers.0: gather
"""

from __future__ import annotations

import difflib
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from . import meta
from .collectives import WAIT
from .graph import is_backward, starts
from .memory import profile
from .plan import current_plan
from .planner import predict
from .records import write_records
from .regions import find_regions
from .schema import FREE, KEEP_SLICE, REDUCE_GRAD, REDUCE_LATER, UNSHARD, UNSHARD_SLICE
from .spec import ParamSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.fx import Graph, GraphModule, Node

    from .passes.base import Pass

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
    torch.uint8: "u8",
}
_SPEC_FROM: dict[object, int] = {UNSHARD: 1, REDUCE_GRAD: 2, KEEP_SLICE: 1, UNSHARD_SLICE: 1, REDUCE_LATER: 3}


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
    name = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", str(node.target))
    arguments = ", ".join([*map(_text, _arguments(node)), *(f"{k}={_text(v)}" for k, v in node.kwargs.items())])
    kind = _type(node)
    left = f"%{node.name}: {kind} = " if kind else ""
    return f"{left}{name}({arguments}){_note(node)}"


def _arguments(node: Node) -> list[object]:
    """An fsdp op's constants are named by the parameter; the reshard class is what else matters."""
    count = _SPEC_FROM.get(node.target)
    if count is None:
        return list(node.args)
    spec = ParamSpec.of(node.args[count:])
    return [*node.args[:count], spec.fqn, f"reshard={spec.reshard}"]


def _note(node: Node) -> str:
    tag = meta.get_tag(node)
    if tag is None:
        return ""
    unit = tag.unit.split("#")[0]
    return f"  # {unit}: {tag.kind}"


def _text(value: object) -> str:
    if isinstance(value, torch.fx.Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, torch.dtype):
        return _DTYPES.get(value, str(value))
    return repr(value) if isinstance(value, str) and "=" not in value else str(value)


def _type(node: Node) -> str:
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return f"{_DTYPES.get(val.dtype, str(val.dtype))}[{','.join(map(str, val.shape))}]"
    if isinstance(val, list | tuple):
        return "tuple"
    return "" if val is None else type(val).__name__


def collectives(graph: Graph) -> list[str]:
    """The collectives, casts of parameters and frees, in order, in the printed form."""
    kept = {*starts(graph)}
    lines = []
    for node in graph.nodes:
        is_ours = node.op == "call_function" and (node.target in _SPEC_FROM or node.target in (WAIT, FREE))
        if node in kept or is_ours:
            lines.append(_line(node))
    return lines


def provenance(graph: Graph, made_by: str, held: list[str]) -> str:
    """The first line of a dump: what made it, what holds of it, and what it communicates."""
    gathers, reduces = find_regions(graph, "gather"), find_regions(graph, "reduce")
    moved = [sum(s.shard_numel * s.group_size * s.dtype.itemsize for s in r.tag.specs) for r in gathers if r.starts]
    count = f"{sum(bool(r.starts) for r in gathers)} gathers, {sum(bool(r.starts) for r in reduces)} reductions"
    size = f"{sum(moved)} bytes gathered, largest bucket {max(moved, default=0)}"
    return f"# made by {made_by}; holds: {', '.join(held) or 'nothing yet'}; {count}; {size}"


# -- the folder

_folder: Path | None = None
_number = 0


def folder() -> Path | None:
    """Where dumps go: the innermost `dumped_to`, else COMPILED_FSDP_DUMP, else nowhere."""
    if _folder is not None:
        return _folder
    name = os.environ.get("COMPILED_FSDP_DUMP")
    return Path(name) if name else None


@contextmanager
def dumped_to(path: str | Path) -> Iterator[Path]:
    """Write dumps of graphs compiled inside to `path`; compile caches are bypassed, so that every pass runs."""
    global _folder
    if not isinstance(path, str | Path):
        raise TypeError(f"dumped_to: path is {path!r}; should be the path of a folder")
    if Path(path).exists() and not Path(path).is_dir():
        raise NotADirectoryError(f"dumped_to: {path} is a file; should be a folder, or nothing yet")
    before, _folder = _folder, Path(path)
    try:
        yield _folder
    finally:
        _folder = before


class Dump:
    """The files of one graph: `rank0/003_backward/02_bucket_all_gather.txt`, and `.diff` beside it."""

    def __init__(self, gm: GraphModule, kind: str, held: Sequence[str] = (), is_fused: bool = False) -> None:
        global _number
        root = folder()
        self.path: Path | None = None
        self.is_fused = is_fused
        self.held = list(held)
        self.step = 0
        self.before: list[str] = []
        if root is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            self.path = root / f"rank{rank}" / f"{_number:03d}_{kind}"
            self.path.mkdir(parents=True, exist_ok=True)
            _number += 1
            self._write(gm.graph, "capture")

    def after_pass(self, gm: GraphModule, entry: Pass) -> None:
        """Write the graph after a pass."""
        self.held.append(entry.provides.name)
        if self.path is not None:
            self._write(gm.graph, entry.name)
            if entry.provides.name == "VERIFIED":
                self._write_memory(gm.graph)
                self._write_timeline(gm.graph)
                write_records(gm.graph, self.path, self.is_fused)

    def _write_memory(self, graph: Graph) -> None:
        """The memory of the finished graph, `memory.txt`, for both executors."""
        assert self.path is not None
        plain, fused = profile(graph), profile(graph, is_fused=True)
        (self.path / "memory.txt").write_text(f"as it is, {plain}\n\nunder Inductor, {fused}\n")

    def _write_timeline(self, graph: Graph) -> None:
        """What the finished graph is expected to take, `timeline.txt`, for both executors; nothing without costs."""
        assert self.path is not None
        costs = current_plan().costs
        if costs is not None:
            plain, fused = predict(graph, costs.fused(False)), predict(graph, costs.fused(True))
            (self.path / "timeline.txt").write_text(f"as it is, {plain}\n\nunder Inductor, {fused}\n")

    def _write(self, graph: Graph, name: str) -> None:
        assert self.path is not None
        stem = f"{self.step:02d}_{name}"
        (self.path / f"{stem}.txt").write_text(f"{provenance(graph, name, self.held)}\n{show(graph)}\n")
        now = collectives(graph)
        if self.step:
            changes = difflib.unified_diff(self.before, now, "before", f"after {name}", lineterm="", n=1)
            (self.path / f"{stem}.diff").write_text("\n".join(changes) + "\n")
        self.before = now
        self.step += 1


def kind_of(graph: Graph) -> str:
    """Forward or backward, by the inputs."""
    return "backward" if is_backward(graph) else "forward"
