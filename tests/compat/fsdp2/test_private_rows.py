"""What training repositories read and change of stock's private state: `_get_fsdp_state()`, its
parameter groups, and what torch's meshes are called there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.oracle import (
    Api,
    ShardPlacementResult,
    batch,
    is_sharded,
    mesh_of,
    message,
    needs_meshes_of_their_own,
    net,
    raised,
    rows,
    same,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

if TYPE_CHECKING:
    from kit.pool import Pool


@rows("2.14", "3.16")
def test_private_state(two: Pool) -> None:
    two.run(same, private_state)


def private_state(api: Api) -> Any:
    model = api.units(net(), "0", reshard_after_forward=True)
    state, root = model[0]._get_fsdp_state(), model._get_fsdp_state()
    group = state._fsdp_param_group
    info = group.mesh_info
    early = state._is_root, root._is_root, group._reshard_after_forward
    root._lazy_init()
    call = api.compile(model)
    call(batch()).sum().backward()
    param = group.fsdp_params[0]
    return (
        early,
        (state._is_root, root._is_root, _groups(state)[0] is group, info.mesh),
        (type(info).__name__, info.shard_mesh_size, info.shard_mesh_rank, state._mp_policy),
        [p._param_fqn for p in group.fsdp_params],
        (param.sharded_param is model[0].weight, param.sharded_param.grad, param.orig_dtype),
        (param._module_info.module is model[0], param._module_info.param_name),
        (group.is_sharded, group.modules == (model[0],), group._module_fqn),
        hasattr(group, "no such thing"),
    )


def _groups(state: Any) -> Any:
    """Stock's of torch 2.11 has the one alone."""
    return getattr(state, "_fsdp_param_groups", [state._fsdp_param_group])


@rows("7.1", "7.3")
def test_mesh_after_forward_is_set(two: Pool) -> None:
    two.run(same, mesh_after_forward_is_set)


def mesh_after_forward_is_set(api: Api) -> Any:
    """As for an evaluation that gathers once, and for a frozen root that is to be freed."""
    found = []
    for of_root in (None, True, False):
        model = api.units(net(), "0", reshard_after_forward=of_root)
        root, group = model._get_fsdp_state(), model[0]._get_fsdp_state()._fsdp_param_group
        before = root._fsdp_param_group.post_forward_mesh_info
        root._lazy_init()
        found.append([before is None, root._fsdp_param_group.post_forward_mesh_info is None])
        root._fsdp_param_group.post_forward_mesh_info = before
        kept, group.post_forward_mesh_info = group.post_forward_mesh_info, None
        for info in (None, kept):
            group.post_forward_mesh_info = info
            model(batch())
            found.append(is_sharded(model))
            model.reshard()
            model[0].reshard()
        call = api.compile(model)
        call(batch()).sum().backward()
        found.append(is_sharded(model))
    return found


@rows("7.5", status="improved")
def test_smaller_mesh_after_forward_is_set(four: Pool) -> None:
    """What was read may be set again, and nothing else; stock asks for its own class."""
    four.run(smaller_mesh_after_forward_is_set)


def smaller_mesh_after_forward_is_set() -> None:
    found = []
    for kind in ("stock", "eager"):
        model = Api(kind).units(net(), "0", mesh=mesh_of(4), reshard_after_forward=2)
        group = model[0]._get_fsdp_state()._fsdp_param_group
        kept, group.post_forward_mesh_info = group.post_forward_mesh_info, None
        model(batch())
        sizes = [type(kept).__name__, kept.mesh.mesh, kept.shard_mesh_size]
        group.post_forward_mesh_info = kept
        found.append((sizes, group.post_forward_mesh_info is kept, group._reshard_after_forward))
        model(batch()).sum().backward()
    assert str(found[0]) == str(found[1])
    other = FSDPMeshInfo(mesh_of(4), 0)
    assert "read from it before" in message(lambda: setattr(group, "post_forward_mesh_info", other))


@rows("2.14", status="improved")
def test_private_names_that_are_missing(two: Pool) -> None:
    """Reading or setting a private name that ours lacks says which it has, and loses nothing."""
    two.run(private_names_that_are_missing)


def private_names_that_are_missing() -> None:
    model = Api("eager").units(net(), "0")
    state = model[0]._get_fsdp_state()
    for of, name in (
        (state, "_comm_ctx"),
        (state, "_auto_reshard_after_forward"),
        (state._fsdp_param_group, "reduce_grads"),
        (state._fsdp_param_group, "mesh_info"),
    ):
        with pytest.raises(AttributeError) as error:
            setattr(of, name, False)
        said = str(error.value)
        assert name in said, said
        assert "'0'" in said, said
        assert "post_forward_mesh_info" in said or "_fsdp_param_group" in said, said
    assert not hasattr(state, "_comm_ctx")
    assert not hasattr(state._fsdp_param_group, "comm_ctx")
    state.note = 1  # a user's own


@needs_meshes_of_their_own
@rows("3.11")
def test_groups_of_a_unit(four: Pool) -> None:
    four.run(same, groups_of_a_unit)


def groups_of_a_unit(api: Api) -> Any:
    mesh = mesh_of(2, 2, names=("r", "s"))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 8)
    special = ShardPlacementResult(None, FSDPMeshInfo(mesh["s"], shard_mesh_dim=0))
    result = {model.bias: special}
    api.fully_shard(model, mesh=mesh, shard_placement_fn=result.get)
    state = model._get_fsdp_state()
    groups = state._fsdp_param_groups
    return (
        [(type(g.mesh_info).__name__, len(g.fsdp_params)) for g in groups],
        raised(lambda: state._fsdp_param_group),
    )
