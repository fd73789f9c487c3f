"""The eager runtime: the same units where there is no graph, because the user did not compile or
Dynamo could not.

A unit is gathered before its forward and freed after it, gathered again before its backward, and
its gradients are reduced after it: one collective each, as in stock FSDP2, with the arithmetic of
`ir/transfers.py`, in the background of what is computed meanwhile.

What is gathered, and how: `full_params.py`. In which order units follow each other: `tree.py`. What
is gathered ahead: `prefetch.py`. How autograd says that a backward comes: `watch.py`. What stays
gathered behind an eager forward, and what graphs make of that: `left_over.py`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compiled_fsdp.ir.schema import KEEP_SLICE
from compiled_fsdp.torch_private.autograd import (
    accumulates,
    backward_number,
    is_transformed,
    next_run,
)
from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.units.handles import OPEN
from compiled_fsdp.wire.ops import TRACED

from . import prefetch, reductions, transformed
from .containers import tensors_in
from .emptied import say_hooked_inputs, say_what_is_emptied
from .full_params import NUM_LOOKED, FullParams, span
from .left_over import is_for_graphs, put_down
from .tree import WHO, Tree, in_backward, log
from .watch import watch_inputs, watch_leaves, watch_output
from .whose_gradients import say_after_backward, say_after_forward

if TYPE_CHECKING:
    from compiled_fsdp.units.unit import Unit


class Runtime(FullParams):
    """Gathers, frees and reduces one unit, called by the hooks on its modules.

    has_run: members of a list unit that ran in this forward; the last of them frees.
    under_way: the modules of the unit that are being called, outside any graph, one inside the
        other; one that calls itself (a tree) is gathered and freed by the outermost call.
    indices: places of this unit in `tree.order` that backward has not come to.
    awaited: what will come back to this unit: numbers of backwards that have come to its outputs
        and not to its inputs, and forwards computed again whose inputs they have not come to. A
        backward inside of these does not free it.
    began: the first run that autograd may record in its last forward.
    prefetch: explicit lists, by direction: what to start gathering when this unit's forward or
        backward begins.
    is_apart: its last forward ran without grad mode inside one with it; then its gather is not
        started ahead.
    watched: what its running forward was given in the place of inputs that require a gradient,
        while hooks on them are looked for.
    was_reached: a backward has come to it.
    gave_zeros: the running one has reduced zeros for what it does not use.
    lenders, borrowers: units whose parameters this one reads too, and those that read this one's
        (tied weights).
    """

    def __init__(self, unit: Unit) -> None:
        super().__init__(unit)
        self.tree = Tree()
        self.tree.members.add(self)
        self.has_run: set[nn.Module] = set()
        self.under_way: list[nn.Module] = []
        self.indices: list[int] = []
        self.awaited: set[object] = set()
        self.began = 0
        self.prefetch: dict[str, list[Runtime]] = {"forward": [], "backward": []}
        self.lenders: list[Runtime] = []
        self.borrowers: list[Runtime] = []
        self.is_in_forward = self.is_apart = self.was_reached = self.gave_zeros = False
        self.watched: tuple[Tensor, ...] = ()
        self._root = weakref.ref(self)

    @property
    def root(self) -> Runtime:
        """That of the outermost sharded module around this one's, or itself."""
        return self._root() or self

    def enter(self, root: Runtime) -> None:
        """This unit is inside the outermost module of another by now."""
        self._root = weakref.ref(root)

    def borrow(self, lender: Runtime) -> None:
        """Parameters of `lender`'s unit are read in this unit's forward too."""
        if lender is not self and lender not in self.lenders:
            self.lenders.append(lender)
            lender.borrowers.append(self)

    @property
    def is_in_graphs(self) -> bool:
        """Whether graphs read the unit or, if it has no parameters, one beside it."""
        beside = [self] if self.unit.flats else self.tree.members
        return any(runtime.unit.key in TRACED for runtime in beside)

    def why_outside(self) -> str:
        """As known of the unit, or of one around or beside it."""
        known = [r.unit.why_eager for r in (self, self.root, *self.tree.members)]
        return next((next(reversed(why)) for why in known if why), "")

    def set_prefetch(self, direction: str, targets: list[Runtime]) -> None:
        """Replace the explicit list of what this unit's forward or backward starts to gather."""
        for target in self.prefetch[direction]:
            target.unit.prefetched_by[direction].remove(self.unit)
            target.unit.publish()
        self.prefetch[direction] = targets
        for target in targets:
            target.unit.prefetched_by[direction].append(self.unit)
            target.unit.publish()

    # -- forward

    @untraced
    def pre_forward(self, module: nn.Module, inputs: Any) -> Any:
        """Gather; watch the inputs, so that the reduction runs when their gradients are done."""
        if self.unit.is_outermost:
            log.debug("FSDP::root_pre_forward")
        self._log("pre_forward")
        self.unit.num_eager_forwards += 1
        self.unit.num_eager_recorded += torch.is_grad_enabled()
        if is_transformed():
            transformed.enter(self)
            return inputs
        if self._calls_itself(module):
            return inputs  # everything is there, and stays for the call around this one
        self.began = next_run()
        with span("pre_forward", self.unit.name):
            self.tree.recover()
            is_first = not self.has_run or module in self.has_run
            if is_first:
                self.has_run.clear()
            if not in_backward():
                self._drop_what_is_stale()
            for runtime in (*self.lenders, self):
                runtime.unshard()
                runtime.open()
            self.is_in_forward = True
            if in_backward():
                return self._pre_recompute(inputs)
            self._note_mode()
            self.tree.note_forward(self)
            prefetch.in_forward(self)
            if not torch.is_grad_enabled() or not is_first:
                return inputs
            return self._watch_inputs(inputs)

    def _drop_what_is_stale(self) -> None:
        self.tree.forget_double()
        for runtime in (*self.lenders, self):
            if not runtime.is_in_forward:
                runtime.drop_stale()

    def _calls_itself(self, module: nn.Module) -> bool:
        return self.under_way.count(module) > 1

    def _pre_recompute(self, inputs: Any) -> Any:
        """A forward inside backward, by activation checkpointing; when reentrant, the first that
        autograd records.
        """
        if self in self.tree.used or not torch.is_grad_enabled():
            return inputs
        self.tree.enter_backward(self)
        return self._watch_inputs(inputs)

    def _note_mode(self) -> None:
        """A unit that runs under `no_grad` inside a forward that is recorded, and that no backward
        comes to, may be a momentum encoder: what forward writes to it must be there when it is
        gathered.
        """
        is_recorded = torch.is_grad_enabled()
        if self.unit.is_outermost:
            self.tree.is_recorded = is_recorded
        self.is_apart = self.tree.is_recorded and not is_recorded and not self.was_reached

    @untraced
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Free according to the policy; watch the outputs, so that backward gathers before it needs
        the parameters.
        """
        self._log("post_forward")
        if is_transformed():
            self.is_in_forward = False
            transformed.leave(self)
            return output
        if self._calls_itself(module):
            return self._watch_outputs(output)
        self.is_in_forward = False
        for runtime in (*self.lenders, self):
            runtime.close()
        if in_backward():  # recomputation by activation checkpointing: backward frees
            return output
        with span("post_forward", self.unit.name):
            self.has_run.add(module)
            if len(self.has_run) == len(self.unit.modules):
                self._end_of_forward()
            if self.unit.is_outermost:
                for runtime in self.tree.in_order():
                    if runtime.has_run:  # a list unit of which this forward left out a member
                        runtime._end_of_forward()
                transformed.end_of_forward(self.tree)
                self.tree.end_forward()
            self.tree.free_kept_for_call()
            if self.num_gathered <= NUM_LOOKED:
                say_what_is_emptied(self.unit, self._own_memory(), output)
            return self._watch_outputs(output)

    def _watch_outputs(self, output: Any) -> Any:
        if torch.is_grad_enabled() and not in_backward():
            self.tree.used.setdefault(self)
            watched = [watch_output(self, tensor) for tensor in tensors_in(output)]
            if self.unit.is_outermost and not any(tensor.requires_grad for tensor in watched):
                self.watch_leaves()  # a loss left on a module, or in a function
        return output

    def end_failed_forward(self) -> None:
        """An exception left a forward of the unit; not the one by which activation checkpointing
        ends a recomputation early. Parameters are sharded then, as those that have the gradients.
        """
        if self.under_way and self._calls_itself(self.under_way[-1]):
            return  # the call around this one may catch it, and needs what is there
        self.is_in_forward = False
        if in_backward():
            return
        self.watched = ()
        for runtime in (*self.lenders, self):
            runtime.close()
            put_down(runtime)
        if self.unit.is_outermost:
            self.tree.end_forward()
        self.tree.free_kept_for_call()

    def _end_of_forward(self) -> None:
        self.has_run.clear()
        say_hooked_inputs(self.unit, self.watched)
        self.watched = ()
        self.close()
        self._reshard_after_forward()
        if torch.is_grad_enabled():
            self.indices.append(len(self.tree.order))
            self.tree.order.append(self)

    def _watch_inputs(self, inputs: Any) -> Any:
        inputs, given = watch_inputs(self, inputs)
        if given and self.num_gathered <= NUM_LOOKED and not in_backward():
            self.watched = given
        return inputs

    def _reshard_after_forward(self, since: tuple[Runtime, ...] = ()) -> None:
        """Since: units whose forward has ended with this one, which may lend to each other."""
        if any(borrower.is_in_forward for borrower in self.borrowers):
            return
        for lender in self.lenders:
            if not lender.is_in_forward and lender not in since:
                lender._reshard_after_forward((*since, self))
        self.unit.options.consume(WHO, "reshard_after_forward")
        stays = self.unit.reshard is False and torch.is_grad_enabled() and not is_for_graphs(self)
        stays = stays or self in self.tree.transformed
        if self._stays_for_call():
            self.keep()
            self.tree.kept_for_call.setdefault(self)
            return
        if stays or not self.is_unsharded:
            self.keep()
            self.is_left_over = self.is_unsharded
            return
        if self.unit.post_meshes and torch.is_grad_enabled():
            for flat in self.unit.flats:
                for param in flat.params:
                    if param.spec.reshard != "slice":
                        continue
                    self.slices[param] = KEEP_SLICE(param.gathered.detach(), *param.spec.args())
        self.reshard(keeps_storage=self.tree.has_double)

    def _stays_for_call(self) -> bool:
        """Whether the rest of the call without gradients that is under way may read what this
        unit's forward was not to free: a head that computes with the weight of an embedding.
        """
        if self.unit.reshard is not False or torch.is_grad_enabled() or self.tree.is_recorded:
            return False
        return self.is_unsharded and any(runtime.is_in_forward for runtime in self.tree.members)

    # -- backward

    @untraced
    def _pre_backward(self, grad: Tensor) -> Tensor:
        """A hook; Dynamo would trace it where `backward()` is called in a compiled function that
        broke its graph.
        """
        tree = self.tree
        tree.forget_failed()
        self.awaited.add(backward_number())
        if self not in tree.backward:
            self._log("pre_backward")
            with span("pre_backward", self.unit.name):
                tree.enter_backward(self)
                tree.note_double(self)
                self._unshard_for_backward()
                if self.unit.settings.backward_prefetch == "pre" or self.prefetch["backward"]:
                    prefetch.in_backward(self)
        else:
            self._unshard_for_backward()
        return grad

    def _unshard_for_backward(self) -> None:
        """Gather; what activation checkpointing computes once more inside the unit finds it as it
        was in forward.
        """
        for runtime in (*self.lenders, self):
            runtime.unit.options.consume(WHO, "set_unshard_in_backward")
            if runtime.unit.settings.unshard_in_backward:
                runtime.unshard()
            for param in runtime.unit.params if runtime.is_unsharded else ():
                param.show_handle(OPEN)
                param.begin_backward()

    def come_to_inputs(self, again: object | None) -> None:
        """The running backward has all gradients inside the module. Unless one around it comes back
        (a hook's `autograd.grad` through the module whose output has the hook, checkpoints inside
        of checkpoints), its parameters are done with.
        """
        self.awaited.discard(backward_number() if again is None else again)
        if not self.awaited:
            self.post_backward()

    def post_backward(self, *, is_end: bool = False) -> None:
        """Free the parameters and reduce what gradients there are; does nothing when called
        again.
        """
        may_come_again = self.borrowers or self in self.tree.transformed
        if may_come_again and not is_end:  # more gradients of these parameters may come
            return
        self._log("post_backward")
        self.slices.clear()
        self.close()
        self.unit.options.consume(WHO, "set_reshard_after_backward")
        if self.unit.settings.reshard_after_backward:
            self.reshard(keeps_storage=self.tree.has_double)
        else:
            self.keep()
            say_after_backward(self.unit)
        for param in self.unit.params:
            param.end_backward()
        if self.unit.settings.backward_prefetch == "post" and not is_end:
            prefetch.in_backward(self)
        with span("post_backward_reduce", self.unit.name), torch.no_grad():
            with_zeros = (
                self.unit.settings.reduce_unused and not self.gave_zeros and self.tree.delivers
            )
            reduction = reductions.of_backward(self.unit, with_zeros=with_zeros)
            self.gave_zeros = True
            if reduction is not None:
                self.tree.add_reduction(reduction)

    def say_whose_gradients(self) -> None:
        """Somebody looks through the parameters: full ones, if a forward has left them, while the
        sharded ones have the gradients of backwards before.
        """
        if not self.is_left_over or self.is_in_forward or in_backward():
            return
        say_after_forward(self.unit)

    def reduce_retained(self) -> None:
        """At the end of a backward that reduces: what earlier ones left, where this one brought
        nothing new.
        """
        for flat in self.unit.flats:
            with torch.no_grad():
                reduction = reductions.of_what_was_kept(flat)
            if reduction is not None:
                self.tree.add_reduction(reduction)

    def watch_leaves(self) -> None:
        """A backward through a backward need not come to the unit's outputs: its parameters'
        gradients say that it was here.
        """
        watch_leaves(self)

    def is_reached(self) -> bool:
        """Whether the running backward adds to gradients of full parameters."""
        trained = (
            p.unsharded
            for p in self.unit.params
            if p.unsharded is not None and p.unsharded.requires_grad
        )
        return any(map(accumulates, trained))

    def has_full_gradients(self) -> bool:
        """Whether a backward has left gradients on full parameters."""
        return any(
            p.unsharded is not None and p.unsharded.grad is not None for p in self.unit.params
        )

    # -- at rest

    def reshard_if_idle(self) -> None:
        """Reshard, unless the backward that is running still needs the full parameters, here or
        where another unit has read them.
        """
        is_idle = not any(user in self.tree.backward for user in (self, *self.borrowers))
        if is_idle and self.unit.settings.reshard_after_backward:
            self.reshard()

    def reset(self) -> None:
        """Back to rest after an exception; gradients that a failed backward has not reduced are
        nobody's.
        """
        for param in self.unit.params:
            if param.unsharded is not None:
                param.unsharded.grad = None
        self.is_in_forward = False
        self.unit.ledger.take()
        self.drop_pending()
        self.close()
        self.has_run.clear()
        self.slices.clear()
        self.indices.clear()
        self.awaited.clear()
        self.reshard()

    def _log(self, what: str) -> None:
        """A line as stock writes it."""
        log.debug("FSDP::%s%s", what, "" if self.unit.is_outermost else f" ({self.unit.name})")

    def open(self) -> None:
        """Let compiled parts of this forward read the full parameters, instead of gathering for
        themselves.
        """
        for param in self.unit.params:
            param.show_handle(OPEN)
            param.begin_forward()

    def close(self) -> None:
        """Show traces the parameters as they are at rest."""
        for param in self.unit.params:
            param.show_handle(param.handle)
            param.end_forward()
