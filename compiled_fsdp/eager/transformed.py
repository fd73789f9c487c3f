"""A unit's forward inside of `torch.vmap`, `torch.func.grad`, `jvp` and their like, in eager mode.

What goes in and comes out there are torch's wrappers, and a transformation may have a backward of
its own inside of the model's forward. So nothing is watched: the unit is gathered outside of the
transformations, stays so until the model's backward ends, and is reduced then. What brings the
backward there is the outermost module, which must not be transformed itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_fsdp.torch_private.autograd import outside_transforms

if TYPE_CHECKING:
    from .runtime import Runtime
    from .tree import Tree


def enter(runtime: Runtime) -> None:
    """Gather.

    Raises:
        NotImplementedError: it is the outermost module, and gradients are computed.
    """
    if runtime.unit.is_outermost and torch.is_grad_enabled():
        raise NotImplementedError(
            f"compiled_fsdp: the outermost sharded module, {runtime.unit.name}, is called inside "
            "of a transformation of torch.func (vmap, grad, jvp, ...) in eager mode, where nothing "
            "would bring its backward to an end. Put the transformation into the forward of a "
            "module around it that is sharded too, or compile the function around it: "
            "torch.compile(lambda x: torch.vmap(model)(x))"
        )
    with outside_transforms():
        runtime.tree.recover()
        for gathered in (*runtime.lenders, runtime):
            if not gathered.is_in_forward:
                gathered.drop_stale()
            gathered.unshard()
            gathered.open()
            runtime.tree.transformed.setdefault(gathered)
        runtime.is_in_forward = True


def leave(runtime: Runtime) -> None:
    """Everything stays; the outermost module's forward or backward frees it."""
    with outside_transforms():
        for gathered in (*runtime.lenders, runtime):
            gathered.close()
            gathered.keep()
            gathered.is_left_over = True
        if runtime.unit.is_outermost:
            end_of_forward(runtime.tree)


def come_again(tree: Tree) -> None:
    """A backward reaches the tree, after another of the same forward: gather again what that has
    freed.
    """
    for runtime in tree.transformed_before:
        runtime.unshard()
        tree.transformed.setdefault(runtime)
    tree.transformed_before.clear()


def end_of_forward(tree: Tree) -> None:
    """The outermost module's forward has ended: without a backward to come, free."""
    if not torch.is_grad_enabled():
        for runtime in tree.transformed:
            runtime.reshard()
        tree.transformed.clear()
