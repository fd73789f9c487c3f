"""Finds the outputs of a graph that the loss does not use, before its backward runs: parameters to
which only they lead get no gradient.

`heads.py` says why. Outputs count as used if they are on any rank: one reduction serves all, so all
must do the same with it.
"""

from __future__ import annotations

import json
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from compiled_fsdp.errors import warn_once
from compiled_fsdp.torch_private.autograd import backward_number, run_of, running_node
from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.torch_private.graphs import outputs_of_tangents, running_compiled_function

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Of a flat buffer: offset of a parameter, and the outputs that lead to it.
Heads = list[tuple[int, list[int]]]


class Buffer(Protocol):
    """A flat buffer, as far as it is told which of its parameters are left out."""

    def groups(self) -> Sequence[dist.ProcessGroup]:
        """Those over which its gradients are reduced."""

    def leave_out(self, run: tuple[int, int], offsets: set[int]) -> None:
        """Give no gradient to parameters to which this run of a backward graph does not lead."""


def watch(buffers: Sequence[Buffer], num_outputs: int, text: str) -> None:
    """Look at the gradients of a graph's outputs before its backward runs; called by an op of its
    forward.
    """
    node = running_compiled_function()
    if node is None:  # nothing is recorded
        return
    outputs = outputs_of_tangents(node)
    if len(outputs) != num_outputs:
        warn_once(
            "compiled_fsdp: a graph returns tensors of a class that wraps others, and some "
            "parameters lead to some of its outputs only. Where the loss leaves an output out, "
            "their gradients are zeros instead of None. Return plain tensors, or compute the loss "
            "inside the compiled function"
        )
        return
    references = [weakref.ref(buffer) for buffer in buffers]
    node.register_prehook(
        partial(_before_backward, run_of(node), outputs, references, json.loads(text))
    )


def announce() -> None:
    """Say so if the loss does not use an output; called by an op in the forward of a graph that our
    passes have not seen.
    """
    node = running_compiled_function()
    if node is None or getattr(node, "_fsdp_announces", False):
        return
    node._fsdp_announces = True
    node.register_prehook(partial(_announce_zeros, outputs_of_tangents(node)))


@untraced
def _announce_zeros(outputs: list[int], grads: tuple[Tensor | None, ...]) -> None:
    if any(grads[output] is None for output in outputs):
        _say("has outputs that the loss does not use. Parameters that only they lead to get zeros")


def announce_zeros(grad: Tensor, fqn: str) -> None:
    """Say the same, called by an op in the backward of a graph whose forward has no op of ours:
    full parameters are its inputs (`resident.py`).
    """
    node = running_node()
    if node is not None and not getattr(node, "_fsdp_announces", False) and not grad.any():
        _say(
            f"gives parameter {fqn} a gradient of zeros. Parameters to which only outputs lead "
            "that the loss does not use get zeros"
        )


def _say(what: str) -> None:
    warn_once(
        f"compiled_fsdp: a graph that reached its backend without our passes {what} for gradients "
        "instead of None, and an optimizer with weight decay or momentum moves them. Use "
        "torch.compile's default backend or 'compiled_fsdp_eager', or return only what the loss "
        "uses",
        about="zeros from a graph without our passes",
    )


@untraced
def _before_backward(
    run: int,
    outputs: list[int],
    references: list[weakref.ref[Any]],
    heads: list[Heads],
    grads: tuple[Tensor | None, ...],
) -> None:
    buffers = [reference() for reference in references]
    groups = dict.fromkeys(
        group for buffer in buffers if buffer is not None for group in buffer.groups()
    )
    used = _used_anywhere([grads[output] is not None for output in outputs], list(groups))
    for buffer, of_buffer in zip(buffers, heads, strict=True):
        if buffer is not None:
            out = {offset for offset, needed in of_buffer if not used.intersection(needed)}
            buffer.leave_out((backward_number(), run), out)


def _used_anywhere(is_used: list[bool], groups: list[dist.ProcessGroup]) -> set[int]:
    """The outputs that have a gradient on any rank."""
    shared = [group for group in groups if dist.get_world_size(group) > 1]
    if shared:
        is_on_cpu = dist.get_backend(shared[0]) in ("gloo", "timed")
        device = (  # a build for a device may run without one, under the fake group
            torch.device("cpu")
            if is_on_cpu or not torch.accelerator.is_available()
            else torch.accelerator.current_accelerator()
        )
        counts = torch.tensor(is_used, dtype=torch.int32, device=device)
        for group in shared:
            dist.all_reduce(counts, dist.ReduceOp.MAX, group=group)
        is_used = counts.tolist()
    return {i for i, used in enumerate(is_used) if used}
