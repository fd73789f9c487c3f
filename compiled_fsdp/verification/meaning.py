"""The meaning of a half graph: what it computes and communicates, whatever its order, captured
before the passes and compared after them.

Every value gets an expression: the op and the expressions of what it reads; equal expressions are
one object. A captured `unshard` stands for itself. A lowered gather must have the expression that
`transfers.py` makes of the same parameters: then it stands for the same `unshard`. Likewise a sum
of `reduce_grad`s is the set of its terms, and a lowered reduction stands for the terms that it
carries. One that is left in flight has the place of the gradient and of its mark, if what the unit
does with it later completes the same expression. So both graphs return the same expressions and
have the same effects (collectives of the user's, marks, retained gradients, writes to buffers), or
a pass changed the program: a wrong buffer, group, dtype, column or divisor.

What this does not see is order, the business of the other invariants in `passes/verify.py`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import torch

from compiled_fsdp.ir import transfers
from compiled_fsdp.ir.graph import find, output, placeholders, sum_root, value
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.ir.schema import (
    MARK_GRADS,
    REDUCE_GRAD,
    STEP,
    UNSHARD_SLICE,
    param_spec,
    traits_of,
)

from .expressions import Expr, Expressions, returned, walk
from .lowered import Gather, Reduce, lowered_form

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.fx import Graph, Node

    from compiled_fsdp.ir.regions import Region
    from compiled_fsdp.ir.spec import ParamSpec


class Captured:
    """A half graph before the passes: its expressions, and the fsdp ops that they have to turn into
    communication.
    """

    def __init__(self, graph: Graph) -> None:
        self.run = Expressions()
        self.gathers: dict[ParamSpec, list[Gather]] = {}
        self.reduces: dict[ParamSpec, list[Reduce]] = {}
        self.inputs = interface(placeholders(graph))
        exprs, effects = walk(graph, self.run, lambda expr, _: expr, self._note)
        self.outputs = [None if _is_kept(e) else e for e in returned(graph, exprs)]
        self.effects = [e for e in effects if e is not None]
        self.marks = self._expected_marks(graph, exprs)

    def _note(self, node: Node, exprs: dict[Node, Expr]) -> Expr | None:
        """Returns what an fsdp op stands for; None for other nodes."""
        run = self.run
        if traits_of(node.target).lowers_to == "gather":
            spec = param_spec(node)
            spec = spec.over_post_group() if node.target is UNSHARD_SLICE else spec
            source: Node = node.args[0]  # type: ignore[assignment]
            flat = transfers.Source(exprs[source], value(source).numel(), value(source).dtype)
            result = run.make("unshard", flat.flat, spec)
            known = self.gathers.setdefault(spec, [])
            if all(entry.result is not result for entry in known):
                known.append(Gather(flat, result))
            return result
        if node.target is REDUCE_GRAD:
            spec = param_spec(node)
            grad, flat_node = cast("tuple[Node, Node]", node.args[:2])
            place = value(flat_node)
            grad_expr, flat_expr = exprs[grad], exprs[flat_node]
            result = run.sum_of([("reduce_grad", grad_expr, flat_expr, spec)])
            entry = Reduce(
                grad_expr, value(grad).dtype, flat_expr, place.numel(), place.dtype, result
            )
            self.reduces.setdefault(spec, []).append(entry)
            return result
        return None

    def _expected_marks(
        self, graph: Graph, exprs: dict[Node, Expr]
    ) -> dict[Expr, tuple[Expr, list[int]]]:
        """Returns for each flat gradient that is fully reduced its flat buffer, and the offsets of
        its parameters.
        """
        found: dict[Node, tuple[Expr, list[int]]] = {}
        for node in graph.nodes:
            if node.target is REDUCE_GRAD:
                spec = param_spec(node)
                if spec.sync == "reduce":
                    found.setdefault(sum_root(node), (exprs[node.args[1]], []))[1].append(
                        spec.offset
                    )
        return {exprs[r]: (flat, sorted(offsets)) for r, (flat, offsets) in found.items()}

    # -- comparing

    def differences(self, graph: Graph) -> Iterator[tuple[Node, str]]:
        """Where the graph after `lower`, or after any later pass, is another program than the
        captured one.
        """
        lowered = lowered_form(graph, self.run, self.gathers, self.reduces)
        carried = Counter(self._is_reduced(region) for region in find_regions(graph, "reduce"))
        if carried[False]:
            yield output(graph), "a reduction carries gradients that were not captured"
        exprs, effects = walk(graph, self.run, lowered.of)
        end = output(graph)
        stepped = {exprs[node.args[0]] for node in find(graph, STEP)}  # type: ignore[index]
        wanted = [None if expr in lowered.left | stepped else expr for expr in self.outputs]
        for i, (before, now) in enumerate(zip(wanted, returned(graph, exprs), strict=False)):
            if before is not now:
                node = end.args[0][i]  # type: ignore[index]
                yield (node or end), f"output {i} is not what was captured"  # type: ignore[misc]
        marks = [
            self.run(STEP if result in stepped else MARK_GRADS, result, flat, offsets)
            for result, (flat, offsets) in self.marks.items()
            if result not in lowered.left
        ]
        expected = Counter([*self.effects, *lowered.effects, *marks])
        missing, surplus = expected - Counter(effects), Counter(effects) - expected
        for expr in surplus:
            node = next(n for n in reversed(graph.nodes) if exprs.get(n) is expr)
            yield (
                node,
                f"%{node.name} communicates or writes what was not captured, or once too often",
            )
        if missing:
            yield (
                end,
                "what was captured does not happen: "
                f"{sorted({e.text.split(' (')[0] for e in missing})}",
            )

    def _is_reduced(self, region: Region) -> bool:
        return all(spec in self.reduces for spec in region.tag.specs)


def interface(nodes: Iterable[Node]) -> list[str]:
    """Names, dtypes and shapes of the inputs."""
    return [f"{n.name}: {_type(n.meta.get('val'))}" for n in nodes]


def _type(val: Any) -> str:
    return f"{val.dtype}{list(val.shape)}" if isinstance(val, torch.Tensor) else type(val).__name__


def _is_kept(expr: Any) -> bool:
    """A flat gradient whose terms the unit keeps for a later backward: the graph returns None for
    it.
    """
    return isinstance(expr, Expr) and bool(expr.terms) and expr.terms[0][3].sync != "reduce"
