"""The script of a program: what a user would write, with `fully_shard`, `compiled`, ... as
`kinds.py` defines them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from programs.grammar import parse
from programs.program import LAYERS, Program
from programs.statements import FORWARD, LOOP, OPTIMIZERS, OTHERS, SETUP, Statement

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# {layers}, {full}: the layers to compile one by one; ", fullgraph=True" or nothing. {loss}: the
# loss of a batch.
WAYS = parse(
    """
-- model
model = compiled(model{full})
-- in_place
compile_in_place(model{full})
-- layers
for layer in ({layers}):
    compile_in_place(layer{full})
-- layers_before at=before
for layer in ({layers}):
    compile_in_place(layer{full})
-- in_place_before at=before
compile_in_place(model{full})
-- model_before at=before
model = compiled(model{full})
-- both
for layer in ({layers}):
    compile_in_place(layer{full})
model = compiled(model{full})
-- loss
loss_of = compiled(lambda x, ids: {loss}{full})
-- train
def train(x, ids):
    loss = {loss}
    loss.backward()
    return loss
train = compiled(train)
-- train_traced
torch._dynamo.config.trace_autograd_ops = True
def train(x, ids):
    loss = {loss}
    loss.backward()
    return loss.detach()
train = compiled(train{full})
-- functional
generated = torch.full((8, {d}), 0.1, requires_grad=True)
def loss_of(x, ids):
    return torch.func.functional_call(model, {'head.weight': generated}, (x, ids)).square().mean()
