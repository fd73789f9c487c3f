"""An executor that computes nothing: graphs are captured, planned and rewritten as for Inductor,
and running one only tells our units what they need to go on. Outputs are zeros of the right size,
or, where they are large, memory that nobody has written to.

So a program goes through its steps with graphs that would not fit here, and `explain`, records and
dumps know what is predicted of them.

Private torch used here (tried on 2.13 and 2.15): `torch._dynamo.backends.common.aot_autograd`,
`torch._inductor.decomposition.select_decomp_table`,
`torch._inductor.fx_passes.joint_graph.joint_graph_passes` and its hook in the configuration. Both
functions take more than a second to import: where a graph is compiled, not in every command.
"""

from __future__ import annotations

import operator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.config as inductor_config
from torch._dynamo.backends.common import aot_autograd
from torch.fx import Interpreter
from torch.utils._pytree import tree_map

from compiled_fsdp.ir.collectives import STARTS
from compiled_fsdp.ir.expected import hint
from compiled_fsdp.ir.graph import find, is_matmul
from compiled_fsdp.ir.schema import FREE, GATHER_NEXT, TO_LOWER, UPDATE, traits_of
from compiled_fsdp.ir.subgraphs import with_inside
from compiled_fsdp.planning.costs import flops, traffic
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.planning.planner import predict
from compiled_fsdp.torch_private.compiling import instead_of
from compiled_fsdp.wire.copies import planned_apart

from .driver import run_half, run_joint
from .partition import partition
from .stitch import stitch
from .whole_step import WholeStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.planner import Timeline

LARGE = 1 << 22  # elements of a tensor from which on it stays as memory is
STATE_AT = 7  # of the arguments of `update_`, the state that was fetched for it
BACKENDS = ("inductor", "compiled_fsdp", "compiled_fsdp_eager")


@dataclass
class Tally:
    """What graphs would have done since it began.

    flops: of matmuls and attentions.
    graphs, total, exposed, wire, sent: how many without anything of ours ran, which have no record,
        and what is predicted of them; as in `GraphRecord.predicted`.
    """

    flops: float = 0.0
    graphs: int = 0
    total: float = 0.0
    exposed: float = 0.0
    wire: float = 0.0
    sent: float = 0.0

    def add(self, line: Timeline, sent: float) -> None:
        """A graph without a record has run."""
        self.graphs += 1
        self.total += line.total
        self.exposed += sum(line.exposed.values())
        self.wire += line.on_wire
        self.sent += sent


@contextmanager
def unrun() -> Iterator[Tally]:
    """Inside, what is compiled by Inductor, or by our own backends, is not run."""
    tally = Tally()

    def backend(gm: GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        from torch._inductor.decomposition import select_decomp_table

        def half(gm: GraphModule, _: Any) -> Callable[..., Any]:
            return _Unrun.of(gm, tally)

        return aot_autograd(
            fw_compiler=half,
            bw_compiler=half,
            inference_compiler=lambda gm, inputs: half(_joint(gm), inputs),
            partition_fn=partial(_partition, WholeStep.of(options)),
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )(gm, inputs)

    with instead_of(BACKENDS, backend), planned_apart():
        yield tally


def _partition(
    step: WholeStep | None, joint: GraphModule, inputs: Any, **options: Any
) -> tuple[GraphModule, GraphModule]:
    plan = current_plan()
    halves = partition(_joint(joint, step), inputs, plan, **options)
    if step is None:
        return halves
    return stitch(*halves, options["num_fwd_outputs"], step, plan, is_fused=True)


def _joint(gm: GraphModule, step: WholeStep | None = None) -> GraphModule:
    """Inductor's passes over a joint graph, which save memory that is never there, and ours."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    with inductor_config.patch(joint_custom_post_pass=None):  # ours, by hand
        joint_graph_passes(gm)
    return run_joint(gm, step, is_fused=True)


class _Unrun(Interpreter):
    """Goes through a graph, and runs nothing but what tells a unit something."""

    @classmethod
    def of(cls, gm: GraphModule, tally: Tally) -> Callable[..., Any]:
        """The runner of a half, before the passes for halves."""
        number = sum(flops(node) for node in with_inside(gm.graph) if is_matmul(node))
        costs, line, sent = current_plan().costs, None, 0.0
        if costs is not None and not find(gm.graph, *TO_LOWER):
            line = predict(gm.graph, costs.fused(True))
            sent = sum(traffic(node)[0] for node in gm.graph.nodes if node.target in STARTS)
        gm = run_half(gm, is_fused=True)

        def run(args: list[Any]) -> Any:
            tally.flops += number
            if line is not None:
                tally.add(line, sent)
            return cls(gm).boxed_run(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def run_node(self, n: Node) -> Any:
        """Run a node, or make something of the size of its result."""
        is_nothing = n.target is FREE or n.target is GATHER_NEXT  # here, where nothing is gathered
        effect = traits_of(n.target).effect and not is_nothing
        if n.op not in ("call_function", "call_module") or n.target is operator.getitem or effect:
            return super().run_node(n)
        return tree_map(_like, n.meta.get("val"))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it; an update without the state that would have been fetched: here is one memory."""
        is_fetched = target is UPDATE and len(args) > STATE_AT
        return super().call_function(target, args[:STATE_AT] if is_fetched else args, kwargs)


def _like(value: Any) -> Any:
    """A tensor of this size, or the number that a symbol stands for."""
    if isinstance(value, torch.SymInt):
        return hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(
        [hint(size) for size in value.shape],
        [hint(stride) for stride in value.stride()],
        dtype=value.dtype,
        device=value.device,
    )
    return made if made.numel() > LARGE else made.zero_()
