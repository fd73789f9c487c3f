"""What torch says that the inputs and outputs of a graph are for: AOTAutograd's descriptors.

Private torch used here (tried on 2.13): these descriptors.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTOutput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    PlainAOTInput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)

from .meta import get_descriptor, get_stack_trace, module_of, noted_returned, set_descriptor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

TOKENS = (ForwardTokenAOTOutput, BackwardTokenAOTOutput)
# None: torch does not say (hand-written graphs).
FOR_BACKWARD = (SavedForBackwardsAOTOutput, SavedForBackwardsNoVcCheckAOTOutput, type(None))

# A line of a stack trace: file, line, and what it says.
_FRAME = re.compile(r'File "(.*)", line (\d+), in .*\n *(.*)')


def returned(output: Node) -> list[tuple[Node | None, object]]:
    """Returns the outputs of a graph, each with what torch says that it is (None in hand-written
    graphs). Inductor takes out of a graph the tokens that order ops with effects, and leaves what
    is said of them.
    """
    nodes: Any = output.args[0]
    kinds: Any = get_descriptor(output) or [None] * len(nodes)
    if len(kinds) > len(nodes):
        kinds = [kind for kind in kinds if not isinstance(kind, TOKENS)]
    return list(zip(nodes, kinds, strict=True))


def set_returned(output: Node, pairs: Sequence[tuple[Node | None, object]]) -> None:
    """Let a graph return something else."""
    output.args = ([node for node, _ in pairs],)
    set_descriptor(output, [kind for _, kind in pairs])


def places_of(tangents: Sequence[Node], output: Node, num_outputs: int) -> list[int]:
    """Where among the outputs of a graph the values stand whose gradients these inputs are: the
    function that was captured returns them, and behind them, buffers that it has assigned.

    num_outputs: of hand-written graphs, which do not say, they are the last of so many.
    """
    wanted = [getattr(get_descriptor(tangent), "output", None) for tangent in tangents]
    if None in wanted:
        return [*range(num_outputs - len(tangents), num_outputs)]
    kinds = noted_returned(output) or [kind for _, kind in returned(output)]
    return [kinds.index(kind) for kind in wanted]


def differentiated(tangent: Node) -> object:
    """Of which output of the captured function an input of a graph is the gradient, or a part of
    it, where that is a tensor whose class wraps others; itself, if torch does not say (hand-written
    graphs).
    """
    kind = get_descriptor(tangent)
    while hasattr(kind, "base"):
        kind = kind.base
    return tangent if kind is None else kind


def made_at(tangent: Node, output: Node) -> str:
    """The module and the line that made the value whose gradient this input is, in words to go
    behind its shape; "" if torch has not noted it.
    """
    kind = getattr(get_descriptor(tangent), "output", None)
    made = next((node for node, each in returned(output) if node and each == kind), None)
    if made is None:
        return ""
    frames = _FRAME.findall(get_stack_trace(made))
    module = module_of(made)
    told = f" of {module}" if module else ""
    return f"{told}, made at {':'.join(frames[-1][:2])}, {frames[-1][2]}" if frames else told


def input_of(kind: object) -> int | None:
    """The place, among the inputs of the captured function, of the tensor that an input of a graph
    is, or that an output is the gradient of; of a DTensor, its local tensor. None for anything
    else, and where torch does not say.
    """
    if isinstance(kind, SubclassGetAttrAOTInput | SubclassGetAttrAOTOutput):
        if kind.attr != "_local_tensor":
            return None
        kind = kind.base
    kind = kind.grad_of if isinstance(kind, GradAOTOutput) else kind
    return kind.idx if isinstance(kind, PlainAOTInput) else None


def place_of_input(node: Node) -> int | None:
    """The same of a graph's input."""
    return input_of(get_descriptor(node))


def is_mesh(kind: object) -> bool:
    """Whether an output of a graph is no tensor, but the mesh of a DTensor."""
    return isinstance(kind, SubclassGetAttrAOTOutput) and kind.attr == "device_mesh"


def saved_for_backward(output: Node) -> list[Node]:
    """Returns the outputs of a graph that are for its backward, not for the user; all of them if
    torch does not say (hand-written graphs).
    """
    return [
        node
        for node, kind in returned(output)
        if node is not None and isinstance(kind, FOR_BACKWARD)
    ]


def is_for_backward(output: Node) -> list[bool] | None:
    """For each value that a graph returns, whether it is saved for backward; None if torch does not
    say.
    """
    if get_descriptor(output) is None:
        return None
    return [isinstance(kind, FOR_BACKWARD) for _, kind in returned(output)]


def set_for_backward(output: Node, flags: list[bool] | None) -> None:
    """Say what of a rebuilt graph's output is saved for backward."""
    if flags is not None:
        set_descriptor(output, [None if flag else "" for flag in flags])
