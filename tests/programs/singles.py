"""Each statement by itself in a small program, and each way to compile: what fails here is found
without shrinking.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from programs.legal import is_legal
from programs.program import LAYERS, Program
from programs.source import WAYS
from programs.statements import FORWARD, LOOP, OPTIMIZERS, SETUP

if TYPE_CHECKING:
    from collections.abc import Iterator

RAISING = {"raises": ("caught",), "hook_raises": ("caught_backward",)}


def singles() -> Iterator[Program]:
    """All of them."""
    makers = (_forward, _setup, _loop, _ways, _optimizers, _many_blocks)
    yield from (program for make in makers for program in make() if is_legal(program))


def _forward() -> Iterator[Program]:
    for name, statement in FORWARD.items():
        entry, loop = f"{name}@a", RAISING.get(name, ())
        for units in ((), ("a",)):
            read = () if units else ("read@a",)  # a parameter of another unit is refused
            yield Program(
                forward=(*read, entry, "call@a"), layers=("linear",), units=units, loop=loop
            )
        block = ("read@up", f"{name}@up", "call@up")
        yield Program(layers=("block",), block=block, forward=("call@a",))
        if name in ("dtype", "finfo", "dtype_of_layer", "norm_of_all", "read", "state_dict"):
            yield Program(layers=("block",), block=block, forward=("call@a",), low_precision=True)
        if any("self.slow" in line for line in statement.init):
            yield Program(forward=(entry, "call@a"), layers=("linear",), units=("a", "slow"))
            yield Program(forward=("call@a", entry, "call@b"), units=("a", "slow"))


def _setup() -> Iterator[Program]:
    for name in SETUP:
        forward = ("embed", "call@a", "call@b") if "head" in name else ("call@a", "call@b")
        for units in ((), ("a", "b", "head")):
            loop = ("update_ema",) if name == "ema" else ()
            yield Program(forward=forward, setup=(name,), units=units, loop=loop)


def _loop() -> Iterator[Program]:
    also = {"caught": "raises@a", "caught_backward": "hook_raises@a", "merge": "adapter@a"}
    for name in LOOP:
        forward = ("call@a", *([also[name]] if name in also else []), "call@b")
        saved = ("checkpoint_save",) if name == "checkpoint_load" else ()
        program = Program(
            forward=forward, loop=(*saved, name), setup=("ema",) if name == "update_ema" else ()
        )
        yield program
        yield replace(program, setup=(*program.setup, "overlap"), optimizer="adamw")
        yield replace(program, heads=True, optimizer="adamw")


def _ways() -> Iterator[Program]:
    blocks = Program(
        layers=("block",) * 3,
        block=("call@up",),
        forward=("call@a", "call@b", "call@c"),
        units=("a", "b"),
    )
    for way in WAYS:
        for fullgraph in (True, False):
            yield Program(way=way, fullgraph=fullgraph, units=("a", "b"))
            yield replace(blocks, way=way, fullgraph=fullgraph)
        for setup in ("to_empty", "to_float64", "load_assign"):
            yield Program(way=way, setup=(setup,))


def _optimizers() -> Iterator[Program]:
    for optimizer in OPTIMIZERS:
        yield Program(optimizer=optimizer, setup=("keep",), steps=3)
        yield Program(optimizer=optimizer, setup=("keep",), reshard=False, steps=3)
        yield Program(optimizer=optimizer, loop=("compiled_step",))


def _many_blocks() -> Iterator[Program]:
    calls = tuple(f"call@{n}" for n in LAYERS)
    many = Program(layers=("block",) * len(LAYERS), forward=calls, units=tuple(LAYERS))
    for name in ("break", "item", "experts@up"):
        for way in ("model", "in_place", "layers"):
            yield replace(many, block=("call@up", name, "call@up"), way=way)
    yield Program(cells=True)
    for name in ("rank_batch", "one_row"):
        yield Program(loop=(name,), units=("a", "b"), budget=0.5)
