"""A backward that a compiled function takes itself: `loss.backward()` under
`torch._dynamo.config.trace_autograd_ops`.

Dynamo traces it as `torch.autograd.grad(loss, leaves)`, and sets `.grad` of all leaves when the
graph has run. The leaves of a sharded model are flat buffers, whose gradients are to become those
of the parameters. So nothing is set, and the fake `unshard` says that there is no gradient
(`wire/ops.py`): Dynamo sees to it that nothing else uses what the backward has consumed. Once the
graph is whole, the call is taken out of it, and the loss becomes its last output. That is what
Dynamo captures for `compile_step`, and it is compiled like that: a whole step (`stitch.py`), whose
updates leave gradients.

What does not allow for that breaks the graph at the call, in another trace, or raises with
`fullgraph=True`.

What nodes of Dynamo's graphs stand for was read on 2.13. Private torch used here (tried on 2.13):
`torch._inductor.config`.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch._inductor.config as inductor_config
from torch.distributed.tensor import DTensor

from compiled_fsdp.ir.meta import real_input, traced_value
from compiled_fsdp.ir.schema import BACKWARD
from compiled_fsdp.torch_private.dynamo import (
    before_backend,
    change_backend,
    compilation,
    current_backend,
    in_backwards,
    touches_grads,
    trace_again,
    trace_number,
)
from compiled_fsdp.wire.ops import in_traced_backwards, num_updates, refusal

from .inductor import joint_pass_of
from .partition import Partitioner, StepPartitioner
from .whole_step import WholeStep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.fx import GraphModule, Node

    from compiled_fsdp.ir.spec import ParamSpec

STEP = WholeStep(BACKWARD, doing="loss.backward() in a compiled function")
BACKENDS = ("inductor", "compiled_fsdp", "compiled_fsdp_eager")
_compiling: list[WholeStep] = []
# Why no backward can be taken out of what Dynamo compiles.
_refused: WeakKeyDictionary[object, str] = WeakKeyDictionary()
# The trace of it whose backward is to be taken out.
_taken_over: WeakKeyDictionary[object, object] = WeakKeyDictionary()


def step_of(options: Mapping[str, Any]) -> WholeStep | None:
    """The step that a backend's options are about, or that the graph is which it compiles now; None
    for a graph of neither.
    """
    return WholeStep.of(options) or (_compiling[-1] if _compiling else None)


def _take_over(nodes: list[Node]) -> str | list[int] | None:
    """Called when Dynamo comes to `loss.backward()`, see `in_backwards`."""
    leaves = [real_input(node) for node in nodes]
    if not any(hasattr(leaf, "_fsdp_owner") for leaf in leaves):
        return None
    backend = current_backend()
    name = getattr(backend, "compiler_name", getattr(backend, "__name__", str(backend)))
    why = _refused.get(compilation(), "")
    if name not in BACKENDS:
        why = f"the backend {name} is none of {list(BACKENDS)}"
    elif type(inductor_config.custom_partitioner_fn) not in (type(None), Partitioner):
        why = "torch._inductor.config.custom_partitioner_fn is set"
    if why:
        return refusal("sharded parameters", why)
    _taken_over[compilation()] = trace_number()
    before_backend(_end_in_loss)
    # No path of autograd's leads to the sharded parameters themselves.
    return [i for i, leaf in enumerate(leaves) if not isinstance(leaf, DTensor)]


def _why_not(spec: ParamSpec) -> str:
    """Called when Dynamo comes to the gradient of a parameter: why it cannot leave the graph."""
    now = compilation()
    if now is None or now not in _taken_over or _taken_over[now] != trace_number():
        return "it is asked for otherwise than by loss.backward() without arguments"
    if spec.is_checked:
        return "Plan(check='checksums') compares at the end of a backward that autograd runs"
    if spec.overlap:
        return "the model has an optimizer that overlaps (overlap_optimizer)"
    if spec.sync != "reduce" or spec.is_accumulating:
        return (
            "gradients are not reduced in every backward (set_requires_gradient_sync, "
            "set_requires_all_reduce, or a pipeline schedule)"
        )
    return ""


def _end_in_loss(gm: GraphModule) -> None:
    """Take the backward out of a graph, and let its last output be the loss."""
    found = gm.graph.find_nodes(op="call_function", target=torch.autograd.grad)
    if why := _why_not_taken_out(gm, found):
        _refused[compilation()] = why
        trace_again(why)
    (call,), end = found, gm.graph.output_node()
    end.args = ((*end.args[0], call.args[0]),)  # type: ignore[misc]
    gm.graph.erase_node(call)
    gm.recompile()
    change_backend(_with_backward)


def _why_not_taken_out(gm: GraphModule, found: list[Node]) -> str:
    if len(found) != 1:
        return f"the graph has {len(found)} calls of backward or torch.autograd.grad, not one"
    inputs: Any = found[0].args[1]
    grads = zip(inputs, traced_value(found[0]), strict=True)
    if others := [each.name for each, grad in grads if grad is not None]:
        return f"the loss has gradients of {others}, which are no sharded parameters"
    returned: Any = gm.graph.output_node().args[0]
    if any(getattr(traced_value(n), "requires_grad", False) for n in returned if n is not None):
        return "the graph returns something that requires a gradient; detach it"
    if touches_grads():
        return "the graph reads or assigns .grad as well"
    return ""


def _with_backward(backend: Callable[..., Any]) -> Callable[..., Any]:
    """The backend, for a graph whose last output is the loss: it compiles the backward too. What it
    returns leaves the loss out, and raises if a run leaves no gradients.
    """

    @wraps(backend)
    def compile_both(gm: Any, inputs: Any) -> Callable[..., Any]:
        patches = {
            "custom_partitioner_fn": StepPartitioner(STEP),
            "joint_custom_post_pass": joint_pass_of(STEP),
        }
        _compiling.append(STEP)
        try:
            with inductor_config.patch(patches):
                compiled = backend(gm, inputs)
        finally:
            _compiling.pop()

        def run(*args: Any) -> Any:
            before = num_updates(BACKWARD)
            *outputs, _ = compiled(*args)
            if num_updates(BACKWARD) == before:
                raise RuntimeError(
                    f"compiled_fsdp: {STEP.doing}: the graph has run and left no gradients. Call "
                    "loss.backward() outside, or set trace_autograd_ops to False"
                )
            return outputs

        return run

    return compile_both


in_backwards(_take_over)
in_traced_backwards(_why_not)
