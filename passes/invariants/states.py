"""Rules about an optimizer's state on the host: it is there for its update, and goes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import argument, find, order
from compiled_fsdp.ir.schema import FETCH_STATE, STORE_STATE, UPDATE
from compiled_fsdp.ir.states import rests_on_device, stored

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan
    from compiled_fsdp.verification.invariant import Violations

WHOSE = ("flat", "offsets", "step")


def fetched_once(gm: GraphModule, plan: Plan) -> Violations:
    """State that rests on the host is fetched once for one update_, of the same parameters and
    size, which reads it behind the wait for its copy; and all state that is to rest there is.
    """
    seen: dict[tuple[object, ...], Node] = {}
    for fetch in find(gm.graph, FETCH_STATE):
        before = seen.setdefault(_whose(fetch), fetch)
        if before is not fetch:
            yield fetch, f"%{fetch.name} reads on the host what %{before.name} has fetched"
    updates = find(gm.graph, UPDATE)
    for update in updates:
        if wrong := _wrong_state(update, is_any_fetched=bool(seen)):
            yield update, f"%{update.name} {wrong}"
    used = {argument(update, "state") for update in updates}
    for fetch in seen.values():
        if not used & {*fetch.users}:
            yield fetch, f"%{fetch.name} is for no update_"


def _wrong_state(update: Node, *, is_any_fetched: bool) -> str:
    """What is wrong with the state that an `update_` reads; "" if nothing is."""
    state = argument(update, "state")
    if state is None:
        is_missing = is_any_fetched and argument(update, "is_hosted")
        return "is given no state, which is to rest on the host" if is_missing else ""
    fetch = state.all_input_nodes[0] if state.target is WAIT else None
    if fetch is None or fetch.target is not FETCH_STATE:
        return f"reads %{state.name}, which is no wait for its state"
    if _whose(fetch) != _whose(update):
        return f"reads the state of others, which %{fetch.name} fetches"
    if argument(fetch, "numel") != argument(update, "state_numel"):
        return f"remembers other elements than %{fetch.name} fetches"
    return ""


def stored_once(gm: GraphModule, plan: Plan) -> Violations:
    """State that was fetched is stored on the host once, where it came from, behind its update_,
    and until it is there nothing else reads or writes it.
    """
    updates = {u.args[7]: u for u in find(gm.graph, UPDATE) if not rests_on_device(u)}
    position = order(gm.graph)
    seen: set[Node] = set()
    for state, update in updates.items():
        users = [user for user in cast("Node", state).users if user is not update]
        stores = [user for user in users if user.target is STORE_STATE]
        seen.update(stores)
        if len(stores) != 1 or len(users) != 1 or stored(update) is None:
            yield update, f"what %{update.name} writes is read by {[f'%{u.name}' for u in users]}"
        elif _whose(stores[0]) != _whose(update):
            yield stores[0], f"%{stores[0].name} stores the state of %{update.name} elsewhere"
        elif position[stores[0]] < position[update]:
            yield stores[0], f"%{stores[0].name} stores what %{update.name} is yet to write"
    for store in find(gm.graph, STORE_STATE):
        if store not in seen:
            yield store, f"%{store.name} stores what no update_ has written"


def _whose(node: Node) -> tuple[object, ...]:
    """The buffer, the parameters and the step that a node is about; lists as texts."""
    values = [argument(node, name) for name in WHOSE]
    return tuple(str([*each]) if isinstance(each, list | tuple) else each for each in values)
