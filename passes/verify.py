"""Check the invariants of a finished graph; changes nothing.

Each invariant is one function below; its docstring is the rule that an error quotes.

Requires: a lowered graph in its final order.
Ensures: the graph keeps every rule, or `GraphInvariantError` names the first one broken, with the
    nodes around the place.
Leaves alone: everything.
"""

from __future__ import annotations

from collections import Counter
from math import ceil, floor, inf, prod
from typing import TYPE_CHECKING, Any, cast

import torch

from compiled_fsdp.ir import checksums, quantized, schema
from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.collectives import ALL_TO_ALL, WAIT
from compiled_fsdp.ir.graph import (
    aliases,
    argument,
    batch_leaves,
    find,
    is_step,
    is_view,
    last_read,
    order,
    output,
    placeholders,
    starts,
    sum_root,
    value,
)
from compiled_fsdp.ir.meta import get_captured, get_heads, get_tag, saved_for_backward
from compiled_fsdp.ir.regions import Region, find_regions
from compiled_fsdp.ir.schema import (
    ADD_RETAINED,
    AGREE,
    CHECKSUM,
    COMPARE,
    FREE,
    FROM_OWNERS,
    GATHER_AHEAD,
    GATHER_NEXT,
    MARK_GRADS,
    MOMENTUM,
    ORTHOGONALIZE,
    REDUCE_LATER,
    START_COPY,
    STEP,
    TO_LOWER,
    TO_OWNERS,
    UPDATE,
    UPDATE_MATRICES,
    VERDICT,
    WATCH_HEADS,
    param_spec,
    traits_of,
)
from compiled_fsdp.ir.sequence import sequence
from compiled_fsdp.ir.spec import AGAIN
from compiled_fsdp.planning.plan import DISTANCES
from compiled_fsdp.planning.planner import AHEAD, UNITS_IN_FLIGHT, reduction_room
from compiled_fsdp.verification.invariant import GraphInvariantError
from compiled_fsdp.verification.meaning import Captured, interface

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

    Violations = Iterator[tuple[Node, str]]


AT_HOME = "momentum_ orthogonalize update_matrices_"
AT_OWNERS = "momentum_ to_owners wait_tensor orthogonalize from_owners wait_tensor update_matrices_"


