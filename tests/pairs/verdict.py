"""What became of a program: the same numbers, a refusal of ours, or a fault."""

from __future__ import annotations

import re
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from kit.pool import WorkerError
from pairs.features import closed, setting_of
from pairs.train import Run, trained

import compiled_fsdp
from compiled_fsdp import GraphInvariantError
from compiled_fsdp.torch_private.compiled import error_of_backend
from compiled_fsdp.wire.divergence import CommunicationError, DivergenceError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kit.pool import Pool
    from pairs.features import Setting
    from torch import Tensor

OURS = (
    str(Path(compiled_fsdp.__file__).parent),
    str(Path(compiled_fsdp.__file__).parents[1] / "passes"),
)
NAMED = (NotImplementedError, ValueError, RuntimeError, TypeError, AssertionError)
INTERNAL = (GraphInvariantError, DivergenceError, CommunicationError)
# "fully_shard: ...", "Plan(check='checksums'): ...", "FSDPModule.set_...: ..."
BEGINS = re.compile(r"^[A-Za-z_][\w.]*(\([^)]*\))?:? ")
BROKEN = re.compile(r"User-inserted graph break\. Message: (.* of unit .*)")
# fp32: sums over ranks in another order than one process adds, and what optimizers make of them.
CLOSE = (1e-4, 3e-5)
LOW = (0.05, 0.05)  # 16 bits, or codes
# What is said of units that run eagerly although they are compiled.
EAGERLY = re.compile(r"runs eagerly|run eagerly|has broken|graph break")


@dataclass(frozen=True)
class Verdict:
    """word: "equal", "refused" or "fault".
    text: the refusal, or what is wrong.
    unused: options that `explain` says changed nothing for any unit.
    is_raised: training ended in an exception that is no refusal.
    """

    word: str
    text: str = ""
    unused: tuple[str, ...] = ()
    is_raised: bool = False

    def __str__(self) -> str:
        return f"{self.word} {self.text}".strip()


def tolerance(setting: Setting) -> tuple[float, float] | None:
    """Relative, absolute, beside the unsharded model; None if that computes something else."""
    is_low = bool(setting.precision) or any("quantized" in name for name in setting.plan)
    if setting.weights == "extension":
        is_low = True
    if is_low and setting.optimizer == "muon":
        return None  # which makes of every direction, however small, one of length one
    return LOW if is_low else CLOSE


def judged(names: tuple[str, ...], folder: str) -> Verdict:
    """In a worker: trains the program, without a graph, and unsharded."""
    setting = setting_of(names)
    made: list[Run] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ours = trained(setting, "ours", f"{folder}/ours", made)
        except Exception as error:  # noqa: BLE001
            return _of_error(error, made)
    said = [str(each.message) for each in caught]
    if found := _strange(ours, said):
        return Verdict("fault", found)
    eager = ours
    if setting.backend:
        try:
            eager = trained(setting.eagerly(), "ours", f"{folder}/eager")
        except Exception as error:  # noqa: BLE001
            found = f"without a graph: {_of_error(error, [])}"
            return Verdict("fault", found, is_raised=True)
    unsharded = trained(setting, "unsharded", folder)
    given = tolerance(setting) or (float("inf"), float("inf"))
    rtol, atol = given if _is_otherwise(setting) else (0.0, 0.0)
    wrong = {
        "other numbers than without a graph": differs(ours.values(), eager.values(), rtol, atol),
        "than unsharded": differs(ours.wholes(), unsharded.wholes(), *given),
        "without a graph others than unsharded": differs(
            eager.wholes(), unsharded.wholes(), *given
        ),
    }
    if any(wrong.values()):
        return Verdict(
            "fault", "; ".join(f"{name}: {text}" for name, text in wrong.items() if text)
        )
    options = ours.explained.options
    unused = {o.name for o in options if o.unused} - {o.name for o in options if o.consumers}
    return Verdict("equal", unused=tuple(sorted(unused)))


def _is_otherwise(setting: Setting) -> bool:
    """Whether a graph computes in another order than eager mode does, each in a way that is
    announced, or torch's.

    Each call of a graph reduces its gradients. Without a graph, as in stock, and in one around all
    calls, they are added first. Of more than two ranks gloo's reduce-scatter adds in another order
    than an all-to-all and a local sum. A whole step puts norms together by its own rule for FSDP1,
    and for parameters on several meshes, where the loop has `_clip_over_meshes`. Torch's AdamW has
    other last bits when it is compiled, of one process too.
    """
    if setting.backend == "inductor":
        return True
    if not setting.backend:
        return False
    is_one = setting.loop == "compile_step" or setting.compiles == "function"
    has_calls = setting.compiles == "blocks" and (
        setting.weights == "tied" or setting.calls == "twice"
    )
    has_own_norms = setting.mesh == "tp" or setting.is_fsdp1
    has_adam = setting.optimizer in ("adamw", "two")
    reductions = setting.plan.get("reductions", "backend")
    return (
        (setting.micro == "two_forwards" and not is_one)
        or has_calls
        or (setting.loop == "compiled_optimizer" and has_adam)
        or (setting.mesh == "1d" and setting.world > 2 and reductions != "backend")
        or (has_own_norms and setting.clip is not None and setting.loop == "compile_step")
    )


