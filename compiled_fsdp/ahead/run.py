"""Calls the halves of a program as AOTAutograd would: inputs in, changed buffers written back, one
node of autograd's graph around both halves.

What this does not do (outputs that share memory, tensors of classes that wrap others, ...) is
refused when a program is captured (`torch_private/ahead.py`, `calling`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.torch_private.ahead import is_keeping_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from compiled_fsdp.torch_private.ahead import Calling

    from .program import Program

    Half = Callable[[list[Any]], Any]


def runner(program: Program, forward: Half, backward: Half | None) -> Callable[..., Any]:
    """A function of the inputs of the graph, which returns its outputs."""
    calling = program.calling
    call = forward if backward is None else _with_backward(calling, forward, backward)

    def run(inputs: list[Tensor]) -> list[Tensor]:
        originals = [inputs[i] for i in calling.changed]
        if calling.written:
            torch.autograd.graph.increment_version([inputs[i] for i in calling.written])
        if backward is None:
            with torch.no_grad():
                returned = call(list(inputs))
        else:
            for i in program.detached:
                inputs[i] = inputs[i].detach()
            returned = call(inputs)
        for original, value in zip(originals, returned, strict=False):
            original.copy_(value)
        return list(returned[len(calling.changed) :])

    return run


def _with_backward(calling: Calling, forward: Half, backward: Half) -> Callable[..., Any]:
    """Forward as a function that autograd records, with its own backward."""
    of = calling
    num_returned = len(of.changed) + of.num_outputs

    class CompiledFunction(torch.autograd.Function):
        """Named as AOTAutograd's, since ops of ours look for its node (`torch_private/graphs.py`).

        tangent_outputs: of each gradient that backward takes, which output it belongs to.
        """

        tangent_outputs = tuple(of.tangents)

        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            values = forward(list(inputs))
            end = len(values) - of.num_sizes
            saved = [t.detach() if t._is_view() else t for t in values[num_returned:end]]
            ctx.sizes = values[end:]
            checked = len(saved) - of.num_unchecked
            ctx.save_for_backward(*saved[:checked])
            ctx.unchecked = saved[checked:]
            returned = list(values[:num_returned])
            for i in of.unsafe_views:
                returned[i] = torch.ops.aten._unsafe_view(returned[i], returned[i].shape)
            ctx.mark_non_differentiable(*(returned[i] for i in of.constant))
            ctx._materialize_non_diff_grads = False
            return tuple(returned)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            if of.is_donated and is_keeping_graph():
                raise RuntimeError(
                    "compiled_fsdp: backward of a precompiled model overwrites what forward has "
                    "saved, and was called with retain_graph=True or create_graph=True. Set "
                    "torch._functorch.config.donated_buffer = False before precompile"
                )
            tangents = [
                _laid_out(grads[i], how) for i, how in zip(of.tangents, of.layouts, strict=True)
            ]
            del grads
            inputs = [*ctx.sizes, *ctx.saved_tensors, *ctx.unchecked, *tangents]
            ctx.unchecked = []
            ctx.maybe_clear_saved_tensors()
            del tangents
            if not torch.is_grad_enabled():
                return tuple(backward(inputs))
            once: Any = _Once
            return once.apply(backward, inputs, torch.empty(0, requires_grad=True))

    function: Any = CompiledFunction
    return lambda inputs: function.apply(*inputs)


class _Once(torch.autograd.Function):
    """A backward that is recorded (`create_graph=True`), and cannot be differentiated itself."""

    @staticmethod
    def forward(ctx: Any, backward: Half, inputs: list[Tensor], _: Tensor) -> Any:
        return tuple(backward(inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "compiled_fsdp: the gradient of a gradient of a compiled model was asked for, which "
            "torch.compile does not have either. Run the model without compiling it"
        )


def _laid_out(grad: Tensor, layout: list[list[int]]) -> Tensor:
    """A gradient as the compiled backward expects it in memory."""
    if not layout:
        return grad.contiguous()
    size, stride = layout
    if list(grad.shape) == size and list(grad.stride()) == stride:
        return grad
    return torch.empty_strided(size, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
