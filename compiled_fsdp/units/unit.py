"""A unit: the parameters of one `fully_shard` call, their flat buffers, and their gradients.

The sharded parameters (DTensors, what the optimizer sees) are views into the flat buffers; a
gradient arrives as one flat buffer too, from a compiled graph or from the eager runtime, and its
views become the parameters' `.grad`.
"""

from __future__ import annotations

import itertools
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compiled_fsdp.options import Options, remember
from compiled_fsdp.torch_private.groups import backend_of
from compiled_fsdp.wire import checks
from compiled_fsdp.wire.ablation import is_ablated

from .assigned import adopt_assigned
from .cutting import classes_of, flat_buffer
from .extension import has_extension
from .handles import Handle
from .hooks import why_hooked
from .mesh import MeshInfo, resolve_reshard, twin_group
from .offload import CPU, Offload
from .param import Original, ShardedParam
from .reads import CAST
from .registered import UNITS, registered
from .settings import Settings
from .specs import after, make_spec, traced
from .tensor_parallel import key_of
from .traced_extension import handle_of, why_extensions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from compiled_fsdp.ir.spec import ParamSpec

    from .flat import FlatBuffer
    from .gathers import Gather
    from .matrices import OnMatrices
    from .states import OnStates
    from .tensor_parallel import Full

    OnUpdate = Callable[[FlatBuffer, Tensor, Sequence[ShardedParam], Tensor | None], object]


_unit_numbers = itertools.count()


