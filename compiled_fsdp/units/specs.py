"""From the settings of a unit to the arguments of its ops: what a graph is told of a parameter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from compiled_fsdp.ir.spec import MEAN, ParamSpec
from compiled_fsdp.torch_private.groups import common_name
from compiled_fsdp.torch_private.modules import reduces_in_grad_dtype
from compiled_fsdp.wire.ablation import fake_group

from . import checking
from .mesh import averages, by_exchange, reduction
from .precision import reduce_dtype
from .quantizing import codes_of

if TYPE_CHECKING:
    from .flat import FlatBuffer
    from .mesh import MeshInfo
    from .param import ShardedParam
    from .unit import Unit


def make_spec(unit: Unit, flat: FlatBuffer, param: ShardedParam) -> ParamSpec:
    """The op arguments of one parameter under the current settings."""
    info, policy, settings = flat.mesh_info, unit.mp_policy, unit.settings
    original = param.sharded.dtype
    compute = param.compute or policy.param_dtype
    dtype = compute if compute is not None and original.is_floating_point else original
    kept = unit.kept_dtypes
    wire = reduce_dtype(policy, original, dtype, kept)
    own = param.grad_dtype or original
    is_widened = bool(kept) and policy.reduce_dtype is None and own != wire
    how = reduction(info, wire, settings.divide_factor, is_sum=settings.force_sum)
    is_mean = averages(how.dtype, settings.divide_factor, is_sum=settings.force_sum)
    if is_mean and settings.reduce_scatter:  # a user's communication is asked for what stock asks
        how = replace(how, op="avg", post_divide=1.0)
    gather_codes, reduce_codes = codes_of(unit, info, param)
    is_faked = settings.fake_all_gather or settings.fake_reduce
    is_checked = bool(settings.check) and not is_faked and not checking.refusal(unit)
    is_exchanged = is_checked or settings.reduce_quantized
    if is_exchanged and info.shard_size > 1 and not settings.reduce_scatter:
        how = by_exchange(how, info.shard_size)
    gather_group, reduce_group = _groups(unit, info)
    if settings.fake_reduce and how.replicate_size > 1:
        how = replace(how, replicate_group=fake_group(how.replicate_group))
    post = unit.post_meshes.get(info)
    kind = "slice" if post else "gather" if unit.reshard else "keep"
    is_whole = settings.sync == "scatter" and info.replicate_size == 1
    spec = ParamSpec(
        offset=param.layout.offset,
        shape=param.layout.shape,
        dim=param.layout.dim,
        dtype=dtype,
        group_size=info.shard_size,
        group=gather_group,
        gather_algorithm=settings.all_gather,
        reduce_group=reduce_group,
        reshard=kind,
        post_size=post.size(1) if post else 1,
        post_group=common_name(post.get_group(1).group_name) if post else "",
        reduce_dtype=how.dtype,
        reduce_op=how.op,
        reduce_algorithm=settings.reduce_scatter or how.algorithm,
        pre_divide=how.pre_divide,
        post_divide=how.post_divide,
        replicate_size=how.replicate_size,
        replicate_group=how.replicate_group,
        sync="reduce" if is_whole else settings.sync,
        is_accumulating=settings.is_accumulating,
        hook=settings.all_reduce_hook and (MEAN if is_mean else "") + settings.all_reduce_hook,
        overlap=settings.overlap,
        unit=unit.key,
        fqn=param.fqn,
        reduces_in_flight=settings.max_reductions_in_flight,
        forward_after=after(unit, "forward"),
        backward_after=after(unit, "backward"),
        forward_ahead=settings.forward_ahead,
        backward_ahead=settings.backward_ahead,
        device=unit.offload.device if unit.offload else "",
        pins=bool(unit.offload and unit.offload.device and unit.offload.pins),
        gather_quantized=gather_codes,
        reduce_quantized=reduce_codes,
        is_checked=is_checked,
        retained_dtype=own if is_widened else None,
        grad_dtype=param.grad_dtype,
    )
    if unit.is_flat or not spec.is_widened:
        return spec
    keeps_wide = reduces_in_grad_dtype() or param.grad_dtype is not None
    return replace(spec, keeps_wide=keeps_wide, adds_wide=param.is_tied_later)


def traced(unit: Unit, spec: ParamSpec) -> ParamSpec:
    """Returns the spec for a graph, which is made in forward, where nobody knows yet which
    backward of a schedule is the last.
    """
    is_kept = unit.settings.is_scheduled and unit.settings.sync == "reduce"
    return replace(spec, sync="retain", is_accumulating=True) if is_kept else spec


def _groups(unit: Unit, info: MeshInfo) -> tuple[str, str]:
    """The names of the groups that gather and that reduce over the shard axis."""
    own = common_name(info.shard_group.group_name)
    gathers = fake_group(own) if unit.settings.fake_all_gather else own
    reduces = fake_group(own) if unit.settings.fake_reduce else unit.reduce_groups.get(info, own)
    return gathers, reduces


def after(unit: Unit, direction: str) -> tuple[str, ...]:
    """The units whose explicit prefetch lists ("forward", "backward") name this one, by their keys;
    "" is the outermost.
    """
    return tuple("" if other.is_outermost else other.key for other in unit.prefetched_by[direction])
