"""What the graph of a whole training step is to do, and whether a joint graph can become it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from compiled_fsdp.ir.descriptors import made_at
from compiled_fsdp.ir.graph import output, placeholders, value
from compiled_fsdp.ir.meta import real_input
from compiled_fsdp.wire.ignored import ignored_of

from .clip import Axes, MeshAxes, Name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.fx import Graph, GraphModule, Node

    from compiled_fsdp.ir.matrices import Matrix

INSTEAD = "Write the loop instead: loss.backward(), optimizer.step(), optimizer.zero_grad()"


@dataclass(frozen=True, slots=True)
class WholeStep:
    """What `compile_step` wants of a graph.

    name: by which `update_` finds the optimizer.
    clip: the largest global norm of the gradients; None: they are not clipped.
    order: all parameters by unit and name, in the order in which their norms are put together.
    meshes: of parameters that are tensor-parallel, or experts of several axes, if there are any.
    units: of the model, by what they are called in graphs; none: any.
    batches: micro-batches whose gradients are added up.
    reduces_once: whether they are added up before they are reduced.
    is_scaled: whether losses are scaled; before them, the graph returns the inverse of the scale.
    unscales: whether gradients are unscaled in the graph, not by the optimizer.
    scaler_group: over which ranks agree on gradients that are inf or NaN, beside the groups that
        gradients are reduced over, and their number.
    max_ahead_bytes: of full parameters that are gathered for the next step.
    captures: whether it is to be captured as a CUDA graph.
    matrices: that are updated whole, each at its owner.
    held_by: with a scaler and several optimizers, which of them holds each parameter.
    ignored: parameters that no unit has, by their place among the inputs of what Dynamo has
        captured: name, and groups that cut them; see `of_inputs`.
    states: of each parameter, what its optimizer remembers of it that may rest on the host: names
        of tensors of its shape and dtype.
    doing: what the user did, for errors.
    """

    name: str
    clip: float | None = None
    order: tuple[Name, ...] = ()
    meshes: tuple[MeshAxes, ...] = ()
    units: tuple[str, ...] = ()
    batches: int = 1
    reduces_once: bool = False
    is_scaled: bool = False
    unscales: bool = False
    scaler_group: tuple[str, int] = ("", 1)
    max_ahead_bytes: int = 0
    captures: bool = False
    matrices: tuple[Matrix, ...] = ()
    held_by: tuple[tuple[Name, int], ...] = ()
    ignored: tuple[tuple[int, str, Axes], ...] = ()
    states: tuple[tuple[Name, tuple[str, ...]], ...] = ()
    doing: str = "compile_step"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> WholeStep | None:
        """From the options of a backend; None if they are not about a whole step."""
        wanted: Mapping[str, Any] | None = (options.get("options") or {}).get("whole_step")
        if wanted is None:
            return None
        meshes = tuple(MeshAxes(*mesh) for mesh in wanted.get("meshes", ()))
        return cls(**{**wanted, "meshes": meshes})

    def of_inputs(self, captured: GraphModule) -> WholeStep:
        """The same, of a graph of Dynamo's, some of whose inputs no unit has."""
        found = [ignored_of(real_input(node)) for node in placeholders(captured.graph)]
        ours = [(i, p) for i, p in enumerate(found) if p is not None and self.name in p.on_update]
        return replace(self, ignored=tuple((i, p.fqn, p.axes) for i, p in ours))

    def check(self, joint: GraphModule) -> None:
        """Check that a joint graph is one of this step.

        Raises:
            NotImplementedError: it is not; the text says what to write instead.
        """
        tangents_of(joint.graph, self)


def tangents_of(backward: Graph, step: WholeStep) -> list[Node]:
    """The gradients of the losses, one for each micro-batch.

    Raises:
        NotImplementedError: there are others, or fewer.
    """
    found = [p for p in placeholders(backward) if p.name.startswith("tangents")]
    count = step.batches
    if len(found) != count or any(value(p).numel() != 1 for p in found):
        shapes = [list(value(p).shape) for p in found]
        each = " for each micro-batch" if count > 1 else ""
        made = [f"{list(value(p).shape)}{made_at(p, output(backward))}" for p in found]
        raise NotImplementedError(
            f"{step.doing}: values of the shapes {shapes} require a gradient behind loss_fn; it "
            f"should be one{each}, the loss, of one element. They are: {'; '.join(made)}. Let "
            "loss_fn return the loss alone, and write to no input, buffer or attribute of a module "
            "what requires a gradient (torch.nn.utils.weight_norm and spectral_norm do; those of "
            "torch.nn.utils.parametrizations do not)"
        )
    return found
