"""What the tests of passes share: graphs written by hand, graphs of real models, and the graphs
that docstrings show.

Nothing here communicates: values are fake tensors, and the process group is torch's fake one, at
any world size.
"""

from __future__ import annotations

import ast
import operator
import re
from contextlib import contextmanager
from difflib import unified_diff
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from expecttest import TestCase
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore

import compiled_fsdp
import compiled_fsdp.compiler.backend  # registers "compiled_fsdp_eager"
from compiled_fsdp.inspection.dump_folder import Dumped
from compiled_fsdp.ir.graph import Builder
from compiled_fsdp.ir.printer import show
from compiled_fsdp.ir.schema import KEEP_SLICE, REDUCE_GRAD, UNSHARD, UNSHARD_SLICE
from compiled_fsdp.ir.spec import ParamSpec
from compiled_fsdp.planning.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import ModuleType

aten = torch.ops.aten
PLAN = Plan(prefetch=1, backward_prefetch=1, reduces_in_flight=1, bucket_bytes=0)
WORLD = 2


def unit(
    name: str, shapes: dict[str, tuple[int, ...]], world: int = WORLD, **changes: Any
) -> list[ParamSpec]:
    """The specs of a unit's parameters, back to back in one flat buffer."""
    specs: list[ParamSpec] = []
    defaults: dict[str, Any] = {
        "dtype": torch.float32,
        "group_size": world,
        "group": "shard",
        "dim": 0,
        "gather_algorithm": "",
        "reduce_group": changes.get("group", "shard"),
        "sync": "reduce",
        "is_accumulating": False,
        "hook": "",
        "overlap": "",
        "reshard": "gather",
        "post_size": 1,
        "post_group": "",
        "reduce_dtype": torch.float32,
        "reduce_op": "sum",
        "reduce_algorithm": "reduce_scatter",
        "pre_divide": 1.0,
        "post_divide": float(world),
        "replicate_size": 1,
        "replicate_group": "",
        "unit": name,
    }
    for fqn, shape in shapes.items():
        offset = specs[-1].offset + specs[-1].shard_numel if specs else 0
        specs.append(ParamSpec(offset=offset, shape=shape, fqn=fqn, **{**defaults, **changes}))
    return specs


def numel(specs: list[ParamSpec]) -> int:
    """Elements of the flat buffer that holds these, and nothing else."""
    return specs[-1].offset + specs[-1].shard_numel


