"""Seeded random programs: a model, how it is sharded and compiled, and its training loop, as source that can be read.

A `Program` is plain data, so that a failure can be shrunk by leaving parts out; `render` makes the script of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from programs.statements import FORWARD, LOOP, OPTIMIZERS, SETUP, Statement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

LAYERS = "abcdefghij"


@dataclass(frozen=True)
class Program:
    """A random program.

    layers: "linear" or "block" each, called `a`, `b` and `c`. units: which of these are units of their own ("a", "head", ...).
    forward, block: statements as "name@layer", of the model's forward and of a block's (whose layers are `up` and `down`).
    way: how it is compiled (`WAYS`). heads: the model returns two outputs, of which the loss uses one.
    """

    seed: int = 0
    layers: tuple[str, ...] = ("linear", "linear")
    forward: tuple[str, ...] = ("call@a", "call@b")
    block: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    loop: tuple[str, ...] = ()
    units: tuple[str, ...] = ("a",)
    way: str = "model"
    optimizer: str = "sgd"
    heads: bool = False
    low_precision: bool = False
    reshard: bool | None = None
    fullgraph: bool = False
    dim: int = 4
    steps: int = 2
    world: int = 2
    bucket: int = 0
    budget: float | None = None
    kinds: tuple[str, ...] = ("eager", "compiled")

    def statements(self) -> list[Statement]:
        """Everything that it says."""
        forward = [FORWARD[name.split("@")[0]] for name in (*self.forward, *self.block)]
        return [*forward, *(SETUP[n] for n in self.setup), *(LOOP[n] for n in self.loop)]

    def names(self) -> set[str]:
        """Of all its statements."""
        return {n.split("@")[0] for n in (*self.forward, *self.block, *self.setup, *self.loop)}


WAYS: dict[str, tuple[str, str]] = {  # what is said before sharding, and after it
    "model": ("", "model = compiled(model{full})"),
    "in_place": ("", "compile_in_place(model{full})"),
    "layers": ("", "for layer in ({layers}):\n    compile_in_place(layer{full})"),
    "layers_before": ("for layer in ({layers}):\n    compile_in_place(layer{full})", ""),
    "in_place_before": ("compile_in_place(model{full})", ""),
    "model_before": ("model = compiled(model{full})", ""),
    "both": ("", "for layer in ({layers}):\n    compile_in_place(layer{full})\nmodel = compiled(model{full})"),
    "loss": ("", "loss_of = compiled(lambda x, ids: {loss}{full})"),
    "train": ("", "def train(x, ids):\n    loss = {loss}\n    loss.backward()\n    return loss\ntrain = compiled(train)"),
    "train_traced": (
        "",
        "torch._dynamo.config.trace_autograd_ops = True\n"
        "def train(x, ids):\n    loss = {loss}\n    loss.backward()\n    return loss\ntrain = compiled(train{full})",
    ),
    "functional": (
        "",
        "generated = torch.full((8, {d}), 0.1, requires_grad=True)\n"
        "loss_of = compiled(lambda x, ids: "
        "torch.func.functional_call(model, {{'head.weight': generated}}, (x, ids)).square().mean(){full})",
    ),
}


def render(program: Program) -> str:
    """The script."""
    names = LAYERS[: len(program.layers)]
    lines = _block(program) if "block" in program.layers else []
    lines += _model(program)
    lines += ["with torch.device('meta'):", "    model = Model()"] if "to_empty" in program.setup else ["model = Model()"]
    say = {
        "layers": ", ".join(f"model.{n}" for n in names) + ("," if len(names) == 1 else ""),
        "full": ", fullgraph=True" if program.fullgraph else "",
        "loss": f"model(x, ids){'[0]' if program.heads else ''}.square().mean()",
        "d": str(program.dim),
        "optimizer": f"optimizer = {OPTIMIZERS[program.optimizer]}",
    }
    before, after = (_split(part.format(**say)) for part in WAYS[program.way])

    def at(place: str, kinds: dict[str, Statement], chosen: Iterable[str]) -> list[str]:
        return [line for n in chosen if kinds[n].at == place for line in _split(kinds[n].lines.format(**say))]

    lines += [*at("before", SETUP, program.setup), *before, *_shard(program), *at("sharded", SETUP, program.setup), *after]
    lines += [say["optimizer"], *at("ready", SETUP, program.setup)]
    forward, backward = _call(program, say["loss"])
    loop = [
        f"x, ids = batch(step{', torch.float64' if 'to_float64' in program.setup else ''})",
        *at("start", LOOP, program.loop),
        *(at("forward", LOOP, program.loop)[:] or [forward]),
        *at("loss", LOOP, program.loop),
        *backward,
        *at("grads", LOOP, program.loop),
        "record(model, loss)",
        *(at("step", LOOP, program.loop) or ["optimizer.step()"]),
        *at("end", LOOP, program.loop),
        *(at("zero", LOOP, program.loop) or ["optimizer.zero_grad()"]),
    ]
    lines += [f"for step in range({program.steps}):", *(f"    {line}" for line in loop), "record(model)"]
    return "\n".join(lines) + "\n"


def _call(program: Program, loss: str) -> tuple[str, list[str]]:
    if program.way in ("train", "train_traced"):
        return "loss = train(x, ids)", []
    if program.way == "functional":
        return "loss = loss_of(x, ids)", ["loss.backward()", "note(generated.grad)"]
    return f"loss = {'loss_of(x, ids)' if program.way == 'loss' else loss}", ["loss.backward()"]


def _split(text: str) -> list[str]:
    return text.splitlines() if text else []


def _forward(names: Sequence[str], dim: int, blocks: set[str]) -> list[str]:
    lines: list[str] = []
    calls = [f"self.{n.partition('@')[2]}" for n in names]
    if len(names) > 3 and all(n.startswith("call@") and n.partition("@")[2] in blocks for n in names):
        return [f"for layer in ({', '.join(calls)}):", "    x = layer(x)"]
    for entry in names:
        name, _, layer = entry.partition("@")
        text = FORWARD[name].lines
        if name == "call" and layer in blocks:
            text = "x = {m}(x)"
        lines += _split(text.format(m=f"self.{layer}", l=layer, d=dim))
    return lines


def _init(names: Iterable[str], dim: int) -> list[str]:
    extra = (line for n in names for line in _split(FORWARD[n.partition("@")[0]].init.format(d=dim)))
    return list({line.split("=")[0]: line for line in extra}.values())


def _class(name: str, init: list[str], arguments: str, forward: list[str]) -> list[str]:
    head = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    return [*head, *(f"        {x}" for x in init), f"    def forward(self, {arguments}):", *(f"        {x}" for x in forward)]


def _block(program: Program) -> list[str]:
    d = program.dim
    init = [f"self.up, self.down = nn.Linear({d}, {d}), nn.Linear({d}, {d})", *_init(program.block, d)]
    return _class("Block", init, "x", [*_forward(program.block, d, set()), "return x + self.down(x)"])


def _model(program: Program) -> list[str]:
    d = program.dim
    made = {"linear": f"nn.Linear({d}, {d})", "block": "Block()"}
    members = {n: made[kind] for n, kind in zip(LAYERS, program.layers, strict=False)}
    members["head"] = f"nn.Linear({d}, 8, bias=False)"
    if program.heads:
        members["other"] = f"nn.Linear({d}, 2)"
    init = [f"{', '.join(f'self.{n}' for n in members)} = {', '.join(members.values())}", *_init(program.forward, d)]
    blocks = {n for n, kind in zip(LAYERS, program.layers, strict=False) if kind == "block"}
    end = "return self.head(x), self.other(x)" if program.heads else "return self.head(x)"
    return _class("Model", init, "x, ids", [*_forward(program.forward, d, blocks), end])


def _shard(program: Program) -> list[str]:
    more = ", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)" if program.low_precision else ""
    more += f", reshard_after_forward={program.reshard}" if program.reshard is not None else ""
    units = [f"model.{n}" for n in program.units]
    if not units:
        return [f"fully_shard(model{more})"]
    return [f"for unit in ({', '.join(units)}, model):", f"    fully_shard(unit{more})"]


# -- which programs make sense


def is_legal(program: Program) -> bool:
    """Whether the statements have what they need; the unsharded model is to run them."""
    blocks = {n for n, kind in zip(LAYERS, program.layers, strict=False) if kind == "block"}
    names = {*LAYERS[: len(program.layers)]}
    has = {n for n in _members(program)}
    for entry in program.forward:
        name, _, layer = entry.partition("@")
        if layer and (layer not in names or (layer in blocks and not FORWARD[name].for_block)):
            return False
    if program.layers == () or any(u not in has for u in program.units):
        return False
    return all(_is_there(s.needs, program, names - blocks, has) for s in program.statements()) and _fits(program)


def _members(program: Program) -> set[str]:
    found = {*LAYERS[: len(program.layers)], "head"} | ({"other"} if program.heads else set())
    for line in _init(program.forward, program.dim):
        if line.startswith("self.") and "nn." in line:
            found.add(line.removeprefix("self.").split(" ")[0])
    return found


def _is_there(need: str, program: Program, linears: set[str], has: set[str]) -> bool:
    names = program.names()
    known = {
        "": True,
        "ab": {"a", "b"} <= linears,
        "embed": "embed" in has,
        "meta": not any(FORWARD[n.partition("@")[0]].init for n in (*program.forward, *program.block)),
        "unit_a": "a" in program.units,
        "plain_loop": not program.loop,
        "raises": any(n.startswith("raises@") for n in program.forward),
        "hook_raises": any(n.startswith("hook_raises@") for n in program.forward),
        "ema": "ema" in names,
        "no_all_to_all": not names & {"all_to_all", "all_to_all_twice"},
    }
    return known[need]


def _fits(program: Program) -> bool:
    names = program.names()
    once = [LOOP[n].at for n in program.loop if LOOP[n].at in ("forward", "step", "zero")]
    is_whole = program.way in ("train", "train_traced", "functional", "loss")
    if len(once) != len(set(once)) or (is_whole and "forward" in once):
        return False
    if program.way in ("train", "train_traced") and any(LOOP[n].at == "loss" for n in program.loop):
        return False
    calls_again = any("model(" in LOOP[n].lines for n in program.loop)
    if program.heads and (program.way == "functional" or calls_again or {"eval_first", "warm_double"} & names):
        return False
    if program.fullgraph and any(s.breaks for s in program.statements()):
        return False
    if "to_float64" in names and ({"eval_first", "warm_double"} & names or program.way == "functional" or program.low_precision):
        return False
    if sum(n.startswith(("tie_head", "load_assign")) for n in program.setup) > 1:
        return False
    return not ("no_input_grad" in names and {"input_grad", "input_backward", "input_grad_after", "accumulate_input_grad"} & names)


# -- programs


def singles() -> Iterator[Program]:
    """Each statement by itself in a small program, then each way to compile: what fails here is found without shrinking."""
    found = [*_single_forward(), *_single_setup(), *_single_loop(), *_single_ways(), *_single_optimizers(), *_many_blocks()]
    yield from filter(is_legal, found)


def _single_forward() -> Iterator[Program]:
    for name, statement in FORWARD.items():
        entry, loop = f"{name}@a", RAISING.get(name, ())
        for units in ((), ("a",)):
            yield Program(forward=("read@a", entry, "call@a"), layers=("linear",), units=units, loop=loop)
        yield Program(layers=("block",), block=("read@up", f"{name}@up", "call@up"), forward=("call@a",))
        if "self.slow" in statement.init:
            yield Program(forward=(entry, "call@a"), layers=("linear",), units=("a", "slow"))
            yield Program(forward=("call@a", entry, "call@b"), units=("a", "slow"))
    for name in ("dtype", "finfo", "dtype_of_layer", "norm_of_all", "read", "state_dict"):
        yield Program(layers=("block",), block=("call@up", f"{name}@up"), forward=("call@a",), low_precision=True)


def _single_setup() -> Iterator[Program]:
    for name in SETUP:
        forward = ("embed", "call@a", "call@b") if "head" in name else ("call@a", "call@b")
        for units in ((), ("a", "b", "head")):
            yield Program(forward=forward, setup=(name,), units=units, loop=("update_ema",) if name == "ema" else ())


def _single_loop() -> Iterator[Program]:
    raising = {"caught": "raises@a", "caught_backward": "hook_raises@a"}
    for name in LOOP:
        forward = ("call@a", *([raising[name]] if name in raising else []), "call@b")
        program = Program(forward=forward, loop=(name,), setup=("ema",) if name == "update_ema" else ())
        yield program
        yield replace(program, setup=(*program.setup, "overlap"), optimizer="adamw")
        yield replace(program, heads=True, optimizer="adamw")


def _single_ways() -> Iterator[Program]:
    two = ("a", "b")
    for way in WAYS:
        for fullgraph in (True, False):
            yield Program(way=way, fullgraph=fullgraph, units=two)
            yield Program(layers=("block",) * 3, block=("call@up",), forward=("call@a", "call@b", "call@c"), way=way, fullgraph=fullgraph, units=two)
        for setup in ("to_empty", "to_float64", "load_assign"):
            yield Program(way=way, setup=(setup,))


def _many_blocks() -> Iterator[Program]:
    calls = tuple(f"call@{n}" for n in LAYERS)
    many = Program(layers=("block",) * len(LAYERS), forward=calls, units=tuple(LAYERS))
    for name in ("break", "item", "experts@up"):
        for way in ("model", "in_place", "layers"):
            yield replace(many, block=("call@up", name, "call@up"), way=way)
    for name in ("rank_batch", "one_row"):
        yield Program(loop=(name,), units=("a", "b"), budget=0.5)


def _single_optimizers() -> Iterator[Program]:
    for optimizer in OPTIMIZERS:
        yield Program(optimizer=optimizer, setup=("keep",), steps=3)
        yield Program(optimizer=optimizer, setup=("keep",), reshard=False, steps=3)
        yield Program(optimizer=optimizer, loop=("compiled_step",))


RAISING = {"raises": ("caught",), "hook_raises": ("caught_backward",)}


def make(seed: int) -> Program:
    """A random program; of those that do not make sense another is drawn."""
    r = random.Random(seed)
    while True:
        program = _draw(r, seed)
        if is_legal(program):
            return program


WRITES = ("alias", "clamp_", "copy_", "mul_", "index_write", "normalize")


def _draw(r: random.Random, seed: int) -> Program:
    layers = tuple(r.choice(("linear", "linear", "block")) for _ in range(r.choice((1, 2, 2, 3))))
    if r.random() < 0.03:  # more than Dynamo compiles for one code object
        layers = ("block",) * len(LAYERS)
    names = LAYERS[: len(layers)]
    forward = [f"call@{n}" for n in names]
    for _ in range(r.choice((0, 1, 1, 2, 3))):
        name, layer = r.choice(list(FORWARD)), r.choice(names)
        is_write = any(word in name for word in WRITES)  # autograd refuses to go back over what was read and written since
        forward.insert(r.randint(0, forward.index(f"call@{layer}") if is_write else len(forward)), f"{name}@{layer}")
    block = ["call@up"]
    for _ in range(r.choice((0, 1, 1, 2)) if "block" in layers else 0):
        name = r.choice([n for n in FORWARD if "raises" not in n and not n.startswith("embed")])
        is_write = any(word in name for word in WRITES)
        block.insert(r.randint(0, block.index("call@up") if is_write else len(block)), f"{name}@up")
    loop = r.sample(list(LOOP), r.choice((0, 1, 1, 2, 3)))
    setup = r.sample(list(SETUP), r.choice((0, 0, 1, 2)))
    kinds = ["eager", "compiled"]
    kinds += ["aot_eager"] if r.random() < 0.15 else []
    kinds += ["inductor"] if r.random() < 0.02 else []
    members = [*names, "head", "embed", "slow", "other"]
    return Program(
        seed=seed,
        layers=layers,
        forward=tuple(forward),
        block=tuple(block) if "block" in layers else (),
        setup=tuple(sorted(setup, key=list(SETUP).index)),
        loop=tuple(sorted(loop, key=list(LOOP).index)),
        units=tuple(m for m in members if r.random() < 0.6 and (m not in ("embed", "slow") or any(m in f for f in forward))),
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


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the large steps first."""
    plain = Program()
    for field in ("loop", "setup", "forward", "block", "units"):
        entries = getattr(program, field)
        if len(entries) > 1:
            yield _change(program, {field: ()})
        for i in range(len(entries)):
            yield _change(program, {field: entries[:i] + entries[i + 1 :]})
    for i in range(len(program.layers)):
        gone, layers = LAYERS[i], program.layers[:i] + program.layers[i + 1 :]
        without = tuple(f for f in program.forward if not f.endswith(f"@{gone}"))
        if i == len(program.layers) - 1:
            yield _change(program, {"layers": layers, "forward": without, "units": tuple(u for u in program.units if u != gone)})
        if program.layers[i] == "block":
            linear = (*program.layers[:i], "linear", *program.layers[i + 1 :])
            yield _change(program, {"layers": linear, "block": program.block if "block" in linear else ()})
            moved = tuple(f.replace("@up", f"@{gone}") for f in program.block)
            inlined = tuple(g for f in program.forward for g in (moved if f == f"call@{gone}" else (f,)))
            yield _change(program, {"layers": linear, "forward": inlined, "block": program.block if "block" in linear else ()})
    for name in (f.name for f in fields(Program)):
        if name in ("way", "optimizer", "heads", "low_precision", "reshard", "fullgraph", "dim", "steps", "world", "bucket", "budget"):
            if getattr(program, name) != getattr(plain, name):
                yield _change(program, {name: getattr(plain, name)})
    if program.steps > 1:
        yield _change(program, {"steps": program.steps - 1})


