"""A random program for each seed.

Seeds in turn say each statement, each way to compile, four ranks, and each backend; everything else
is random. So few programs cover all that there is, however many are run.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from programs.legal import is_legal
from programs.program import LAYERS, Program
from programs.source import WAYS
from programs.statements import (
    ALONE,
    DRAWN_LOOP,
    DRAWN_SETUP,
    FORWARD,
    LOOP,
    NESTED_FORWARD,
    OPERATORS,
    OPTIMIZERS,
    PLAIN,
    ROUTED,
    SCRIPT_FORWARD,
    SCRIPT_LOOP,
    SCRIPT_SETUP,
    SETUP,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

# Autograd refuses to go back over what was read and written since: a layer is written before it is
# called.
WRITES = ("alias", "clamp_", "copy_", "mul_", "index_write", "normalize")
WITH = {
    "caught": "raises",
    "caught_backward": "hook_raises",
    "tie_head": "embed",
}  # what a statement is about
DRAWN = [name for name in (*PLAIN, *OPERATORS) if name not in (ROUTED, ALONE)]
MEMBER = re.compile(r"self\.(\w+) = .*nn\.")
# Every 8th program and so on; Inductor compiles C++ for seconds.
FOUR_RANKS, AOT_EAGER, INDUCTOR, LOW_PRECISION, WHOLE_STEP, OPERATOR = 8, 3, 10, 13, 9, 2
# What a statement reads or writes directly belongs to the unit that runs, or a program is refused
# before it can show much.
TOUCHES = re.compile(
    r"(\{m\}|self\.embed|self\.slow|self\.bounded)"
    r"(?:\.(?:weight|bias|_?parameters|named_parameters|state_dict)|, 'weight')"
)
FOREIGN = 0.2  # of the programs all the same
PATIENCE = 50  # draws, before the seed's turn in one of them is let go


def make(seed: int) -> Program:
    """The program of a seed; of those that do not make sense another is drawn."""
    return make_step(seed, seed // WHOLE_STEP) if seed % WHOLE_STEP == 4 else _make(seed)


def _make(seed: int) -> Program:
    r = random.Random(seed)
    turns = {
        "forward": _turn(seed, [name for name in DRAWN if name in PLAIN]),
        "operator": _turn(seed // OPERATOR, list(OPERATORS)) if seed % OPERATOR == 0 else "",
        "loop": _turn(seed, list(DRAWN_LOOP)),
        "setup": _turn(seed, [*DRAWN_SETUP, ""]),
        "way": _turn(seed, [*WAYS, "model", "model"]),
    }
    while True:
        for _ in range(PATIENCE):
            program = _draw(r, seed, turns)
            if is_legal(program):
                return program
        turns.pop(next(iter(reversed(turns))))


def _turn(seed: int, names: list[str]) -> str:
    """Each in turn, in another order each time around."""
    times, place = divmod(seed, len(names))
    return random.Random(times).sample(names, len(names))[place]


def _draw(r: random.Random, seed: int, turns: dict[str, str]) -> Program:
    layers = tuple(r.choice(("linear", "linear", "block")) for _ in range(r.choice((1, 2, 2, 3))))
    if r.random() < 0.02:  # more than Dynamo compiles for one code object
        layers = ("block",) * len(LAYERS)
    names = LAYERS[: len(layers)]
    forward = [f"call@{n}" for n in names]
    loop = _chosen(r, DRAWN_LOOP, turns.get("loop", ""))
    if "checkpoint_load" in loop:
        loop = tuple(name for name in LOOP if name in {*loop, "checkpoint_save"})
    needed = ["ema"] if "update_ema" in loop else []
    setup = _chosen(r, DRAWN_SETUP, turns.get("setup", ""), *needed)
    about = [
        name
        for word, name in WITH.items()
        if any(s == word or s.startswith(f"{word}_") for s in (*setup, *loop))
    ]
    others = [n for n in DRAWN if not _is_write(n) or r.random() < 0.4]
    for name in (
        turns.get("forward", "call"),
        *filter(None, [turns.get("operator")]),
        *about,
        *(r.choice(others) for _ in range(r.choice((0, 0, 1, 1, 2)))),
    ):
        _insert(r, forward, name, r.choice(names))
    block = ["call@up"] if "block" in layers else []
    for _ in range(r.choice((0, 1, 1, 2)) if block else 0):
        _insert(
            r,
            block,
            r.choice([n for n in DRAWN if "raises" not in n and not n.startswith("embed")]),
            "up",
        )
    said = {f.partition("@")[0] for f in forward}
    members = [
        *names,
        "head",
        *sorted({m for n in said for line in FORWARD[n].init for m in MEMBER.findall(line)}),
    ]
    foreign = set() if r.random() < FOREIGN else _touched(forward)
    return Program(
        seed=seed,
        layers=layers,
        forward=tuple(forward),
        block=tuple(block),
        setup=setup,
        loop=loop,
        units=tuple(m for m in members if r.random() < 0.7 and not {m, "all"} & foreign),
        way=turns.get("way") or r.choice(list(WAYS)),
        optimizer=r.choice(list(OPTIMIZERS)),
        heads=r.random() < 0.1,
        low_precision=seed % LOW_PRECISION == 6,
        reshard=r.choice((None, None, True, False)),
        fullgraph=r.random() < 0.5,
        dynamic=r.random() < 0.1,
        replicas=seed % FOUR_RANKS == 5 and r.random() < 0.5,
        dim=r.choice((4, 4, 5, 3)),
        steps=r.choice((2, 2, 3)),
        world=4 if seed % FOUR_RANKS == 5 else 2,
        bucket=r.choice((0, 1 << 20, 400)),
        budget=0.5 if r.random() < 0.08 else None,
        kinds=kinds_of(seed),
    )


def make_routed(seed: int) -> Program:
    """The program of a seed with a routed layer somewhere in it, or two."""
    program, r = _make(seed), random.Random(seed)
    while True:
        forward = list(program.forward)
        for _ in range(r.choice((1, 1, 2))):
            layer = r.choice(LAYERS[: len(program.layers)])
            forward.insert(r.randint(0, len(forward)), f"{ROUTED}@{layer}")
        routed = replace(program, forward=tuple(forward))
        if is_legal(routed):
            return routed
        program = _make(r.randrange(1 << 16))  # its statements do not go with another that has init


# A larger function around the model cannot be left, and says so.
CALLS = [way for way in WAYS if way.startswith(("model", "in_place", "layers", "both"))]


def make_alone(seed: int) -> Program:
    """A program whose graph Dynamo breaks on rank 0 alone, in the model or in a block."""
    r = random.Random(seed)
    while True:
        program = _make(r.randrange(1 << 16))
        said = {*program.forward, *program.block}
        if any(s.breaks for s in program.statements()) or any(map(_is_write, said)):
            continue  # what is left of a forward behind another break cannot be called again
        places = {"forward": list(program.forward), "block": list(program.block)}
        into = r.choice([place for place, said in places.items() if said])
        layer = "up" if into == "block" else r.choice(LAYERS[: len(program.layers)])
        places[into].insert(r.randint(0, len(places[into])), f"{ALONE}@{layer}")
        alone = replace(
            program,
            seed=seed,
            forward=tuple(places["forward"]),
            block=tuple(places["block"]),
            way=_turn(seed, CALLS),
            fullgraph=False,
            budget=None,  # ranks decide on one before there is a graph
            kinds=("eager", "compiled"),
        )
        if is_legal(alone):
            return alone


STEPS = (
    "",
    "clip=0.5",
    "accumulate=2",
    "scaler=scaler",
    "clip=0.5, accumulate=2",
    "clip=0.5, scaler=scaler",
    "accumulate=2, reduce_once=True, scaler=scaler",
    "keep_grads=True",
    "schedule=schedule",
    "accumulate=2, keep_grads=True, schedule=schedule",
)


def make_step(seed: int, turn: int | None = None) -> Program:
    """A program whose loop is a whole step, with each of the options in turn."""
    r = random.Random(seed)
    while True:
        program = _make(r.randrange(1 << 16))
        step = replace(
            program,
            seed=seed,
            setup=tuple(n for n in program.setup if not n.startswith("overlap")),
            loop=tuple(n for n in program.loop if LOOP[n].at in ("start", "end")),
            way="model",
            fullgraph=False,
            step=_turn(seed if turn is None else turn, list(STEPS)),
            kinds=("eager", "compiled"),
        )
        if is_legal(step):
            return step


CELLS = "cells"
SCRIPTS = (*SCRIPT_FORWARD, *SCRIPT_SETUP, *SCRIPT_LOOP, CELLS)
FROM = 3000  # the first seed of scripts that may say `NESTED_FORWARD`


def make_script(seed: int) -> Program:
    """A program that says, in turn, something of what whole scripts are made of, or whose cells run
    twice.
    """
    r = random.Random(seed)
    while True:
        program = _make(r.randrange(1 << 16))
        names = SCRIPTS if seed < FROM else (*SCRIPTS, *NESTED_FORWARD)
        said = {_turn(seed, list(names)), *r.sample(names, r.choice((0, 0, 1)))}
        said |= {"adapter"} if "merge" in said else set()
        forward = list(program.forward)
        for name in sorted(said & (SCRIPT_FORWARD.keys() | NESTED_FORWARD.keys())):
            _insert(r, forward, name, r.choice(LAYERS[: len(program.layers)]))
        script = replace(
            program,
            seed=seed,
            forward=tuple(forward),
            setup=tuple(n for n in SETUP if n in {*program.setup, *said}),
            loop=tuple(n for n in LOOP if n in {*program.loop, *said}),
            cells=CELLS in said,
            kinds=kinds_of(seed),
        )
        if is_legal(script):
            return script


def kinds_of(seed: int) -> tuple[str, ...]:
    """The ways of running ours that are compared with the unsharded model and with stock."""
    more = ((AOT_EAGER, "aot_eager"), (INDUCTOR, "inductor"))
    return ("eager", "compiled", *(kind for every, kind in more if seed % every == every - 2))


def _chosen(r: random.Random, statements: Iterable[str], *turns: str) -> tuple[str, ...]:
    """Those whose turn it is and some others, in the order in which they are written down."""
    names = list(statements)
    chosen = {*r.sample(names, r.choice((0, 0, 1, 1, 2))), *turns} - {""}
    return tuple(sorted(chosen, key=names.index))


def _touched(forward: list[str]) -> set[str]:
    """The members whose parameters the model's own forward names; "all" where it goes through all
    of them.
    """
    found: set[str] = set()
    for name, _, layer in (entry.partition("@") for entry in forward):
        text = "\n".join(FORWARD[name].lines)
        found |= {layer if m == "{m}" else m.removeprefix("self.") for m in TOUCHES.findall(text)}
        found |= {"all"} if "self.parameters()" in text else set()
    return found


def _is_write(name: str) -> bool:
    return any(word in name for word in WRITES)


def _insert(r: random.Random, names: list[str], name: str, layer: str) -> None:
    last = names.index(f"call@{layer}") if _is_write(name) else len(names)
    names.insert(r.randint(0, last), f"{name}@{layer}")
