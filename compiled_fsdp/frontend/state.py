"""The state that one `fully_shard` call leaves behind, and how to find it."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from compiled_fsdp.eager import optimizer_steps
from compiled_fsdp.eager.full_params import check_not_meta
from compiled_fsdp.eager.left_over import drop_left_over
from compiled_fsdp.eager.resident import drop, prepare
from compiled_fsdp.eager.runtime import Runtime
from compiled_fsdp.eager.stock_state import StockState, show_to_schedules
from compiled_fsdp.eager.tree import in_backward
from compiled_fsdp.eager.whose_gradients import say_after_exception
from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.planning.calibrate import calibrate_plan
from compiled_fsdp.torch_private.compiled import code_in_trace, codes_under_way
from compiled_fsdp.torch_private.dynamo import (
    TRACES_TO_DTENSORS,
    is_refused,
    trace_again,
    traces_autograd,
    untraced,
)
from compiled_fsdp.torch_private.modules import plain_name
from compiled_fsdp.units.assigned import adopt_assigned
from compiled_fsdp.units.tensor_parallel import groups_beside
from compiled_fsdp.units.traced_extension import follow_extensions
from compiled_fsdp.wire.absence import note_goes_on, note_raised

from .as_stock import AsStock
from .beside_stock import check_not_taken
from .calls import innermost
from .classes import keep_classes
from .fallback import (
    note_eager_unit,
    note_refused,
    note_skipped,
    run_as_others,
    run_eagerly,
)
from .first_call import (
    check_buffers,
    check_devices,
    check_same_model,
    explain_dtypes,
    explain_mixed,
    explain_registered,
    warn_unread,
)
from .forward_hooks import PostForward, PreForward
from .moved import follow_moved
from .originals import warn_held, watch_originals
from .quantizing import check_names, check_supported, follow
from .together import meet

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType

    from compiled_fsdp.units.flat import FlatBuffer
    from compiled_fsdp.units.unit import Unit

    from .together import Together

NUM_LOOKED = 16  # calls in which it is asked whether the last step assigned to `.data`


class State(AsStock):
    """The unit of a call, the eager runtime that serves it, and the hooks around its modules'
    forward.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.runtime = Runtime(unit)
        self.pre_forward = PreForward(self)
        self.post_forward = PostForward(self)
        self.stock = StockState(self.runtime)
        self.is_checked = self.is_use_checked = self.is_call_compiled = False
        self.num_looked = 0
        # Of the calls that are under way: what graphs read, and `is_call_compiled` around it.
        self.reading: list[tuple[list[FlatBuffer], bool]] = []
        self.together: Together | None = None
        self.buffers_from_meta: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        follow(unit)
        unit.on_gradients = self.runtime.reshard_if_idle
        unit.on_retained = self._queue_callback
        unit.on_shared = self._share
        unit.on_left_graph = self._follow_others
        unit.on_listed = self.runtime.say_whose_gradients
        unit.ledger.on_entry = self._note_entry

    def _queue_callback(self) -> None:
        self.runtime.tree.queue_callback()
        self.runtime.tree.delivers = True

    def _follow_others(self) -> None:
        """Other ranks have left a graph that gathers this unit, which this rank runs eagerly, in
        the call of its own module or of one that borrows its parameters.
        """
        called = get_state(innermost()[0]) or self
        run_as_others(called.unit, [state.unit for state in called.below()])

    def _note_entry(self) -> None:
        """Checksums of a backward are to be compared at its end."""
        if in_backward():
            self.runtime.tree.queue_callback()

    def _share(self, module: nn.Module) -> None:
        """A module of another unit holds one of this one's parameters from now on (tied after
        sharding).
        """
        borrower: State = module.__dict__["_fsdp_owner"]
        borrower.runtime.borrow(self.runtime)
        self.unit.share_with(borrower.unit)

    def _check(self, *, is_in_graph: bool) -> None:
        # Casts of submodules before the first forward, which nobody saw.
        for runtime in self.runtime.tree.members:
            if not runtime.is_unsharded:
                runtime.unit.take_over()
        units = [runtime.unit for runtime in self.runtime.tree.in_order()]
        if any(p.sharded.device.type == "meta" for unit in units for p in unit.params):
            if is_in_graph:  # before Dynamo finds that devices differ; eagerly, gathering says so
                for unit in units:
                    check_not_meta(unit)
            return
        check_not_taken(units)
        check_devices(units)
        check_same_model(units)
        check_names(units)
        watch_originals(units)
        self.together = meet(units)
        if self.buffers_from_meta:
            check_buffers(self.unit.modules[0], self.unit, self.buffers_from_meta)
        calibrate_plan(
            list(dict.fromkeys(flat.mesh_info for unit in units for flat in unit.flats)),
            groups_beside(p for unit in units for p in unit.params),
        )
        self.is_checked = True

    @untraced
    def note_eager(self) -> None:
        """The unit runs outside a graph: say why, if Dynamo gave one up."""
        units = [runtime.unit for runtime in self.runtime.tree.in_order()]
        refused = self.is_call_compiled and is_refused(self.unit.modules[0])
        if note_eager_unit(self.unit, units, is_refused=refused):
            for runtime in (*self.runtime.lenders, self.runtime):  # whichever is gathered first
                runtime.asks_anew = True
        if refused:
            note_refused(self.unit)
        elif self.is_call_compiled and not any(r.unit.why_eager for r in self.runtime.tree.members):
            note_skipped(self.unit)

    @property
    def root(self) -> State:
        """That of the outermost sharded module around this one's, or itself."""
        return get_state(self.runtime.root.unit.modules[0]) or self

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Where a larger function is compiled nothing is called before its graph: wait at once."""
        tree = self.runtime.tree
        tree.post_optim_event = event
        if (together := self.root.together) is not None and together.is_inlined:
            tree.wait_for_optimizer()

    def below(self) -> list[State]:
        """The states of this unit's modules and of all inside them, in the same order on every
        rank.
        """
        return distinct(state for module in self.unit.modules for state in states_below(module))

    def _count_call(self) -> None:
        """A call of the outermost module begins, one that communicates: from here on, units may run
        eagerly on all ranks.
        """
        together = self.together
        if (
            together is None
            or not (together.is_sharding or torch.is_grad_enabled())
            or in_backward()
        ):
            return
        for number, why in together.begin():
            state = self.below()[number]
            run_eagerly(state.unit, [s.unit for s in state.below()], why)

    def note_callers(self) -> None:
        """While a call of this unit is compiled: what is under way calls it."""
        for code in [*filter(None, [code_in_trace()]), *codes_under_way()]:
            below: weakref.WeakSet[State] = _called_below.setdefault(code, weakref.WeakSet())
            below.add(self)

    def before_call(self, *, is_compiled: bool, is_traced: bool = False) -> None:
        """Before a module of this unit is called: notice what the user changed since.

        is_traced: into a larger graph, which is not called yet; otherwise the call begins outside
            any graph.
        """
        around, self.is_call_compiled = self.is_call_compiled, is_compiled
        tree = self.runtime.tree
        note_goes_on()
        tree.recover()
        tree.wait_for_optimizer()
        optimizer_steps.catch_up()
        if self.unit.is_outermost and not self.is_checked:
            self._check(is_in_graph=is_compiled or is_traced)
        elif self.unit.is_outermost and not self.is_use_checked:
            units = [runtime.unit for runtime in tree.in_order()]
            self.is_use_checked = any(unit.has_gradients for unit in units)
            if self.is_use_checked:
                warn_unread(units)
                warn_held(units)
        if self.unit.is_outermost and is_traced and self.together is not None:
            self.together.is_inlined = True
        elif self.unit.is_outermost:
            self._count_call()
        is_recorded = torch.is_grad_enabled() and not in_backward()
        tree.was_recorded |= self.unit.is_outermost and is_recorded
        called = tree.in_order() if self.unit.is_outermost else [self.runtime]
        self._say_what_was_ignored(called)
        for runtime in called:
            keep_classes(runtime.unit)
            _follow_user(runtime, is_compiled=is_compiled, is_traced=is_traced)
        read = self._note_reads(called, is_compiled=is_compiled)
        if (is_compiled or is_traced) and [r for r in called if drop_left_over(r)] and is_traced:
            trace_again("full parameters that an eager forward had left are dropped")
        if is_compiled:
            _say_if_backward_is_traced(self.unit)
            prepare(called)
        if not is_traced:
            self.reading.append((read, around))

    def _accelerator(self) -> torch.device | None:
        """The device that computes, if it is no CPU."""
        device = self.unit.mesh_info.device
        return None if device.type == "cpu" else device

    def device_of_inputs(self) -> torch.device | None:
        """Where the call that has begun is to find the tensors that it is given: where the unit
        computes, if no other unit's call is around it. None: where they are, on a CPU.
        """
        device, root = self._accelerator(), self.runtime.root
        if device is None or (root is not self.runtime and root.under_way):
            return None
        is_first = sum(len(member.under_way) for member in self.runtime.tree.members) == 1
        return device if is_first else None

    def _note_reads(self, called: Iterable[Runtime], *, is_compiled: bool) -> list[FlatBuffer]:
        """Another forward begins, or a graph of one: what is read now is what backward is about.
        Returns what graphs read.
        """
        flats = [flat for runtime in called for flat in runtime.unit.flats]
        if self.unit.is_outermost and not in_backward():
            for flat in flats:
                flat.forget_read()
                flat.forget_failed()
        read = flats if is_compiled else []
        for flat in read:
            flat.begin_read()
        return read

    def end_call(self) -> None:
        """A call that began outside of any graph has ended."""
        read, self.is_call_compiled = self.reading.pop()
        for flat in read:
            flat.end_read()

    def after_error(self, error: BaseException) -> None:
        """A call of this unit has raised: graphs gather for themselves again; raise a clearer
        error, where there is one.
        """
        self.runtime.end_failed_forward()
        units = [runtime.unit for runtime in self.runtime.tree.in_order()]
        if not in_backward():  # where checkpointing ends what it computes again by an exception
            say_after_exception(units, "forward")
        try:
            if isinstance(error, RuntimeError):
                explain_mixed(error, self.unit, units)
                explain_dtypes(error, self.unit)
            elif isinstance(error, TypeError) and self.is_call_compiled:
                explain_registered(error, self.unit)
        except (RuntimeError, TypeError) as clearer:
            error = clearer
            raise
        finally:
            if self.unit.is_outermost and not in_backward():
                note_raised(error)

    def _say_what_was_ignored(self, called: Iterable[Runtime]) -> None:
        """In the first calls: what is done in a step, is done in each."""
        if not self.unit.is_outermost or self.num_looked == NUM_LOOKED:
            return
        self.num_looked += 1
        ignored = [
            p.fqn for runtime in called for p in runtime.unit.params if p.was_data_assigned()
        ]
        if ignored:
            warn_once(
                f"compiled_fsdp: `.data` of parameter {shortened(ignored, 1)} was assigned to "
                "while it is sharded. DTensor ignores that, as with torch's FSDP2: the parameter "
                "has the values of before. Write `p.data.copy_(x)`, or `p.copy_(x)` under "
                "torch.no_grad()",
                about="assigned data",
            )

    def before_trace(self, module: nn.Module) -> None:
        """As `before_call`, where a larger function is traced; leaves on the module what the graph
        is to guard on.
        """
        self.before_call(is_compiled=False, is_traced=True)
        self.note_callers()
        if traces_autograd() and TRACES_TO_DTENSORS:
            warn_once(
                "compiled_fsdp: torch._dynamo.config.trace_autograd_ops is on, and a sharded "
                "module is called in a compiled function. There, one loss.backward() without "
                "arguments becomes a part of the graph, if the loss is detached before the "
                "function returns it or goes on to optimizer.step(). Any other backward breaks the "
                "graph, or raises with fullgraph=True, and torch.autograd.grad raises that "
                "parameters are not used. For a whole step in one graph, use "
                "compiled_fsdp.compile_step"
            )
        elif traces_autograd():
            warn_once(
                "compiled_fsdp: torch._dynamo.config.trace_autograd_ops is on, and a sharded "
                "module is called in a compiled function. If loss.backward() is called there too, "
                "Dynamo of this torch ends in an AssertionError without a text, as for any "
                "DTensor. Call loss.backward() outside, or set it to False"
            )
        called = self.runtime.tree.in_order() if self.unit.is_outermost else []
        for runtime in called:
            if not runtime.unit.settings.reshard_after_backward:
                warn_once(
                    f"compiled_fsdp: set_reshard_after_backward(False) on {runtime.unit.name!r} "
                    "changes nothing where the call of the sharded module is compiled as part of "
                    "a larger function. Compile the sharded module itself"
                )
            drop(runtime)
        place = self._accelerator() if self.unit.is_outermost else None
        module.__dict__["_fsdp_inputs_on"] = place
        module.__dict__["_fsdp_watched"] = [
            p.sharded for runtime in called for p in runtime.unit.params
        ]


def follow_user_below(code: CodeType) -> None:
    """Before a graph of a function of this code object, whose guards ask what is trained."""
    trees = dict.fromkeys(state.runtime.tree for state in called_below(code))
    for runtime in [runtime for tree in trees for runtime in tree.in_order()]:
        _follow_user(runtime, is_compiled=False, is_traced=False)


def _follow_user(runtime: Runtime, *, is_compiled: bool, is_traced: bool) -> None:
    """Take over what was assigned, moved, frozen or unfrozen since the last call."""
    follow_moved(runtime)
    check_supported(runtime.unit)
    if runtime.unit.was_assigned:
        adopt_assigned(runtime.unit)
    if runtime.unit.offload is not None:  # moved since the first forward
        check_devices([runtime.unit])
    runtime.follow_requires_grad()
    runtime.unit.follow_requires_grad()
    runtime.unit.follow_hooks()
    if is_compiled or is_traced:
        follow_extensions(runtime.unit, is_traced=is_traced)


# For each code object (by identity, see `limits.py`): the states of modules called below it.
_called_below: WeakIdKeyDictionary = WeakIdKeyDictionary()


def called_below(code: CodeType) -> list[State]:
    """The states of modules that are called, in a graph or outside, while a frame of this code
    object is under way.
    """
    return list(_called_below.get(code, ()))


_keys = itertools.count()
_modules: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()


def get_state(module: object) -> State | None:
    """The state of the `fully_shard` call that was given this very module, or None."""
    return module.__dict__.get("_fsdp_state") if isinstance(module, nn.Module) else None


def set_state(module: nn.Module, state: State) -> None:
    """Attach a call's state to a module that it was given; as an attribute, so that both are
    collected together.
    """
    enter_state(module, state)
    show_to_schedules(module, state.stock)


def enter_state(module: nn.Module, state: State) -> None:
    """As `set_state`, without showing it to torch as a module that `fully_shard` was given."""
    module.__dict__["_fsdp_state"] = state
    module.__dict__["_fsdp_key"] = key = f"module {next(_keys)}"
    _modules[key] = module


def module_by_key(key: str) -> nn.Module:
    """The sharded module whose `_fsdp_key` this is: torch 2.11 takes no module for a constant while
    it traces.
    """
    return _modules[key]


def distinct(states: Iterable[State | None]) -> list[State]:
    """Each state once, in order."""
    return list({id(s): s for s in states if s is not None}.values())


def states_below(module: nn.Module, *, recurse: bool = True) -> list[State]:
    """The states of a module and, with `recurse`, of all modules inside it."""
    return distinct(get_state(m) for m in (module.modules() if recurse else [module]))


def adopt_nested(root: nn.Module) -> None:
    """This module was sharded last: units below are named from here and no longer count as
    outermost.
    """
    outer = get_state(root)
    assert outer is not None
    paths = {module: plain_name(path) for path, module in root.named_modules()}
    for state in distinct(get_state(module) for module in paths):
        if state is not outer:
            state.unit.adopt(paths, is_nested=True)
            state.runtime.enter(outer.runtime)
            if state.runtime.tree is not outer.runtime.tree:
                outer.runtime.tree.absorb(state.runtime.tree)


def _say_if_backward_is_traced(unit: Unit) -> None:
    if unit.is_outermost and traces_autograd():
        warn_once(
            "compiled_fsdp: torch._dynamo.config.trace_autograd_ops is on. Where a graph "
            "break separates the call of a model from loss.backward() in the same compiled "
            "function, torch traces a backward that trains nothing, sharded or not, and "
            "does not say so. Call loss.backward() outside, or set it to False"
        )
