"""What a kind's outcome is worth: equal, announced, refused by name, torch's own limit, or a fault."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from programs.kinds import Entry, Outcome
from torch import Tensor

# Errors of ours say what was done and what to do; those of a broken graph or of ranks that diverge are for broken programs.
NAMED = (
    "NotImplementedError",
    "FallbackError",
    "UnusedOptionError",
    "RuntimeError",
    "ValueError",
    "TypeError",
    "AssertionError",
    "InternalTorchDynamoError",  # what Dynamo makes of an error of ours that is raised while it traces; it keeps the text
)
# fp32: sums over ranks, and of several backwards, in another order. Units that compute in bf16 are compared with stock's.
RTOL, ATOL = 1e-4, 1e-5
LOW = 0.05
SET_DATA = "Failed to mutate tensor data attribute"
NO_DTENSORS = "Dynamo of this torch ends in an AssertionError without a text"  # 2.11, of a backward in a compiled function
# What DTensor says of a parameter that is sharded at that moment; in eager mode we say which.
SHARDED = ("got mixed torch.Tensor and DTensor", "does not have a sharding strategy registered")
HARMLESS = ("esults are the same", "The results are right")

Outcomes = dict[str, "list[Outcome] | str"]


@dataclass(frozen=True)
class Verdict:
    """kind: which way of running; word: "equal", "as stock", "announced", "refused", "torch" or "fault"."""

    kind: str
    word: str
    detail: str = ""
    is_exact: bool = False

    @property
    def is_fault(self) -> bool:
        return self.word == "fault"


def judge(kind: str, outcomes: Outcomes, *, low_precision: bool, is_whole: bool) -> Verdict:
    """Of one kind, from what all kinds did on every rank; a text stands for a hang or a death."""
    mine = outcomes[kind]
    if isinstance(mine, str):
        return Verdict(kind, "fault", f"hangs or dies: {mine[-1500:]}")
    if any(o.error for o in mine):
        return _of_error(kind, mine, outcomes)
    rtol, atol = (LOW, LOW) if low_precision else (RTOL, ATOL)
    stock = outcomes.get("stock")
    is_legal = isinstance(stock, list) and not any(o.error for o in stock)
    reference = outcomes["unsharded"]
    assert isinstance(reference, list)
    found = differs(mine, reference, rtol, atol)
    if found and is_legal and kind != "stock":
        assert isinstance(stock, list)
        from_stock = differs(mine, stock, rtol, atol)
        if not from_stock:
            return _silent(kind, mine, is_whole) or Verdict(kind, "as stock", found)
        found += f"; from stock: {from_stock}"
    if not found:
        return _silent(kind, mine, is_whole) or Verdict(kind, "equal", is_exact=not differs(mine, reference, 0, 0))
    told = [w for o in mine for w in o.warnings if not any(text in w for text in HARMLESS)]
    return Verdict(kind, "announced" if told else "fault", f"differs from unsharded: {found} {told[:1] or ''}")


def differs(mine: list[Outcome], theirs: list[Outcome], rtol: float, atol: float) -> str:
    """The first difference on any rank in words; "" for none."""
    return next(filter(None, (_difference(a.entries, b.entries, rtol, atol) for a, b in zip(mine, theirs, strict=True))), "")


def _difference(ours: list[Entry], theirs: list[Entry], rtol: float, atol: float) -> str:
    for i, ((name, a), (other, b)) in enumerate(zip(ours, theirs, strict=False)):
        found = (f"is {other} there" if name != other else "") or _unequal(a, b, rtol, atol)
        if found:
            return f"value {i}, {name}: {found}"
    return "" if len(ours) == len(theirs) else f"{len(ours)} values were recorded, {len(theirs)} there"


def _unequal(a: Tensor | None, b: Tensor | None, rtol: float, atol: float) -> str:
    if a is None or b is None:
        return "" if a is b else f"{'None' if a is None else 'a tensor'}, should be {'None' if b is None else 'a tensor'}"
    if a.shape != b.shape or (a.dtype != b.dtype and not rtol == LOW):
        return f"{a.dtype} {tuple(a.shape)}, should be {b.dtype} {tuple(b.shape)}"
    if torch.equal(a, b) or torch.allclose(a.double(), b.double(), rtol, atol, equal_nan=True):
        return ""
    return f"differs by {(a - b).abs().max().item():.1e} of {b.abs().max().item():.1e}"


def _silent(kind: str, mine: list[Outcome], is_whole: bool) -> Verdict | None:
    if is_whole and kind not in ("eager", "stock") and any(o.num_eager and not o.warnings for o in mine):
        return Verdict(kind, "fault", f"silence: {mine[0].num_eager} forwards of units ran eagerly, and nothing was said")
    return None


def _of_error(kind: str, mine: list[Outcome], outcomes: Outcomes) -> Verdict:
    first = next(o for o in mine if o.error)
    text = f"{first.error}: {first.text[:1500]}"
    if not all(o.error == first.error for o in mine):
        return Verdict(kind, "fault", f"raises on some ranks only {text}")
    if first.error in NAMED and first.is_ours:
        return Verdict(kind, "refused", text)
    if SET_DATA in first.text:  # a full parameter is no input of the graph: Dynamo says so, with its line
        return Verdict(kind, "refused", text)
    if any(words in first.text for words in SHARDED):
        return Verdict(kind, "as stock", text)
    if any(NO_DTENSORS in w for o in mine for w in o.warnings):
        return Verdict(kind, "announced", text)
    others = {"torch": "plain" if kind not in ("eager", "stock") else "", "as stock": "stock"}
    for word, other in others.items():
        theirs = outcomes.get(other)
        if isinstance(theirs, list) and all(o.error == first.error for o in theirs):
            return Verdict(kind, word, text)
    return Verdict(kind, "fault", f"raises {text}")
