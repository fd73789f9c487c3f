"""Our backends for `torch.compile`: "compiled_fsdp" (Inductor, said explicitly) and "compiled_fsdp_eager" (no Inductor).

The second runs the same passes and executes the final FX graph as it is: it compiles in about a second and computes with the
same kernels as eager mode, which makes it the one to test and to debug with.

Private torch used here (tried on 2.13): `torch._dynamo.backends.common.aot_autograd`, `boxed_nop`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

from .inductor import install_passes, run_half, run_joint, use_gloo
from .partition import partition
from .plan import current_plan
from .sequence import add_agreement

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule


def _partition(joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
    return partition(run_joint(joint), inputs, current_plan(), **options)


def _compile_half(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
    gm = run_half(gm)
    add_agreement(gm.graph)
    use_gloo(gm.graph)
    gm.recompile()
    runner: Callable[..., Any] = boxed_nop(gm, inputs)
    return runner


def _compile_inference(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
    return _compile_half(run_joint(gm), inputs)


@register_backend(name="compiled_fsdp_eager")
def compiled_fsdp_eager(gm: GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
    """All passes, no Inductor."""
    compile_graph = aot_autograd(
        fw_compiler=_compile_half,
        bw_compiler=_compile_half,
        inference_compiler=_compile_inference,
        partition_fn=_partition,
        keep_inference_input_mutations=True,
    )
    return compile_graph(gm, inputs, **options)


@register_backend(name="compiled_fsdp")
def compiled_fsdp(gm: GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
    """Inductor with our passes; the same as the default backend once a module was sharded."""
    from torch._inductor.compile_fx import compile_fx

    install_passes()
    return compile_fx(gm, inputs, **options)
