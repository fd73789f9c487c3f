"""The smallest program that fails as a given one does."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from programs.legal import is_legal
from programs.program import LAYERS, Program
from programs.source import render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from programs.verdict import Verdict

LISTS = ("loop", "setup", "forward", "block", "units")
KEPT = ("seed", "layers", "kinds", *LISTS)


def smallest(
    program: Program, verdict: Verdict, fails: Callable[[Program], Verdict | None], tries: int
) -> tuple[Program, Verdict]:
    """The first smaller program that fails, again and again."""
    seen = {render(program)}
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in smaller(program):
            if not is_legal(candidate) or (text := render(candidate)) in seen:
                continue
            seen.add(text)
            tries -= 1
            if tries < 0:
                return program, verdict
            found = fails(candidate)
            if found is not None:
                program, verdict, is_smaller = candidate, found, True
                break
    return program, verdict


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the large steps first."""
    for field in LISTS:
        entries = getattr(program, field)
        if len(entries) > 1:
            yield _change(program, {field: ()})
        for i in range(len(entries)):
            yield _change(program, {field: entries[:i] + entries[i + 1 :]})
    yield from _fewer_layers(program)
    yield from _plainer_layers(program)
    plain = Program()
    for name in (f.name for f in fields(Program)):
        if name not in KEPT and getattr(program, name) != getattr(plain, name):
            yield _change(program, {name: getattr(plain, name)})
    if program.steps > 1:
        yield _change(program, {"steps": program.steps - 1})


def _fewer_layers(program: Program) -> Iterator[Program]:
    gone = LAYERS[len(program.layers) - 1]
    without = tuple(f for f in program.forward if not f.endswith(f"@{gone}"))
    units = tuple(u for u in program.units if u != gone)
    yield _without_blocks(
        program, {"layers": program.layers[:-1], "forward": without, "units": units}
    )


def _plainer_layers(program: Program) -> Iterator[Program]:
    """A linear layer in place of a block, and what the block says said by the model."""
    for i, kind in enumerate(program.layers):
        if kind == "block":
            layers = (*program.layers[:i], "linear", *program.layers[i + 1 :])
            yield _without_blocks(program, {"layers": layers})
            moved = tuple(f.replace("@up", f"@{LAYERS[i]}") for f in program.block)
            inlined = tuple(
                g for f in program.forward for g in (moved if f == f"call@{LAYERS[i]}" else (f,))
            )
            yield _without_blocks(program, {"layers": layers, "forward": inlined})


def _without_blocks(program: Program, changes: dict[str, Any]) -> Program:
    """A program whose last block may be gone, and what blocks say with it."""
    changed = _change(program, changes)
    return changed if changed.blocks else replace(changed, block=())


def _change(program: Program, changes: dict[str, Any]) -> Program:
    return replace(program, **changes)
