"""Rules about what travels: each collective is the one that settings name, once, awaited once."""

from __future__ import annotations

import operator
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch

from compiled_fsdp.ir import checksums, quantized, schema, transfers
from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.collectives import ALL_TO_ALL, WAIT
from compiled_fsdp.ir.graph import find, op_name, output, placeholders, starts, value
from compiled_fsdp.ir.meta import get_heads, get_tag
from compiled_fsdp.ir.regions import Region, find_regions
from compiled_fsdp.ir.schema import (
    AGREE,
    CHECKSUM,
    COMPARE,
    FETCH_STATE,
    GATHER_AHEAD,
    OFFLOAD,
    REDUCE_LATER,
    RELOAD,
    START_COPY,
    STORE_STATE,
    TO_LOWER,
    WATCH_HEADS,
    param_spec,
    traits_of,
)
from compiled_fsdp.ir.sequence import sequence
from compiled_fsdp.ir.spec import AGAIN
from compiled_fsdp.ir.subgraphs import called_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan
    from compiled_fsdp.verification.invariant import Violations

    # By the node of the graph, and by that which divides: itself, or one in a graph that it calls.
    Divisions = dict[tuple[Node, Node], float]


def lowered(gm: GraphModule, plan: Plan) -> Violations:
    """Every fsdp op that communicates has been lowered to collectives."""
    for node in find(gm.graph, *TO_LOWER):
        yield node, f"%{node.name} is still an fsdp op"


def waited_once(gm: GraphModule, plan: Plan) -> Violations:
    """Every collective is awaited exactly once, or its wait is left to the unit, and nothing else
    reads its result.
    """
    for node in _ours(starts(gm.graph)):  # the user may await his own as often as he likes
        users = list(node.users)
        if len(users) != 1 or not traits_of(users[0].target).awaits:
            yield node, f"%{node.name} is read by {[f'%{u.name}' for u in users]}"
    for wait in _ours(find(gm.graph, WAIT)):
        if wait.all_input_nodes[0].target is WAIT:
            yield (
                wait,
                f"%{wait.name} awaits %{wait.all_input_nodes[0].name}, which is no collective",
            )


def copied_once(gm: GraphModule, plan: Plan) -> Violations:
    """Every copy to or from the host is awaited exactly once, and nothing else reads its result."""
    for node in find(gm.graph, START_COPY, OFFLOAD, RELOAD, FETCH_STATE, STORE_STATE):
        if [user.target for user in node.users] != [WAIT]:
            yield node, f"%{node.name} is read by {[f'%{u.name}' for u in node.users]}"


def _ours(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if get_tag(node) is not None]


def gathered_once(gm: GraphModule, plan: Plan) -> Violations:
    """Every parameter is gathered at most once over a group in a graph; of a whole step, once each
    way for each micro-batch.
    """
    seen: dict[tuple[str, str, str, bool, int], Node] = {}
    for region in find_regions(gm.graph, "gather"):
        for spec in region.tag.specs:
            before = seen.setdefault(
                (spec.unit, spec.fqn, spec.group, spec.reshard == AGAIN, spec.batch),
                region.nodes[0],
            )
            if before is not region.nodes[0]:
                yield region.nodes[0], f"{spec.fqn} is gathered here and at %{before.name}"


def uniform_buckets(gm: GraphModule, plan: Plan) -> Violations:
    """All members of a bucket have the same group, dtype and way of reducing."""
    for kind in ("gather", "reduce"):
        for region in find_regions(gm.graph, kind):
            # Gradients of any dtype are cast to that of their reduction.
            is_gather = kind == "gather"
            ways = {
                (s.group, s.dtype if is_gather else None, None if is_gather else s.reduction)
                for s in region.tag.specs
            }
            if len(ways) > 1:
                yield (
                    region.nodes[0],
                    f"members of the bucket of {region.tag.unit} differ: {sorted(map(str, ways))}",
                )


def as_specified(gm: GraphModule, plan: Plan) -> Violations:
    """Each communication starts the collectives that its parameters' settings name: op, group, size
    and dtype.
    """
    for kind in ("gather", "reduce"):
        for region in find_regions(gm.graph, kind):
            found = [_described(node) for node in region.starts]
            wanted = _wanted_gather(region) if kind == "gather" else _wanted_reduction(region)
            if found != wanted:
                names = [s.fqn for s in region.tag.specs]
                yield (
                    (*region.starts, *region.nodes)[0],
                    f"the {kind} of {names} starts {found}; its settings name {wanted}",
                )


def _described(start: Node) -> str:
    """Returns what a collective does, without its position in the arguments; one that may have
    started ahead, as it would start here.
    """
    target, args, _ = comm.as_in_torch(start)
    if target is GATHER_AHEAD:
        shard, _, _, sizes, _, group_size, group, *_ = args
        others = [group_size, group]
        is_whole = len(sizes) == 1
        target, args = (
            (comm.ALL_GATHER, (shard, *others))
            if is_whole
            else (schema.ALL_GATHER, (shard, sizes, *others))
        )
    sent = [value(n) for n in _sent(start)]
    others = [a for a in args[1:] if isinstance(a, str | int | list | tuple)]
    return (
        f"{op_name(target)}({sum(v.numel() for v in sent)} x {sent[0].dtype}, "
        f"{', '.join(map(str, others))})"
    )