def _strange(run: Run, said: list[str]) -> str:
    """What no program may do: run eagerly without a word where it is compiled."""
    if not run.setting.backend:
        return ""
    blocks = [u for u in run.explained.units if "block" in u.name.lower()]
    eager = [u.name for u in blocks if u.where == "eager" and u.params]
    if eager and not any(EAGERLY.search(text) for text in said):
        return f"{eager} ran eagerly, which was not announced; explain says {blocks[0].why}"
    if "optimizer_state" in run.setting.plan and not any("on the device" in text for text in said):
        choices = [choice for graph in run.explained.graphs for choice in graph.choices]
        if not any(c["what"] == "state" and not c["is_kept"] for c in choices):
            return "no optimizer state is on the host, which was not said"
    return ""


def differs(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *by: float) -> str:
    """What differs, at most three; "" if nothing does. Whether what overflows is infinite or no
    number depends on the kernels: of 1e30 torch's LayerNorm yields nan, Inductor's 0.
    """
    rtol, atol = by
    if list(found) != list(expected):
        return f"{sorted(found)} and {sorted(expected)}"
    wrong = []
    for name in found:
        a, b = _overflown(found[name]), _overflown(expected[name])
        is_same = torch.equal(a, b) or (
            a.shape == b.shape and torch.allclose(a, b, rtol, atol, equal_nan=True)
        )
        if not is_same:
            by_how_much = (a - b).abs().max() if a.shape == b.shape else f"{a.shape}, {b.shape}"
            wrong.append(f"{name} by {by_how_much:.2e}" if torch.is_tensor(by_how_much) else name)
    return ", ".join(wrong[:3])


def _overflown(values: Tensor) -> Tensor:
    """Infinity for all that is not finite."""
    is_float = values.is_floating_point()
    return torch.where(values.isfinite(), values, torch.inf) if is_float else values


def _of_error(error: BaseException, made: list[Run]) -> Verdict:
    inner = error_of_backend(error) or error
    text = str(inner)
    at = made[-1].step_at if made else -1
    frames = traceback.extract_tb(inner.__traceback__)
    is_ours = any(frames[-1].filename.startswith(place) for place in OURS) if frames else False
    is_named = isinstance(inner, NAMED) and not isinstance(inner, INTERNAL)
    if is_ours and is_named and BEGINS.match(text):
        return Verdict("refused", text)
    if why := BROKEN.search(text):  # with fullgraph=True, a graph break of ours is an error
        return Verdict("refused", why[1])
    stack = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-4:]))
    return Verdict(
        "fault", f"{type(inner).__name__} in step {at}: {text[:600]} [{stack}]", is_raised=True
    )


class Judge:
    """Runs programs on pools of two and four ranks."""

    def __init__(self, pools: dict[int, Pool], limit: float = 120.0) -> None:
        self._pools, self._limit = pools, limit
        self.count = 0

    def __call__(self, names: Collection[str]) -> Verdict:
        """One verdict of all ranks."""
        self.count += 1
        setting = setting_of(names)
        pool = self._pools[setting.world]
        limit = self._limit * (4 if setting.backend == "inductor" else 1)
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = pool.run(judged, tuple(sorted(names)), folder, timeout=limit)
            except WorkerError as error:
                return Verdict("fault", _of_workers(str(error)))
        words = {verdict.word for verdict in found}
        if len(words) > 1:
            pool.close()
            texts = "; ".join(f"rank {i}: {str(v)[:300]}" for i, v in enumerate(found))
            return Verdict("fault", f"ranks differ: {texts}")
        if any(verdict.is_raised for verdict in found):
            pool.close()  # messages of it may be under way
        return found[0]


def _of_workers(text: str) -> str:
    is_late = "no answer within" in text
    lines = [line for line in text.splitlines() if line.strip()]
    what = "hangs" if is_late else "dies"
    return f"{what}: {' | '.join(lines[-1:])[:300]}\n{text[-3000:]}"


def shrunk(judge: Judge, names: frozenset[str], verdict: Verdict) -> tuple[frozenset[str], Verdict]:
    """The fewest of the features that give the same word, and what is said of them."""
    for size_now in range(len(names)):
        del size_now
        for name in sorted(names):
            fewer = names - {name}
            if not fewer or closed(fewer) == closed(names):
                continue
            found = judge(fewer)
            if found.word == verdict.word:
                names, verdict = fewer, found
                break
        else:
            break
    return names, verdict
