"""A random program as plain data that prints, so that a failure can be shrunk by leaving parts
out.
"""

from __future__ import annotations

from dataclasses import dataclass

from programs.statements import FORWARD, LOOP, SETUP, Statement

LAYERS = "abcdefghij"


@dataclass(frozen=True)
class Program:
    """A model, how it is sharded and compiled, and its training loop.

    layers: "linear" or "block" each, called `a`, `b`, ... units: which of the model's members are
        units of their own.
    forward, block: statements as "name@layer", of the model's forward and of a block's (whose
        layers are `up` and `down`).
    way: how it is compiled (`source.WAYS`). heads: the model returns two outputs, of which the loss
        uses one.
    step: options of `compile_step`, which the loop is then; None: it is written out.
    dynamic: compiled for every number of rows. replicas: of four ranks, two pairs shard. cells: all
        of it runs twice, as in a notebook.
    bucket, budget: of the plan. kinds: which ways of running it are compared with the unsharded
        model.
    """

    seed: int = 0
    layers: tuple[str, ...] = ("linear", "linear")
    forward: tuple[str, ...] = ("call@a", "call@b")
    block: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    loop: tuple[str, ...] = ()
    units: tuple[str, ...] = ("a",)
    way: str = "model"
    step: str | None = None
    optimizer: str = "sgd"
    heads: bool = False
    low_precision: bool = False
    reshard: bool | None = None
    fullgraph: bool = False
    dynamic: bool = False
    replicas: bool = False
    cells: bool = False
    dim: int = 4
    steps: int = 2
    world: int = 2
    bucket: int = 0
    budget: float | None = None
    kinds: tuple[str, ...] = ("eager", "compiled")

    @property
    def blocks(self) -> set[str]:
        """The names of the layers that are blocks."""
        return {n for n, kind in zip(LAYERS, self.layers, strict=False) if kind == "block"}

    @property
    def linears(self) -> set[str]:
        """The names of the others."""
        return {*LAYERS[: len(self.layers)]} - self.blocks

    def statements(self) -> list[Statement]:
        """Everything that it says."""
        forward = [FORWARD[name.partition("@")[0]] for name in (*self.forward, *self.block)]
        return [*forward, *(SETUP[n] for n in self.setup), *(LOOP[n] for n in self.loop)]

    def names(self) -> set[str]:
        """Of all its statements."""
        return {n.partition("@")[0] for n in (*self.forward, *self.block, *self.setup, *self.loop)}