def _sent(start: Node) -> list[Node]:
    """Returns what a collective sends."""
    first: Any = start.args[0]
    return list(first) if isinstance(first, list | tuple) else [first]


def _wanted_gather(region: Region) -> list[str]:
    spec = region.spec
    if spec.group_size == 1:
        return []
    specs = region.tag.specs
    sent = f"{sum(s.shard_numel for s in specs)} x {spec.dtype}"
    if quantized.gathers_bytes(specs):
        sent = f"{sum(quantized.gathered_payloads(specs))} x {quantized.WIRE}"
    if spec.gather_algorithm:
        return [
            f"{op_name(schema.CUSTOM_ALL_GATHER)}({sent}, {spec.group_size}, {spec.group}, "
            f"{spec.gather_algorithm})"
        ]
    sizes = [message.numel for message in transfers.gather_messages(specs)]
    if len(sizes) > 1:
        return [f"{op_name(schema.ALL_GATHER)}({sent}, {sizes}, {spec.group_size}, {spec.group})"]
    return [f"{op_name(comm.ALL_GATHER)}({sent}, {spec.group_size}, {spec.group})"]


def _wanted_reduction(region: Region) -> list[str]:
    spec = region.spec
    how, size = spec.reduction, spec.group_size
    numel = sum(s.shard_numel for s in region.tag.specs)
    rows, wanted = f"{size * numel} x {how.dtype}", []
    if how.sync == "retain":
        return []
    if quantized.reduces_bytes(region.tag.specs):
        sent = f"{quantized.reduced_bytes(region.tag.specs)} x {quantized.WIRE}"
        wanted = [f"{op_name(ALL_TO_ALL)}({sent}, {size}, {spec.reduce_group})"]
    elif size > 1 and how.algorithm == "all_to_all":
        wanted = [f"{op_name(ALL_TO_ALL)}({rows}, {size}, {spec.reduce_group})"]
    elif size > 1 and how.algorithm.startswith(comm.CUSTOM):
        wanted = [
            f"{op_name(schema.CUSTOM_REDUCE_SCATTER)}({rows}, {how.op}, {size}, "
            f"{spec.reduce_group}, {how.algorithm})"
        ]
    elif size > 1:
        wanted = [f"{op_name(comm.REDUCE_SCATTER)}({rows}, {how.op}, {size}, {spec.reduce_group})"]
    if how.replicate_size > 1 and how.sync == "reduce":
        wanted.append(
            f"{op_name(comm.ALL_REDUCE)}({numel} x {how.dtype}, {how.op}, {how.replicate_group})"
        )
    return wanted


def divided(gm: GraphModule, plan: Plan) -> Violations:
    """Every gradient is divided by what its settings say: before it is reduced, and after, or by
    the unit that awaits it.
    """
    for region in find_regions(gm.graph, "reduce"):
        how, communicates = region.spec.reduction, (*region.starts, *region.waits)
        divided_at = [n for n in region.nodes if _divisions(n, region)]
        behind = [n for n in region.nodes if not communicates or communicates[0] < n]
        after = {_divisor(n, region, behind) for n in _ends(behind)} or {1.0}
        sent = _sent(communicates[0]) if communicates else []
        before = {_divisor(n, region, region.nodes) for n in sent} or {1.0}
        wanted = {"retain": (1.0, 1.0), "scatter": (how.pre_divide, 1.0)}.get(
            how.sync, (how.pre_divide, how.post_divide)
        )
        if not communicates:
            wanted = 1.0, prod(wanted)
        for later in (n for n in region.nodes if n.target is REDUCE_LATER):
            after = {number * param_spec(later).post_divide for number in after}
        if (before, after) != ({wanted[0]}, {wanted[1]}):
            names = [s.fqn for s in region.tag.specs]
            found = (*sorted(before), *sorted(after))
            yield (
                (*divided_at, *region.nodes)[0],
                f"gradients of {names} are divided by {found}, not by {wanted}",
            )


def _ends(nodes: Sequence[Node]) -> list[Node]:
    """The values that others read of these, and not these themselves, or a call of which these have
    results.
    """
    inside = set(nodes)

    def is_read_here(user: Node) -> bool:
        return user in inside or (called_by(user) is not None and not inside.isdisjoint(user.users))

    return [n for n in nodes if n.users and not any(map(is_read_here, n.users))]


def _divisor(node: Node, region: Region, among: Sequence[Node]) -> float:
    """Returns what a value was divided by in these nodes of a region; all that was joined to it, by
    the same.
    """
    found, nodes = [], {node}
    for current in reversed(among):
        if current in nodes:
            inputs = current.all_input_nodes
            calls = [n for n in inputs if called_by(n) is not None]
            nodes.update(inputs, *(call.all_input_nodes for call in calls))
            found.append(_divisions(current, region))
    return _product(found)


