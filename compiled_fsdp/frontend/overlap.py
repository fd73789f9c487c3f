"""Overlap the optimizer's step with the last reductions of backward and the first all-gathers of
the next forward.

Backward returns while its last reductions are under way (`passes/leave_in_flight.py`), and their
gradients wait when they are read (`in_flight.py`). The step goes unit by unit: first those whose
gradients are there, in the order of forward, then the others in the order in which their reductions
were started. As soon as the units that forward uses first are stepped, their gathers start, and the
next forward finds them under way (`passes/gather_ahead.py`).

With `in_backward`, units whose reductions are awaited in backward are stepped right there
(`passes/step_in_backward.py`), and gathers of the next forward start beside the rest of backward;
the step does what is left.

Collectives start in the same order as without all this, on every rank: reductions in the order of
backward, gathers in the order of forward. In which order units are stepped may differ between ranks
(somebody looked at a gradient on one of them); nothing is communicated by that.

Private torch used here (tried on 2.13): `Optimizer._patch_step_function`, which runs the step
hooks, and what it leaves on `step`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn, optim

from compiled_fsdp.eager import optimizer_steps
from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.spec import IN_BACKWARD
from compiled_fsdp.optim.muon import Muon
from compiled_fsdp.planning.planner import MAX_AHEAD_BYTES
from compiled_fsdp.torch_private.autograd import backward_number
from compiled_fsdp.torch_private.compiled import uncompiled
from compiled_fsdp.torch_private.dtensors import make_dtensor
from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.units.in_flight import SteppedGrad, is_stepped_grad

from .others import Others
from .parts import check_ahead_bytes, check_one_by_one, step_part
from .state import states_below

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from compiled_fsdp.eager.runtime import Runtime
    from compiled_fsdp.units.flat import FlatBuffer
    from compiled_fsdp.units.gathers import Gather
    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.units.unit import Unit

Optimizer = TypeVar("Optimizer", bound=optim.Optimizer)


def overlap_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    max_ahead_bytes: int = MAX_AHEAD_BYTES,
    in_backward: bool = False,
) -> Optimizer:
    """Let `optimizer.step()` overlap with the reductions before it and the gathers after it; the
    numbers stay the same.

    Call it once, on every rank, after building the optimizer and before its learning rate
    scheduler. The training loop stays as it is. Returns the optimizer.

    Args:
        model: the sharded module, compiled or not.
        optimizer: of one of the classes in `parts.ONE_BY_ONE`, or a `Muon`, whose matrices then go
            to their owners while gathers of the next forward are under way. Other optimizers of the
            same model are to step before this one: where they come after it, gathers wait for
            forward.
        max_ahead_bytes: at most so many bytes of full parameters are gathered before the next
            forward begins; 0 for none. Inside backward, at most half of them.
        in_backward: step units in a compiled backward as soon as their gradients are reduced, and
            drop these gradients: every backward that reduces is then a step, with the
            hyperparameters of that moment, and `.grad` raises where it is read. Not for clipping,
            gradient scaling, adding up gradients of several backwards (but for
            `set_requires_gradient_sync`), or hooks on the optimizer's step. `step()` does the rest
            and stays in the loop: a forward before it, or after a backward that failed or whose
            step is left out, computes with some units stepped and others not.

    Raises:
        NotImplementedError: the model is a `FullyShardedDataParallel`.
        TypeError: the optimizer is of another class.
        ValueError: nothing in `model` is sharded, the optimizer holds none of its parameters, or
            `max_ahead_bytes` is no size.
        RuntimeError: the optimizer's `step` was wrapped already, as by a learning rate scheduler;
            with `in_backward`, from backward: gradients of an earlier backward are still there, or
            the optimizer has hooks on its step.
    """
    states = states_below(uncompiled(model))
    units = [state.unit for state in states]
    base: type[optim.Optimizer] = type(optimizer)
    _check(units, optimizer, max_ahead_bytes, in_backward)
    for unit in units:
        unit.settings.overlap = IN_BACKWARD if in_backward else "step"
        unit.options.ask("overlap_optimizer", True)
        unit.publish()
    overlap = Overlap([state.runtime for state in states], optimizer, max_ahead_bytes)
    for unit in units:
        unit.on_gather = overlap.note
        if in_backward:
            unit.on_reduced = overlap.take
            unit.on_kept = overlap.forget
    optimizer._fsdp_overlap = overlap  # type: ignore[attr-defined]
    optimizer.__class__ = _overlapped(base)  # type: ignore[assignment]
    optimizer._patch_step_function()
    return optimizer


def _check(
    units: list[Unit], optimizer: optim.Optimizer, max_ahead_bytes: object, in_backward: bool
) -> None:
    name = type(optimizer).__name__
    if not units:
        raise ValueError(
            "overlap_optimizer: the model has no sharded module. Call fully_shard first, build the "
            "optimizer from the sharded model's parameters, then call overlap_optimizer(model, "
            "optimizer)"
        )
    if any(unit.is_flat for unit in units):
        raise NotImplementedError(
            "overlap_optimizer: flat parameters of FullyShardedDataParallel are not supported yet. "
            "Use fully_shard, or leave it out"
        )
    if hasattr(optimizer, "_fsdp_overlap"):
        raise ValueError(f"overlap_optimizer: this {name} overlaps already. Call it once")
    if type(optimizer) is not Muon:
        check_one_by_one(optimizer, "overlap_optimizer")
    elif in_backward:
        raise NotImplementedError(
            "overlap_optimizer(in_backward=True): Muon exchanges matrices between ranks, which is "
            "not supported inside backward. Leave out in_backward=True"
        )
    if "step" in vars(optimizer):
        raise RuntimeError(
            f"overlap_optimizer: step of this {name} was replaced already, as a learning rate "
            "scheduler does. Call overlap_optimizer directly after building the optimizer, then "
            "build the scheduler"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p.sharded) in held for unit in units for p in unit.params):
        raise ValueError(
            f"overlap_optimizer: the {name} holds no parameter of the model's units. Build it from "
            "the sharded model's parameters"
        )
    check_ahead_bytes(max_ahead_bytes, "overlap_optimizer")


_classes: dict[type[optim.Optimizer], type[optim.Optimizer]] = {}


def _overlapped(base: type[optim.Optimizer]) -> type[optim.Optimizer]:
    """A subclass whose step goes unit by unit; hooks, profiles and schedulers see one step, as
    ever.
    """

    def step(self: Any, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            raise ValueError(
                f"{base.__name__}.step(closure): not with overlap_optimizer, since a closure runs "
                "backward inside the step. Run backward before, and call step()"
            )
        self._fsdp_overlap.step(self)

    if base not in _classes:
        _classes[base] = type(base.__name__, (base,), {"__module__": base.__module__, "step": step})
    return _classes[base]


class Overlap:
    """The step of one optimizer of one model.

    order: gathers that forward came to since the last step, in order.
    early: of these, those that backward has started again for the next forward.
    reads: for each buffer, what forward has gathered of it since the last step or backward, as
        (first element, end).
    shared: buffers of which something was gathered twice, by several graphs or eagerly: their
        backwards will gather it again.
    """

    def __init__(
        self, runtimes: list[Runtime], optimizer: optim.Optimizer, max_ahead_bytes: int
    ) -> None:
        base = type(optimizer)
        self.runtimes = runtimes
        self.max_ahead_bytes = max_ahead_bytes
        self.order: dict[Gather, None] = {}
        self.early: dict[Gather, None] = {}
        self.reads: dict[FlatBuffer, list[tuple[int, int]]] = {}
        self.shared: set[FlatBuffer] = set()
        self._optimizer = weakref.ref(optimizer)
        self._backward = -1
        self._said: set[str] = set()
        self._held_now: dict[FlatBuffer | None, set[int]] = {}
        self._base = base
        self._others = Others()
        _made.add(self)
        optimizer_steps.after(_note_step)

    def note_step(self, optimizer: optim.Optimizer) -> None:
        """Some optimizer has stepped."""
        if optimizer is not self._optimizer():
            self._others.note(optimizer)

    def note(self, gather: Gather) -> None:
        """Forward comes to a gather. A graph gathers no element of a buffer twice."""
        self.order.setdefault(gather)
        for flat in gather.flats:
            start, end = gather.part(flat)
            reads = self.reads.setdefault(flat, [])
            if any(start < other_end and other < end for other, other_end in reads):
                self.shared.add(flat)
            if (start, end) not in reads:
                reads.append((start, end))

    @untraced
    def step(self, optimizer: optim.Optimizer) -> None:
        """Step unit by unit, and start gathers as soon as their units are stepped."""
        for runtime in self.runtimes:
            runtime.drop_pending(is_end_of_backward=True)
        held = self._held(optimizer)
        consumed = {
            id(p)
            for group in optimizer.param_groups
            for p in group["params"]
            if is_stepped_grad(p.grad)
        }
        remaining = {part: params - consumed for part, params in held.items() if params - consumed}
        ahead = self._first_gathers(held)
        waiting = set(remaining)
        for part in self._stepped(optimizer, remaining):
            waiting.discard(part)
            while ahead and not any(flat in waiting for flat in ahead[0].flats):
                ahead.pop(0).start()
        for flat in self._flats():
            flat.is_stepped = False
        self.order.clear()
        self.early.clear()
        self.reads.clear()
        self.shared.clear()

    def _stepped(
        self, optimizer: optim.Optimizer, remaining: dict[FlatBuffer | None, set[int]]
    ) -> Iterator[FlatBuffer | None]:
        """Step these parameters, and yield each buffer once all of its are stepped.

        Muon's exchanges come in the same order on every rank, whatever has arrived on it.
        """
        if not isinstance(optimizer, Muon):
            for part in self._sorted(remaining):
                step_part(optimizer, self._base, remaining[part])
                yield part
            return
        with_grad = {
            id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        }
        left = {part: params & with_grad for part, params in remaining.items()}
        yield from [part for part, params in left.items() if not params]
        places = {key: part for part, params in left.items() for key in params}
        for p in optimizer.updates():
            part = places[id(p)]
            left[part].discard(id(p))
            if not left[part]:
                yield part

    def take(self, flat: FlatBuffer, flat_grad: Tensor, params: Sequence[ShardedParam]) -> bool:
        """Step these parameters inside backward, which has reduced their gradient, and start
        gathers of the next forward; not if they are not all of the buffer's, some are another
        optimizer's or have a gradient already, or another backward may still gather the buffer:
        then they get their gradient, and the step is to come. All of that is the same on every
        rank.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        self._begin_backward(optimizer)
        self._check(optimizer, params)
        if why := self._why_not(flat, params):
            if why not in self._said:  # once, whatever the unit
                self._said.add(why)
                warn_once(
                    f"compiled_fsdp: overlap_optimizer(in_backward=True): {flat.unit.name} is "
                    f"stepped by optimizer.step(), not inside backward, since {why}. The numbers "
                    "are the same; of other units it is not said again"
                )
            return False
        flat.settle()
        flat.is_stepped = True
        for param in params:
            param.sharded.grad = make_dtensor(flat.local_view(flat_grad, param), param.sharded)
        for param in params:
            for hook in list((param.sharded._post_accumulate_grad_hooks or {}).values()):
                hook(param.sharded)
        step_part(optimizer, self._base, {id(p.sharded) for p in params})
        for param in params:
            stepped = SteppedGrad(param.fqn).make_grad(param.sharded)  # type: ignore[arg-type]
            param.sharded.grad = stepped
        self._start_early()
        return True

    def _why_not(self, flat: FlatBuffer, params: Sequence[ShardedParam]) -> str:
        """Why a buffer may not be stepped inside backward; "" if it may."""
        trained = _trained(flat)
        if not trained <= self._held_now.get(flat, set()):
            return "the optimizer does not hold all of its parameters"
        if trained != {id(p.sharded) for p in params}:
            return "this graph has no gradients for some of its parameters"
        if flat in self.shared:
            return (
                "forward has read it more than once since the last backward, and another backward "
                "may gather it"
            )
        if flat not in self.reads:
            return "forward has not gathered it by an all-gather of its own"
        if any(p.sharded.grad is not None for p in params):
            return "its parameters have gradients already"
        return ""

    def forget(self, flat: FlatBuffer) -> None:
        """Forget what forward has read of a buffer: it was for a backward that has come to it now,
        and did not reduce.
        """
        self.reads.pop(flat, None)
        self.shared.discard(flat)

    def _begin_backward(self, optimizer: optim.Optimizer) -> None:
        """Once for each backward: look who holds what, and drop gathers of an earlier step that no
        forward has used.
        """
        backward = backward_number()
        if backward == self._backward:
            return
        self._backward = backward
        self._held_now = self._held(optimizer)
        for flat in self._flats():  # no longer, if the user went on without a step
            flat.is_stepped = any(is_stepped_grad(p.sharded.grad) for p in flat.params)
        if not any(flat.is_stepped for flat in self._flats()):
            self.early.clear()
            for flat in self._flats():
                flat.drop_ahead()

    def _check(self, optimizer: optim.Optimizer, params: Sequence[ShardedParam]) -> None:
        name = type(optimizer).__name__
        if stepped := [p.fqn for p in params if is_stepped_grad(p.sharded.grad)]:
            raise RuntimeError(
                f"overlap_optimizer(in_backward=True): backward is about to step {stepped[0]}, "
                "which still has a gradient of an earlier backward. Each backward is a step: call "
                "zero_grad() between them, add up gradients by set_requires_gradient_sync(False), "
                "or leave out in_backward=True"
            )
        # Its own; among those of all optimizers are Dynamo's.
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise RuntimeError(
                f"overlap_optimizer(in_backward=True): the {name} has hooks on its step, which is "
                "taken in parts inside backward. Remove the hooks, or leave out in_backward=True"
            )

    def _start_early(self) -> None:
        """Gathers of the next forward whose units are stepped, in the order in which backward comes
        to them.
        """
        room = self.max_ahead_bytes // 2 - sum(gather.num_bytes for gather in self.early)
        for gather in reversed(self.order):
            is_ready = gather not in self.early and all(flat.is_stepped for flat in gather.flats)
            if is_ready and gather.num_bytes <= room:
                room -= gather.num_bytes
                self.early[gather] = None
                gather.start()

    def _flats(self) -> list[FlatBuffer]:
        return [flat for runtime in self.runtimes for flat in runtime.unit.flats]

    def _held(self, optimizer: optim.Optimizer) -> dict[FlatBuffer | None, set[int]]:
        """The optimizer's parameters, by the flat buffer that they lie in; None for those of no
        unit.
        """
        owners = {id(p.sharded): flat for flat in self._flats() for p in flat.params}
        held: dict[FlatBuffer | None, set[int]] = {}
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            held.setdefault(owners.get(id(param)), set()).add(id(param))
        return held

    def _sorted(self, held: Iterable[FlatBuffer | None]) -> list[FlatBuffer | None]:
        """Those whose gradients are there in the order of forward, then those that wait, oldest
        reduction first.
        """
        forward = {
            flat: i
            for i, flat in enumerate(
                dict.fromkeys(f for gather in self.order for f in gather.flats)
            )
        }

        def key(flat: FlatBuffer | None) -> tuple[int, int]:
            if flat is None:
                return 0, -1
            if flat.arrival is not None and not flat.arrival.is_done:
                return 1, flat.arrival.number
            return 0, forward.get(flat, len(forward))

        return sorted(held, key=key)

    def _first_gathers(self, held: dict[FlatBuffer | None, set[int]]) -> list[Gather]:
        """The first gathers of forward that fit, up to the first buffer that another optimizer is
        still to change.
        """
        found = []
        room = self.max_ahead_bytes - sum(gather.num_bytes for gather in self.early)
        for gather in (g for g in self.order if g not in self.early):
            room -= gather.num_bytes
            if room < 0 or not all(self._is_ours(flat, held) for flat in gather.flats):
                break
            found.append(gather)
        return found

    def _is_ours(self, flat: FlatBuffer, held: dict[FlatBuffer | None, set[int]]) -> bool:
        """Whether this step makes the buffer what the next forward gathers."""
        others = _trained(flat) - held.get(flat, set())
        return all(self._others.are_done(p.sharded) for p in flat.params if id(p.sharded) in others)


_made: weakref.WeakSet[Overlap] = weakref.WeakSet()


def _note_step(optimizer: optim.Optimizer) -> None:
    """Called after every step."""
    for overlap in _made:
        overlap.note_step(optimizer)


def _trained(flat: FlatBuffer) -> set[int]:
    return {id(p.sharded) for p in flat.params if p.sharded.requires_grad}