def _change(program: Program, changes: dict[str, Any]) -> Program:
    return replace(program, **changes)


# -- scripts


@dataclass(frozen=True)
class Script:
    """What is run: a source, and under what. is_whole: everything that it calls is compiled; is_silent: without graph breaks."""

    source: str
    world: int = 2
    dim: int = 4
    bucket: int = 0
    budget: float | None = None
    low_precision: bool = False
    is_whole: bool = False
    kinds: tuple[str, ...] = ("eager", "compiled")

    def header(self) -> str:
        """One line that `read` understands."""
        kinds = ",".join(self.kinds)
        return (
            f"# run: world={self.world} dim={self.dim} bucket={self.bucket} budget={self.budget} "
            f"low_precision={self.low_precision} is_whole={self.is_whole} kinds={kinds}\n"
        )


WHOLE = ("model", "in_place", "model_before", "in_place_before", "both", "loss", "train")
RUNS_EAGERLY = {"checkpoint_reentrant", "disabled_call", "unshard", "unshard_async", "wait_late", "wait_after_forward"}


def script(program: Program) -> Script:
    """What is run for a program."""
    is_whole = program.way in WHOLE and not program.names() & RUNS_EAGERLY
    numbers = (program.world, program.dim, program.bucket, program.budget)
    return Script(render(program), *numbers, program.low_precision, is_whole, program.kinds)


def read(text: str) -> Script:
    """A script from the text of a file: its header, comments, and source."""
    header, *lines = text.splitlines(keepends=True)
    said = dict(word.split("=") for word in header.removeprefix("# run: ").split())
    return Script(
        source="".join(line for line in lines if not line.startswith("#")),
        world=int(said["world"]),
        dim=int(said["dim"]),
        bucket=int(said["bucket"]),
        budget=None if said["budget"] == "None" else float(said["budget"]),
        low_precision=said["low_precision"] == "True",
        is_whole=said["is_whole"] == "True",
        kinds=tuple(said["kinds"].split(",")),
    )