class Hand:
    """A graph written by hand, one call a node: `hand.input(...)`, `hand(op, ...)`,
    `hand.returns(...)`.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.graph = Graph()
        self.end = self.graph.output(())

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        with self.graph.inserting_before(self.end), self.mode:
            node = self.graph.placeholder(name)
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def __call__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return Builder(self.end, self.end)(op, *args, **kwargs)

    def unshard(self, flat: Node, spec: ParamSpec) -> Node:
        return self(UNSHARD, flat, *spec.args())

    def reduce_grad(self, grad: Node, flat: Node, spec: ParamSpec) -> Node:
        return self(REDUCE_GRAD, grad, flat, *spec.args())

    def keep_slice(self, param: Node, spec: ParamSpec) -> Node:
        return self(KEEP_SLICE, param, *spec.args())

    def unshard_slice(self, kept: Node, spec: ParamSpec) -> Node:
        return self(UNSHARD_SLICE, kept, *spec.args())

    def compute(self, node: Node) -> Node:
        """Something that the user computes."""
        return self(aten.neg.default, node)

    def add(self, a: Node, b: Node) -> Node:
        return self(aten.add.Tensor, a, b)

    def returns(self, *nodes: Node | None) -> GraphModule:
        self.end.args = (list(nodes),)
        return GraphModule(torch.nn.Module(), self.graph)


class GraphTest(TestCase):
    """Inline expectations of whole graphs."""

    def assertGraph(self, gm: GraphModule, expected: str) -> None:
        gm.graph.lint()
        self.assertExpectedInline(show(gm.graph), expected, skip=1)

    def assertUnchanged(
        self, run: Callable[[GraphModule, Plan], GraphModule], gm: GraphModule, plan: Plan = PLAN
    ) -> None:
        before = show(gm.graph)
        after = show(run(gm, plan).graph)
        self.assertEqual(before, after)

    def assertDocumented(self, module: ModuleType, heading: str, gm: GraphModule) -> None:
        """The graph is the one under `heading` in the module's docstring: same ops, same data flow,
        same order.
        """
        self.assertEqual(documented(module.__doc__ or "", heading), flow(gm.graph))


# -- graphs as docstrings write them

_SHORT = {
    "all_gather_into_tensor": "all_gather",
    "wait_tensor": "wait",
    "reduce_scatter_tensor": "reduce_scatter",
    "neg": "compute",
}


def flow(graph: Graph) -> list[str]:
    """Ops and what they read: inputs by name, results as the number of the line that makes them; no
    reshapes.
    """
    lines: list[str] = []
    names: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            names[node] = node.name
        if node.op == "call_function":
            op = getattr(node.target, "_opname", None) or node.target.__name__
            if op == "reshape":
                names[node] = names[node.args[0]]
                continue
            names[node] = f"#{len(lines)}"
            lines.append(f"{_SHORT.get(op, op)}({', '.join(names[n] for n in _reads(node.args))})")
    return lines


def _reads(value: Any) -> list[Node]:
    if isinstance(value, Node):
        return [value]
    return [n for entry in value for n in _reads(entry)] if isinstance(value, list | tuple) else []


def documented(docstring: str, heading: str) -> list[str]:
    """The same for the block under `heading`: each line is Python, but for the `%` and for `...
    compute ...`.
    """
    block = re.search(rf"^{re.escape(heading)}.*:\n\n((?:    .*\n|\n)+)", docstring, re.MULTILINE)
    assert block is not None, f"no block {heading!r}"
    lines: list[str] = []
    names: dict[str, str] = {}
    for line in block[1].splitlines():
        text = line.strip().replace("%", "v_")
        if text.startswith("..."):
            source = re.search(r"v_\w+", text)
            lines.append(f"compute({names.get(source[0], source[0][2:]) if source else ''})")
        elif text:
            statement = ast.parse(text).body[0]
            assert isinstance(statement, ast.Assign | ast.Expr)
            result = _evaluate(statement.value, names, lines)
            if isinstance(statement, ast.Assign):
                assert isinstance(statement.targets[0], ast.Name)
                names[statement.targets[0].id] = result[0]
    return lines


def _evaluate(node: ast.expr, names: dict[str, str], lines: list[str]) -> list[str]:
    if isinstance(node, ast.Call):
        reads = [r for a in node.args for r in _evaluate(a, names, lines)]
        if ast.unparse(node.func) == "reshape":
            return reads
        lines.append(f"{ast.unparse(node.func)}({', '.join(reads)})")
        return [f"#{len(lines) - 1}"]
    if isinstance(node, ast.List):
        return [r for e in node.elts for r in _evaluate(e, names, lines)]
    if isinstance(node, ast.Name) and node.id.startswith("v_"):
        return [names.get(node.id, node.id[2:])]
    return []


# -- graphs of real models


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """A process group of this size in one process; its collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()


def trace(
    model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], folder: Path, backward: bool = True
) -> dict[str, str]:
    """Compile a sharded model, and its backward; every graph that was dumped, by `forward/01_lower`
    and the like.
    """
    with compiled_fsdp.dumped_to(folder):
        out = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(*inputs)
        leaves = out if isinstance(out, tuple) else (out,)
        if backward:
            sum(leaf.float().sum() for leaf in leaves).backward()
    found = {}
    for path in sorted(folder.rglob("*_*.txt")):
        kind = path.parent.name.split("_", 1)[1]
        found[f"{kind}/{path.stem}"] = Dumped(path.with_suffix("")).text
    return found


def body(text: str) -> str:
    """A dump without its first line."""
    return text.split("\n", 1)[1].rstrip()


def changes(before: str, after: str) -> str:
    """What differs between two dumps, each place with one line before and after it."""
    lines = unified_diff(body(before).splitlines(), body(after).splitlines(), n=1, lineterm="")
    return "\n".join(list(lines)[2:])


def ops(graph: Graph) -> list[str]:
    """Names of the ops, in order."""
    return [
        getattr(n.target, "_opname", str(n.target)) for n in graph.nodes if n.op == "call_function"
    ]


getitem = operator.getitem
