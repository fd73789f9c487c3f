"""The arithmetic around each collective, written once for four executors.

Every function takes `run`, which applies an op: `launch.call` applies it to real tensors (unlowered
IR ops), the graph builder in `graph.py` appends a node, `Deferred` records it until it is needed
(eager runtime), `Expressions` says what it means (the verifier). So lowering and eager mode cannot
drift apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from . import quantized, schema
from .spec import MEAN, REGISTRY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Node

    from .spec import ParamSpec, Reduction

    Value = Any  # a torch.Tensor, or an fx.Node standing for one
    Run = Callable[..., Value]

aten = torch.ops.aten
c10d = schema.c10d
ALL_GATHER = c10d.all_gather_into_tensor.default
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
ALL_REDUCE = c10d.all_reduce.default
WAIT = c10d.wait_tensor.default
CONVERT = torch.ops.prims.convert_element_type.default
GATHERS = (ALL_GATHER, schema.ALL_GATHER)
ALL_TO_ALL = schema.ALL_TO_ALL
STARTS = tuple(op for op, traits in schema.TRAITS.items() if traits.is_collective)
HOST = "host"  # where a copy goes, apart from the types of devices
OWN = "_exchanges"  # behind the name of a group: a second one, for the user's all-to-alls
CUSTOM = "custom:"  # before a key in `spec.REGISTRY`: an algorithm that the user brought


def asked_by(algorithm: str, setter: str) -> str:
    """Returns which setter asked for an algorithm in `REGISTRY`: its `asked_by`, or `setter`."""
    found: str = getattr(REGISTRY.get(algorithm.removeprefix(CUSTOM)), "asked_by", setter)
    return found


def convert(run: Run, x: Value, source: torch.dtype, target: torch.dtype) -> Value:
    """Cast, if the dtypes differ."""
    return x if source == target else run(CONVERT, x, target)


# The user's options that decide how a parameter is gathered, and what becomes of its gradient.
OF_GATHERS = (
    "mesh",
    "mp_policy.param_dtype",
    "offload_policy",
    "set_custom_all_gather",
    "set_symm_mem_for_comm",
    "gather_quantized",
)
OF_REDUCTIONS = (
    "mp_policy.reduce_dtype",
    "set_separate_reduce_scatter_group",
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_custom_reduce_scatter",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_all_reduce_hook",
    "reduce_quantized",
)
OPTIONS = (*OF_GATHERS, *OF_REDUCTIONS)


def from_host(run: Run, x: Value, spec: ParamSpec) -> Value:
    """A shard on the device that computes, if it rests in host memory."""
    return run(schema.COPY_TO, x, spec.device, False) if spec.device else x


def to_host(run: Run, x: Value, spec: ParamSpec) -> Value:
    """A flat gradient where its parameters rest."""
    return run(schema.COPY_TO, x, HOST, spec.pins) if spec.device else x


def gather_options(spec: ParamSpec) -> list[str]:
    """The user's options that decide how this is gathered."""
    options = ["mesh", "mp_policy.param_dtype", *(["offload_policy"] if spec.device else [])]
    options += ["gather_quantized"] if quantized.gathers_bytes([spec]) else []
    if spec.gather_algorithm and spec.group_size > 1:
        options.append(asked_by(spec.gather_algorithm, "set_custom_all_gather"))
    return options


def reduce_options(spec: ParamSpec) -> list[str]:
    """The user's options that decide what becomes of this gradient."""
    how = spec.reduction
    kept = {"retain": ["set_requires_gradient_sync"], "scatter": ["set_requires_all_reduce"]}.get(
        how.sync, []
    )
    if how.sync == "retain":
        return ["mp_policy.reduce_dtype", *kept]
    found = ["mesh", "mp_policy.reduce_dtype", "set_separate_reduce_scatter_group", *kept]
    found += ["reduce_quantized"] if quantized.reduces_bytes([spec]) else []
    if how.algorithm.startswith(CUSTOM):
        found.append(asked_by(how.algorithm, "set_custom_reduce_scatter"))
    if how.sync == "scatter":
        return found
    return [
        *found,
        "set_gradient_divide_factor",
        "set_force_sum_reduction_for_comms",
        *(["set_all_reduce_hook"] if how.hook else []),
    ]


def all_gather(run: Run, shard: Value, spec: ParamSpec) -> Value:
    """Gather `shard` [n] from every rank of the spec's group to [group_size * n]; for one rank, the
    shard itself.
    """
    if spec.group_size == 1:
        return shard
    if spec.gather_algorithm:
        return run(
            WAIT,
            run(
                schema.CUSTOM_ALL_GATHER, shard, spec.group_size, spec.group, spec.gather_algorithm
            ),
        )
    return run(WAIT, run(ALL_GATHER, shard, spec.group_size, spec.group))


def from_rows(run: Run, rows: Value, spec: ParamSpec) -> Value:
    """From [group_size * shard_numel], the padded shards of all ranks, to one parameter of
    `spec.shape`.
    """
    if spec.dim == 0:
        return unpad(run, run(aten.view.default, rows, list(spec.padded_shape)), spec)
    apart = run(aten.view.default, rows, [spec.group_size, *spec.shard_shape])
    together = run(
        aten.permute.default,
        apart,
        [*range(1, spec.dim + 1), 0, *range(spec.dim + 1, len(spec.shape) + 1)],
    )
    return run(aten.reshape.default, together, list(spec.shape))


def unpad(run: Run, padded: Value, spec: ParamSpec) -> Value:
    """Drop the rows that only fill up the last shards."""
    if spec.padded_shape == spec.shape:
        return padded
    return run(aten.slice.Tensor, padded, 0, 0, spec.shape[0])


