"""A random program for each seed."""

from __future__ import annotations

import random

from programs.legal import is_legal
from programs.program import LAYERS, Program
from programs.source import WAYS
from programs.statements import FORWARD, LOOP, OPTIMIZERS, SETUP

# Autograd refuses to go back over what was read and written since: a layer is written before it is called.
WRITES = ("alias", "clamp_", "copy_", "mul_", "index_write", "normalize")


def make(seed: int) -> Program:
    """The program of a seed; of those that do not make sense another is drawn."""
    r = random.Random(seed)
    while True:
        program = _draw(r, seed)
        if is_legal(program):
            return program


def _draw(r: random.Random, seed: int) -> Program:
    layers = tuple(r.choice(("linear", "linear", "block")) for _ in range(r.choice((1, 2, 2, 3))))
    if r.random() < 0.03:  # more than Dynamo compiles for one code object
        layers = ("block",) * len(LAYERS)
    names = LAYERS[: len(layers)]
    forward = [f"call@{n}" for n in names]
    for _ in range(r.choice((0, 1, 1, 2, 3))):
        _insert(r, forward, r.choice(list(FORWARD)), r.choice(names))
    block = ["call@up"] if "block" in layers else []
    for _ in range(r.choice((0, 1, 1, 2)) if block else 0):
        _insert(r, block, r.choice([n for n in FORWARD if "raises" not in n and not n.startswith("embed")]), "up")
    said = {f.partition("@")[0] for f in forward}
    members = [*names, "head", *(m for m in ("embed", "slow") if any(m in line for n in said for line in FORWARD[n].init))]
    kinds = [
        kind
        for kind, share in (("eager", 1.0), ("compiled", 1.0), ("aot_eager", 0.15), ("inductor", 0.02))
        if r.random() < share
    ]
    return Program(
        seed=seed,
        layers=layers,
        forward=tuple(forward),
        block=tuple(block),
        setup=tuple(sorted(r.sample(list(SETUP), r.choice((0, 0, 1, 2))), key=list(SETUP).index)),
        loop=tuple(sorted(r.sample(list(LOOP), r.choice((0, 1, 1, 2, 3))), key=list(LOOP).index)),
        units=tuple(m for m in members if r.random() < 0.6),
        way=r.choice(("model", "model", *WAYS)),
        optimizer=r.choice(list(OPTIMIZERS)),
        heads=r.random() < 0.1,
        low_precision=r.random() < 0.08,
        reshard=r.choice((None, None, True, False)),
        fullgraph=r.random() < 0.5,
        dim=r.choice((4, 4, 5, 3)),
        steps=r.choice((2, 2, 3)),
        world=4 if r.random() < 0.2 else 2,
        bucket=r.choice((0, 1 << 20, 400)),
        budget=0.5 if r.random() < 0.08 else None,
        kinds=tuple(kinds),
    )


def _insert(r: random.Random, names: list[str], name: str, layer: str) -> None:
    is_write = any(word in name for word in WRITES)
    last = names.index(f"call@{layer}") if is_write else len(names)
    names.insert(r.randint(0, last), f"{name}@{layer}")
