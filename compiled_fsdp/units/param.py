"""A parameter before it is cut, and after: where it is held, its sharded form, and its full one in
eager mode.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compiled_fsdp.errors import check_dense
from compiled_fsdp.ir.spec import ParamSpec
from compiled_fsdp.torch_private.autograd import grad_dtype_set
from compiled_fsdp.torch_private.dtensors import local_tensor

from .extension import has_extension
from .layout import ShardLayout
from .mesh import MeshInfo
from .registered import registered
from .tensor_parallel import Full

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

    from .handles import Handle
    from .traced_extension import TracedExtension
    from .typed import Typed


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def keep_marks(of: Tensor, to: Tensor) -> None:
    """Give a parameter what a user has noted on the one in whose place it stands
    (`weight._no_weight_decay = True`): numbers and words, since a tensor would be of another shape,
    and an object may know the parameter. What else a tensor subclass has is its own.
    """
    if type(local_tensor(of)) not in (Tensor, nn.Parameter):
        return
    for name, value in vars(of).items():
        if not name.startswith("_fsdp_") and name not in vars(to) and _is_plain(value):
            setattr(to, name, value)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(each) for entry in value.items() for each in entry)
    return isinstance(value, PLAIN)


@dataclass(frozen=True, slots=True)
class Original:
    """A parameter before it is cut: everything that holds it, its name below one of the call's
    modules, how it is cut.

    place: mesh and placements of the DTensor that it becomes.
    compute: the dtype that the policy gives to this parameter alone; None: as to all.
    grad_dtype: that of the parameter, where somebody has set it; else None.
    typed: what its types say (`typed.py`); None if it has none.
    """

    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    root: nn.Module
    path: str
    dim: int
    mesh_info: MeshInfo
    place: tuple[DeviceMesh, tuple[Placement, ...]]
    compute: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    typed: Typed | None = None

    @property
    def whole(self) -> Tensor:
        """The parameter; a DTensor, also if it is a plain tensor whose types describe one."""
        return self.typed.placed(self.parameter) if self.typed else self.parameter

    @property
    def local(self) -> Tensor:
        """Returns what is cut: the parameter, or the local tensor of one that is a DTensor."""
        return local_tensor(self.parameter)

    @property
    def is_apart(self) -> bool:
        """Whether its class brings an all-gather of its own; methods that only this object has are
        lost when it is cut.
        """
        return has_extension(type(self.local), self.path)


@dataclass(eq=False)
class ShardedParam:
    """One parameter: where it is registered, and its sharded form.

    owners: every (module, name) that holds it; several when tied.
    root, path: a module that the call was given, and the name below it.
    fqn: name relative to the outermost `fully_shard` module known so far.
    sharded: the DTensor parameter; the same object for ever, unless the user replaces it.
    full: how the gathered local tensor becomes the DTensor that computation reads; None for a plain
        parameter.
    compute: the dtype that the policy gives to this parameter alone; None: as to all.
    grad_dtype: in which its reduced gradient is kept; None: in its own.
    unsharded: the eager runtime's full parameter; None before the first eager use.
    is_borrowed: it lies in the shard's own memory, which is not to be freed.
    is_tied_later: a module holds it too that did not when it was sharded. Stock gathers it for that
        module once more, and adds the gradients when they are reduced.
    spec: the arguments of its ops under the current settings.
    handle: what a traced read outside an eager forward needs.
    extends: its local tensor brings an all-gather of its own; `extension` is how a graph makes it,
        `extensions` how graphs did under other settings too, and `why_apart` why none can.
    held: what `sharded` was made of when that was last looked at.
    registered_as, shown_as: parameter and handle that the owning modules were last given; they
        outlast the last of these (weights that are exchanged).
    """

    owners: list[tuple[nn.Module, str]]
    root: nn.Module
    path: str
    sharded: nn.Parameter
    layout: ShardLayout
    full: Full | None = None
    compute: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    unsharded: nn.Parameter | None = None
    is_borrowed: bool = False
    is_tied_later: bool = False
    fqn: str = ""
    spec: ParamSpec = field(init=False)
    handle: Handle = field(init=False)
    extends: bool = False
    extension: TracedExtension | None = None
    extensions: list[TracedExtension] = field(default_factory=list)
    why_apart: str = ""
    held: tuple[int, weakref.ref[Tensor], int] | None = None
    registered_as: nn.Parameter | None = None
    shown_as: Handle | None = None

    def was_data_assigned(self) -> bool:
        """Whether somebody has written `p.data = x` since this was last asked: DTensor takes
        nothing of `x` but what it says of itself, so that the values are those of before.
        """
        if not isinstance(self.sharded, DTensor):
            return False
        number, local, storage = (
            id(self.sharded),
            self.local,
            self.sharded.untyped_storage()._cdata,
        )
        before, self.held = self.held, (number, weakref.ref(local), storage)
        if before is None or before[0] != number:
            return False
        is_same = before[1]() is local  # by its id, another that `model.to` made could pass for it
        return is_same and before[2] != storage

    @property
    def local(self) -> Tensor:
        """This rank's shard."""
        return local_tensor(self.sharded)

    @property
    def is_on_all_ranks(self) -> bool:
        """Whether each rank has rows of it."""
        return self.layout.local_rows(self.spec.group_size - 1) > 0 and self.layout.numel > 0

    @property
    def held_as(self) -> list[nn.Parameter]:
        """What optimizers hold of it."""
        return [self.sharded]

    @property
    def gathered(self) -> Tensor:
        """The eager runtime's full parameter; the local tensor of it, if it is a DTensor."""
        assert self.unsharded is not None
        return local_tensor(self.unsharded)

    @property
    def is_shard_whole(self) -> bool:
        """Whether computation is to read the shard itself: nothing is gathered, cast or copied."""
        return False

    def set_gathered(self, local: Tensor) -> None:
        """Begin to compute with a full parameter around this tensor."""
        self.is_borrowed = self.is_shard_whole
        full = self.full.wrap(local) if self.full else local
        self.unsharded = nn.Parameter(full, requires_grad=self.sharded.requires_grad)
        self.keep_gradients_wide()
        keep_marks(self.sharded, self.unsharded)

    def keep_gradients_wide(self) -> None:
        """Let the full parameter take gradients of a wider dtype than its own, and add them in it,
        where they are to be reduced so.
        """
        if self.unsharded is None:
            return
        wide = self.full.sum_dtype if self.full else None
        if self.spec.adds_wide:
            wide = self.spec.sum_dtype
        if wide is not None:
            grad, self.unsharded.grad = self.unsharded.grad, None
            self.unsharded.grad_dtype = wide
            self.unsharded.grad = None if grad is None else grad.to(wide)
        elif self.spec.keeps_wide:
            self.unsharded.grad_dtype = None

    def hold(self, sharded: nn.Parameter) -> None:
        """Begin to be held in another sharded form."""
        self.sharded = sharded
        if not grad_dtype_set(sharded)[0]:
            self.keep_grad_dtype()

    def keep_grad_dtype(self) -> None:
        """Give the sharded form, which torch may have made anew, the `grad_dtype` that was asked
        for, and cast a gradient that is there already to it.
        """
        if self.grad_dtype in (None, self.sharded.grad_dtype):
            return
        grad, self.sharded.grad = self.sharded.grad, None
        self.sharded.grad_dtype = self.grad_dtype
        self.sharded.grad = None if grad is None else grad.to(self.grad_dtype)

    def local_grad(self, grad: Tensor) -> Tensor:
        """Returns what of a full gradient is to be reduced.

        Raises:
            NotImplementedError: it is sparse.
        """
        check_dense(grad, self.fqn)
        return self.full.local_grad(grad) if self.full else grad

    def begin_forward(self) -> None:
        """An eager forward of the unit begins; `unsharded` is registered."""
        if self.full and self.full.typed and self.unsharded is not None:
            self.full.typed.note_on(self.unsharded)

    def end_forward(self) -> None:
        """It has ended; `unsharded` may still be there."""

    def begin_backward(self) -> None:
        """A backward comes to the unit; `unsharded` is registered."""

    def end_backward(self) -> None:
        """The unit's backward has ended; `unsharded` may still be there."""

    @property
    def names(self) -> list[str]:
        """What users call what it is made of."""
        return [self.fqn]

    @property
    def num_dims(self) -> int:
        """The dims of what it is made of, at most."""
        return len(self.layout.shape)

    def is_held_in(self, modules: set[nn.Module]) -> bool:
        """Whether one of these modules holds it."""
        return any(module in modules for module, _ in self.owners)

    def is_open(self) -> bool:
        """Whether an eager forward, whose runtime reduces gradients,
        has the full one registered.
        """
        return any(not module.__dict__["_fsdp_handles"][name].key for module, name in self.owners)

    def show_handle(self, handle: Handle) -> None:
        """Make `handle` what a traced read finds; compiled code guards on it."""
        self.shown_as = handle
        for module, name in self.owners:
            module.__dict__.setdefault("_fsdp_handles", {})[name] = handle

    def show_full(self, full: Tensor | None) -> None:
        """Give graphs the full parameter as an input, of sizes that are known with `dynamic=True`
        too; None takes it away.
        """
        if full is not None:
            torch._dynamo.mark_static(full)
        for module, name in self.owners:
            module.__dict__.setdefault("_fsdp_full", {})[name] = full

    def assigned(self) -> Any:
        """Returns what the owning modules hold that neither unit nor runtime has put there; None if
        there is nothing like it.
        """
        for module, name in self.owners:
            held = module._parameters.get(name)
            if held is not None and held is not self.sharded and held is not self.unsharded:
                return held
        return None

    def put_back(self) -> None:
        """Let the owning modules hold what is registered, whatever users have put in its place."""
        for module, name in self.owners:
            table = registered(module)
            table[name] = table.shown[name]

    def register(self, param: nn.Parameter) -> None:
        """Make `param` what the owning modules hold, where users have not put something else."""
        self.registered_as = param
        param._fsdp_is_units = True  # type: ignore[attr-defined]
        for module, name in self.owners:
            registered(module).show(name, param)


@contextmanager
def kept_grads(params: Iterable[ShardedParam]) -> Iterator[None]:
    """Put aside gradients with a `grad_dtype` while parameters are moved or cast: torch's
    `Module.to` would round them to the parameters' new dtype. They go to the new device.
    """
    asking = [param for param in params if param.grad_dtype is not None]
    aside = [(param, grad) for param in asking if (grad := param.sharded.grad) is not None]
    for param, _ in aside:
        param.sharded.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for param, grad in aside:
                param.keep_grad_dtype()  # torch has forgotten it; `take_over` if all went well
                param.sharded.grad = grad.to(param.sharded.device)


def trained(params: Iterable[ShardedParam]) -> list[ShardedParam]:
    """Those that autograd adds a gradient to: not what was frozen after forward."""
    return [param for param in params if param.sharded.requires_grad]
