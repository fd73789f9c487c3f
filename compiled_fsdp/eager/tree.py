"""What the units of one model share in eager mode: their order, reductions under way, the end of a
backward.

[Note: order]
The units below one outermost module form a `Tree`. Forward starts the gather of the unit that came
next in the forward before; backward starts that of the unit whose forward came before; explicit
lists replace both. A reduction is awaited when the next but one starts, or at the end of backward.
Every rank takes these decisions from the same history, so all agree.

Private torch used here (tried on 2.13): autograd's callback queue.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import torch

from compiled_fsdp.torch_private.autograd import backward_number
from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.wire import ranges

from . import transformed
from .clock import Clock
from .finalization import Finalization
from .resident import num_steps
from .whose_gradients import say_after_exception

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compiled_fsdp.units.flat import FlatBuffer
    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.wire.deferred import Deferred
    from compiled_fsdp.wire.deferred import Value as Recorded

    from .runtime import Runtime


WHO = "eager runtime"  # consumes options
# Torch's own: TORCH_LOGS="+fsdp" shows both.
log = logging.getLogger("torch.distributed.fsdp.fully_shard")


# Of all models; those without members were absorbed by others.
TREES: weakref.WeakSet[Tree] = weakref.WeakSet()


class Tree:
    """The units below one outermost module, and what they share.

    members: the units' runtimes.
    order: post-forwards of this iteration, with repeats.
    next_forward: which unit's forward followed which in the last forward.
    in_flight: reductions under way, oldest first.
    arriving: what is left of reductions whose gradients are being copied to the host.
    backward: units that the running backward has reached, in order.
    used: units that ran a forward which backward may come back to.
    transformed: units that ran a forward inside of `torch.func`'s transformations, see
        `transformed.py`.
    transformed_before: the same of a forward whose backward has ended; another may come
        (`retain_graph=True`).
    has_callback, callback: a backward has begun and not ended; a weak reference to what autograd
        calls at its end.
    delivers: the running backward adds to gradients of the units' parameters: it was not asked for
        others only.
    creates_graph: the running backward records itself (`create_graph=True`).
    has_double: one has, so that the storage of full parameters stays for a backward through it;
        until a whole backward that does not record itself, or an optimizer's step.
    double_step: how often optimizers had stepped then.
    is_recorded: whether the last forward of the outermost module began in grad mode.
    was_recorded: whether any call of it has, in a graph or eagerly.
    entered: units in the order in which their last forwards began.
    ahead: units whose gathers the running forward has started, by no list of the user's.
    kept_for_call: units that stay gathered until the call without gradients ends that is under way.
    clock: of its optimizer's steps.
    finalization: what the end of a backward does.
    post_optim_event: what the next forward's gathers are to wait for, beside what the current
        stream does.
    """

    def __init__(self) -> None:
        self.members: weakref.WeakSet[Runtime] = weakref.WeakSet()
        self.clock = Clock()
        self.finalization = Finalization(self)
        TREES.add(self)
        self.order: list[Runtime] = []
        self.next_forward: dict[Runtime, Runtime] = {}
        self.last_forward: Runtime | None = None
        self.in_flight: deque[Reduction] = deque()
        self.arriving: list[Deferred] = []
        self.backward: dict[Runtime, None] = {}
        self.used: dict[Runtime, None] = {}
        self.transformed: dict[Runtime, None] = {}
        self.transformed_before: dict[Runtime, None] = {}
        self.double_step = 0
        self.entered: dict[Runtime, None] = {}
        self.ahead: list[Runtime] = []
        self.kept_for_call: dict[Runtime, None] = {}
        self.post_optim_event: torch.Event | None = None
        self.callback: Callable[[], object] = lambda: None
        self.is_last_backward = True
        self.has_callback = self.delivers = self.creates_graph = self.has_double = False
        self.is_recorded = self.was_recorded = False

    def in_order(self) -> list[Runtime]:
        """The units by their numbers: the same on every rank, which a set's own order is not."""
        return sorted(self.members, key=lambda runtime: runtime.unit.number)

    def absorb(self, other: Tree) -> None:
        """Take over the units of another tree."""
        for runtime in list(other.members):
            runtime.tree = self
            self.members.add(runtime)
        self.finalization.manual.update(other.finalization.manual)
        self.post_optim_event = self.post_optim_event or other.post_optim_event
        other.members.clear()

    def wait_for_optimizer(self) -> None:
        """Let the current stream, which gathers are behind, wait once for the event of
        `set_post_optim_event`.
        """
        if self.post_optim_event is not None:
            self.post_optim_event.wait()
            self.post_optim_event = None

    def note_forward(self, runtime: Runtime) -> None:
        """A unit's forward begins: remember which one it follows."""
        if runtime.unit.is_outermost:  # no forward need come after this one
            self.last_forward = None
        if self.last_forward is not None and self.last_forward is not runtime:
            self.next_forward[self.last_forward] = runtime
        self.last_forward = runtime
        self.entered.pop(runtime, None)
        self.entered[runtime] = None

    def enter_backward(self, runtime: Runtime) -> None:
        """Note that the running backward reaches a unit, and have its end noticed."""
        self.queue_callback()
        transformed.come_again(self)
        for reached in (runtime, *self.transformed):
            if reached not in self.backward:
                reached.gave_zeros = False
            self.backward.setdefault(reached)
            reached.was_reached = True
            self.delivers = self.delivers or reached.is_reached()

    def note_double(self, runtime: Runtime) -> None:
        """In a node or hook of the running backward, which reaches a unit: if it records itself,
        another may come through it.
        """
        if torch.is_grad_enabled():
            self.creates_graph = self.has_double = True
            self.double_step = num_steps()
            runtime.watch_leaves()

    def forget_double(self) -> None:
        """Before a forward: after an optimizer's step, no backward goes through what an earlier one
        has recorded.
        """
        if self.has_double and self.double_step != num_steps():
            self.free_double()

    def free_double(self) -> None:
        """Empty what was kept for a backward through a backward."""
        self.has_double = False
        for runtime in self.members:
            runtime.free()

    def queue_callback(self) -> None:
        """Have the end of the running backward noticed, once."""
        self.forget_failed()
        if not self.has_callback:
            self.has_callback, self.delivers, self.creates_graph = True, False, False
            callback = partial(Tree.end_of_backward, self)
            self.callback = weakref.ref(callback)
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def forget_failed(self) -> None:
        """In a backward: one that began before it and never ended, nor will, is over. Autograd has
        let go of what was to be called at its end, or that has raised.
        """
        if self.has_callback and self.callback() is None:
            self.drop_failed()

    def drop_failed(self) -> None:
        """Forget a backward that an exception has ended, and say what it leaves all the same."""
        self.reset()
        say_after_exception((r.unit for r in self.in_order()), "backward")

    def add_reduction(self, reduction: Reduction) -> None:
        """Let a reduction run in the background; await the oldest if too many are under way."""
        self.in_flight.append(reduction)
        for runtime in self.members:
            if runtime.unit.settings.max_reductions_in_flight:
                runtime.unit.options.consume(WHO, "set_reduce_scatter_max_input_buffers")
        limit = max(r.unit.settings.max_reductions_in_flight or 1 for r in self.members)
        while len(self.in_flight) > limit:
            self.in_flight.popleft().finish(self.arriving)

    @untraced
    def end_of_backward(self) -> None:
        """Autograd has come to the end of a backward; see `Finalization`. What raises here, has not
        ended it.
        """
        try:
            self.has_callback = False
            is_over = self.has_double and self.delivers and not self.creates_graph
            log.debug("FSDP::root_post_backward")
            with ranges.stock("FSDP::root_post_backward_callback"):
                self.finalization.end_of_backward()
        except BaseException:
            self.has_callback = True
            raise
        if is_over:
            self.free_double()

    def end_iteration(self, *, is_last: bool) -> None:
        """Nothing of a backward is left; after the last one, its order counts no more."""
        for runtime in self.members:
            runtime.unit.options.consume(WHO, "set_is_last_backward")
        if is_last:
            self.order.clear()
            for runtime in self.members:
                runtime.indices.clear()
                runtime.drop_pending(is_end_of_backward=True)

    def last(self, reached: Sequence[Runtime]) -> list[Runtime]:
        """The units that the end of a backward reduces, in stock's order: that in which backward
        came to them; but for FSDP1, whose flat gradients are complete in the reverse order in which
        forward made their views, so that the root's is the last; and where unused parameters take
        part: a rank that leaves some out may not reduce in another order than the others.
        """
        backwards = [
            r
            for r in reversed(self.entered)
            if r in reached and (r.unit.is_flat or r.unit.settings.reduce_unused)
        ]
        return [*backwards, *(r for r in reached if r not in backwards)]

    def await_or_leave(self) -> None:
        """Await all reductions, but for those that are left to whoever reads the gradients."""
        while self.in_flight:
            self.in_flight.popleft().finish(self.arriving, may_leave=True)
        while self.arriving:
            self.arriving.pop().finish()

    def end_forward(self) -> None:
        """A forward of an outermost module has ended, be it by an exception: what it has started to
        gather and not used (a layer that it dropped) is not for another, before which parameters
        may be written to. Ranks of which only some raise go on with the same gathers.
        """
        for runtime in self.ahead:
            runtime.outdate_pending()
        self.ahead.clear()

    def free_kept_for_call(self) -> None:
        """A forward has ended, be it by an exception: if no other is around it, nothing reads what
        it has kept.
        """
        if self.kept_for_call and not any(runtime.is_in_forward for runtime in self.members):
            kept, self.kept_for_call = self.kept_for_call, {}
            for runtime in kept:
                runtime.reshard()

    def recover(self) -> None:
        """Before a forward. If a backward began and never ended, an exception ended it: `reset`."""
        if not in_backward():
            self.transformed_before.clear()
            if self.has_callback:
                self.drop_failed()
        self.finalization.before_forward()

    def rest(self) -> None:
        """Between steps: whoever looks through the parameters finds sharded ones; a backward
        through an earlier forward gathers for itself.
        """
        for runtime in self.in_order():
            if runtime.is_unsharded and not runtime.is_in_forward:
                runtime.reshard(keeps_storage=self.has_double)

    def reset(self) -> None:
        """Forget a forward or backward that an exception ended: await what is under way, free
        everything.
        """
        while self.in_flight:
            self.in_flight.popleft().discard()
        while self.arriving:
            self.arriving.pop().finish()
        self.has_callback = self.delivers = False
        self.last_forward = None
        self.finalization.reset()
        for collection in (self.order, self.backward, self.used):
            collection.clear()
        for runtime in self.members:
            runtime.reset()
        self.free_double()


