"""What the end of a backward does, and who calls it: autograd, or the user
(`FSDPModule.finalize_backward`).

At the end of a backward what is left is reduced: units that autograd brought to no end of their
own, and what earlier backwards have kept. Then everything is awaited and freed. With
`set_manual_backward_finalization(True)` all this waits for the user's call, and with
`async_op=True` the awaiting for a call more.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compiled_fsdp.torch_private.autograd import backward_number
from compiled_fsdp.torch_private.modules import StockGradientReductionHandle

from .verdict import compare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .runtime import Runtime
    from .tree import Tree

SETTER = "set_manual_backward_finalization"


class GradientReductionHandle(StockGradientReductionHandle):  # type: ignore[misc]
    """What `FSDPModule.finalize_backward(async_op=True)` returns; until `wait`, gradients are on
    their way.
    """

    def __init__(self, tree: Tree | None = None, root: Runtime | None = None) -> None:
        self._tree = tree
        self.root = root

    def wait(self) -> None:
        """Await the gradients and end the backward; calling it again does nothing.

        Raises:
            RuntimeError: `reset_iter_state` has dropped what this stands for.
        """
        if self._tree is not None and self.root is not None:
            self._tree.finalization.wait(self, self.root)
            self._tree = self.root = None


class Finalization:
    """The end of backwards of one tree, whose roots (outermost modules) may share their
    communications.

    manual: the roots whose user finalizes.
    held: of these, the ones with a backward that has ended and that the user has not finalized.
    reached, used: units that backwards have come to, and that ran a forward, since the last end.
    delivered: a backward since then has added to gradients of parameters: it was not asked for
        others only.
    keeping: of `manual`, those whose last backward kept its gradients, to be reduced by the user's
        call: a pipeline schedule's.
    handle: what nobody has awaited.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = weakref.ref(tree)
        self.manual: weakref.WeakSet[Runtime] = weakref.WeakSet()
        self.held: weakref.WeakSet[Runtime] = weakref.WeakSet()
        self.reached: dict[Runtime, None] = {}
        self.used: dict[Runtime, None] = {}
        self.delivered = False
        self.keeping: weakref.WeakSet[Runtime] = weakref.WeakSet()
        self.handle: GradientReductionHandle | None = None

    @property
    def tree(self) -> Tree:
        """The units whose backwards end here."""
        tree = self._tree()
        assert tree is not None
        return tree

    def set_manual(self, root: Runtime, *, enabled: bool) -> None:
        """See `FSDPModule.set_manual_backward_finalization`."""
        if enabled == (root in self.manual):
            return
        if backward_number() != -1 or root in self.held or self._is_under_way(root):
            raise RuntimeError(
                f"{SETTER}({enabled}) on {root.unit.name!r}: cannot change mode after backward "
                "starts, until it is finalized. Call finalize_backward() or reset_iter_state() "
                "first"
            )
        (self.manual.add if enabled else self.manual.discard)(root)

    def _is_under_way(self, root: Runtime) -> bool:
        return self.handle is not None and self.handle.root is root

    def before_forward(self) -> None:
        """Refuse a forward that comes too early.

        Raises:
            RuntimeError: gradients on their way, or a setting on a module that is inside another by
                now.
        """
        self._check_awaited("forward")
        inside = [root.unit.name for root in self.manual if root.root is not root]
        if inside:
            raise RuntimeError(
                f"{SETTER}: was called on {inside}, which are inside another sharded module by "
                "now. It must be called on the root module: call it after the last fully_shard"
            )

    def end_of_backward(self) -> None:
        """A backward has come to its end: reduce what is left, await everything, and free; or leave
        that to the user.
        """
        tree = self.tree
        for runtime in [r for r in tree.in_order() if r not in tree.backward]:
            if runtime.has_full_gradients():  # by another way than its outputs, as by an attribute
                tree.backward.setdefault(runtime)
                runtime.was_reached, runtime.gave_zeros, tree.delivers = True, False, True
        self.reached.update(tree.backward)
        self.used.update(tree.used)
        self.delivered |= tree.delivers
        for runtime in tree.backward:
            runtime.awaited.clear()
        tree.backward.clear()
        tree.used.clear()
        tree.transformed_before.update(tree.transformed)
        tree.transformed.clear()
        tree.last_forward = None
        for runtime in self._with_lenders(list(self.reached)):
            if runtime.root in self.manual and runtime.unit.settings.sync == "retain":
                runtime.post_backward(is_end=True)
        self.held.update(r.root for r in self.reached if r.root in self.manual)
        self.keeping = weakref.WeakSet(
            root for root in self.manual if root.unit.settings.sync == "retain"
        )
        units = {r: None for r in tree.in_order() if r.root not in self.manual}
        if units or not self.manual:
            self._reduce(units)
            self._end(units, is_last=tree.is_last_backward)

    def finalize(self, root: Runtime, *, is_async: bool) -> GradientReductionHandle | None:
        """See `FSDPModule.finalize_backward`."""
        units = self._below(root)
        self.tree.forget_failed()
        self._check(root, units)
        with self._dropped_if_failed():
            for runtime in units if root in self.keeping else ():
                runtime.unit.note_schedule()
            self._reduce(units, awaits=not is_async)
            if not is_async:
                self._end(units)
                return None
            self._reshard(units)
        self.handle = GradientReductionHandle(self.tree, root)
        return self.handle

    @contextmanager
    def _dropped_if_failed(self) -> Iterator[None]:
        """What is left of a backward whose end raises is nobody's."""
        try:
            yield
        except BaseException:
            self.tree.drop_failed()
            raise

    def _check(self, root: Runtime, units: dict[Runtime, None]) -> None:
        what = f"finalize_backward of {root.unit.name!r}"
        self._check_awaited(what)
        if root not in self.manual:
            raise RuntimeError(
                f"{what}: autograd finalizes this backward. Call {SETTER}(True) before forward"
            )
        if backward_number() != -1 or self.tree.has_callback:
            raise RuntimeError(f"{what}: a backward is running. Call it after backward completes")
        # What is under way decides what has been kept.
        if any(r.unit.mesh_info.replicate_size > 1 for r in units):
            self.tree.await_or_leave()
        for unit in (r.unit for r in units):
            is_partial = any(
                where == "partial" for flat in unit.flats for where, _ in flat.retained
            )
            if is_partial or (
                unit.settings.sync == "scatter" and unit.mesh_info.replicate_size > 1
            ):
                raise RuntimeError(
                    f"{what}: gradients of {unit.name!r} are not all-reduced over the replicate "
                    "axis (set_requires_all_reduce(False)). Let autograd finalize, or call "
                    "set_requires_all_reduce(True) before backward"
                )

    def _check_awaited(self, what: str) -> None:
        if self.handle is not None:
            raise RuntimeError(
                f"{what}: the previous gradient reduction must be waited on before. Call wait() on "
                "what finalize_backward(async_op=True) returned"
            )

    def wait(self, handle: GradientReductionHandle, root: Runtime) -> None:
        """See `GradientReductionHandle.wait`."""
        if handle is not self.handle:
            raise RuntimeError(
                "GradientReductionHandle.wait: this handle was invalidated by reset_iter_state()"
            )
        self.handle = None
        with self._dropped_if_failed():
            self._end(self._below(root))

    def reset(self) -> None:
        """Forget what is held."""
        self.held.clear()
        self.reached.clear()
        self.used.clear()
        self.handle = None
        self.delivered = False
        self.keeping.clear()

    def _below(self, root: Runtime) -> dict[Runtime, None]:
        return {r: None for r in self.tree.in_order() if r.root is root}

    def _with_lenders(self, readers: list[Runtime]) -> list[Runtime]:
        return list(dict.fromkeys(r for reader in readers for r in (reader, *reader.lenders)))

    def _reduce(self, units: dict[Runtime, None], *, awaits: bool = True) -> None:
        """Start what is left; what was kept after the shard axis is known only once the others are
        done.
        """
        for runtime in self._with_lenders(self.tree.last([r for r in self.reached if r in units])):
            runtime.post_backward(is_end=True)
        if awaits:
            self.tree.await_or_leave()
        for runtime in units if self.delivered else ():
            runtime.reduce_retained()

    def _reshard(self, units: dict[Runtime, None]) -> None:
        used = self._with_lenders([r for r in self.used if r in units])
        for runtime in (*(r for r in self.reached if r in units), *used):
            if runtime.unit.settings.reshard_after_backward:
                runtime.reshard(keeps_storage=self.tree.has_double)

    def _end(self, units: dict[Runtime, None], *, is_last: bool = True) -> None:
        """Await everything, and free."""
        self.tree.await_or_leave()
        self._reshard(units)
        for runtime in [r for r in dict.fromkeys((*self.reached, *self.used)) if r in units]:
            self.reached.pop(runtime, None)
            self.used.pop(runtime, None)
            runtime.unit.on_end_of_backward()
        self.held.difference_update({r.root for r in units})
        self.delivered = self.delivered and bool(self.held)
        self.tree.end_iteration(is_last=is_last)
        compare([runtime.unit for runtime in units], self.tree.clock.count + 1)
