"""What stands in the place of a compiled call once a folder is loaded: each call is compared with
what was compiled for, and then runs it.

Private torch used here (tried on 2.13): `torch.utils._pytree`.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_loads

from compiled_fsdp.errors import warn_once
from compiled_fsdp.frontend.entry import compiled_from_here
from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.wire.ops import TRACED

from . import facts as of_code
from .capture import describe_leaf
from .code import Libraries, load
from .program import MESH, SIZE
from .run import runner
from .sizes import bound, checker
from .target import ORDER, describe, differences, ignored, mismatch, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compiled_fsdp.units.handles import Handle
    from compiled_fsdp.units.unit import Unit

    from .program import Program

COMPILE = "compile"  # instead of an error
ADVICE = "Precompile for what is here, or pass otherwise='compile' to compile normally"


@dataclass(eq=False)
class Ready:
    """A program that can run.

    read: the plain values of the model that it was made for; `values` are those that it accepted.
    broken: of sizes that it was not made for alone, which guards do not hold.
    """

    program: Program
    run: Callable[[list[Any]], list[Any]]
    nesting: Any
    read: Callable[[Any], tuple[Any, ...]]
    broken: Callable[[dict[str, int]], list[str]]
    values: tuple[Any, ...] | None = None

    @classmethod
    def of(
        cls, program: Program, files: dict[str, bytes], units: Sequence[Unit], digest: str
    ) -> Ready:
        """From checked files."""
        renamed = _renaming(program.units, [unit.key for unit in units])
        with Libraries(digest) as libraries:
            forward, backward = (
                None if half is None else load(half, files, renamed, libraries)
                for half in (program.forward, program.backward)
            )
        assert forward is not None
        TRACED.update(unit.key for unit in units)
        return cls(
            program,
            runner(program, forward, backward),
            treespec_loads(program.nesting),
            of_code.reader(program.facts),
            checker(program.guards),
        )


def _renaming(before: Sequence[str], here: Sequence[str]) -> Callable[[str], str]:
    """Units are numbered by each process for itself: their names in code, as they are here."""
    names = {a: b for a, b in zip(before, here, strict=True) if a != b}
    if not names:
        return lambda text: text
    pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, names))})(?!\d)")
    return lambda text: pattern.sub(lambda found: names[found[0]], text)


@dataclass(eq=False)
class Loaded:
    """The compiled call of a model, from a folder.

    ready: its programs by mode.
    handles: of each sharded parameter that was accepted, module and name, and what is read of it.
    others: the parameters that were in no unit then.
    trained: of each flat buffer, and of these, whether it was trained then: a unit that is frozen
        or unfrozen as a whole keeps its handles.
    children: of each module that was there when parameters were accepted, what it had: its table of
        modules or buffers, and what stood there, in order.
    forwards: the forward of each class of the model's modules.
    otherwise: "raise", or "compile".
    """

    model: Any
    units: Sequence[Unit]
    backend: str
    target: dict[str, Any]
    ready: dict[str, Ready]
    otherwise: str
    handles: list[tuple[Any, str, Handle]] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    children: list[tuple[dict[str, Any], tuple[Any, ...]]] = field(default_factory=list)
    forwards: dict[Any, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    compiled: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self.settings = {name: self.target[name] for name in settings()}
        kinds: set[Any] = {type(each) for each in self.model.modules()}
        self.forwards = {kind: kind.forward for kind in kinds}

    @property
    def _torchdynamo_orig_callable(self) -> Any:
        """Where the normal compilation begins, if there is one (`frontend/entry.py` asks)."""
        return getattr(self.compiled, "_torchdynamo_orig_callable", None)

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program for this call.

        Raises:
            PrecompiledError: none fits; all that differs is listed.
        """
        leaves, nesting = tree_flatten((args, kwargs))
        mode = "training" if torch.is_grad_enabled() else "inference"
        found = self._differences(mode, leaves, nesting)
        if found:
            return self._otherwise(mode, found, args, kwargs)
        ready = self.ready[mode]
        outputs = ready.run([self._input(place, leaves) for place in ready.program.inputs])
        of = {"output": outputs, "input": leaves}
        results = [
            value if kind == "value" else of[kind][value] for kind, value in ready.program.results
        ]
        return tree_unflatten(results, ready.nesting)

    def _input(self, place: list[Any], leaves: list[Any]) -> Any:
        kind, where, *number = place
        if kind == "input":
            return leaves[where]
        if kind == SIZE:
            return leaves[where].shape[number[0]]
        if kind == MESH:
            return None
        if kind == "flat":
            return self.units[where].flats[number[0]].data
        owner, _, name = where.rpartition(".")
        return getattr(self.model.get_submodule(owner), name)

    def _differences(
        self, mode: str, leaves: list[Any], nesting: Any
    ) -> dict[str, tuple[str, str]]:
        """All in which this call differs from what was compiled."""
        if mode not in self.ready:
            return {"mode": (" and ".join(self.ready), mode)}
        if not all(map(_has_still, self.children)):
            self._forget()
        ready = self.ready[mode]
        program = ready.program
        found = differences(self.settings, settings())
        found |= {
            f"{kind.__name__}.forward": (before.__qualname__, kind.forward.__qualname__)
            for kind, before in self.forwards.items()
            if kind.forward is not before
        }
        if torch.is_inference_mode_enabled():
            found["torch.inference_mode"] = "off", "on"
        here = {"how arguments are nested": str(nesting)}
        found |= differences({"how arguments are nested": program.arguments}, here)
        if not found:
            sizes: dict[str, int] = {}
            for number, (wanted, leaf) in enumerate(zip(program.leaves, leaves, strict=True)):
                now = bound(wanted, describe_leaf(leaf), leaf, sizes)
                if now != wanted:
                    prefix = f"argument {number}"
                    found |= {f"{prefix}: {k}": v for k, v in differences(wanted, now).items()}
            for guard in () if found else ready.broken(sizes):
                found[f"sizes of arguments: {guard}"] = "assumed", str(sizes)
        return found | self._of_facts(ready) | self._of_parameters()

    def _forget(self) -> None:
        """Another module stands somewhere: all of the model is to be compared again."""
        self.handles, self.children = [], []
        for ready in self.ready.values():
            ready.values = None

    def _of_facts(self, ready: Ready) -> dict[str, tuple[str, str]]:
        try:
            if ready.values is not None and ready.read(self.model) == ready.values:
                return {}
        except (AttributeError, KeyError, IndexError, TypeError):
            pass  # what is not there any more is listed
        made_for = ready.program.facts
        found = differences(made_for, of_code.current(made_for, self.model))
        ready.values = None if found else ready.read(self.model)
        return {of_code.in_words(name): values for name, values in found.items()}

    def _of_parameters(self) -> dict[str, tuple[str, str]]:
        """What units are set to, where anything was set since the last call."""
        if (
            self.handles
            and self._trained() == self.trained
            and all(
                module._fsdp_handles[name] is handle and not module._fsdp_replaced
                for module, name, handle in self.handles
            )
        ):
            return {}
        self.others = [param for _, param in ignored(self.model)]
        self.trained = self._trained()
        self.handles = [
            (module, name, param.handle)
            for unit in self.units
            for param in unit.params
            for module, name in param.owners
        ]
        here = describe(self.model, self.units, self.backend)
        names = [n for n in self.target if n.startswith(("unit ", "parameter ", "buffer ", ORDER))]
        found = differences({n: self.target[n] for n in names}, {n: here.get(n) for n in names})
        found |= {
            f"{type(module).__name__}.{name}": ("the sharded parameter", "replaced")
            for module, name, _ in self.handles
            if name in module._fsdp_replaced
        }
        self.children = [
            (table, tuple(table.values()))
            for module in self.model.modules()
            for table in (module._modules, module._buffers)
            if table
        ]
        if found:
            self._forget()
        return found

    def _trained(self) -> list[bool]:
        flats = [flat.data for unit in self.units for flat in unit.flats]
        return [each.requires_grad for each in (*flats, *self.others)]

    def _otherwise(
        self, mode: str, found: dict[str, tuple[str, str]], args: Any, kwargs: Any
    ) -> Any:
        error = mismatch(
            f"compiled_fsdp: a precompiled model was called ({mode}) in another way than it was "
            "compiled for:",
            found,
            ADVICE,
        )
        if self.otherwise != COMPILE:
            raise error
        warn_once(f"{error}. As was asked for, torch.compile compiles it now")
        if self.compiled is None:
            self.compiled = compiled_from_here(self.model, self.backend)
        return self.compiled(*args, **kwargs)


def _has_still(children: tuple[dict[str, Any], tuple[Any, ...]]) -> bool:
    """Whether the same stands in a table, in the same order."""
    table, before = children
    return len(table) == len(before) and all(map(operator.is_, table.values(), before))
