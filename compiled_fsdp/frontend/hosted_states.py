"""What the optimizers of a whole step remember, on the host between updates: which tensors may be
there, and what the graph calls for them; see [Note: state at rest].

All that is remembered of what one `update_` updates has one pinned buffer. The graph copies it to
the device (`fetch_state`), lends it to the optimizers for the update, and copies it back
(`store_state`). State that the buffer does not have comes into it on the way: what a first update
has made, and what was loaded, or brought home for a step outside, is taken there before it is
fetched.

Stays on the device, and is said once: what a Muon remembers of matrices that are updated whole, and
what is remembered of parameters that no unit has, of `FullyShardedDataParallel`'s, of those with
all-gather extensions, and in another shape or dtype than the parameter's. Where parameters rest on
the host themselves, so does their state.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.ir.collectives import HOST
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.torch_private.dtensors import local_tensor, make_dtensor, starting_at_zero
from compiled_fsdp.wire import copies

from .parts import ONE_BY_ONE, remembered
from .states_at_rest import is_at_rest, note_at_rest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch.distributed as dist
    from torch import optim

    from compiled_fsdp.units.flat import FlatBuffer
    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.units.unit import Unit

    from .optimizers import Optimizers

Key = tuple[str, str]  # a unit and a parameter
Parts = tuple["FlatBuffer", tuple[int, ...]]  # of a buffer, by their offsets


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor of state, by its name: whose, and where it lies in a buffer."""

    optimizer: optim.Optimizer
    param: ShardedParam
    name: str
    start: int

    def view(self, buffer: Tensor, rank: int) -> Tensor:
        """This rank's part, without padding, in a buffer of state."""
        return replace(self.param.layout, offset=self.start).view(buffer, rank)

    @property
    def value(self) -> Tensor | None:
        """What the optimizer has now; None if nothing yet."""
        state = self.optimizer.state.get(self.param.sharded) or {}
        value: Tensor | None = state.get(self.name)
        return value

    def set(self, value: Tensor) -> None:
        """Let the optimizer have this."""
        self.optimizer.state[self.param.sharded][self.name] = value


class Rest:
    """A pinned buffer on the host, in which the state of some parameters of a flat buffer rests."""

    def __init__(self, flat: FlatBuffer, places: Sequence[Place], numel: int) -> None:
        self.rank, self.places = flat.mesh_info.shard_rank, tuple(places)
        dtype, self.device = flat.data.dtype, flat.data.device.type
        self.buffer = copies.pinned(torch.zeros(numel, dtype=dtype, device="cpu"))
        self.views = [place.view(self.buffer, self.rank) for place in places]
        self.values = [
            starting_at_zero(make_dtensor(view, place.param.sharded))
            for place, view in zip(self.places, self.views, strict=True)
        ]
        for view in self.views:
            note_at_rest(view, self.device)

    def gather(self) -> bool:
        """Bring what is elsewhere into the buffer; returns whether there is any state."""
        is_any = False
        for place, view, own in zip(self.places, self.views, self.values, strict=True):
            value = place.value
            is_any |= value is not None
            if value is None or local_tensor(value) is view:
                continue
            local = local_tensor(value)
            if is_at_rest(local):
                view.copy_(local)
            else:
                copies.begin(local.detach(), HOST, True, into=view)[1].wait()
            place.set(own)
        return is_any

    def lend(self, state: Tensor) -> list[Tensor]:
        """Let the optimizers have their state in this copy; returns where each lies in it."""
        lent = [place.view(state, self.rank) for place in self.places]
        for place, view in zip(self.places, lent, strict=True):
            if place.value is not None:
                place.set(make_dtensor(view, place.param.sharded))
        return lent

    def take_back(self, lent: Sequence[Tensor]) -> None:
        """Let the optimizers have what rests here, and the copy all that they have meanwhile."""
        for place, view, own in zip(self.places, lent, self.values, strict=True):
            value = place.value
            if value is None:
                continue
            local = local_tensor(value)
            if local is not view:
                view.copy_(local)
            place.set(own)


