"""What a compiled step says where it cannot be taken, in words of `compile_step`.

Private torch used here (tried on 2.13): the hooks of tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.torch_private.compiled import error_of_backend, raised_in_trace, why_no_graph
from compiled_fsdp.torch_private.modules import hooked_on_backward

from .optimizers import LOOP
from .step_values import what_is_strange

if TYPE_CHECKING:
    from torch import nn

    from compiled_fsdp.units.unit import Unit


def check_trainable(model: nn.Module) -> None:
    """Check, before a step, that a graph can do what the loop would have done here.

    Raises:
        RuntimeError: it is called in inference mode.
        NotImplementedError: modules have hooks on their backward.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "compile_step: called in inference mode, where nothing can be trained. Call it outside"
        )
    if names := hooked_on_backward(model):
        raise NotImplementedError(
            f"compile_step: hooks on the backward of {shortened(names)} would not be called: "
            "backward is a part of the graph. Remove them, or register them on a tensor in "
            f"forward (output.register_hook). {LOOP}"
        )


def check_gradient(fqn: str, held: nn.Parameter) -> None:
    """Check, before a step, that a parameter has no gradient, and nothing that waits for one.

    Raises:
        RuntimeError: it has.
    """
    if held.grad is not None:
        raise RuntimeError(
            f"compile_step: {fqn} has a gradient of an earlier backward, which the step "
            "would not add to. Call optimizer.zero_grad() before, which drops gradients "
            "(zeros, of set_to_none=False, are gradients too)"
        )
    if held._backward_hooks or held._post_accumulate_grad_hooks:
        raise RuntimeError(
            f"compile_step: {fqn} has hooks on its gradient, which would not be called: "
            f"it goes from the reduction to the update. Remove them. {LOOP}"
        )


def look_reduced(unit: Unit) -> None:
    """Check, before a step, that a unit keeps no gradients of a backward that has not reduced them;
    from then on its graphs look for none, until it is told again not to reduce.

    Raises:
        RuntimeError: it keeps some.
    """
    settings = unit.settings
    if not settings.is_accumulating or settings.is_scheduled or settings.sync != "reduce":
        return  # what a graph says of the latter two is enough
    for flat in unit.flats:
        flat.forget_dropped()
    if any(flat.retained for flat in unit.flats):
        raise RuntimeError(
            f"compile_step: {unit.name} keeps gradients of a backward without synchronization "
            "(set_requires_gradient_sync(False), no_sync()), which the step would not add. Let a "
            "backward that reduces come first, and an optimizer.step(), or drop them "
            "(reset_iter_state() of fully_shard's outermost module, zero_grad() of FSDP1)"
        )
    settings.is_accumulating = False
    unit.publish()


def raise_explained(error: BaseException, name: str, num_batches: int) -> None:
    """Raise in our words what left the step of this name; does nothing where torch's say it.

    Raises:
        NotImplementedError: the step cannot be one graph.
        TypeError: the loss function returned something else than a loss.
        BaseException: the loss function, or the model, raised this.
    """
    if (raised := raised_in_trace(error)) is not None:
        raise raised from error
    inner = error_of_backend(error)
    if isinstance(inner, NotImplementedError):
        raise inner from None
    if num_batches > 1 and "modified by an inplace operation" in str(inner):
        raise NotImplementedError(
            f"compile_step: accumulate={num_batches}, and forward writes in place to what "
            "backward needs of a micro-batch before: in the graph all forwards are captured "
            "before the backwards, in the loop each backward comes before the next forward. "
            f"Write behind the step, or leave accumulate out. {LOOP}"
        ) from error
    if kind := what_is_strange(name):
        raise TypeError(
            f"compile_step: loss_fn (or the model, without one) returns {kind}; should be the "
            "loss, a tensor of one element, or a tuple that begins with it, all others "
            "detached: return loss, {'accuracy': accuracy.detach()}. step(...) returns the same"
        ) from None
    if why := why_no_graph(error):
        raise NotImplementedError(
            f"compile_step: the model with its loss is not one graph: {why}. Make it one "
            f"(torch.compile(..., fullgraph=True) of it says where it breaks). {LOOP}"
        ) from error


def say_compiled_often(name: str, times: int, why: str) -> None:
    """Announce that the step of this name was compiled as often as Dynamo has it."""
    warn_once(
        f"compile_step: {name} was compiled {times} times, as often as "
        f"torch._dynamo.config.recompile_limit has it, last because {why}. It is compiled on "
        "for every new kind of input. Pass numbers that change from step to step as arguments "
        "(of a module's attribute, p of a dropout say, each value is a graph), append to no "
        "list in loss_fn (return what is to be kept: return loss, metrics), and mark sizes "
        "that change with torch._dynamo.mark_dynamic",
        about=f"{name} is compiled often",
    )