class Reduction:
    """The gradients of a unit on their way: one program for each flat buffer."""

    def __init__(
        self, programs: Sequence[tuple[Deferred, FlatBuffer, Recorded | None, list[ShardedParam]]]
    ) -> None:
        self.programs = programs
        for program, *_ in programs:
            program.advance()

    def finish(self, arriving: list[Deferred], *, may_leave: bool = False) -> None:
        """Await it and write `.grad`; or leave the waiting to whoever reads it, if the unit asked
        for that (`overlap`), and for copies to the host to the end of backward (`arriving`).
        """
        with torch.no_grad():
            for program, flat, result, params in self.programs:
                if (
                    may_leave
                    and result is not None
                    and flat.unit.settings.overlap
                    and program.is_local
                ):
                    flat.unit.options.consume(WHO, "overlap_optimizer")
                    flat.deliver_later(program, result, params)
                    continue
                if result is not None and flat.may_arrive_late(params):
                    arriving.append(program)
                    flat.accumulate_grad(program.come_to_copy(), params)
                    continue
                program.finish()
                if result is not None:
                    flat.accumulate_grad(result.tensor, params)

    def discard(self) -> None:
        """Await it, so that the ranks stay in step, and drop the result."""
        for program, *_ in self.programs:
            program.finish()


def in_backward() -> bool:
    """Whether autograd is running, so that a forward now is a recomputation."""
    return backward_number() != -1
