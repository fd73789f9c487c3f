"""What is kept of a compiled call, in JSON: where its inputs come from, how its halves are called,
and where its outputs go.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from compiled_fsdp.torch_private.ahead import Calling

MESH = "mesh"  # the kind of an input that is a DeviceMesh
SIZE = "size"  # of one that is a size of an argument
FX, INDUCTOR = "graph", "inductor"  # how the code of a half was made


@dataclass(frozen=True)
class Constant:
    """A tensor that code reads: its bytes are in `file`."""

    name: str
    file: str
    dtype: str
    shape: list[int]
    stride: list[int]


@dataclass(frozen=True)
class Half:
    """A forward or backward: Python code in `file`, and what that needs.

    kernels: shared libraries, in the order in which the code asks for them.
    """

    kind: str
    file: str
    kernels: list[str]
    constants: list[Constant]

    @classmethod
    def of(cls, read: dict[str, Any]) -> Half:
        """From JSON."""
        return cls(**{**read, "constants": [Constant(**c) for c in read["constants"]]})


@dataclass(frozen=True)
class Program:
    """A compiled call of a model.

    mode: "training" (autograd records) or "inference".
    inputs: of each input of the graph, where it is: ["flat", unit, number], ["buffer", name],
        ["parameter", name] (not sharded), ["input", number] among the leaves of the arguments, or
        ["mesh", words] (a DeviceMesh, which nothing reads once DTensors are gone), or
        ["size", number, dim] (of such a leaf).
    arguments: how arguments are nested, as text.
    leaves: their leaves: of a tensor its layout, else its value as text.
    results: how outputs are nested, as torch writes it down; of each leaf, ["output", number],
        ["input", number] or ["value", a plain value].
    units: what each unit is called in the graph.
    detached: inputs that get no gradient.
    facts: what Python values of the model the code was made for, by expression.
    guards: what has to hold for sizes of the arguments that are not known (`sizes.py`).
    groups: process groups that it communicates over, beside those of the sharded parameters.
    ranks: those that it is for.
    """

    mode: str
    inputs: list[list[Any]]
    arguments: str
    leaves: list[dict[str, Any]]
    nesting: str
    results: list[list[Any]]
    units: list[str]
    calling: Calling
    detached: list[int]
    forward: Half
    backward: Half | None
    facts: dict[str, str]
    guards: list[str]
    groups: list[str]
    ranks: list[int]

    def to_json(self) -> dict[str, Any]:
        """As dicts and lists."""
        return asdict(self)

    @classmethod
    def of(cls, read: dict[str, Any]) -> Program:
        """From JSON."""
        backward = read["backward"]
        return cls(
            **{
                **read,
                "calling": Calling(**read["calling"]),
                "forward": Half.of(read["forward"]),
                "backward": None if backward is None else Half.of(backward),
            }
        )
