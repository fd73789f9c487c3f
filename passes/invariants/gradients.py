"""Rules about gradients and updates: each is reduced once, and read by one update, in order."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import torch

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.graph import (
    aliases,
    argument,
    batch_leaves,
    find,
    is_step,
    is_view,
    last_read,
    op_name,
    order,
    output,
    sum_root,
    value,
)
from compiled_fsdp.ir.regions import Region, find_regions
from compiled_fsdp.ir.schema import (
    ADD_RETAINED,
    AGREE,
    COMPARE,
    FROM_OWNERS,
    GATHER_AHEAD,
    GATHER_NEXT,
    MARK_GRADS,
    MOMENTUM,
    ORTHOGONALIZE,
    STEP,
    TO_OWNERS,
    UPDATE,
    UPDATE_MATRICES,
    VERDICT,
    traits_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan
    from compiled_fsdp.verification.invariant import Violations

AT_HOME = "momentum_ orthogonalize update_matrices_"
AT_OWNERS = "momentum_ to_owners wait_tensor orthogonalize from_owners wait_tensor update_matrices_"


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


def reduced_once(gm: GraphModule, plan: Plan) -> Violations:
    """Every parameter's gradient is reduced at most once into a flat gradient."""
    seen: dict[tuple[str, str, Node], Region] = {}
    for region in find_regions(gm.graph, "reduce"):
        for spec in region.tag.specs:
            into = region.result.args[1] if region.is_left_in_flight else sum_root(region.result)
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
    """In the graph of a whole step, of every flat gradient that is reduced, each parameter's part
    goes to exactly one update_ or momentum_, of its own buffer and parameters, with those of other
    micro-batches; a parameter that no unit has is an input that is updated once, with a gradient of
    its shape; and all are scaled by the same factors or none is.
    """
    marks: dict[tuple[object, object], Node] = {
        (m.args[0], m.args[1]): m for m in find(gm.graph, MARK_GRADS)
    }
    taken: dict[tuple[object, object, int], Node] = {}
    factors: dict[tuple[Node, ...], Node] = {}
    alone: dict[Node, Node] = {}
    for update in find(gm.graph, UPDATE, MOMENTUM):
        flat, offsets = cast("tuple[Any, ...]", update.args)[1:3]
        if not offsets:
            yield from _updated_alone(update, alone)
            continue
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
    wanted = next(iter(factors), ())
    for update in alone.values():
        by = _unscaled(update)[1][: len(wanted)]  # its gradient may itself be a product
        factors.setdefault(tuple(by), update)
    if len(factors) > 1:
        yield list(factors.values())[1], f"gradients are scaled by {[[*by] for by in factors]}"


def _updated_alone(update: Node, seen: dict[Node, Node]) -> Violations:
    """The update of a parameter that no unit has. seen: the updates of such parameters."""
    grad, param = cast("tuple[Any, ...]", update.args)[:2]
    if param.op != "placeholder" or value(param).shape != value(grad).shape:
        yield update, f"%{update.name} updates %{param.name}, which is no input of its shape"
    if param in seen:
        yield update, f"%{update.name} and %{seen[param].name} update %{param.name}"
    seen[param] = update


def _unscaled(update: Node) -> tuple[Node, list[Node]]:
    """The flat gradient of an update, and what it is scaled by."""
    grad: Any = update.args[0]
    product, factors = _uncast(grad), []
    mul = torch.ops.aten.mul.Tensor
    while product.target is mul and isinstance(product.args[1], torch.fx.Node):
        grad, factor = product.args
        product = _uncast(grad)
        factors.append(factor)
    return grad, factors


def _uncast(product: Any) -> Any:
    """What `scaled_by` casts, where a gradient has no dimensions."""
    return product.args[0] if product.target is comm.CONVERT else product


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
    """In the graph of a whole step, what a momentum_ yields goes to owners, is orthogonalized
    there, comes back and updates the same parameters, with nothing else in between: the same
    buffer, order, owners, sizes and group all the way; over one rank, without travelling.
    """
    seen: set[Node] = set()
    for momentum in find(gm.graph, MOMENTUM):
        way, node = [momentum], momentum
        while node.target is not UPDATE_MATRICES and len(node.users) == 1:
            (node,) = node.users
            way.append(node)
        seen.update(way)
        if " ".join(op_name(node.target) for node in way) in (AT_HOME, AT_OWNERS):
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
    """What is gathered for the next step is a piece that the graph takes over at its beginning,
    once each, in the same order, and its buffer is updated before, never after.
    """
    position = order(gm.graph)
    updates = find(gm.graph, UPDATE, UPDATE_MATRICES)
    taken = Counter(_piece(node.args[1:]) for node in find(gm.graph, GATHER_AHEAD))
    places = {piece: place for place, piece in enumerate(taken)}
    seen: Counter[tuple[object, ...]] = Counter()
    latest = -1
    for node in find(gm.graph, GATHER_NEXT):
        flat, piece = cast("Node", node.args[0]), _piece(node.args)
        seen[piece] += 1
        place = places.get(piece, latest)
        if place < latest:
            yield node, f"%{node.name} gathers behind others what the graph takes over before them"
        latest = max(latest, place)
        if taken[piece] != 1 or seen[piece] > 1:
            yield node, f"%{node.name} gathers what no gather_ahead takes over, or a second time"
        of_buffer = [update for update in updates if update.args[1] is flat]
        for update in of_buffer:
            if position[update] > position[node]:
                yield node, f"%{node.name} gathers %{flat.name} before %{update.name} writes it"


def _piece(args: Sequence[object]) -> tuple[object, ...]:
    """A buffer, and what of it is gathered how; lists as texts."""
    return tuple(str(list(a)) if isinstance(a, list | tuple) else a for a in args)


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
