"""Our backends for `torch.compile`: "compiled_fsdp" (Inductor, said explicitly) and
"compiled_fsdp_eager" (no Inductor).

The second runs the same passes and executes the final FX graph as it is: it compiles in about a
second and computes with the same kernels as eager mode, which makes it the one to test and to debug
with.

Private torch used here (tried on 2.13): `torch._dynamo.backends.common.aot_autograd`, `boxed_nop`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.fx import Interpreter

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import phase_of, starts
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.sequence import owner
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.torch_private.compiling import config_of
from compiled_fsdp.torch_private.dynamo import donate_nothing
from compiled_fsdp.torch_private.tracing import is_profiling
from compiled_fsdp.wire.captured import captured
from compiled_fsdp.wire.ranges import title

from .driver import run_half, run_joint
from .inductor import install_passes, joint_pass_of
from .partition import StepPartitioner, is_unit, min_cut, partition
from .stitch import stitch
from .traced_step import step_of
from .whole_step import WholeStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, GraphModule, Node


def _partition(joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
    if is_unit(joint):
        return min_cut(joint, inputs, current_plan(), **options)
    return partition(run_joint(joint), inputs, current_plan(), **options)


def _compile_half(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
    gm = run_half(gm)
    plain: Callable[..., Any] = boxed_nop(gm, inputs)
    names = _names(gm.graph)
    if not names:
        return plain

    def run(args: list[Any]) -> Any:
        return Named(gm, names).boxed_run(args) if is_profiling() else plain(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _names(graph: Graph) -> dict[Node, str]:
    """Names in profiles of torch's own collectives, and of the waits for them."""
    phase, found = phase_of(graph), {}
    for node in (
        n for n in starts(graph) if str(n.target).startswith("_c10d_functional.") and get_tag(n)
    ):
        op = node.target._opname  # type: ignore[union-attr]
        found[node] = title(op, phase, owner(node))
        found.update(
            {
                user: title(f"wait {op}", phase, owner(node))
                for user in node.users
                if user.target is WAIT
            }
        )
    return found


class Named(Interpreter):
    """Runs a graph with a range around each of these nodes; only while a profiler is on."""

    def __init__(self, gm: GraphModule, names: dict[Node, str]) -> None:
        super().__init__(gm)
        self.names = names

    def run_node(self, n: Node) -> Any:
        """Run a node."""
        if n not in self.names:
            return super().run_node(n)
        with torch.profiler.record_function(self.names[n]):
            return super().run_node(n)


def _partition_step(
    step: WholeStep, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any
) -> tuple[GraphModule, GraphModule]:
    if is_unit(joint):
        return min_cut(joint, inputs, current_plan(), num_fwd_outputs=num_fwd_outputs, **options)
    halves = partition(
        run_joint(joint, step), inputs, current_plan(), num_fwd_outputs=num_fwd_outputs, **options
    )
    return stitch(*halves, num_fwd_outputs, step, current_plan(), is_fused=False)


@register_backend(name="compiled_fsdp_eager")
def compiled_fsdp_eager(gm: GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
    """All passes, no Inductor; of a whole step with the options that `compile_step` gives."""
    return without_inductor(gm, inputs, _compile_half, **options)


def without_inductor(
    gm: GraphModule, inputs: list[torch.Tensor], compile_half: Callable[..., Any], **options: Any
) -> Any:
    """As "compiled_fsdp_eager", with something else to make of each half; it has to call `run_half`
    itself.
    """

    def compile_inference(gm: GraphModule, inputs: Any) -> Any:
        return compile_half(run_joint(gm), inputs)

    def compile_backward(gm: GraphModule, inputs: Any) -> Any:
        donate_nothing()  # only Inductor plans memory
        return compile_half(gm, inputs)

    step = step_of(options)
    step = step and step.of_inputs(gm)
    ignored = {name: options.pop(name, None) for name in ("mode", "options")}
    if WholeStep.of(ignored) is None and any(ignored.values()):
        given = ", ".join(f"{name}={value!r}" for name, value in ignored.items() if value)
        warn_once(
            f"compiled_fsdp: torch.compile(backend='compiled_fsdp_eager', {given}): they are "
            "Inductor's, which this backend does without, so they change nothing. Leave them out, "
            "or use backend='compiled_fsdp'"
        )
    compile_graph = aot_autograd(
        fw_compiler=compile_half,
        bw_compiler=compile_backward,
        inference_compiler=compile_inference,
        partition_fn=_partition if step is None else partial(_partition_step, step),
        keep_inference_input_mutations=True,
    )
    return _captured(step, compile_graph(gm, inputs, **options))


@register_backend(name="compiled_fsdp")
def compiled_fsdp(gm: GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
    """Inductor with our passes; the same as the default backend once a module was sharded.

    options: of `compile_fx`, and `mode` and `options` of `torch.compile`.
    """
    from torch._inductor.compile_fx import compile_fx

    install_passes()
    step = WholeStep.of(options)
    mode, asked = options.pop("mode", None), options.pop("options", None)
    if step is None and (mode or asked):
        options["config_patches"] = options.get("config_patches", {}) | config_of(mode, asked)
    if step is not None:
        patches = (asked or {}).get("patches", {})
        step = step.of_inputs(gm)
        options["config_patches"] = {
            **patches,
            "custom_partitioner_fn": StepPartitioner(step),
            "joint_custom_post_pass": joint_pass_of(step),
        }
    return _captured(step, compile_fx(gm, inputs, **options))


def _captured(step: WholeStep | None, run: Any) -> Any:
    return captured(step.name, run) if step is not None and step.captures else run