class Unit:
    """The parameters of one `fully_shard` call; they are gathered, freed and reduced together.

    offload: where it computes, if it rests on the host.
    is_flat: whether its one parameter is FSDP1's flat parameter, of which the module's are views.
    """

    is_flat = False

    def __init__(
        self,
        modules: Sequence[nn.Module],
        originals: Sequence[Original],
        mesh_info: MeshInfo,
        mp_policy: MixedPrecisionPolicy,
        reshard: bool | int | None,
        offload: Offload | None = None,
    ) -> None:
        self.modules = tuple(modules)
        self.offload = offload
        self.mesh_info = mesh_info
        self.mp_policy = mp_policy
        self.settings = Settings(
            fake_all_gather=is_ablated("FSDP_USE_FAKE_ALL_GATHER"),
            fake_reduce=is_ablated("FSDP_USE_FAKE_REDUCE"),
        )
        self.ledger = checks.Ledger()
        self.is_auto_reshard = reshard is None
        self.reshard: bool | int = False if reshard is None else reshard
        self.number = next(_unit_numbers)
        self.kind = self.name = type(modules[0]).__name__
        self.options = Options()
        remember(self.number, self.options)
        checks.remember(self.number, self.ledger)
        # Why it ran outside a graph inside a compiled model, if Dynamo said so.
        self.why_eager: dict[str, None] = {}
        self.num_eager_forwards = 0
        self.num_eager_recorded = 0  # of these, by autograd
        self._call_nobody()
        # The stream of the user's all-reduce hook.
        self.hook_stream: Any = None
        # What the user has brought for it to call, see `spec.REGISTRY`.
        self.brought: list[Any] = []
        self.post_meshes: dict[MeshInfo, DeviceMesh] = {}
        self.reduce_groups: dict[MeshInfo, str] = {}
        # Units whose explicit prefetch lists name this one.
        self.prefetched_by: dict[str, list[Unit]] = {"forward": [], "backward": []}
        if not isinstance(self.reshard, bool):
            for info in dict.fromkeys(o.mesh_info for o in originals):
                size = resolve_reshard(self.reshard, info.shard_size)
                if size is not None and not isinstance(size, bool):
                    self.post_meshes[info] = info.post_forward_mesh(size)
        self._handles: dict[object, tuple[ParamSpec, Full | None, Handle]] = {}
        self.is_outermost = True
        # Units whose forwards read parameters of this one too, by their numbers.
        self.shared_with: list[str] = []
        # All ranks run it eagerly, since one cannot go on to compile it.
        self.runs_eagerly = False
        self.is_resident = self.was_read = self.has_gradients = False
        # Whether a parameter brings an all-gather of its own; settled before the first forward.
        self.has_extensions = False
        # Why no graph can have it, whatever the model is like.
        self.why_outside_graphs = self.why_hooked = ""
        # Whether a user has put something in the place of a parameter since the last call, or moved
        # or cast a module by itself.
        self.was_assigned = self.was_moved = False
        self.flats = [flat_buffer(self, group) for group in classes_of(originals)]
        self.adopt({module: "" for module in modules}, is_nested=False)
        UNITS.add(self)

    def _call_nobody(self) -> None:
        """No runtime, overlapped optimizer or whole step has asked to be called."""
        # Called before a compiled backward writes `.grad`: an eager forward may have left full
        # parameters registered.
        self.on_gradients: Callable[[], None] = _nothing
        # Called when a backward leaves gradients unreduced, so that its end looks after them.
        self.on_retained: Callable[[], None] = _nothing
        # Called with gradients that a backward has reduced, before anybody sees them: whether they
        # were used up.
        self.on_reduced: Callable[[FlatBuffer, Tensor, Sequence[ShardedParam]], bool] = _keep
        # Called with gradients that the graph of a whole step has reduced, by the step's name.
        self.on_update: dict[str, OnUpdate] = {}
        # Called with those that it updates whole, each at one rank.
        self.on_matrices: dict[str, OnMatrices] = {}
        # Called for what the step's optimizers remember, where that rests on the host.
        self.on_states: dict[str, OnStates] = {}
        # Called by such a graph before it updates anything: the ranks compare their checksums.
        self.on_verdict: dict[str, Callable[[], None]] = {}
        # Called when a backward keeps gradients of a buffer for a later one.
        self.on_kept: Callable[[FlatBuffer], None] = _nothing_of
        # Called when a module of another unit holds one of its parameters too.
        self.on_shared: Callable[[nn.Module], None] = _nothing_of
        # Called when other ranks have left a graph of it, which this rank runs eagerly.
        self.on_left_graph: Callable[[], None] = _nothing
        # Called when somebody looks through the parameters of its modules, while some are gathered.
        self.on_listed: Callable[[], None] = _nothing
        # Called when a forward comes to a gather.
        self.on_gather: Callable[[Gather], None] = _nothing_of
        # Called at the end of a backward that has reached the unit.
        self.on_end_of_backward: Callable[[], None] = _nothing

    @property
    def key(self) -> str:
        """Returns what the unit is called in a graph: its name for people, and its number, since
        names need not differ.
        """
        return f"{self.name}#{self.number}"

    @property
    def params(self) -> Iterable[ShardedParam]:
        """Every parameter, class by class."""
        return (param for flat in self.flats for param in flat.params)

    @property
    def kept_dtypes(self) -> tuple[torch.dtype, ...]:
        """Returns the dtypes in which gradients of trained parameters are kept, where somebody has
        set one (`grad_dtype`); else none.
        """
        if all(param.grad_dtype is None for param in self.params):
            return ()
        trains = [p for p in self.params if p.sharded.requires_grad]
        return tuple(dict.fromkeys(p.grad_dtype or p.sharded.dtype for p in trains))

    def own_modules(self) -> Iterable[nn.Module]:
        """The modules of the call and those that hold its parameters."""
        return dict.fromkeys(
            (*self.modules, *(module for param in self.params for module, _ in param.owners))
        )

    def why_not_in_step(self, *, changes_grads: bool) -> str:
        """Why no graph of a whole step can have it; "" if one can. changes_grads: whether the graph
        scales gradients.
        """
        if self.has_extensions:
            return "all-gather extensions of tensor subclasses (fsdp_pre_all_gather)"
        return ""

    def in_use(self) -> set[nn.Module]:
        """The modules from which a forward can come to the unit's parameters; not those that a
        user has taken out of the model (`model.b = model.a`).
        """
        borrowers = [
            module.__dict__["_fsdp_owner"].unit
            for param in self.params
            for module, _ in param.owners
            if "_fsdp_owner" in module.__dict__
        ]
        roots = {root for unit in (self, *borrowers) for root in unit.modules}
        return {module for root in roots for module in root.modules()}

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer, in pinned memory where the unit rests so."""
        if self.offload is not None and device.type == CPU.type:
            return self.offload.zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    @property
    def rests_on(self) -> str:
        """The type of device where its parameters are at rest."""
        return (CPU if self.offload else self.mesh_info.device).type

    def adopt(self, paths: dict[nn.Module, str], *, is_nested: bool) -> None:
        """Take names from the outermost sharded module, whose descendants are at `paths`.

        A unit inside another drops its parameters after forward unless told otherwise; the
        outermost keeps them.
        """
        own = [path for module in self.modules if (path := paths.get(module))]
        self.name = ", ".join(own) or self.kind
        for param in self.params:
            above = paths.get(param.root, "")
            param.fqn = f"{above}.{param.path}" if above else param.path
        self.is_outermost = not is_nested
        if self.is_auto_reshard:
            self.reshard = is_nested
        self.publish()

    def add_owner(self, param: ShardedParam, module: nn.Module, name: str) -> None:
        """Let a module hold one of the unit's parameters too: `name` is tied to it from now on."""
        param.owners.append((module, name))
        param.is_tied_later = True
        self.publish()
        param.keep_gradients_wide()
        table = registered(module)
        table.note_owner(name, self, param)
        assert param.registered_as is not None
        table.show(name, param.registered_as)
        param.show_handle(param.shown_as or param.handle)

    def tie(
        self, module: nn.Module, name: str, old: ShardedParam, unit: Unit, new: ShardedParam
    ) -> None:
        """A user has put a sharded parameter of `unit` in the place of this unit's `old`:
        `m.head.weight = m.embed.weight`.
        """
        old.owners.remove((module, name))
        unit.add_owner(new, module, name)
        unit.on_shared(module)

    def share_with(self, borrower: Unit) -> None:
        """Parameters of this unit are gathered while the borrower's forward runs, too."""
        number = f"#{borrower.number}"
        if borrower is not self and number not in self.shared_with:
            self.shared_with.append(number)
            self.publish()

    def take_over(self) -> None:
        """Follow what the user did to the sharded parameters: replaced, moved, cast."""
        adopt_assigned(self)
        self.follow_grad_dtype()
        for flat in self.flats:
            flat.refresh(is_moved=True)
        self.was_moved = False
        self.publish()

    def follow_grad_dtype(self) -> None:
        """Take over a `grad_dtype` that a user has set on the sharded parameters, before torch
        makes others of them and forgets it.
        """
        for flat in self.flats:
            flat.follow_grad_dtype()

    def set_reshard(
        self, value: bool | int, post_meshes: Mapping[MeshInfo, DeviceMesh] | None = None
    ) -> None:
        """Choose whether the parameters are dropped after forward; an int comes with the meshes
        that it had before.
        """
        self.reshard, self.is_auto_reshard = value, False
        self.post_meshes = dict(post_meshes or {})
        self.publish()

    def note_schedule(self) -> None:
        """A pipeline schedule has ended a step, as it will end those to come: graphs made from now
        on leave reducing to it.

        A backward outside any schedule, which ends with gradients to be reduced, reduces what its
        graph has kept.
        """
        if not self.settings.is_scheduled:
            self.settings.is_scheduled = self.settings.is_accumulating = True
            self.publish()

    def make_spec(self, flat: FlatBuffer, param: ShardedParam) -> ParamSpec:
        """The op arguments of one parameter under the current settings."""
        return make_spec(self, flat, param)

    @property
    def is_reduced_by_user(self) -> bool:
        """Whether a communication of the user's reduces its gradients over the shard axis."""
        return bool(self.settings.reduce_scatter)

    @property
    def mode(self) -> object:
        """Returns what else the op arguments follow from."""
        return None

    def publish(self) -> None:
        """Give the owning modules the constants that a traced read turns into an op; compiled code
        guards on them.

        Handles are kept: coming back to settings that were used before finds the code that was
        compiled for them.
        """
        lists = after(self, "forward"), after(self, "backward")
        groups = tuple(self.reduce_groups.values())
        shared_with = tuple(self.shared_with)
        state = (
            astuple(self.settings),
            self.reshard,
            self.name,
            groups,
            lists,
            self.is_resident,
            self.mode,
            shared_with,
            self.kept_dtypes,
            tuple(backend_of(flat.mesh_info.shard_group) for flat in self.flats),
        )
        for flat in self.flats:
            for param in flat.params:
                is_frozen = flat.data.requires_grad and not param.sharded.requires_grad
                param.extends = has_extension(param.local, param.fqn)
                if param.extends:
                    self._check_extension(flat, param)
                    param.spec = self.make_spec(flat, param)
                    param.full = param.full and param.full.reduced_as(param.spec)
                    param.handle = handle_of(self, flat, param, is_frozen=is_frozen)
                    param.show_handle(param.handle)
                    continue
                key = (
                    state,
                    id(flat.data),
                    param.layout.offset,
                    param.fqn,
                    param.sharded.dtype,
                    param.is_tied_later,
                    is_frozen,
                )
                if key not in self._handles:
                    spec = self.make_spec(flat, param)
                    full = param.full and param.full.reduced_as(spec)
                    self._handles[key] = (
                        spec,
                        full,
                        Handle(
                            flat.data,
                            traced(self, spec).key(),
                            is_frozen,
                            key_of(full),
                            self.is_resident,
                            units=(f"#{self.number}", *self.shared_with),
                        ),
                    )
                param.spec, param.full, param.handle = self._handles[key]
                if param.spec.dtype != param.sharded.dtype:
                    CAST[param.handle.key] = param.handle.units
                param.show_handle(param.handle)
        self.has_extensions = any(param.extends for param in self.params)
        self.why_hooked = why_hooked(self.params)
        why = why_extensions(self) or self.why_hooked
        self.why_outside_graphs = f"{why} of unit {self.name}" if why else ""

    def _check_extension(self, flat: FlatBuffer, param: ShardedParam) -> None:
        if flat.mesh_info in self.post_meshes:
            raise NotImplementedError(
                f"fully_shard: parameter {param.fqn} is a {type(param.local).__name__} with an "
                "all-gather extension, which is not supported with an int reshard_after_forward. "
                "Pass True or False"
            )

    def drop_gradients(self) -> None:
        """Forget gradients that are not reduced yet."""
        for flat in self.flats:
            flat.retained.clear()
            flat.owner.marked.clear()
            for param in flat.params:
                if param.unsharded is not None:
                    param.unsharded.grad = None

    def separate_reduce_groups(self, enable: bool) -> None:
        """Reduce over groups of their own, or over those that gather; collective."""
        self.reduce_groups = (
            {flat.mesh_info: twin_group(flat.mesh_info.shard_group) for flat in self.flats}
            if enable
            else {}
        )
        self.publish()

    def forget_handles(self) -> None:
        """They hold a flat buffer that is replaced."""
        self._handles.clear()

    def follow_requires_grad(self) -> None:
        """Take over what the user froze or unfroze since the last call."""
        has_changed = False
        for flat in self.flats:
            wanted = [p.sharded.requires_grad for p in flat.params]
            if any(wanted) != flat.data.requires_grad:
                flat.set_requires_grad(any(wanted))
                has_changed = True
            elif flat.data.requires_grad:
                frozen = [p.handle.is_frozen for p in flat.params]
                has_changed = has_changed or frozen != [not w for w in wanted]
        if has_changed:
            self.publish()

    def follow_hooks(self) -> None:
        """Take over which hooks the user has registered on full parameters, or removed."""
        if why_hooked(self.params) != self.why_hooked:
            self.publish()


originals: dict[type, type] = {}  # generated class -> what it was made of


def original_class(module: nn.Module) -> type:
    """The class that the module had before it was sharded."""
    return originals.get(type(module), type(module))


def _nothing() -> None:
    """Does what is to be done where there is no eager runtime: nothing."""


def _keep(flat: FlatBuffer, flat_grad: Tensor, params: Sequence[ShardedParam]) -> bool:
    """Returns what to do with gradients while no optimizer steps inside backward."""
    return False


def _nothing_of(gather_or_buffer: object) -> None:
    """Does with a gather, or a buffer, what is to be done while nobody overlaps the optimizer's
    step: nothing.
    """