def _divisions(node: Node, region: Region) -> Divisions:
    """Returns the divisors of a node of a region: of a division, or, of the result of a call
    (`outline`), of the divisions in it that lead there.
    """
    if node.target is torch.ops.aten.div.Tensor:
        return {(node, node): _number(node)}
    if node.target is not operator.getitem:
        return {}
    call, place = cast("tuple[Node, int]", node.args)
    if (body := called_by(call)) is None:
        return {}
    results: Any = output(body).args[0]
    found, nodes = {}, {results[place]}
    for inside in reversed(body.nodes):
        tag = get_tag(inside)  # as in the first layer that the body was made of
        if inside in nodes and tag is not None and tag.kind == region.tag.kind:
            nodes.update(inside.all_input_nodes)
            if inside.target is torch.ops.aten.div.Tensor:
                found[call, inside] = _number(inside)
    return found


def _product(found: Iterable[Divisions]) -> float:
    """Returns the product of all divisors; of a division that leads to several results, once."""
    divisors: Divisions = {}
    for each in found:
        divisors |= each
    return prod(divisors.values(), start=1.0)


def _number(division: Node) -> float:
    """Returns what a division divides by."""
    divisor: Any = division.args[1]
    return float(divisor)


def cast_by_policy(gm: GraphModule, plan: Plan) -> Violations:
    """Parameters are cast to the compute dtype before they are gathered, gradients to the reduce
    dtype and back around it.
    """
    for kind in ("gather", "reduce"):
        for region in find_regions(gm.graph, kind):
            spec, starts_ = region.spec, region.starts
            for node in region.nodes:
                if node.target is not comm.CONVERT:
                    continue
                source, target = value(node.all_input_nodes[0]).dtype, node.args[1]
                is_before = not starts_ or node < starts_[0]
                if kind == "gather":
                    is_right = target == spec.dtype and is_before
                else:
                    dtypes = (
                        (target, source) if not starts_ else (target,) if is_before else (source,)
                    )
                    is_right = spec.reduce_dtype in dtypes or (
                        is_before and spec.reduction.first_dtype in dtypes
                    )
                if not is_right:
                    place = "before" if is_before else "after"
                    wanted = spec.dtype if kind == "gather" else spec.reduce_dtype
                    yield (
                        node,
                        f"%{node.name} casts from {source} to {target} {place} the {kind} of "
                        f"{spec.fqn} in {wanted}",
                    )


def summed_up(gm: GraphModule, plan: Plan) -> Violations:
    """Each collective of checked parameters is summed up on both sides, what is sent before it
    starts, and compared once under their names; no other is.
    """
    compared = {node: 0 for node in find(gm.graph, COMPARE)}
    regions = [r for kind in ("gather", "reduce") for r in find_regions(gm.graph, kind)]
    is_finished = compared or find(gm.graph, AGREE)  # after `lower` nothing is summed up yet
    for region in regions if is_finished else ():
        for start in region.starts if checksums.is_checked(region.tag.specs) else ():
            kind = checksums.kind_of(start.target)
            (wait,) = start.users if len(start.users) == 1 else (None,)
            if not kind or wait is None or wait.target is not WAIT:
                yield start, f"%{start.name} of checked parameters cannot be compared"
                continue
            found = [c for c in compared if _sums(c.args[1]) == [wait]]
            for compare in found:
                compared[compare] += 1
                sent, _, *_, name, _, names = cast("tuple[Any, ...]", compare.args)
                is_sent = sent < start and _sums(sent) == _sent(start)
                if kind != checksums.REPLICATED and not is_sent:
                    yield compare, f"%{sent.name} is no sum of what %{start.name} is about to send"
                if (name, list(names)) != (kind, checksums.names_of(region.tag.specs)):
                    yield compare, f"%{compare.name} compares {name} of {list(names)}"
            if len(found) != 1:
                yield start, f"%{start.name} is compared {len(found)} times"
    for compare, num in compared.items():
        if not num:
            yield compare, f"%{compare.name} compares what no checked collective has brought"


def _sums(node: Any) -> list[Node]:
    """What a checksum is of."""
    return list(node.args[0]) if node.target is CHECKSUM else []


def announced(gm: GraphModule, plan: Plan) -> Violations:
    """What a graph says of itself before it runs is so: its collectives, in order, and which
    outputs lead to which parameters.
    """
    text, groups = sequence(gm.graph)
    for node in find(gm.graph, AGREE):
        if node.args[1] and list(node.args[1:3]) != [text, groups]:
            yield node, f"%{node.name} compares\n{node.args[1]}\nwhere the graph has\n{text}"
    flats = [flat for flat in placeholders(gm.graph) if get_heads(flat) is not None]
    for node in find(gm.graph, WATCH_HEADS) if flats else ():
        if list(node.args[1]) != flats:  # type: ignore[arg-type]
            named = ", ".join(f"%{flat.name}" for flat in flats)
            yield node, f"%{node.name} leaves out some of {named}, to which not all outputs lead"
