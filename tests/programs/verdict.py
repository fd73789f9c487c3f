"""What a kind's outcome is worth: equal, announced, refused by name, torch's own limit, or a
fault.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard

import torch
from programs.kinds import Entry, Outcome
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from programs.source import Script

# Errors of ours say what was done and what to do; those of a broken graph or of ranks that diverge
# are for broken programs.
NAMED = (
    "NotImplementedError",
    "FallbackError",
    "UnusedOptionError",
    "RuntimeError",
    "ValueError",
    "TypeError",
    "AssertionError",
    # what Dynamo makes of an error of ours that is raised while it traces; it keeps the text
    "InternalTorchDynamoError",
)
# fp32: sums over ranks, and of several backwards, in another order. Units that compute in bf16 are
# compared with stock's.
RTOL, ATOL = 1e-4, 1e-5
LOW = 0.05
SET_DATA = "Failed to mutate tensor data attribute"
# 2.11, of a backward in a compiled function
NO_DTENSORS = "Dynamo of this torch ends in an AssertionError without a text"
# What torch itself says of unsharded models, too, and what the script has to say: the unsharded
# model may have been compiled for fewer shapes. 2.11 cannot compile a layer in inference mode;
# autograd saved another unit's parameter, and its own backward has freed it (stock's processes die
# there). A module of a class of the user's own raises the last, too; one of torch's, compiled alone
# with fullgraph=True, says otherwise what is wrong
# (`test_torch_transforms_nothing_that_is_compiled_by_itself`). A backward that writes over what
# forward has saved is for once only: other backends than our eager one compile it so.
DONATED = "non-empty donated buffers"
TORCHS_OWN = {
    DONATED: r"retain_graph=True",
    "to 'torch.storage.UntypedStorage'": r"inference_mode",
    "modified by an inplace operation": r"\.unshard\(",
    # A layer of torch.nn that is compiled by itself: whether Dynamo finds a frame of its, unless it
    # has hooks, depends on what it has compiled before.
    "found no compiled frames": r"for layer in .*\n.*compile_in_place\(layer, fullgraph=True",
    # Between sharded parameters, of fewer rows than ranks: plain DTensors say the same.
    "in-place operations that require placement changes": (
        r"(?s)no_grad\(\):\n +model\.[\w.]+\.(add|sub)_\("
    ),
    "Calling torch.func.vmap(compiled_fn)": r"(?s)(vmap\(|torch\.func\.).*fullgraph=True",
}
# On 2.15 DTensor writes `w[0] = x` to a copy, if `w` is sharded there; older ones refuse it.
LOSES_ITEMS = hasattr(FSDPModule, "finalize_backward")
# What DTensor says of a parameter that is sharded at that moment; in eager mode we say which.
SHARDED = ("got mixed torch.Tensor and DTensor", "does not have a sharding strategy registered")
# The same in a trace, whatever DTensor says: with dynamic=True, that its sizes are symbols.
SHARDED_FAKE = "DTensor(local_tensor=FakeTensor"
# What is announced of a backward that may not come: then full parameters stay beside sharded ones.
NO_BACKWARD = "torch traces a backward that trains nothing"
AT_REST = (*SHARDED, "that is sharded at that moment")
# What torch alone does to parameters that only unused outputs of a graph lead to,
# and ours does not.
ZEROS = r"grad [\w.]+: a tensor, should be None"
# Of a unit around which torch compiles graphs that are not ours: there it does so too.
AROUND = "runs eagerly, not in a graph"
# Announcements that explain another result; of which scripts, and what is different first.
EXPLAIN = {
    "so the write is lost": ("", ""),
    "is read in a graph that ends at a graph break": ("", "grad|value|param"),
    "trains nothing": ("", r"^(?!value 0,)"),  # what comes before the first backward is as it was
    "neither gathered nor reduced over the ranks": ("", ""),
    "Sharded weights stay tied": ("assign=True", ""),
    "in a graph that is part of a forward": (r"foreach|\.data|_\(", r"grad|value"),
    "between a graph that read them and its backward": (r"foreach|\.data|_\(", "grad|value|param"),
    "gives these, whose .grad is None": (r"p\.grad|clip_grad|clip=", r"grad|param|value"),
    "DTensor ignores that": (r"\.data = ", ""),
    "zero_grad() does not drop them": ("zero_grad", ""),
    "zeros for gradients instead of None": ("", ZEROS),
    "a branch on the dtype may take the other side": (r"\.dtype", "grad|param|value"),
    "registers a hook on its input": ("register_hook", "grad|param|value"),
    "which a forward has left for a backward": (r"parameters\(\)", "grad|param|value"),
    "their gradients are not reduced": (r"nn\.", "grad|param|value"),
}
# Announcements that a unit runs eagerly, which explain that in scripts that say this.
EAGERLY = {"it has given up the call for good": r"raise"}
# What stock does otherwise than the unsharded model, unsaid, by what the source says. Ours has to
# announce it.
QUIRKS = {
    # not that of `__init__(`
    "a write to a gathered parameter is lost": r"(?<!_)_\(|p\.data|max_norm|\[0\] = ",
    "functional_call does not replace a parameter that is gathered": "functional_call",
    "full parameters of before the step go on": r"set_reshard_after_backward\(False\)",
    "weights that load_state_dict(assign=True) unties stay tied": (
        r"(?s)model\.\w+(\.weight)? = model\..*assign=True"
    ),
}

# Operators run as they are, in the same order, on two ranks. Not "inductor", which fuses; nor
# "aot_eager", which reduces the gradient of each read by itself; and sums over more ranks have an
# order.
SAME_ARITHMETIC = ("compiled",)
# Only the ranks whose shard was changed can know of a write that no version counts; the error ends
# the job for all.
UNSEEN = "were written to through .data, or by a foreach op"
RAISED = re.compile(r"this rank raised (\w+) \((ours|not ours)\): (.*?); nothing from", re.DOTALL)

# Inductor rounds otherwise, and a batch norm over two rows makes gradients out of small differences
# of large terms: 2e-5 of the largest element was found, which is more than 1e-4 of a small one. So
# a tensor is measured by its largest.
FUSED = ("inductor",)
# What every script says, and every message may.
TOO_COMMON = {
    *(
        "a b c d e f x y w p q in is if not for of to and with as or self the model loss step "
        "import"
    ).split()
}
TOO_COMMON |= {
    *(
        "torch data class def return try except range forward zip all no sum mean read True False "
        "None"
    ).split()
}

Outcomes = dict[str, "list[Outcome] | str"]


@dataclass(frozen=True)
class Verdict:
    """kind: which way of running; word: "equal", "announced", "quirk" (of stock), "as stock",
    "refused", "torch" or "fault".

    is_exact: the same bits as the unsharded model's; as_eager: as our eager runtime's.
    """

    kind: str
    word: str
    detail: str = ""
    is_exact: bool = False
    as_eager: bool = True

    @property
    def is_fault(self) -> bool:
        return self.word == "fault"


def judge(kind: str, outcomes: Outcomes, script: Script) -> Verdict:
    """Of one kind, from what all kinds did on every rank; a text stands for a hang or a death."""
    mine, reference = outcomes[kind], outcomes["unsharded"]
    if isinstance(mine, str):
        return _of_death(kind, mine, outcomes, script)
    if any(o.error for o in mine):
        return _of_error(kind, mine, outcomes, script)
    assert isinstance(reference, list)
    rtol, atol = (LOW, LOW) if script.low_precision else (RTOL, ATOL)
    found = differs(mine, reference, rtol, atol, of_largest=kind in FUSED)
    if found:
        return _of_difference(kind, mine, outcomes, script, found)
    is_exact, as_eager = not differs(mine, reference, 0, 0), _is_eager(mine, outcomes)
    is_same = as_eager or _is_torchs_step(script, outcomes)
    if kind in SAME_ARITHMETIC and not is_same and script.world == 2 and is_read_once(script):
        return Verdict(kind, "fault", "is equal, but not bit for bit what eager computes")
    return _silent(kind, mine, script) or Verdict(
        kind, "equal", is_exact=is_exact, as_eager=as_eager
    )


def _is_torchs_step(script: Script, outcomes: Outcomes) -> bool:
    """Whether an optimizer's step, compiled by torch alone,
    has other last bits, as Adagrad's has.
    """
    plain, reference = outcomes.get("plain"), outcomes["unsharded"]
    return (
        "compiled(optimizer.step)" in script.source
        and is_whole(plain)
        and is_whole(reference)
        and bool(differs(plain, reference, 0, 0))
    )


def _of_death(kind: str, text: str, outcomes: Outcomes, script: Script) -> Verdict:
    """A hang, or the death of a process.

    An error that only some ranks have, because of what only they hold, leaves the others waiting in
    a collective; torchrun ends them, and a user sees the error: it is what counts. A process of
    stock's that dies, too, dies of torch: full parameters of a unit that another unit's forward has
    read are freed under autograd.
    """
    raised = RAISED.search(text)
    if raised and (raised[2] == "not ours" or UNSEEN in raised[3]):
        verdict = _of_error(
            kind,
            [Outcome(error=raised[1], text=raised[3], is_ours=raised[2] == "ours")],
            outcomes,
            script,
        )
        return replace(verdict, detail=f"on some ranks, and the others wait: {verdict.detail}")
    word = "as stock" if kind != "stock" and isinstance(outcomes.get("stock"), str) else "fault"
    return Verdict(kind, word, f"hangs or dies: {text[-1500:]}")


def _is_eager(mine: list[Outcome], outcomes: Outcomes) -> bool:
    eager = outcomes.get("eager", "")
    return isinstance(eager, str) or any(o.error for o in eager) or not differs(mine, eager, 0, 0)


def _of_difference(
    kind: str, mine: list[Outcome], outcomes: Outcomes, script: Script, found: str
) -> Verdict:
    """Announced by a text that explains it, or torch's own: compiled by torch alone, the unsharded
    model does the same.
    """
    plain, stock, eager = (outcomes.get(name) for name in (plain_of(kind), "stock", "eager"))
    rtol, atol = (LOW, LOW) if script.low_precision else (RTOL, ATOL)
    from_stock, from_eager = (
        (differs(mine, other, rtol, atol) or "not") if is_whole(other) else "it raises"
        for other in (stock, eager)
    )
    told = [w for o in mine for w in o.warnings if explains(w, script.source, found)]
    if told:
        others = f"from stock: {from_stock}; from eager: {from_eager}"
        return Verdict(kind, "announced", f"differs from unsharded: {found}; {others}: {told[0]}")
    is_torchs = kind not in ("eager", "stock") and (
        not re.search(ZEROS, found)
        or any(AROUND in w for outcome in mine for w in outcome.warnings)
    )
    if is_torchs and is_whole(plain) and not differs(mine, plain, rtol, atol):
        return Verdict(kind, "torch", f"unsharded, compiled by torch alone, does the same: {found}")
    if ".data = " in script.source and is_whole(stock) and not differs(mine, stock, rtol, atol):
        return Verdict(kind, "torch", f"DTensor ignores `.data = x`: {found}")
    if (
        LOSES_ITEMS
        and "[0] = " in script.source
        and is_whole(stock)
        and not differs(mine, stock, rtol, atol)
    ):
        return Verdict(kind, "torch", f"DTensor's item assignment is lost: {found}")
    if kind == "stock" and (quirk := quirk_of(script.source)):
        return Verdict(kind, "quirk", f"{quirk}: {found}")
    return Verdict(kind, "fault", f"differs from unsharded: {found}; from stock: {from_stock}")


def plain_of(kind: str) -> str:
    """Which kind is the unsharded model, compiled in the same way; "" for what is not compiled."""
    return {"eager": "", "stock": "", "inductor": "plain inductor"}.get(kind, "plain")


def is_whole(outcome: list[Outcome] | str | None) -> TypeGuard[list[Outcome]]:
    """Whether a kind ran, and to its end, on every rank."""
    return isinstance(outcome, list) and not any(o.error for o in outcome)


def explains(text: str, source: str, found: str) -> bool:
    """Whether an announcement is about this difference, and names what the script says."""
    about = [of for words, of in EXPLAIN.items() if words in text]
    is_about = any(re.search(said, source) and re.search(first, found) for said, first in about)
    return is_about and names_a_cause(text, source)


# Which give a parameter several gradients for one read, or have it read by a function of theirs.
SEVERAL = re.compile(
    r"torch\.func\.|vmap\(|scan\(|while_loop\(|map_rows\(|cond\(|for _ in|checkpoint|_norm\(|"
    r"parametrize|hook|autograd\.grad\("
)


def is_read_once(script: Script) -> bool:
    """Whether each gradient is one term: sums of several are made in another order, in bf16 or
    under a budget, too.
    """
    model, _, rest = script.source.partition("model = Model()")
    made = ("nn.", "Block()", "register_buffer")
    lines = [line for line in model.splitlines() if not any(word in line for word in made)]
    uses = re.findall(r"self\.\w+", "\n".join(lines))
    is_once = (
        len(uses) == len({*uses})
        and "parameters()" not in "".join(lines)
        and " = model." not in rest
    )
    is_once = is_once and rest.count("model(") <= 1 and rest.count("backward(") <= 1
    is_once = is_once and not re.search(r"whole_step\(.*accumulate=", rest)
    is_once = is_once and not SEVERAL.search(script.source)
    return is_once and not script.low_precision and script.budget is None


def quirk_of(source: str) -> str:
    """The known one of stock that a script can show."""
    return next((name for name, words in QUIRKS.items() if re.search(words, source)), "")


def names_a_cause(text: str, source: str) -> bool:
    """Whether a message names something of the script: its line, or a parameter, module, function
    or class that it says.
    """
    words = {*re.findall(r"[A-Za-z_]\w*", source)} - TOO_COMMON
    is_member = re.search(r"(?:^|parameters? |parameters of |unit |['(])[a-j](?:[.:, ')]|$)", text)
    return "program.py" in text or bool(is_member or words & {*re.findall(r"[A-Za-z_]\w*", text)})


def differs(
    mine: list[Outcome],
    theirs: list[Outcome],
    rtol: float,
    atol: float,
    *,
    of_largest: bool = False,
) -> str:
    """The first difference on any rank in words; "" for none. of_largest: measure tensors by their
    largest element.
    """
    pairs = zip(mine, theirs, strict=True)
    return next(
        filter(None, (_difference(a.entries, b.entries, rtol, atol, of_largest) for a, b in pairs)),
        "",
    )


def _difference(
    ours: list[Entry], theirs: list[Entry], rtol: float, atol: float, of_largest: bool
) -> str:
    for i, ((name, a), (other, b)) in enumerate(zip(ours, theirs, strict=False)):
        found = (f"is {other} there" if name != other else "") or _unequal(
            a, b, rtol, atol, of_largest
        )
        if found:
            return f"value {i}, {name}: {found}"
    return (
        "" if len(ours) == len(theirs) else f"{len(ours)} values were recorded, {len(theirs)} there"
    )


def _unequal(a: Tensor | None, b: Tensor | None, rtol: float, atol: float, of_largest: bool) -> str:
    if a is None or b is None:
        return (
            ""
            if a is b
            else f"{'None' if a is None else 'a tensor'}, should be "
            f"{'None' if b is None else 'a tensor'}"
        )
    if a.shape != b.shape or (a.dtype != b.dtype and not rtol == LOW):
        return f"{a.dtype} {tuple(a.shape)}, should be {b.dtype} {tuple(b.shape)}"
    if of_largest and b.numel():
        atol += rtol * float(b.abs().max())
    if torch.equal(a, b) or torch.allclose(a.double(), b.double(), rtol, atol, equal_nan=True):
        return ""
    return f"differs by {(a - b).abs().max().item():.1e} of {b.abs().max().item():.1e}"


def _silent(kind: str, mine: list[Outcome], script: Script) -> Verdict | None:
    """Units that run eagerly where all that calls them is compiled, and nothing that was said
    explains it.
    """
    eager = next(
        (o for o in mine if o.num_eager and not any(_is_why(w, script.source) for w in o.warnings)),
        None,
    )
    if eager is None or not script.is_whole or kind in ("eager", "stock"):
        return None
    said = f"only {eager.warnings[0]}" if eager.warnings else "nothing"
    return Verdict(
        kind,
        "fault",
        f"silence: {eager.num_eager} forwards of units ran eagerly, and {said} was said",
    )


def _is_why(text: str, source: str) -> bool:
    return all(re.search(said, source) for words, said in EAGERLY.items() if words in text)


def _refuses_what_runs(first: Outcome, outcomes: Outcomes) -> bool:
    """Whether a parameter is said to be sharded where eager and stock find a full one."""
    others = [outcomes.get(kind) for kind in ("eager", "stock")]
    run = all(isinstance(found, list) and not any(o.error for o in found) for found in others)
    return run and any(words in first.text for words in AT_REST)


def _is_stocks(first: Outcome, eager: list[Outcome] | str | None) -> bool:
    """Whether DTensor says something of a parameter that is sharded."""
    if any(words in first.text for words in SHARDED):
        return True
    are_sharded = isinstance(eager, list) and any(AT_REST[-1] in o.text for o in eager)
    return are_sharded and SHARDED_FAKE in first.text


def _of_error(kind: str, mine: list[Outcome], outcomes: Outcomes, script: Script) -> Verdict:
    first = next(o for o in mine if o.error)
    text = f"{first.error}: {first.text[:1500]}"
    alone = next((o for o in mine if o.is_ours and UNSEEN in o.text), None)
    if alone is not None and names_a_cause(alone.text, script.source):
        return Verdict(kind, "refused", f"{alone.error}: {alone.text[:1500]}")
    if not all(o.error == first.error for o in mine):
        return Verdict(kind, "fault", f"raises on some ranks only {text}")
    if kind != "stock" and _refuses_what_runs(first, outcomes):
        is_limit = any(words in script.source for words in ("._parameters[", ".data = "))
        is_limit |= any(NO_BACKWARD in w for o in mine for w in o.warnings)
        word = "refused" if is_limit else "fault"  # docs/limits.md
        return Verdict(kind, word, f"refuses what eager and stock run: {text}")
    is_named = names_a_cause(first.text, script.source)
    if first.error in NAMED and first.is_ours:
        return (
            Verdict(kind, "refused", text)
            if is_named
            else Verdict(kind, "fault", f"raises without a cause {text}")
        )
    if first.error == "Unsupported" and "compiled_fsdp: " in first.text and is_named:
        return Verdict(
            kind, "refused", text
        )  # with fullgraph=True, Dynamo raises our text as its own, or quotes our error
    if (
        SET_DATA in first.text
    ):  # a full parameter is no input of the graph: Dynamo says so, with its line
        return Verdict(kind, "refused", text)
    if any(
        words in first.text and re.search(said, script.source)
        for words, said in TORCHS_OWN.items()
        if words != DONATED or not kind.endswith("compiled")
    ):
        return Verdict(kind, "torch", text)
    if _is_stocks(first, outcomes.get("eager")):
        return Verdict(kind, "as stock", text)
    if any(NO_DTENSORS in w for o in mine for w in o.warnings):
        return Verdict(kind, "announced", text)
    return _as_others_raise(kind, first, outcomes, text)


def _same_error(mine: Outcome, theirs: Outcome) -> bool:
    """Also if mine was raised while a graph was traced, where torch puts its type into the text."""
    if mine.error == theirs.error:
        return True
    text = theirs.text.splitlines()[0].partition(":")[0] if theirs.error else ""
    return bool(text) and f"raised:\n{theirs.error}: {text}" in mine.text


def _as_others_raise(kind: str, first: Outcome, outcomes: Outcomes, text: str) -> Verdict:
    others = {"torch": plain_of(kind), "as stock": "stock"}
    for word, other in others.items():
        theirs = outcomes.get(other)
        if isinstance(theirs, list) and all(_same_error(first, o) for o in theirs):
            return Verdict(kind, word, text)
    return Verdict(kind, "fault", f"raises {text}")