loss_of = compiled(loss_of{full})
"""
)
WHOLE = ("model", "in_place", "model_before", "in_place_before", "both", "loss", "train")
RUNS_EAGERLY = {
    "checkpoint_reentrant",
    "checkpoint_itself",
    "gradient_in_hook",
    "disabled_call",
    "unshard",
    "unshard_async",
    "wait_late",
    "wait_after_forward",
    "adversary_penalty",  # no graph has a backward through its backward
}


@dataclass(frozen=True)
class Script:
    """What is run: a source, and under what. is_whole: everything that it calls is compiled, so
    eager units are announced.
    """

    source: str
    world: int = 2
    dim: int = 4
    bucket: int = 0
    budget: float | None = None
    low_precision: bool = False
    is_whole: bool = False
    mesh: str = "1d"
    kinds: tuple[str, ...] = ("eager", "compiled")

    def header(self) -> str:
        """One line that `read` understands."""
        return (
            f"# run: world={self.world} dim={self.dim} bucket={self.bucket} budget={self.budget} "
            f"low_precision={self.low_precision} is_whole={self.is_whole} mesh={self.mesh} "
            f"kinds={','.join(self.kinds)}\n"
        )


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
        mesh=said["mesh"],
        kinds=tuple(said["kinds"].split(",")),
    )


def script(program: Program) -> Script:
    """What is run for a program."""
    eagerly = program.way in ("loss", "train") and "model(" in "".join(
        line for s in _around(program) for line in s.lines
    )
    eagerly |= program.step is not None and "model(" in "".join(
        line for s in _around(program) for line in s.lines
    )
    is_whole = program.way in WHOLE and not program.names() & RUNS_EAGERLY and not eagerly
    numbers = (program.world, program.dim, program.bucket, program.budget)
    is_low = program.low_precision or "autocast" in program.names()
    mesh = "hsdp" if program.replicas else "1d"
    return Script(render(program), *numbers, is_low, is_whole, mesh, program.kinds)


def _around(program: Program) -> list[Statement]:
    """What it says outside of forward."""
    return [*(SETUP[n] for n in program.setup), *(LOOP[n] for n in program.loop)]


def render(program: Program) -> str:
    """The source."""
    return _once(program) * (2 if program.cells else 1)


def _once(program: Program) -> str:
    build = (
        ["with torch.device('meta'):", "    model = Model()"]
        if "to_empty" in program.setup
        else ["model = Model()"]
    )
    way = {program.way: WAYS[program.way]}
    words = _words(program)

    def at(place: str, statements: Mapping[str, Statement], names: Iterable[str]) -> list[str]:
        return [
            fill(line, words)
            for n in names
            if statements[n].at == place
            for line in statements[n].lines
        ]

    lines = [
        *(_block(program) if program.blocks else []),
        *_model(program),
        *build,
        *at("before", SETUP, program.setup),
        *at("before", way, way),
        *_shard(program),
        *at("sharded", SETUP, program.setup),
        *at("forward", way, way),
        words["optimizer"],
        *at("ready", SETUP, program.setup),
        *(fill(line, words) for n in program.loop for line in LOOP[n].init),
        *(_made(program, words["loss"]) if program.step is not None else []),
        f"for step in range({program.steps}):",
    ]
    given = f"x, ids = batch(step{', torch.float64' if 'to_float64' in program.setup else ''})"
    if program.step is not None:
        start, end = (at(place, LOOP, program.loop) for place in ("start", "end"))
        body = [given, *start, *_taken(program), *end]
        return "\n".join([*lines, *(f"    {line}" for line in body)]) + "\n"
    forward, backward = _call(program, words["loss"])
    loop = [
        given,
        *at("start", LOOP, program.loop),
        *(at("forward", LOOP, program.loop) or [forward]),
        *at("loss", LOOP, program.loop),
        *backward,
        *at("grads", LOOP, program.loop),
        "note(loss)" if "overlap_in_backward" in program.setup else "record(model, loss)",
        *(at("step", LOOP, program.loop) or ["optimizer.step()"]),
        *at("end", LOOP, program.loop),
        *(at("zero", LOOP, program.loop) or ["optimizer.zero_grad()"]),
    ]
    return "\n".join([*lines, *(f"    {line}" for line in loop), "record(model)"]) + "\n"


def _made(program: Program, loss: str) -> list[str]:
    """A whole step."""
    assert program.step is not None
    scaler = ["scaler = torch.amp.GradScaler('cpu', init_scale=256.0, growth_interval=1)"]
    schedule = ["schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)"]
    more = f", {program.step}" if program.step else ""
    is_several = program.optimizer in OTHERS
    others = [f"others = {OTHERS[program.optimizer]}"] if is_several else []
    optimizers = "[optimizer, others]" if is_several else "optimizer"
    made = f"take = whole_step(model, {optimizers}, lambda model, x, ids: {loss}{more})"
    scaler = scaler if "scaler" in program.step else []
    return [*scaler, *(schedule if "schedule" in program.step else []), *others, made]


def _taken(program: Program) -> list[str]:
    """One of them; with a scaler, the second meets an inf on one rank."""
    assert program.step is not None
    lines = ["x = x.detach()"]
    if "scaler" in program.step:
        lines.append("x = x * (float('inf') if step == 1 and rank == 1 else 1.0)")
    is_several = "accumulate" in program.step
    given = "[(x, ids), (x * 0.5, ids)]" if is_several else "x, ids"
    lines.append(f"record(model, take({given}))")
    return [*lines, *(["note(torch.tensor(scaler.get_scale()))"] if len(lines) == 3 else [])]


def fill(line: str, words: Mapping[str, str]) -> str:
    """A line with its `{words}` replaced."""
    for word, text in words.items():
        line = line.replace(f"{{{word}}}", text)
    return line


def init(names: Iterable[str], dim: int) -> list[str]:
    """What statements need in `__init__`; of two that make the same member the last."""
    lines = (
        fill(line, {"d": str(dim)}) for n in names for line in FORWARD[n.partition("@")[0]].init
    )
    return list({line.partition(" =")[0]: line for line in lines}.values())


def _words(program: Program) -> dict[str, str]:
    names = LAYERS[: len(program.layers)]
    full = ", fullgraph=True" if program.fullgraph else ""
    return {
        "layers": ", ".join(f"model.{n}" for n in names) + ("," if len(names) == 1 else ""),
        "full": f"{full}, dynamic=True" if program.dynamic else full,
        "loss": f"model(x, ids){'[0]' if program.heads else ''}.square().mean()",
        "d": str(program.dim),
        "optimizer": f"optimizer = {OPTIMIZERS[program.optimizer]}",
    }


def _call(program: Program, loss: str) -> tuple[str, list[str]]:
    if program.way in ("train", "train_traced"):
        # what has gradients besides parameters breaks a graph with a backward in it
        is_one = program.way == "train_traced" and program.fullgraph
        return f"loss = train({'x.detach()' if is_one else 'x'}, ids)", []
    if program.way == "functional":
        return "loss = loss_of(x, ids)", ["loss.backward()", "note(generated.grad)"]
    return f"loss = {'loss_of(x, ids)' if program.way == 'loss' else loss}", ["loss.backward()"]


def _forward(names: Sequence[str], dim: int, blocks: set[str]) -> list[str]:
    if len(names) > 3 and all(n.startswith("call@") and n[5:] in blocks for n in names):
        return [f"for layer in ({', '.join(f'self.{n[5:]}' for n in names)}):", "    x = layer(x)"]
    lines: list[str] = []
    for name, _, layer in (entry.partition("@") for entry in names):
        words = {"m": f"self.{layer}", "d": str(dim)}
        is_block = name == "call" and layer in blocks
        lines += [
            fill(line, words) for line in (["x = {m}(x)"] if is_block else FORWARD[name].lines)
        ]
    return lines


def _class(name: str, members: list[str], arguments: str, forward: list[str]) -> list[str]:
    head = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    body = [f"        {line}" for line in forward]
    return [
        *head,
        *(f"        {line}" for line in members),
        f"    def forward(self, {arguments}):",
        *body,
    ]


def _block(program: Program) -> list[str]:
    d = program.dim
    members = [
        f"self.up, self.down = nn.Linear({d}, {d}), nn.Linear({d}, {d})",
        *init(program.block, d),
    ]
    return _class(
        "Block", members, "x", [*_forward(program.block, d, set()), "return x + self.down(x)"]
    )


def _model(program: Program) -> list[str]:
    d = program.dim
    made = {"linear": f"nn.Linear({d}, {d})", "block": "Block()"}
    members = {n: made[kind] for n, kind in zip(LAYERS, program.layers, strict=False)}
    members["head"] = f"nn.Linear({d}, 8, bias=False)"
    if program.heads:
        members["other"] = f"nn.Linear({d}, 2)"
    first = f"{', '.join(f'self.{n}' for n in members)} = {', '.join(members.values())}"
    end = "return self.head(x), self.other(x)" if program.heads else "return self.head(x)"
    forward = [*_forward(program.forward, d, program.blocks), end]
    return _class("Model", [first, *init(program.forward, d)], "x, ids", forward)


def _shard(program: Program) -> list[str]:
    more = (
        ", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        if program.low_precision
        else ""
    )
    more += f", reshard_after_forward={program.reshard}" if program.reshard is not None else ""
    units = [f"model.{n}" for n in program.units]
    if not units:
        return [f"fully_shard(model{more})"]
    return [f"for unit in ({', '.join(units)}, model):", f"    fully_shard(unit{more})"]
