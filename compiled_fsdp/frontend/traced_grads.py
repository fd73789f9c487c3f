"""Gradients of sharded parameters that a compiled function asks for itself,
by `torch.autograd.grad`.

Under `torch._dynamo.config.trace_autograd_ops` Dynamo traces that into the graph. A graph reads
flat buffers, so no path leads to the parameters themselves: torch raises, or, with
`allow_unused=True`, says None, and a step that goes on with that trains nothing. (`loss.backward()`
leads to the flat buffers, and is refused where `unshard` is differentiated, in `wire/ops.py`.)

What nodes of Dynamo's graphs stand for was read on 2.13 and 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from compiled_fsdp.ir.meta import traced_value

if TYPE_CHECKING:
    from torch.fx import GraphModule


def refuse_no_gradients(gm: GraphModule) -> None:
    """Refuse a graph of Dynamo's that computes no gradient of a sharded parameter
    where it was asked for one.

    Raises:
        NotImplementedError: it does.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.autograd.grad):
        inputs: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("inputs")
        asked = [inputs] if isinstance(inputs, torch.fx.Node) else list(inputs or ())
        found = traced_value(node) or ()
        for each, grad in zip(asked, found, strict=False):
            if grad is None and isinstance(traced_value(each), DTensor):
                raise NotImplementedError(
                    "compiled_fsdp: a compiled function computes gradients of sharded parameters "
                    f"by torch.autograd.grad ({each.name}; "
                    "torch._dynamo.config.trace_autograd_ops is True, and allow_unused=True), and "
                    "gets None for them: nothing would be trained. For a whole step in one graph, "
                    "use compiled_fsdp.compile_step; otherwise return the loss from the compiled "
                    "function, and call loss.backward() outside"
                )
