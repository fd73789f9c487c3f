"""The changes that `fully_shard` makes to modules: their classes (`classes.py`), the hooks on them,
and parameters that calls share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.frontend.classes import swap_class
from compiled_fsdp.frontend.state import State, get_state, set_state
from compiled_fsdp.torch_private.compiled import rebind_compiled, uncompiled
from compiled_fsdp.torch_private.dtensors import in_own_storage, local_tensor, starting_at_zero
from compiled_fsdp.torch_private.dynamo import never_traced_alone, untraced
from compiled_fsdp.torch_private.modules import register_first
from compiled_fsdp.units.assigned import adopt_replaced
from compiled_fsdp.units.registered import Registered
from compiled_fsdp.wire import copies

from .fsdp_module import FSDPModule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.units.unit import Unit


def shard_classes(
    roots: Sequence[nn.Module], managed: Sequence[nn.Module], unit: Unit, state: State
) -> None:
    """Swap classes so that parameters are read through properties, and hook the roots."""
    names: dict[nn.Module, list[str]] = {}
    for param in unit.params:
        for module, name in param.owners:
            names.setdefault(module, []).append(name)
    for module, owned in names.items():
        swap_class(module, tuple(owned), FSDPModule if isinstance(module, FSDPModule) else None)
        module.__dict__["_fsdp_owner"] = state
        _hook_states(module)
        module.register_load_state_dict_post_hook(_adopt_loaded(state))
    for root in roots:
        inner = uncompiled(root)
        for module in dict.fromkeys((inner, root)):
            set_state(module, state)
            swap_class(module, tuple(names.get(module, ())), FSDPModule)
        register_first(inner, state.pre_forward)
        inner.register_forward_hook(state.post_forward)
        if inner is not root:
            rebind_compiled(root)
    for module in managed:
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        if not isinstance(module, FSDPModule):  # which has it as a property
            module._fsdp_use_orig_params = True  # type: ignore[assignment]


def share_params(
    shared: Sequence[tuple[Unit, ShardedParam, nn.Module, str]], borrower: State
) -> None:
    """Let modules of a later call hold parameters of earlier units (tied weights)."""
    for unit, param, module, name in shared:
        if not _owners(module):  # else it has been hooked
            _hook_states(module)
        unit.add_owner(param, module, name)
        swap_class(module, (name,), FSDPModule if isinstance(module, FSDPModule) else None)
        if (unit.mp_policy, param.layout.dim) != (
            borrower.unit.mp_policy,
            0,
        ) or unit.mesh_info != borrower.unit.mesh_info:
            warn_once(
                f"fully_shard: parameter {param.fqn} is shared with an earlier call, whose mesh, "
                f"placement and mp_policy hold for it; those of {borrower.unit.name} differ and do "
                "not"
            )
        lender = get_state(unit.modules[0])
        assert lender is not None
        borrower.runtime.borrow(lender.runtime)


def _hook_states(module: nn.Module) -> None:
    """`state_dict` and `load_state_dict` of a module that holds sharded parameters, whoever
    shards them.
    """
    module.register_state_dict_pre_hook(_reshard_first)
    module.register_state_dict_post_hook(_start_at_zero)
    module.register_load_state_dict_pre_hook(_reshard_first)
    module.register_load_state_dict_pre_hook(_explain_full)


def _owners(module: nn.Module) -> list[Unit]:
    """The units whose parameters a module holds: tied ones are those of another's."""
    table = module._parameters
    owners = table.owners.values() if isinstance(table, Registered) else ()
    return list(dict.fromkeys(unit for unit, _ in owners))


def _reshard_first(module: nn.Module, *_: object) -> None:
    """A hook before `state_dict` and `load_state_dict`: both are about the sharded parameters.

    So are tied ones, whose unit may come later, and free then what a state dict would hold.
    Where Dynamo has left the graph around it, it has no business inside: torch 2.11 prints what it
    guards on, freed parameters too, and dies.
    """
    if torch.compiler.is_dynamo_compiling():
        _rest(module)
    else:
        _rest_untraced(module)


def _rest(module: nn.Module) -> None:
    for unit in _owners(module):
        state = get_state(unit.modules[0])
        assert state is not None
        state.runtime.reshard()
    copies.settle()


_rest_untraced = untraced(_rest)
never_traced_alone(_reshard_first)


def _explain_full(
    module: nn.Module,
    entries: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """A hook before `load_state_dict`, which says what torch says of each parameter: a shard cannot
    be copied from a full tensor. All that can be loaded is, as ever.
    """
    if metadata.get("assign_to_params_buffers"):
        return
    full = [
        prefix + name
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
        and isinstance(entry := entries.get(prefix + name), Tensor)
        and not isinstance(entry, DTensor)
    ]
    if full:
        errors.append(
            f"load_state_dict: {shortened(full)} are full tensors, and the model's parameters are "
            "shards of them. Let torch.distributed.checkpoint.state_dict cut them: "
            "set_model_state_dict(model, state_dict, "
            "options=StateDictOptions(full_state_dict=True))"
        )


@untraced
def _start_at_zero(module: nn.Module, entries: dict[str, Any], prefix: str, _: object) -> None:
    """A hook after `state_dict`: parameters lie somewhere in a flat buffer, and are to be copied
    and saved all the same. What is written to their local tensors, as a checkpoint is loaded, is
    counted like any other write; where a rank has no rows it would write nothing, and others alone
    would count.

    Names that are tied get one tensor: `torch.save` would write two.
    """
    for name in module._parameters:
        entry = entries.get(prefix + name)
        if type(entry) is not DTensor or isinstance(entry, nn.Parameter):
            continue
        if entry.device.type == "meta":
            entries[prefix + name] = starting_at_zero(entry)
            continue
        known = _of_a_tied_name(module, name, entry, entries)
        if known is None:
            param = _param_of(module, name)
            counted = param.local if param is not None and param.is_on_all_ranks else None
            known = in_own_storage(entry, counted)
        entries[prefix + name] = known


def _param_of(module: nn.Module, name: str) -> ShardedParam | None:
    table = module._parameters
    owner = table.owners.get(name) if isinstance(table, Registered) else None
    return owner[1] if owner is not None else None


def _of_a_tied_name(
    module: nn.Module, name: str, entry: DTensor, entries: dict[str, Any]
) -> DTensor | None:
    """Returns what another name of the same parameter has got already."""
    param = _param_of(module, name)
    if param is None or len(param.owners) == 1 or not local_tensor(entry).numel():
        return None
    start = local_tensor(entry).data_ptr()
    others = (
        v
        for v in entries.values()
        if type(v) is DTensor and v is not entry and not v.storage_offset()
    )
    return next(
        (v for v in others if v.shape == entry.shape and local_tensor(v).data_ptr() == start), None
    )


def _adopt_loaded(state: State) -> Callable[..., None]:
    """A hook after `load_state_dict`: with `assign=True` it replaced the parameters."""

    def hook(*_: object) -> None:
        adopt_replaced(state.unit)

    return hook
