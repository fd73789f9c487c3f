"""What programs read and change of torch's private `FSDPState` and `FSDPParamGroup`, in torch's
words: of a unit of ours.

    group = module._get_fsdp_state()._fsdp_param_group
    group.mesh_info.shard_mesh_size, [p.sharded_param for p in group.fsdp_params]
    group.post_forward_mesh_info = None     # as reshard_after_forward=False

Names that torch has and ours lacks raise an AttributeError that says which there are, read or
written: a program that asks by `hasattr` goes another way, and a write is not lost.

Private torch used here (tried on 2.11, 2.13 and 2.15): the attributes of `FSDPState`, by name, and
`FSDPMeshInfo`, `HSDPMeshInfo` and `DDPMeshInfo` of `_fsdp_common`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import Shard

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from compiled_fsdp.units.mesh import MeshInfo
    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.units.unit import Unit

    from .state import State


SET_BY_INIT = (  # of `FSDPState`, beside those that an empty one has
    "_auto_reshard_after_forward",
    "_device_handle",
    "_post_forward_hook_handle",
    "_pre_forward_hook_handle",
)


class Lacking:
    """A private name of torch's that ours has not got."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, state: Any, of: type | None = None) -> NoReturn:
        raise _refusal(self.name, state, AsStock)

    def __set__(self, state: Any, value: object) -> NoReturn:
        raise _refusal(self.name, state, AsStock)


def _refusal(name: str, state: State | None, ours: type) -> AttributeError:
    """What to say to who reads or sets a name that is not there, or sets one that is only read."""
    there = {
        n: found
        for n, found in vars(ours).items()
        if not n.startswith("__") and not n.startswith("_of")
    }
    shown = {n for n, found in there.items() if not isinstance(found, Lacking)}
    of = "FSDPState" if ours is AsStock else "FSDPParamGroup"
    whose = "" if state is None else f" of module {state.unit.name!r}"
    why = "can only be read" if name in shown else "is not there"
    return AttributeError(
        f"{name}, a private attribute of torch's {of}, was asked for or set{whose}, which "
        f"compiled_fsdp sharded: it {why}. There are {', '.join(sorted(shown))}. Use these, or the "
        "public methods of FSDPModule"
    )


class AsStock:
    """What a `State` has by torch's names."""

    unit: Unit
    _of_root = False
    _of_groups: list[ParamGroup] | None = None

    def _lazy_init(self: Any) -> None:
        """From here on the outermost module keeps its parameters, if it was not told otherwise:
        which it is, ours knows before.
        """
        for state in self.below():
            state._of_root = True

    @property
    def _is_root(self: Any) -> bool | None:
        return self.unit.is_outermost if _is_settled(self) else None

    @property
    def _mp_policy(self) -> Any:
        return self.unit.mp_policy

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return self.unit.modules

    @property
    def _device(self) -> Any:
        return self.unit.mesh_info.device

    @property
    def _state_ctx(self: Any) -> Any:
        """What torch's pipeline schedules, and copies of them in training repositories, read of
        what `fully_shard.state` returns: the states whose groups they tell that backward is over.
        """
        return self.stock._state_ctx

    def _root_post_backward_final_callback(self: Any) -> None:
        self.stock._root_post_backward_final_callback()

    @property
    def _fsdp_param_groups(self: Any) -> list[ParamGroup]:
        """One for each mesh, in the order of their parameters; the same objects each time."""
        if self._of_groups is None:
            infos = dict.fromkeys(flat.mesh_info for flat in self.unit.flats)
            self._of_groups = [ParamGroup(self, info) for info in infos]
        return list(self._of_groups)

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        groups = self._fsdp_param_groups
        if len(groups) > 1:
            raise AssertionError(
                f"_fsdp_param_group: the parameters of {self.unit.name!r} are sharded over "
                f"{len(groups)} meshes. Use _fsdp_param_groups, which has one group for each"
            )
        return groups[0] if groups else None


def _is_settled(state: State) -> bool:
    return state._of_root or state.root.is_checked