def verify(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    check(gm, plan, "the pipeline")
    return gm


def check(gm: GraphModule, plan: Plan, where: str) -> None:
    """Raise `GraphInvariantError` for the first rule that the graph breaks, after `where`."""
    for invariant in INVARIANTS:
        for node, detail in invariant(gm, plan):
            rule = " ".join((invariant.__doc__ or "").split())
            raise GraphInvariantError(where, rule, detail, node)


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
    for node in find(gm.graph, START_COPY):
        if [user.target for user in node.users] != [WAIT]:
            yield node, f"%{node.name} is read by {[f'%{u.name}' for u in node.users]}"


def _ours(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if get_tag(node) is not None]


def gathered_once(gm: GraphModule, plan: Plan) -> Violations:
    """Every parameter is gathered at most once over a group in a graph; of a whole step, once each way
    for each micro-batch.
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
            is_gather = (
                kind == "gather"
            )  # gradients of any dtype are cast to that of their reduction
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
    return f"{_op(target)}({sum(v.numel() for v in sent)} x {sent[0].dtype}, {', '.join(map(str, others))})"


def _sent(start: Node) -> list[Node]:
    """Returns what a collective sends."""
    first: Any = start.args[0]
    return list(first) if isinstance(first, list | tuple) else [first]


def _op(target: object) -> str:
    return str(getattr(target, "_opname", target))


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
            f"{_op(schema.CUSTOM_ALL_GATHER)}({sent}, {spec.group_size}, {spec.group}, "
            f"{spec.gather_algorithm})"
        ]
    sizes = [message.numel for message in comm.gather_messages(specs)]
    if len(sizes) > 1:
        return [f"{_op(schema.ALL_GATHER)}({sent}, {sizes}, {spec.group_size}, {spec.group})"]
    return [f"{_op(comm.ALL_GATHER)}({sent}, {spec.group_size}, {spec.group})"]


def _wanted_reduction(region: Region) -> list[str]:
    spec = region.spec
    how, size = spec.reduction, spec.group_size
    numel = sum(s.shard_numel for s in region.tag.specs)
    rows, wanted = f"{size * numel} x {how.dtype}", []
    if how.sync == "retain":
        return []
    if quantized.reduces_bytes(region.tag.specs):
        sent = f"{quantized.reduced_bytes(region.tag.specs)} x {quantized.WIRE}"
        wanted = [f"{_op(ALL_TO_ALL)}({sent}, {size}, {spec.reduce_group})"]
    elif size > 1 and how.algorithm == "all_to_all":
        wanted = [f"{_op(ALL_TO_ALL)}({rows}, {size}, {spec.reduce_group})"]
    elif size > 1 and how.algorithm.startswith(comm.CUSTOM):
        wanted = [
            f"{_op(schema.CUSTOM_REDUCE_SCATTER)}({rows}, {how.op}, {size}, {spec.reduce_group}, "
            f"{how.algorithm})"
        ]
    elif size > 1:
        wanted = [f"{_op(comm.REDUCE_SCATTER)}({rows}, {how.op}, {size}, {spec.reduce_group})"]
    if how.replicate_size > 1 and how.sync == "reduce":
        wanted.append(
            f"{_op(comm.ALL_REDUCE)}({numel} x {how.dtype}, {how.op}, {how.replicate_group})"
        )
    return wanted


def divided(gm: GraphModule, plan: Plan) -> Violations:
    """Every gradient is divided by what its settings say: before it is reduced, and after, or by
    the unit that awaits it.
    """
    for region in find_regions(gm.graph, "reduce"):
        how, communicates = region.spec.reduction, (*region.starts, *region.waits)
        divisions = [n for n in region.nodes if n.target is torch.ops.aten.div.Tensor]
        after = prod(
            [_number(n) for n in divisions if not communicates or communicates[0] < n], start=1.0
        )
        before = {_divisor(n, region) for n in _sent(communicates[0])} if communicates else {1.0}
        wanted = {"retain": (1.0, 1.0), "scatter": (how.pre_divide, 1.0)}.get(
            how.sync, (how.pre_divide, how.post_divide)
        )
        if not communicates:
            wanted = 1.0, prod(wanted)
        for later in (n for n in region.nodes if n.target is REDUCE_LATER):
            after *= param_spec(later).post_divide
        if (before, after) != ({wanted[0]}, wanted[1]):
            names = [s.fqn for s in region.tag.specs]
            found = (*sorted(before), after)
            yield (
                (*divisions, *region.nodes)[0],
                f"gradients of {names} are divided by {found}, not by {wanted}",
            )


def _divisor(node: Node, region: Region) -> float:
    """Returns what a value that a region sends was divided by in it; all that was joined to it, by
    the same.
    """
    product, nodes = 1.0, {node}
    for current in reversed(region.nodes):
        if current in nodes:
            nodes.update(current.all_input_nodes)
            if current.target is torch.ops.aten.div.Tensor:
                product *= _number(current)
    return product


def _number(division: Node) -> float:
    """Returns what a division divides by."""
    divisor: Any = division.args[1]
    return float(divisor)


def _is_in_flight(region: Region) -> bool:
    """Whether the unit awaits this reduction, since the graph does not."""
    return any(node.target is REDUCE_LATER for node in region.nodes)


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


def no_use_after_free(gm: GraphModule, plan: Plan) -> Violations:
    """No gathered buffer, nor a view of it, is read after its free, or by a collective that is not
    awaited by then.
    """
    position = order(gm.graph)
    for free in find(gm.graph, FREE):
        for alias in aliases(free.all_input_nodes[0]):
            for user in alias.users:
                if user.target is not FREE and position[user] > position[free]:
                    yield user, f"%{user.name} reads %{alias.name} after it is freed"
                elif traits_of(user.target).starts and any(
                    position[w] > position[free] for w in user.users
                ):
                    yield user, f"%{user.name} is still reading %{alias.name} when it is freed"


def added_first(gm: GraphModule, plan: Plan) -> Violations:
    """What a unit has kept of earlier backwards is added to gradients before anything reads
    them.
    """
    position = order(gm.graph)
    for add in find(gm.graph, ADD_RETAINED):
        for alias in aliases(add.all_input_nodes[0]):
            for user in alias.users:
                if not is_view(user) and position[user] < position[add]:
                    yield (
                        user,
                        f"%{user.name} reads %{alias.name} before what was kept is added to it",
                    )


def freed_once(gm: GraphModule, plan: Plan) -> Violations:
    """A graph that frees, frees every buffer that it received exactly once, unless it returns
    it.
    """
    frees = Counter(node.all_input_nodes[0] for node in find(gm.graph, FREE))
    end = output(gm.graph)
    for wait in find(gm.graph, WAIT) if frees else ():
        is_buffer = (
            traits_of(wait.all_input_nodes[0].target).is_buffer and get_tag(wait) is not None
        )
        is_returned = any(alias in end.all_input_nodes for alias in aliases(wait))
        if frees[wait] > 1 or (is_buffer and frees[wait] != (not is_returned)):
            yield (
                wait,
                f"%{wait.name} is freed {frees[wait]} times"
                + (" and returned" if is_returned else ""),
            )


def nothing_gathered_saved(gm: GraphModule, plan: Plan) -> Violations:
    """No graph saves storage of a parameter that is to be dropped after forward; what the user
    returns is the user's.
    """
    saved = set(saved_for_backward(output(gm.graph)))
    for region in find_regions(gm.graph, "gather"):
        kept = [s.fqn for s in region.tag.specs if s.reshard == "keep"]
        full = [n for n in region.nodes if any(w is n or w < n for w in region.waits)]
        for alias in dict.fromkeys(a for node in full for a in aliases(node)):
            if alias in saved and not kept:
                names = [s.fqn for s in region.tag.specs]
                yield (
                    alias,
                    f"%{alias.name} is saved for backward and shares storage with the gathered "
                    f"{names}",
                )


def reduced_once(gm: GraphModule, plan: Plan) -> Violations:
    """Every parameter's gradient is reduced at most once into a flat gradient."""
    seen: dict[tuple[str, str, Node], Region] = {}
    for region in find_regions(gm.graph, "reduce"):
        for spec in region.tag.specs:
            into = region.result.args[1] if _is_in_flight(region) else sum_root(region.result)
            before = seen.setdefault((spec.unit, spec.fqn, into), region)  # type: ignore[arg-type]
            if before is not region:
                yield (
                    region.nodes[0],
                    f"the gradient of {spec.fqn} is reduced here and at %{before.nodes[0].name}",
                )


def gradients_marked(gm: GraphModule, plan: Plan) -> Violations:
    """Every fully reduced gradient is named by exactly one mark_grads_, reduce_later_ or step_."""
    marks = [node for node in gm.graph.nodes if traits_of(node.target).marks]
    marked = Counter(offset for node in marks for offset in cast("list[int]", node.args[2]))
    regions = find_regions(gm.graph, "reduce")
    reduced = Counter(
        spec.offset for region in regions for spec in region.tag.specs if spec.sync == "reduce"
    )
    if marked != reduced:
        where = regions[0].nodes[0] if regions else output(gm.graph)
        yield where, f"offsets reduced {dict(reduced)} are not the offsets marked {dict(marked)}"


def stepped_last(gm: GraphModule, plan: Plan) -> Violations:
    """No flat buffer is read after the optimizer has stepped it, nor by a collective that is not
    awaited by then.
    """
    position = order(gm.graph)
    for step in find(gm.graph, STEP, UPDATE, UPDATE_MATRICES):
        flat: Any = step.args[1]
        if last_read(flat, position) > position[step]:
            yield step, f"%{step.name} writes %{flat.name}, which is still to be read"


def updated_once(gm: GraphModule, plan: Plan) -> Violations:
    """In the graph of a whole step, of every flat gradient that is reduced, each parameter's part goes
    to exactly one update_ or momentum_, of its own buffer and parameters, with those of other
    micro-batches, and all are scaled by the same factors or none is.
    """
    marks: dict[tuple[object, object], Node] = {
        (m.args[0], m.args[1]): m for m in find(gm.graph, MARK_GRADS)
    }
    taken: dict[tuple[object, object, int], Node] = {}
    factors: dict[tuple[Node, ...], Node] = {}
    for update in find(gm.graph, UPDATE, MOMENTUM):
        flat, offsets = cast("tuple[Any, ...]", update.args)[1:3]
        grad, by = _unscaled(update)
        keys = [(leaf, flat) for leaf in batch_leaves(grad)]
        factors.setdefault(tuple(by), update)
        named = {offset for key in keys if key in marks for offset in _offsets(marks[key])}
        if any(key not in marks for key in keys) or not named >= {*offsets}:
            yield update, f"%{update.name} updates what is not the gradient of its buffer"
        for part in [(*key, offset) for key in keys for offset in offsets]:
            if part in taken:
                yield update, f"%{update.name} and %{taken[part].name} take the same gradient"
            taken[part] = update
    for left, mark in marks.items() if taken else ():
        if any((*left, offset) not in taken for offset in _offsets(mark)):
            yield mark, f"%{mark.name} marks a gradient that no update_ takes"
    if len(factors) > 1:
        yield list(factors.values())[1], f"gradients are scaled by {[[*by] for by in factors]}"


def _unscaled(update: Node) -> tuple[Node, list[Node]]:
    """The flat gradient of an update, and what it is scaled by."""
    grad: Any = update.args[0]
    factors = []
    while grad.target is torch.ops.aten.mul.Tensor and isinstance(grad.args[1], torch.fx.Node):
        grad, factor = grad.args
        factors.append(factor.args[0] if factor.target is comm.CONVERT else factor)
    return grad, factors


def left_out_together(gm: GraphModule, plan: Plan) -> Violations:
    """In the graph of a whole step whose gradients are scaled, every update_ takes the same
    found_inf, which is computed from every flat gradient that is updated.
    """
    updates = find(gm.graph, UPDATE, MOMENTUM)
    told = {u: argument(u, "found_inf") for u in updates if argument(u, "found_inf") is not None}
    if not told:
        return
    first = next(iter(told.values()))
    for update in updates:
        if told.get(update) is not first:
            yield update, f"%{update.name} does not take %{first.name}, as others do"
    read, stack = set(), [first]
    while stack:
        node = stack.pop()
        if node not in read:
            read.add(node)
            stack += node.all_input_nodes
    for update in updates:
        grad, _ = _unscaled(update)
        if grad not in read:
            yield update, f"%{first.name} does not depend on %{grad.name}, which it updates with"


def updated_at_owners(gm: GraphModule, plan: Plan) -> Violations:
    """In the graph of a whole step, what a momentum_ yields goes to owners, is orthogonalized there,
    comes back and updates the same parameters, with nothing else in between: the same buffer, order,
    owners, sizes and group all the way; over one rank, without travelling.
    """
    seen: set[Node] = set()
    for momentum in find(gm.graph, MOMENTUM):
        way, node = [momentum], momentum
        while node.target is not UPDATE_MATRICES and len(node.users) == 1:
            (node,) = node.users
            way.append(node)
        seen.update(way)
        if " ".join(_op(node.target) for node in way) in (AT_HOME, AT_OWNERS):
            yield from _changes_on_the_way(way)
        else:
            names = [f"%{node.name}" for node in way[1:]]
            yield momentum, f"what %{momentum.name} yields goes to {names}"
    for node in find(gm.graph, TO_OWNERS, ORTHOGONALIZE, FROM_OWNERS, UPDATE_MATRICES):
        if node not in seen:
            yield node, f"%{node.name} is on no way from a momentum_"


def _changes_on_the_way(way: list[Node]) -> Violations:
    momentum, there = way[0], _among(way, TO_OWNERS, FROM_OWNERS)
    if not there and any(argument(way[1], "owners")):
        yield way[1], f"%{way[1].name} has the pieces of one rank alone"
    for name, nodes in {
        **dict.fromkeys(
            ("flat", "offsets", "step"), _among(way, MOMENTUM, ORTHOGONALIZE, UPDATE_MATRICES)
        ),
        "owners": _among(way, ORTHOGONALIZE, TO_OWNERS, FROM_OWNERS),
        **dict.fromkeys(("numels", "group_size", "group"), there),
    }.items():
        given = [argument(node, name) for node in nodes]
        if any(each != given[0] for each in given):
            yield nodes[0], f"{name} change on the way of %{momentum.name}: {given}"
    for numels in [argument(node, "numels") for node in there]:
        if sum(numels) != argument(momentum, "numel"):
            yield momentum, f"%{momentum.name} yields other pieces than {list(numels)}"


def _among(nodes: list[Node], *targets: object) -> list[Node]:
    return [node for node in nodes if node.target in targets]


def _offsets(mark: Node) -> list[int]:
    return cast("list[int]", mark.args[2])


def gathered_after_update(gm: GraphModule, plan: Plan) -> Violations:
    """What is gathered for the next step is a piece that the graph takes over at its beginning, once
    each, and its buffer is updated before, never after.
    """
    position = order(gm.graph)
    updates = find(gm.graph, UPDATE, UPDATE_MATRICES)
    taken = Counter(_piece(node.args[1:]) for node in find(gm.graph, GATHER_AHEAD))
    seen: Counter[tuple[object, ...]] = Counter()
    for node in find(gm.graph, GATHER_NEXT):
        flat, piece = cast("Node", node.args[0]), _piece(node.args)
        seen[piece] += 1
        if taken[piece] != 1 or seen[piece] > 1:
            yield node, f"%{node.name} gathers what no gather_ahead takes over, or a second time"
        of_buffer = [update for update in updates if update.args[1] is flat]
        if not of_buffer:
            yield node, f"%{node.name} gathers %{flat.name}, which the graph does not update"
        for update in of_buffer:
            if position[update] > position[node]:
                yield node, f"%{node.name} gathers %{flat.name} before %{update.name} writes it"


def _piece(args: Sequence[object]) -> tuple[object, ...]:
    """A buffer, and what of it is gathered how; lists as texts."""
    return tuple(str(list(a)) if isinstance(a, list | tuple) else a for a in args)


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


def judged_first(gm: GraphModule, plan: Plan) -> Violations:
    """In the graph of a whole step that sums up what travels, one verdict_ of all sums and all
    gradients stands behind every sum and before every update.
    """
    position = order(gm.graph)
    compared, updates = find(gm.graph, COMPARE), find(gm.graph, UPDATE, MOMENTUM)
    verdicts = find(gm.graph, VERDICT)
    is_finished = verdicts or find(gm.graph, AGREE)  # before `await_verdict` there is none
    if is_finished and len(verdicts) != bool(compared and is_step(gm.graph)):
        where = verdicts[-1] if verdicts else updates[0]
        yield where, f"{len(verdicts)} verdicts for {len(compared)} sums and {len(updates)} updates"
    for verdict in verdicts:
        grads, sums, *_ = cast("tuple[Any, ...]", verdict.args)
        for compare in compared:
            if compare.args[0] not in sums or position[compare] > position[verdict]:
                yield verdict, f"%{verdict.name} comes before %{compare.name}, or leaves it out"
        for update in updates:
            grad = cast("Any", update.args[0])
            scaled = grad.args[:1] if grad.target is torch.ops.aten.mul.Tensor else ()
            if not {grad, *scaled} & {*grads} or position[update] < position[verdict]:
                yield update, f"%{update.name} does not wait for %{verdict.name}"


def _sums(node: Any) -> list[Node]:
    """What a checksum is of."""
    return list(node.args[0]) if node.target is CHECKSUM else []


def bounded_in_flight(gm: GraphModule, plan: Plan) -> Violations:
    """No more gathers or reductions are under way at once than the plan, or the user for a unit,
    allows.
    """
    for kind in ("gather", "reduce"):
        regions = [r for r in find_regions(gm.graph, kind) if r.starts]
        limit, room = _limit(gm, plan, kind, regions)
        first_waits = {r.waits[0]: r for r in regions if r.waits}
        first_starts = {r.starts[0]: r for r in regions if r.waits}
        under_way: dict[int, int] = {}
        for node in gm.graph.nodes:
            if node in first_starts:
                under_way[first_starts[node].tag.region] = first_starts[node].sent_bytes
            if node in first_waits:
                under_way.pop(first_waits[node].tag.region, None)
            num, total = len(under_way), sum(under_way.values())
            if node in first_starts and (num > limit or (num > 1 and total > room)):
                allowed = f"{room:g} bytes" if num <= limit else f"{limit:g}"
                yield (
                    node,
                    f"%{node.name} makes {num} {kind}s of together {total} bytes under way; the "
                    f"plan allows {allowed}",
                )


def _limit(gm: GraphModule, plan: Plan, kind: str, regions: list[Region]) -> tuple[float, float]:
    """How many may be under way at once, and bytes of several; with prefetch lists of the user, any
    number of gathers.
    """
    if kind == "reduce":
        distance = plan.distance("reduces_in_flight")
        asked = [r.spec.reduces_in_flight for r in regions if r.waits]
        if distance is None and not any(asked):
            return inf, reduction_room(regions, plan.reduction_bytes)
        by_default = DISTANCES["reduces_in_flight"] if distance is None else distance
        return max([1, *(ceil(number or by_default) for number in asked)]), inf
    sides = {r.is_in_backward for r in regions}
    if any(r.spec.backward_after if r.is_in_backward else r.spec.forward_after for r in regions):
        return inf, inf
    distances = [plan.distance("backward_prefetch" if side else "prefetch") for side in sides]
    return max((AHEAD if d is None else floor(d) for d in distances), default=0) + 1, inf


def bounded_left(gm: GraphModule, plan: Plan) -> Violations:
    """What a graph leaves in flight for the unit to await is no more than twice the bytes of its
    largest reduction.
    """
    regions = [r for r in find_regions(gm.graph, "reduce") if r.starts]
    in_flight = [r for r in regions if _is_in_flight(r)]
    sizes = [r.sent_bytes for r in in_flight]
    room = UNITS_IN_FLIGHT * max((r.sent_bytes for r in regions), default=0)
    if sum(sizes) > room:
        yield (
            in_flight[0].nodes[-1],
            f"{len(in_flight)} reductions of together {sum(sizes)} bytes; at most {room}",
        )


def same_interface(gm: GraphModule, plan: Plan) -> Violations:
    """The inputs of the graph are those that were captured, and so is the number of its outputs."""
    captured: Captured | None = get_captured(gm)
    if captured is None:
        return
    now, end = interface(placeholders(gm.graph)), output(gm.graph)
    if now != captured.inputs:
        changed = sorted({*now} ^ {*captured.inputs})
        yield (
            next(iter(gm.graph.nodes)),
            f"inputs differ from the captured ones: {changed or 'another order'}",
        )
    if len(end.args[0]) != len(captured.outputs):  # type: ignore[arg-type]
        yield end, f"{len(end.args[0])} outputs; {len(captured.outputs)} were captured"  # type: ignore[arg-type]


def same_meaning(gm: GraphModule, plan: Plan) -> Violations:
    """The graph returns the values that were captured, with the same effects, of the communications
    that its settings name.
    """
    captured: Captured | None = get_captured(gm)
    if captured is not None:
        yield from captured.differences(gm.graph)


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


INVARIANTS: tuple[Callable[[GraphModule, Plan], Violations], ...] = (
    lowered,
    waited_once,
    copied_once,
    gathered_once,
    uniform_buckets,
    as_specified,
    divided,
    cast_by_policy,
    no_use_after_free,
    added_first,
    freed_once,
    nothing_gathered_saved,
    reduced_once,
    gradients_marked,
    updated_once,
    updated_at_owners,
    left_out_together,
    gathered_after_update,
    stepped_last,
    summed_up,
    judged_first,
    bounded_in_flight,
    bounded_left,
    same_interface,
    same_meaning,
    announced,
)