class HostedStates:
    """What the optimizers of a whole step remember of the parameters of these units."""

    def __init__(self, units: list[Unit], optimizers: Optimizers) -> None:
        self._units, self._optimizers = units, optimizers
        self._is_asked = False
        self._names: dict[Key, tuple[str, ...]] = {}
        self._rests: dict[Parts, Rest] = {}
        self._current: set[Parts] = set()  # laid out as was planned last

    def signature(self) -> tuple[object, ...]:
        """Changes if other parameters are held, or other things are remembered of them."""
        self._is_asked |= current_plan().optimizer_state is not None
        if not self._is_asked:
            return ()
        groups = [(each, g) for each in self._optimizers.made for g in each.param_groups]
        return tuple((id(each), _settings(g), *map(id, g["params"])) for each, g in groups)

    def planned(self) -> tuple[tuple[Key, tuple[str, ...]], ...]:
        """Of each parameter, the names of the tensors that may rest on the host, if the plan has
        asked for that so far.
        """
        if not self._is_asked:
            return ()
        known: dict[object, tuple[str, ...]] = {}
        self._names, self._current, staying = {}, set(), []
        holders = self._holders()
        for unit, flat, param in self._params():
            held = [each for each in param.held_as if id(each) in holders]
            if not held:
                continue
            optimizer, group = holders[id(held[0])]
            if type(optimizer) not in ONE_BY_ONE or not _may_rest(unit, flat):
                staying += [param.fqn] if flat.data.device == flat.device else []
                continue
            kind = id(group), param.sharded.dtype, bool(optimizer.state.get(param.sharded))
            if kind not in known:
                known[kind] = remembered(optimizer, group, param.sharded)
            if known[kind]:
                self._names[unit.key, param.fqn] = known[kind]
        if staying:
            warn_once(
                "compile_step: Plan(optimizer_state='budget'): what the optimizer remembers of "
                f"{shortened(staying)} stays on the device, whatever the budget: a Muon's matrices "
                "are updated whole, FullyShardedDataParallel's parameters are parts, those with "
                "all-gather extensions are no plain tensors, and with a grad_dtype momentum has "
                "another dtype than the parameter. Count it to what is at rest"
            )
        return tuple(self._names.items())

    def _params(self) -> Iterator[tuple[Unit, FlatBuffer, ShardedParam]]:
        for unit in self._units:
            for flat in unit.flats:
                for param in flat.params:
                    yield unit, flat, param

    def _holders(self) -> dict[int, tuple[optim.Optimizer, dict[str, Any]]]:
        groups = [(each, g) for each in self._optimizers.made for g in each.param_groups]
        return {id(p): (each, group) for each, group in groups for p in group["params"]}

    # -- called by a graph; see `units.states.OnStates`

    def fetch(
        self, flat: FlatBuffer, offsets: Sequence[int], numel: int
    ) -> tuple[Tensor, dist.Work | None]:
        """See `OnStates`."""
        rest = self._rest(flat, tuple(offsets), numel)
        if not rest.gather():
            return flat.data.new_empty(numel), None
        fetched: tuple[Tensor, dist.Work] = copies.begin(rest.buffer, rest.device, False)
        return fetched

    @contextmanager
    def lent(self, flat: FlatBuffer, offsets: Sequence[int], state: Tensor) -> Iterator[None]:
        """See `OnStates`."""
        rest = self._rests[flat, tuple(offsets)]
        lent = rest.lend(state)
        try:
            yield
        finally:
            rest.take_back(lent)

    def store(self, flat: FlatBuffer, offsets: Sequence[int], state: Tensor) -> dist.Work:
        """See `OnStates`."""
        buffer = self._rests[flat, tuple(offsets)].buffer
        _, work = copies.begin(state, HOST, True, is_for_device=True, into=buffer)
        stored: dist.Work = work
        return stored

    def _rest(self, flat: FlatBuffer, offsets: tuple[int, ...], numel: int) -> Rest:
        """The buffer for these; a new one for others than before, which brings them along."""
        if (flat, offsets) in self._current:
            return self._rests[flat, offsets]
        places, size = self._places(flat, offsets)
        if size != numel:
            raise RuntimeError(
                f"fsdp::fetch_state: the graph fetches {numel} elements of state of "
                f"{flat.unit.name}, and its optimizer remembers {size}: the optimizer was changed "
                "after the step was compiled. Call torch._dynamo.reset()"
            )
        made = Rest(flat, places, numel)
        made.gather()
        for key in [key for key in self._rests if key[0] is flat]:
            del self._rests[key]
            self._current.discard(key)
        self._rests[flat, offsets] = made
        self._current.add((flat, offsets))
        return made

    def _places(self, flat: FlatBuffer, offsets: tuple[int, ...]) -> tuple[list[Place], int]:
        """Tensor by tensor as in the flat buffer, those of one name behind each other."""
        holders, places, start = self._holders(), [], 0
        params = [param for param in flat.params if param.layout.offset in offsets]
        named = [(param, self._names.get((flat.unit.key, param.fqn), ())) for param in params]
        for name in sorted({name for _, names in named for name in names}):
            for param, names in named:
                if name in names:
                    optimizer, _ = holders[id(param.sharded)]
                    places.append(Place(optimizer, param, name, start))
                    start += param.layout.numel
        return places, start


def _may_rest(unit: Unit, flat: FlatBuffer) -> bool:
    """Whether state of these parameters is tensors like plain shards, computed with where they
    rest.
    """
    is_plain = not unit.is_flat and not flat.is_apart and flat.params[0].grad_dtype is None
    return is_plain and flat.data.device == flat.device


def _settings(group: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
    """What of a group may decide which tensors there are: whether each of its numbers is any."""
    kinds = (bool, int, float, type(None))
    return tuple(
        (name, bool(value))
        for name, value in group.items()
        if isinstance(value, kinds) and name != "lr"
    )
