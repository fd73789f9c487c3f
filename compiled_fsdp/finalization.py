"""What the end of a backward does, and who calls it: autograd, or the user (`FSDPModule.finalize_backward`).

At the end of a backward what is left is reduced: units that autograd brought to no end of their own, and what earlier backwards
have kept. Then everything is awaited and freed. With `set_manual_backward_finalization(True)` all this waits for the user's call,
and with `async_op=True` the awaiting for a call more.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from .torch_private import StockGradientReductionHandle, backward_number

if TYPE_CHECKING:
    from .runtime import Runtime
    from .tree import Tree

SETTER = "set_manual_backward_finalization"


class GradientReductionHandle(StockGradientReductionHandle):
    """What `FSDPModule.finalize_backward(async_op=True)` returns; until `wait`, gradients are on their way."""

    def __init__(self, tree: Tree | None = None) -> None:
        self._tree = tree

    def wait(self) -> None:
        """Await the gradients and end the backward; calling it again does nothing.

        Raises:
            RuntimeError: `reset_iter_state` has dropped what this stands for.
        """
        if self._tree is not None:
            self._tree.finalization.wait(self)
            self._tree = None


class Finalization:
    """The end of backwards of one tree.

    manual: the outermost units whose user finalizes.
    reached, used: units that backwards have come to, and that ran a forward, since the last end.
    is_held: a backward has ended, and the user has not finalized it.
    handle: what nobody has awaited.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = weakref.ref(tree)
        self.manual: weakref.WeakSet[Runtime] = weakref.WeakSet()
        self.reached: dict[Runtime, None] = {}
        self.used: dict[Runtime, None] = {}
        self.is_held = False
        self.handle: GradientReductionHandle | None = None

    @property
    def tree(self) -> Tree:
        """Whose backwards end here."""
        tree = self._tree()
        assert tree is not None
        return tree

    def set_manual(self, runtime: Runtime, *, enabled: bool) -> None:
        """See `FSDPModule.set_manual_backward_finalization`."""
        name = runtime.unit.name
        if not runtime.unit.is_outermost:
            raise RuntimeError(
                f"{SETTER}: called on {name!r}, which is inside another sharded module. Call it on the root module, the "
                "outermost sharded one"
            )
        if enabled == (runtime in self.manual):
            return
        if backward_number() != -1 or self.is_held or self.handle is not None:
            raise RuntimeError(
                f"{SETTER}({enabled}) on {name!r}: cannot change mode after backward starts, until it is finalized. Call "
                "finalize_backward() or reset_iter_state() first"
            )
        (self.manual.add if enabled else self.manual.discard)(runtime)

    def is_manual(self) -> bool:
        """Whether the user finalizes.

        Raises:
            RuntimeError: a unit that is inside another by now was told so, or one of several roots and not all.
        """
        if not self.manual:
            return False
        inside = [runtime.unit.name for runtime in self.manual if not runtime.unit.is_outermost]
        if inside:
            raise RuntimeError(
                f"{SETTER}: was called on {inside}, which are inside another sharded module by now. It must be called on the "
                "root module: call it after the last fully_shard"
            )
        others = [r.unit.name for r in self.tree.in_order() if r.unit.is_outermost and r not in self.manual]
        if others:
            raise RuntimeError(
                f"{SETTER}: was called on {[r.unit.name for r in self.manual]} and not on {others}, which share their "
                "communications (share_comm_ctx). Call it on all of them"
            )
        return True

    def end_of_backward(self) -> None:
        """A backward has come to its end: reduce what is left, await everything, and free; or leave that to the user."""
        tree = self.tree
        self.reached.update(tree.backward)
        self.used.update(tree.used)
        tree.backward.clear()
        tree.used.clear()
        tree.last_forward = None
        if not self.is_manual():
            self._reduce()
            self.end()
            return
        self.is_held = True
        for runtime in self._with_lenders():
            if runtime.unit.settings.sync == "retain":
                runtime.post_backward(is_end=True)

    def finalize(self, runtime: Runtime, *, is_async: bool) -> GradientReductionHandle | None:
        """See `FSDPModule.finalize_backward`."""
        self._check(runtime)
        if not is_async:
            self._reduce()
            self.end()
            return None
        self._reduce(awaits=False)
        self._reshard()
        self.handle = GradientReductionHandle(self.tree)
        return self.handle

    def _check(self, runtime: Runtime) -> None:
        name = runtime.unit.name
        self.check_awaited(f"finalize_backward of {name!r}")
        if not self.is_manual():
            raise RuntimeError(
                f"finalize_backward of {name!r}: autograd finalizes this backward. Call {SETTER}(True) before forward"
            )
        if backward_number() != -1 or self.tree.has_callback:
            raise RuntimeError(f"finalize_backward of {name!r}: a backward is running. Call it after backward completes")
        units = [r.unit for r in self.tree.in_order()]
        if any(unit.mesh_info.replicate_size > 1 for unit in units):  # what is under way decides what has been kept
            self.tree.await_or_leave()
        for unit in units:
            is_partial = any(where == "partial" for flat in unit.flats for where, _ in flat.retained)
            if is_partial or (unit.settings.sync == "scatter" and unit.mesh_info.replicate_size > 1):
                raise RuntimeError(
                    f"finalize_backward of {name!r}: gradients of {unit.name!r} are not all-reduced over the replicate axis "
                    "(set_requires_all_reduce(False)). Let autograd finalize, or call set_requires_all_reduce(True) before backward"
                )

    def check_awaited(self, what: str) -> None:
        """No gradients may be on their way.

        Raises:
            RuntimeError: `finalize_backward(async_op=True)` has started them, and nobody has awaited them.
        """
        if self.handle is not None:
            raise RuntimeError(
                f"{what}: the previous gradient reduction must be waited on before. Call wait() on what "
                "finalize_backward(async_op=True) returned"
            )

    def wait(self, handle: GradientReductionHandle) -> None:
        """See `GradientReductionHandle.wait`."""
        if handle is not self.handle:
            raise RuntimeError("GradientReductionHandle.wait: this handle was invalidated by reset_iter_state()")
        self.handle = None
        self.end()

    def reset(self) -> None:
        """Forget what is held."""
        self.reached.clear()
        self.used.clear()
        self.is_held = False
        self.handle = None

    def _with_lenders(self) -> list[Runtime]:
        return list(dict.fromkeys(r for reader in self.reached for r in (reader, *reader.lenders)))

    def _reduce(self, *, awaits: bool = True) -> None:
        """Start what is left; what was kept after the shard axis is known only once the others are done."""
        for runtime in self._with_lenders():
            runtime.post_backward(is_end=True)
        if awaits:
            self.tree.await_or_leave()
        for runtime in self.tree.in_order():
            runtime.reduce_retained()

    def _reshard(self) -> None:
        for runtime in (*self.reached, *self.used, *(lender for r in self.used for lender in r.lenders)):
            if runtime.unit.settings.reshard_after_backward:
                runtime.reshard()

    def end(self) -> None:
        """Await everything, and free."""
        self.tree.await_or_leave()
        self._reshard()
        for runtime in dict.fromkeys((*self.reached, *self.used)):
            runtime.unit.on_end_of_backward()
        is_last = self.tree.is_last_backward or bool(self.manual)
        self.reset()
        self.tree.end_iteration(is_last=is_last)