def pad_rows(run: Run, full: Value, spec: ParamSpec) -> Value:
    """From `spec.shape` to `spec.padded_shape`, filled with zeros."""
    missing = spec.padded_shape[0] - spec.shape[0]
    if not missing:
        return full
    return run(aten.constant_pad_nd.default, full, [0, 0] * (len(spec.shape) - 1) + [0, missing])


def rank_rows(run: Run, full: Value, spec: ParamSpec) -> Value:
    """From `spec.shape` to [group_size, shard_numel]: row r is what rank r owns."""
    padded = pad_rows(run, full, spec)
    if spec.dim:
        apart = run(
            aten.view.default,
            padded,
            list((*spec.shape[: spec.dim], spec.group_size, *spec.shard_shape[spec.dim :])),
        )
        padded = run(
            aten.permute.default,
            apart,
            [spec.dim, *(d for d in range(len(spec.shape) + 1) if d != spec.dim)],
        )
    return run(aten.reshape.default, padded, [spec.group_size, spec.shard_numel])


def joined(run: Run, rows: Sequence[Value]) -> Value:
    """Pieces [group_size, n_i] side by side."""
    return rows[0] if len(rows) == 1 else run(aten.cat.default, rows, 1)


def reduce_scatter(
    run: Run, rows: Sequence[Value], spec: ParamSpec, flat: Value, offsets: list[int], numel: int
) -> Value | None:
    """Reduce pieces [group_size, n_i] of `numel` columns over all data-parallel ranks to this
    rank's row [numel], before it is divided.

    None if the policy is to stop after the shard axis (`sync="scatter"`): then the unit has kept
    the result.
    """
    how, group_size = spec.reduction, spec.group_size
    if group_size > 1 and how.algorithm == "all_to_all":
        if how.pre_divide != 1.0:
            rows = [run(aten.div.Tensor, piece, how.pre_divide) for piece in rows]
        x = run(
            aten.sum.dim_IntList,
            run(WAIT, run(ALL_TO_ALL, list(rows), group_size, spec.reduce_group)),
            [0],
        )
        return after_shard_axis(run, x, spec, flat, offsets)
    x = run(aten.reshape.default, joined(run, rows), [group_size * numel])
    if how.pre_divide != 1.0:
        x = run(aten.div.Tensor, x, how.pre_divide)
    if group_size > 1 and how.algorithm.startswith(CUSTOM):
        x = run(
            WAIT,
            run(
                schema.CUSTOM_REDUCE_SCATTER,
                x,
                how.op,
                group_size,
                spec.reduce_group,
                how.algorithm,
            ),
        )
    elif group_size > 1:
        x = run(WAIT, run(REDUCE_SCATTER, x, how.op, group_size, spec.reduce_group))
    return after_shard_axis(run, x, spec, flat, offsets)


def after_shard_axis(
    run: Run, x: Value, spec: ParamSpec, flat: Value, offsets: list[int]
) -> Value | None:
    """Reduce this rank's row over HSDP's replicate axis."""
    how = spec.reduction
    if how.replicate_size > 1:
        if how.sync == "scatter":
            run(schema.RETAIN, x, flat, offsets, "partial")
            return None
        if how.is_accumulating:
            run(schema.ADD_RETAINED, x, flat, offsets, "partial")
        x = run(WAIT, run(ALL_REDUCE, x, how.op, how.replicate_group))
    return x


def divide(run: Run, x: Value, how: Reduction) -> Value:
    """From the sum over all ranks (or their mean, see `Reduction.op`) to the gradient; the user's
    hook sees it.
    """
    is_mean = how.hook.startswith(MEAN)
    if how.hook and not is_mean:
        x = run(schema.HOOK, x, how.hook)
    if how.post_divide != 1.0:
        x = run(aten.div.Tensor, x, how.post_divide)
    return run(schema.HOOK, x, how.hook.removeprefix(MEAN)) if is_mean else x


def as_in_torch(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call that a node stands for: op, arguments and keywords, without names for profiles; of
    ours that do what an op of torch's does (a gather of one message), torch's; of the user's
    all-to-alls, with the group that the user said.
    """
    target, args = node.target, cast("tuple[Any, ...]", node.args)
    if target is schema.COPY_COLUMNS:
        return aten.clone.default, args, {"memory_format": torch.contiguous_format}
    if target is schema.ALL_REDUCE:
        return ALL_REDUCE, args, {}
    if target is schema.START_COPY:
        return schema.COPY_TO, args, {}
    if target is schema.OFFLOAD:
        return schema.COPY_TO, (args[0], HOST, args[1]), {}
    if target is schema.RELOAD:
        return schema.COPY_TO, (*args, False), {}
    if target is schema.ALL_GATHER and list(args[1]) in ([], [args[0].meta["val"].numel()]):
        return ALL_GATHER, (args[0], *args[2:]), {}
    if target is schema.UPDATE:
        return target, args[:7], dict(node.kwargs)  # wherever its state comes from
    if target is schema.EXCHANGE:
        args = tuple(shared_group(a) if isinstance(a, str) else a for a in args)
    return target, args, {} if target in STARTS else dict(node.kwargs)


def group_of(start: Node) -> str:
    """The name of the group that a collective runs over."""
    return next(a for a in reversed(start.args) if isinstance(a, str) and not a.startswith(CUSTOM))


def own_group(name: str) -> str:
    """The name of the second group of these ranks, for the user's all-to-alls."""
    return name + OWN


def is_own_group(name: str) -> bool:
    """Whether this names such a group."""
    return name.endswith(OWN)


def shared_group(name: str) -> str:
    """The name of the group that one belongs to; of every other, its own."""
    return name.removesuffix(OWN)
