"""Which programs make sense: the unsharded model is to run them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from programs.program import LAYERS
from programs.source import init
from programs.statements import FORWARD, LOOP, OTHERS

if TYPE_CHECKING:
    from programs.program import Program

GRADIENTS = re.compile(
    r"grad\b|grads|backward|optimizer|gradient"
)  # what another backward than the loop's own is about
CONTROL_FLOW = {"cond", "cond_read", "cond_two", "scan", "while_loop", "map"}
TRANSFORMED = {
    "func_grad",
    "func_grad_own",
    "per_sample",
    "vmap",
    "jvp",
    "vjp",
    "jacobian",
    "ensemble",
}
NAMES_INSIDE = re.compile(r"functional_call|_parameters\[|state_dict\(\)\[")  # of what is wrapped
COLLECTIVES = {"all_to_all", "all_to_all_twice", "all_reduce", "dist_all_reduce"}


def is_legal(program: Program) -> bool:
    """Whether its statements have what they need, and fit together."""
    layers = program.linears | program.blocks
    for name, _, layer in (entry.partition("@") for entry in program.forward):
        if layer and (
            layer not in layers or (layer in program.blocks and not FORWARD[name].for_block)
        ):
            return False
    if not layers or any(unit not in members(program) for unit in program.units):
        return False
    needs = {need for statement in program.statements() for need in statement.needs}
    return all(_has(need, program) for need in needs) and _fits(program)


def members(program: Program) -> set[str]:
    """The modules that the model holds."""
    found = {*LAYERS[: len(program.layers)], "head"} | ({"other"} if program.heads else set())
    lines = init(program.forward, program.dim)
    return found | {
        line.removeprefix("self.").split()[0]
        for line in lines
        if line.startswith("self.") and "nn." in line
    }


def _has(need: str, program: Program) -> bool:
    names = program.names()
    known = {
        "ab": program.linears >= {"a", "b"},
        "embed": "embed" in members(program),
        "meta": not any(
            FORWARD[n.partition("@")[0]].init for n in (*program.forward, *program.block)
        ),
        "unit_a": "a" in program.units,
        "plain_loop": not any(
            GRADIENTS.search(line) for n in program.loop for line in LOOP[n].lines
        ),
        "raises": any(n.startswith("raises@") for n in program.forward),
        "hook_raises": any(n.startswith("hook_raises@") for n in program.forward),
        "ema": "ema" in names,
        "pure": all(_is_pure(n.partition("@")[0]) for n in program.block),
        "saved": "checkpoint_save" in names,
        "one_output": not program.heads,
        "adapter": "adapter" in names,
        "no_all_to_all": not names & {"all_to_all", "all_to_all_twice"},
        "no_collective": not names & COLLECTIVES,
    }
    return known[need]


def _is_pure(name: str) -> bool:
    """Whether a block that says it can be transformed: nothing is written or sent."""
    statement = FORWARD[name]
    said = "\n".join(statement.lines)
    is_plain = (
        not statement.init and not statement.breaks and not re.search(r"_\(|\.data|no_grad", said)
    )
    return is_plain and name not in COLLECTIVES and "raises" not in name and name != "index_write"


def _fits(program: Program) -> bool:
    names = program.names()
    once = [LOOP[n].at for n in program.loop if LOOP[n].at in ("forward", "step", "zero")]
    calls_again = any("model(" in line for n in program.loop for line in LOOP[n].lines)
    calls_first = bool({"eval_first", "warm_double"} & names)
    wants_grad = {
        "input_grad",
        "input_backward",
        "input_grad_after",
        "accumulate_input_grad",
        "penalty",
    } & names
    is_step = program.step is not None
    said = [line for s in program.statements() for line in s.lines]
    wrong = (
        is_step and any(s.breaks for s in program.statements()),
        is_step and program.way != "model",
        is_step and {"overlap", "overlap_in_backward"} & names,
        is_step and any(LOOP[n].at not in ("start", "end") for n in program.loop),
        is_step and not _has("plain_loop", program),
        len(once) != len(set(once)),
        program.way in ("train", "train_traced", "functional", "loss") and "forward" in once,
        program.way in ("train", "train_traced")
        and any(LOOP[n].at == "loss" for n in program.loop),
        program.heads and (program.way == "functional" or calls_again or calls_first),
        program.fullgraph and any(s.breaks for s in program.statements()),
        "to_float64" in names
        and (calls_first or program.way == "functional" or program.low_precision),
        sum(n.startswith(("tie_head", "load_assign")) for n in program.setup) > 1,
        "no_input_grad" in names and wants_grad,
        {"checkpoint_reentrant", "checkpoint_itself"} & names and wants_grad,
        {"overlap", "overlap_in_backward"} <= names,
        # `to_empty` on a plain model makes a parameter of each name and so unties them; sharded
        # ones stay tied
        "to_empty" in names and {name for name in names if name.startswith("tie_")},
        # two rows are normalized to 1 and -1, whatever they are: gradients before that are rounding
        "batch_norm" in names and {"one_row", "half_batch"} & names,
        # what is substituted would be fp32
        program.low_precision and (program.way == "functional" or "substitute_buffer" in names),
        "post_grad_hook" in names
        and (is_step or "no_zero" in names or program.optimizer in OTHERS),
        # a copy of the model has ways of its own to be compiled, and hooks
        {"averaged", "averaged_ema"} & names
        and (program.way not in ("model", "loss", "train") or program.heads),
        is_step and "scaler" in (program.step or "") and program.optimizer in OTHERS,
        "wrap_checkpoint" in names and any(map(NAMES_INSIDE.search, said)),
        program.replicas and program.world != 4,
        # torch's control flow takes no graph with hooks of a module's backward,
        # nor saved tensor hooks
        names & CONTROL_FLOW and {"backward_hook", "backward_pre_hook"} & names,
        "wrap_checkpoint" in names and names & TRANSFORMED,
        # what the loss does not use has no state to be saved
        program.heads and "checkpoint_states" in names,
    )
    return not any(wrong)
