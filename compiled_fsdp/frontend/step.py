"""A whole training step as one graph, as `compile_step` makes it.

Forward, loss, backward, reductions, clipping and the optimizer's update are nodes of one graph,
which the passes schedule and `verify` checks as a whole (`compiler/stitch.py`). The update is the
user's own optimizer, stepped for the parameters of a unit where the unit's gradients are there:
learning rates, schedules and state dicts are its own, and no recompile follows from them.

Private torch used here (tried on 2.13): what optimizers leave for learning rate schedulers, and
`torch.utils._pytree`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from compiled_fsdp.eager import optimizer_steps
from compiled_fsdp.eager.verdict import compare
from compiled_fsdp.errors import warn_once
from compiled_fsdp.torch_private.compiled import compile_for_good, uncompiled
from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.wire import copies
from compiled_fsdp.wire.captured import Captures, each_run, on_device
from compiled_fsdp.wire.ignored import Ignored

from .captures import TOLD, Capturable, captures_of, check_ready
from .hosted_states import HostedStates
from .ignored import IgnoredParams
from .matrices import Matrices
from .optimizers import Optimizers, Told
from .scaling import Scaling
from .state import follow_user_below
from .states_at_rest import bring_home
from .step_errors import (
    check_gradient,
    check_trainable,
    look_reduced,
    raise_explained,
    say_compiled_often,
)
from .step_values import batches, function_of, with_loss, with_own_code
from .stepped import announce_updated

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, optim

    from compiled_fsdp.eager.runtime import Runtime
    from compiled_fsdp.units.flat import FlatBuffer
    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.units.unit import Unit

_numbers = itertools.count()


class Step:
    """A compiled training step, made by `compile_step`.

    name: what its graphs call it.
    num_batches: micro-batches of each step.
    is_running: whether a step is being taken.
    keeps_grads: whether parameters keep their gradients until the next step.
    runtimes: of its units, which know how many steps there were.
    scaling: of losses and gradients, if there is a scaler.
    schedules: stepped behind each step.
    captures: of it as CUDA graphs, if there are any.
    """

    scaling: Scaling | None = None
    schedules: Sequence[LRScheduler] = ()
    captures: Captures | None = None

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        optimizers: Optimizers,
        ignored: IgnoredParams,
        loss_fn: Callable[..., Tensor | tuple[Any, ...]] | None,
        wanted: dict[str, Any],
        backend: str,
        dynamic: bool | None,
        mode: str | None,
        patches: dict[str, Any],
    ) -> None:
        self.name = f"step{next(_numbers)}"
        self.num_batches: int = wanted["batches"]
        self.optimizers = optimizers
        self._units = units
        self.keeps_grads = False
        self.runtimes: Sequence[Runtime] = ()
        self._ignored = ignored
        self._updated: dict[FlatBuffer | Ignored, None] = {}
        self._kept: dict[nn.Parameter, tuple[int, int]] = {}
        self._model: nn.Module = uncompiled(model)
        self._function = function_of(
            self._model,
            loss_fn,
            self.name,
            self.num_batches,
            is_scaled=bool(wanted.get("is_scaled")),
        )
        self._options: dict[str, Any] = {"backend": backend, "fullgraph": True, "dynamic": dynamic}
        self._patches = patches
        if wanted["captures"]:
            assert mode is not None
            self.captures = captures_of(mode, units, optimizers, self.name)
        if self.captures is not None:
            self._capturable = Capturable(self.captures.mode, self.captures.device)
            wanted["max_ahead_bytes"] = 0  # a graph has what it gathers
        wanted["captures"] = self.captures is not None
        self._wanted = {
            **wanted,
            "name": self.name,
            "order": tuple(self._names(self._model)),
            "units": tuple(unit.key for unit in units),
        }
        self._matrices = Matrices(units, optimizers, self._take, self._told)
        self._states = HostedStates(units, optimizers)
        self._plan()
        for unit in units:
            unit.on_update[self.name] = _weakly(self._update)
            unit.on_matrices[self.name] = weakref.proxy(self._matrices)
            unit.on_states[self.name] = weakref.proxy(self._states)
            unit.on_verdict[self.name] = _weakly(self._judge)
        ignored.join(self.name, self._update_ignored, self._judge)
        weakref.finalize(self, _leave, units, self.name).atexit = False
        self.is_running = False
        _made.add(self)
        optimizer_steps.before(_drop_gathered)

    def _plan(self) -> None:
        """Decide who owns which matrix, and compile for that, for which optimizer holds which
        parameter, if a scaler asks, and for what they remember, if that may rest on the host; anew
        if others are trained, or held by others, or other things are remembered.
        """
        planned_for = self._signature()
        planned = {
            "matrices": self._matrices.planned(),
            "held_by": self._held_by(),
            "states": self._states.planned(),
        }
        self._planned_for = planned_for
        if planned.items() <= self._wanted.items():
            return
        self._wanted.update(planned)
        own = with_own_code(self._function, self.name)
        self._code = own.__code__
        compile_for_good(self._code, self._note_compiled_often)
        self._run: Callable[..., Any] = torch.compile(
            own,
            **self._options,
            options={"whole_step": dict(self._wanted), "patches": self._patches},  # type: ignore[dict-item]
        )

    def _note_compiled_often(self, times: int, why: str) -> None:
        """Dynamo would raise; other ranks may be in a graph."""
        say_compiled_often(self.name, times, why)

    def _signature(self) -> tuple[object, ...]:
        """Changes if the step has to be planned anew."""
        return self._matrices.signature(), self._held_by(), self._states.signature()

    def _held_by(self) -> tuple[tuple[tuple[str, str], int], ...]:
        """Which optimizer holds each parameter, by unit and name, if a graph has to know."""
        if not self._wanted.get("is_scaled") or len(self.optimizers.made) == 1:
            return ()
        holders = self.optimizers.holders()
        named = [((p.spec.unit, p.fqn), held) for p, held in self._held()]
        named += [(("", each.fqn), each.param) for each in self._ignored.found]
        return tuple((name, holders[id(held)]) for name, held in named if id(held) in holders)

    def _names(self, model: nn.Module) -> list[tuple[str, str]]:
        """The units and names of all parameters, in the order in which the model yields them."""
        owners = {id(held): (p.spec.unit, p.fqn) for p, held in self._held()}
        owners.update((id(each.param), ("", each.fqn)) for each in self._ignored.found)
        found = (owners[id(p)] for p in model.parameters() if id(p) in owners)
        return list(dict.fromkeys(found))

    def _held(self) -> list[tuple[ShardedParam, nn.Parameter]]:
        """All parameters, and what the optimizer may hold of each."""
        return [(p, held) for unit in self._units for p in unit.params for held in p.held_as]

    @untraced
    def __call__(self, *batch: Any, **more: Any) -> Any:
        """One training step; returns the loss, detached, and what else `loss_fn` returns."""
        if self.num_batches > 1:
            batch, more = batches(batch, more, self.num_batches), {}
        self._check()
        self._note_running(True)
        try:
            return self._step(batch, more)
        finally:
            self._note_running(False)

    def _note_running(self, is_running: bool) -> None:
        self.is_running = is_running
        for unit in self._units:
            unit.ledger.keeps_all = is_running

    def _step(self, batch: tuple[Any, ...], more: dict[str, Any]) -> Any:
        for optimizer in self.optimizers.made:
            optimizer_steps.begun(optimizer)
        self._updated.clear()
        given = () if self.scaling is None else (self.scaling.begin(),)
        if self.captures is not None:
            self.captures.batch = {id(each) for each in tree_leaves((batch, more))}
        try:
            with torch.enable_grad():
                found = self._run(*given, *batch, **more)
        except BaseException as error:  # an interrupt ends a step halfway, too
            self._explain(error)
            raise
        finally:
            copies.arrived()
        if not self._updated:
            raise RuntimeError(
                "compile_step: the loss depends on no parameter that is trained, so nothing was "
                "updated. Let loss_fn return a loss of the model's output, and train a parameter"
            )
        made = self.optimizers.made
        called = [True] * len(made) if self.scaling is None else self.scaling.end()
        for optimizer, was_called in zip(made, called, strict=True):
            if was_called:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers' advice
            optimizer_steps.ended(optimizer)
            announce_updated(optimizer, [p.param for p in self._updated if isinstance(p, Ignored)])
        for schedule in self.schedules:
            schedule.step()
        losses, others = found if self.scaling is None else found[1]
        mean: Tensor = sum((each.detach() for each in losses[1:]), losses[0].detach())
        return with_loss(mean, others)

    def drop_gathered(self, optimizer: optim.Optimizer) -> None:
        """Forget what was gathered for the next step of parameters that an optimizer is about to
        write to: not every write of its has a version.
        """
        for flat in [flat for unit in self._units for flat in unit.flats if flat.ahead]:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if any(id(each) in held for p in flat.params for each in p.held_as):
                flat.drop_ahead()

    def _explain(self, error: BaseException) -> None:
        """Say in our words what Dynamo says; and that a step has ended halfway."""
        raise_explained(error, self.name, self.num_batches)
        if self._updated:
            warn_once(
                "compile_step: an exception left a step when some units were updated and others "
                "were not. Load a checkpoint before going on"
            )

    def _check(self) -> None:
        """What a graph cannot see, and the loop would have done."""
        check_trainable(self._model)
        self._drop_left_over()
        for unit in self._units:
            look_reduced(unit)
        params = self._held()
        self.optimizers.check_ready()
        if self.captures is not None:
            self._capturable.check(self.optimizers)
        follow_user_below(self._code)
        self._ignored.check(self._units, params)
        if self.captures is not None:
            check_ready(self.captures.mode, self._units, self._ignored.found)
        if self._signature() != self._planned_for:
            self._plan()
        kept, self._kept = self._kept, {}
        held: list[tuple[ShardedParam | Ignored, nn.Parameter]] = [*params]
        held += [(each, each.param) for each in self._ignored.found]
        for p, own in held:
            if own in kept and _state(own.grad) == kept[own]:
                own.grad = None
            check_gradient(p.fqn, own)

    def _drop_left_over(self) -> None:
        """What an eager forward has left for a backward that has not come, or `unshard()`, is not
        what there is after the step: whoever goes through the parameters is to find that.
        """
        for runtime in self.runtimes:
            if runtime.is_unsharded:
                runtime.reshard()

    def _judge(self) -> None:
        """Called by a graph, once all gradients are reduced and nothing is updated."""
        steps = self.runtimes[0].tree.clock.count if self.runtimes else 0
        compare(self._units, steps + 1)

    def _update(
        self,
        flat: FlatBuffer,
        flat_grad: Tensor,
        params: Sequence[ShardedParam],
        found_inf: Tensor | None,
    ) -> None:
        """Called by a graph: update these parameters, whose gradients are reduced (unscaled, and
        clipped), unless some gradient of their optimizer is inf or NaN.
        """
        told = self._told(found_inf)
        drop = self._take(flat, flat_grad, params, told)
        try:
            held = {id(each) for param in params for each in param.held_as}
            with on_device():
                self.optimizers.step_part(held, told)
        finally:
            drop()

    def _update_ignored(self, own: Ignored, grad: Tensor, found_inf: Tensor | None) -> None:
        """Called by a graph: the same for a parameter that no unit has."""
        told = self._told(found_inf)
        self._note_writing(told)
        writes = any(given and given.get("grad_scale") is not None for given in told)  # unscales it
        own.param.grad = own.grad_of(grad, copies=self.keeps_grads or writes)
        self._updated[own] = None
        try:
            self.optimizers.step_part({id(own.param)}, told)
        finally:
            if self.keeps_grads:
                self._kept[own.param] = _state(own.param.grad)
            else:
                own.param.grad = None

    def _told(self, found_inf: Tensor | None) -> Told:
        """Which optimizers leave their updates out; what the others have to know of the scale."""
        if self.scaling is None or found_inf is None:
            return [{} if self.captures is None else TOLD] * len(self.optimizers.made)
        return self.scaling.told(found_inf)

    def _note_writing(self, told: Told) -> None:
        """Before the first update of a step."""
        if not self._updated:
            for optimizer, given in zip(self.optimizers.made, told, strict=True):
                if given is not None:
                    optimizer_steps.writing(optimizer)

    def _note_update(self, flat: FlatBuffer, told: Told) -> None:
        """A buffer is updated next."""
        flat.settle()
        self._note_writing(told)
        flat.drop_ahead()  # what another step has gathered, and this one has not used
        self._updated[flat] = None
        if self.captures is not None:
            flat.count_write()

    def _take(
        self,
        flat: FlatBuffer,
        flat_grad: Tensor,
        params: Sequence[ShardedParam],
        told: Told,
    ) -> Callable[[], None]:
        """Let these have their gradients until what is returned is called."""
        each_run(partial(_weakly(self._note_update), flat, told))
        if self.keeps_grads:
            flat_grad = flat_grad.clone()  # the graph's own is used for something else
        flat.show_grad(flat_grad, params)

        def drop() -> None:
            held = [each for param in params for each in param.held_as]
            if self.keeps_grads:
                self._kept.update((p, _state(p.grad)) for p in held if p.grad is not None)
            else:
                flat.drop_grad(params)

        return drop


def _state(grad: Tensor | None) -> tuple[int, int]:
    """Changes if a gradient is another, or is added to."""
    local: Any = getattr(grad, "_local_tensor", grad)
    return id(grad), -1 if local is None else local._version


_made: weakref.WeakSet[Step] = weakref.WeakSet()


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The same, for units, which must not keep a step: a notebook makes one after the other, each
    with an optimizer and its state. While a graph calls it, the step is running.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = reference()
        assert found is not None, "a step outlives its graph"
        found(*args)

    return call


def _leave(units: list[Unit], name: str) -> None:
    """A step of this name is gone."""
    for unit in units:
        for table in (unit.on_update, unit.on_matrices, unit.on_states, unit.on_verdict):
            table.pop(name, None)


def _drop_gathered(optimizer: optim.Optimizer) -> None:
    """Called before every step; one that is a graph takes over what it can use, and drops the
    rest. What another step is to read has to be on the device.
    """
    if not any(step.is_running and optimizer in step.optimizers.made for step in _made):
        for step in list(_made):
            step.drop_gathered(optimizer)
        bring_home(optimizer, list(optimizer.state))