class ParamGroup:
    """The parameters of a unit that one mesh cuts."""

    __slots__ = ("__weakref__", "_of")
    _of: tuple[State, MeshInfo, Any, list[tuple[Any, bool | int, dict[MeshInfo, DeviceMesh]]]]

    def __init__(self, state: State, info: MeshInfo) -> None:
        object.__setattr__(self, "_of", (state, info, stock_mesh_info(info), []))

    def __getattr__(self, name: str) -> NoReturn:
        raise _refusal(name, self._of[0], ParamGroup)

    def __setattr__(self, name: str, value: object) -> None:
        found = vars(ParamGroup).get(name)
        if not isinstance(found, property) or found.fset is None:
            raise _refusal(name, self._of[0], ParamGroup)
        found.fset(self, value)

    @property
    def fsdp_params(self) -> list[Any]:
        """Its parameters, as torch's `FSDPParam` shows them."""
        state, info, _, _ = self._of
        flats = [flat for flat in state.unit.flats if flat.mesh_info == info]
        return [FSDPParam(p, self.mesh_info) for flat in flats for p in flat.params]

    @property
    def mesh_info(self) -> Any:
        """Torch's own class: `mesh`, `shard_mesh_size`, `shard_process_group`, ..."""
        return self._of[2]

    @property
    def mp_policy(self) -> Any:
        """The policy of its call."""
        return self._of[0].unit.mp_policy

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Those that its call was given."""
        return self._of[0].unit.modules

    @property
    def device(self) -> Any:
        """Where it computes."""
        return self._of[1].device

    @property
    def _module_fqn(self) -> str:
        unit = self._of[0].unit
        return "" if unit.is_outermost else unit.name

    @property
    def is_unsharded(self) -> bool:
        """Whether full parameters are registered."""
        return self._of[0].runtime.is_unsharded

    @property
    def is_sharded(self) -> bool:
        """Whether shards are."""
        return not self.is_unsharded

    @property
    def _reshard_after_forward(self) -> bool:
        return self.post_forward_mesh_info is not None

    @property
    def post_forward_mesh_info(self) -> Any:
        """The mesh that parameters are cut over after forward: None if they stay gathered, and for
        an int `reshard_after_forward` a smaller one. What was read may be assigned again, and None.
        """
        state, info, own, read = self._of
        unit = state.unit
        # Torch does not tell a root from others before its first forward.
        is_kept = unit.reshard is False and (not unit.is_auto_reshard or _is_settled(state))
        if is_kept or not info.is_sharding:
            return None
        if (mesh := unit.post_meshes.get(info)) is None:
            return own
        if not any(meshes == unit.post_meshes for _, _, meshes in read):
            found = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
            read.append((found, unit.reshard, dict(unit.post_meshes)))
        return read[-1][0]

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, value: Any) -> None:
        state, _, own, read = self._of
        slices = {id(found): (size, meshes) for found, size, meshes in read}
        if value is not None and value is not own and id(value) not in slices:
            raise ValueError(
                f"post_forward_mesh_info of {state.unit.name!r} was set to {value!r}. Set it to "
                "None, or to what was read from it before; pass another size to "
                "fully_shard(reshard_after_forward=)"
            )
        reshard, meshes = slices.get(id(value), (value is own, {}))
        state.unit.options.ask("reshard_after_forward", reshard)
        state.unit.set_reshard(reshard, meshes)

    def lazy_init(self) -> None:
        """What torch prepares here, ours has in the first forward."""

    def unshard(self, async_op: bool = False) -> None:
        """Start to gather; `wait_for_unshard` registers the full parameters."""
        del async_op  # the host goes on in either case
        self._of[0].runtime.start_unshard()

    def wait_for_unshard(self) -> None:
        """Register them, once they are there."""
        self._of[0].runtime.unshard()
        self._of[0].runtime.keep()

    def reshard(self) -> None:
        """Free them."""
        self._of[0].runtime.reshard()


class FSDPParam:
    """A parameter by the names of torch's `FSDPParam`, as it is now."""

    def __init__(self, param: ShardedParam, mesh_info: Any) -> None:
        (module, name), *shared = param.owners
        self.sharded_param = param.sharded
        self.orig_dtype = param.sharded.dtype
        self.fsdp_placement = Shard(param.layout.dim)
        self.mesh_info = mesh_info
        self._param_fqn = param.fqn
        self._module_info = SimpleNamespace(
            module=module,
            param_name=name,
            shared_modules=[m for m, _ in shared],
            shared_param_names=[n for _, n in shared],
        )
        if param.unsharded is not None:
            self.unsharded_param = param.unsharded


def stock_mesh_info(info: MeshInfo) -> Any:
    """In the class that torch has for it."""
    if not info.is_sharding:
        return DDPMeshInfo(info.mesh, replicate_mesh_dim=0)
    if info.is_replicating:
        return HSDPMeshInfo(info.mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return FSDPMeshInfo(info.mesh, shard_mesh_dim=0)


for _name in {*dir(FSDPState()), *SET_BY_INIT}:
    if _name.startswith("_") and not hasattr(object, _name) and _name not in vars(AsStock):
        setattr(AsStock, _name, Lacking(_name))
