"""`module._parameters` of a module that owns sharded parameters: what Python reads there, also
while a graph is traced.

[Note: what a read yields]
A module's parameter is what is registered under its name. A unit registers the sharded parameter at
rest and the full one while it is gathered; a user may put something else in its place:
`torch.func.functional_call`, `m.head.weight = m.embed.weight`, `del`. In eager mode the dict says
all of that. In a trace nothing is gathered when a name is read, so the dict holds sharded
parameters where an eager forward would find full ones. Hence `Registered`: it knows which names
hold what their unit registered, and
    - a read by name yields an `fsdp::unshard` for those, and what is registered for the others
      (`reads.traced`);
    - `items()`, and so `parameters()` and `named_parameters()`, yields the same for units whose
      forward is being traced or that are gathered already (`unshard()`), and the sharded parameters
      of all others: what an eager forward finds.
`[]` yields what is registered: `functional_call` takes it from there and puts it back.

FSDP1 registers by itself, and copies back what users assign outside of a trace.
`Watched` is what is the same there.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compiled_fsdp.torch_private.dtensors import local_tensor
from compiled_fsdp.torch_private.dynamo import never_traced_alone, untraced

from .reads import is_in_forward, is_seen_elsewhere, traced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .param import ShardedParam
    from .unit import Unit


# All there are: to find whose parameter it is that a user assigns. Not by weak references to
# parameters: torch swaps tensors (`to`, `to_empty`) only if there are none.
UNITS: weakref.WeakSet[Unit] = weakref.WeakSet()


_numbers = itertools.count()
_watches = [True]  # whether units are told of those who look through parameters

TIED = (
    "parameters() of a module that fully_shard was not given comes to one tied parameter under two "
    "names, and would yield it twice. Iterate over the parameters of the sharded module around it"
)
TIED_INSIDE = "a forward registers a sharded parameter under another name, which ties the two"
ADDED = "a forward registers a parameter in a module that has sharded ones"
# Dynamo forgets what comes back under a name that was removed in the same frame, sharded or not.
REMOVED = "a forward removes a sharded parameter from its module"
FLAT = (
    "a forward iterates over parameters of its own FullyShardedDataParallel instance, which has "
    "them as one flat parameter (use_orig_params=False)"
)


class Watched(dict[str, Any]):
    """The parameters of one module by name,
    of which a trace finds what an eager forward would find.

    module: whose they are.
    number: tells it apart from others.
    shown: what is registered for parameters of units, by name.
    replaced: names under which a user has put something else, or nothing; a traced read guards on
        it.
    gathered: names whose full parameter is registered; a traced iteration guards on it.
    flat: names of flat parameters, which no trace has whole, and the numbers of their units.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module._parameters)
        self.module = module
        self.number = str(next(_numbers))
        self.shown: dict[str, Any] = {}
        self.replaced: dict[str, bool] = module.__dict__.setdefault("_fsdp_replaced", {})
        self.gathered: dict[str, bool] = {}
        self.flat: dict[str, str] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.shown:
            if torch.compiler.is_dynamo_compiling() and isinstance(value, nn.Parameter):
                torch._dynamo.graph_break(msg=ADDED)
            check_lasts(self.module, name, value)
            super().__setitem__(name, value)
        elif torch.compiler.is_dynamo_compiling():
            if value is self.shown[name]:
                self.replaced.pop(name, None)
            else:
                if isinstance(value, nn.Parameter) and getattr(value, "_fsdp_is_units", False):
                    torch._dynamo.graph_break(msg=TIED_INSIDE)
                self.replaced[name] = True
            super().__setitem__(name, value)
        else:
            self._assign(name, value)

    @untraced
    def _assign(self, name: str, value: Any) -> None:
        """Outside of a trace: FSDP1 registers something, or will copy what a user assigns into its
        flat parameter.
        """
        self.shown[name] = value
        self.replaced.pop(name, None)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        if name in self.shown and torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break(msg=REMOVED)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a name."""
        if name in self.shown and torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break(msg=REMOVED)
        return super().pop(name, *default)

    def items(self) -> Any:
        """Names and parameters; in a trace as an eager forward would find them."""
        if torch.compiler.is_dynamo_compiling():
            return [(name, value) for name, value, _ in self.seen()]
        return super().items()

    def values(self) -> Any:
        """Parameters; in a trace as an eager forward would find them."""
        if torch.compiler.is_dynamo_compiling():
            return [value for _, value, _ in self.seen()]
        return super().values()

    def seen(self, *, tells_apart: bool = False) -> Any:
        """In a trace: name, parameter, and what tells parameters apart, since two reads of one are
        two tensors there.

        tells_apart: whether the caller looks at the last; others could count a tied parameter
            twice.
        """
        module: Any = self.module
        found = []
        for name in dict.keys(self):
            if name in self.flat and is_in_forward(self.flat[name]):
                torch._dynamo.graph_break(msg=FLAT)
            handle = (
                module._fsdp_handles[name]
                if name in self.shown and name not in self.replaced
                else None
            )
            if (
                handle is None
                or not handle.key
                or not (name in self.gathered or is_in_forward(*handle.units))
            ):
                value = dict.__getitem__(self, name)
                found.append((name, value, value))
                continue
            key = handle.key + handle.view
            if not tells_apart and is_seen_elsewhere(key, self.number, name):
                torch._dynamo.graph_break(msg=TIED)
            found.append((name, traced(module, name), key))
        return found

    def __reduce__(self) -> Any:
        """A copy is a plain dict: it is nobody's registry."""
        return dict, (dict(self),)


class Registered(Watched):
    """The parameters of one module by name, whose units register them.

    owners: the unit and the sharded parameter behind each name of `shown`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.owners: dict[str, tuple[Unit, ShardedParam]] = {}

    def note_owner(self, name: str, unit: Unit, param: ShardedParam) -> None:
        """Note which sharded parameter of which unit `name` stands for."""
        self.owners[name] = unit, param

    def show(self, name: str, param: nn.Parameter) -> None:
        """Register what a unit has for `name`, unless a user has put something else in its
        place.
        """
        self.shown[name] = param
        if param is self.owners[name][1].sharded:
            self.gathered.pop(name, None)
        else:
            self.gathered[name] = True
        if name in self.replaced:
            return
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            dict.__setitem__(self, name, param)
        else:  # a module that watches assignments, such as nn.LSTM
            setattr(self.module, name, param)

    @untraced
    def _assign(self, name: str, value: Any) -> None:
        """A user assigns: what is the unit's own again, another sharded parameter (tied from now
        on), or something else.
        """
        unit, param = self.owners[name]
        if value is None or not (
            value is self.shown[name] or value is param.sharded or value is param.unsharded
        ):
            other = sharded_behind(value)
            if other is None:
                check_lasts(self.module, name, value)
                self.replaced[name] = unit.was_assigned = True
                dict.__setitem__(self, name, value)
                return
            unit.tie(self.module, name, param, *other)
        self.replaced.pop(name, None)
        dict.__setitem__(self, name, self.shown[name])

    def items(self) -> Any:
        """See `Watched`; units are told of whoever looks at what is gathered."""
        if self.gathered and _watches[-1] and not torch.compiler.is_dynamo_compiling():
            for unit in dict.fromkeys(self.owners[name][0] for name in self.gathered):
                unit.on_listed()
        return super().items()

    def __delitem__(self, name: str) -> None:
        if name in self.shown:
            self.replaced[name] = True
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a name."""
        if name in self.shown:
            self.replaced[name] = True
        return super().pop(name, *default)


@contextmanager
def unwatched() -> Iterator[None]:
    """Who looks through parameters inside knows what is registered there."""
    _watches.append(False)
    try:
        yield
    finally:
        _watches.pop()


# After a graph break Dynamo meets these as frames of their own: one code object for all modules,
# and what they answer in a trace is for the trace of a forward.
for _method in (
    method
    for table in (Watched, Registered)
    for method in vars(table).values()
    if isinstance(method, FunctionType)
):
    never_traced_alone(getattr(_method, "__wrapped__", _method))


@untraced
def check_lasts(module: nn.Module, name: str, value: object) -> None:
    """What a forward registers is not to read memory that is emptied behind it.

    Raises:
        RuntimeError: it has the memory of a gathered parameter.
    """
    if not isinstance(value, nn.Parameter) or value.layout is not torch.strided:
        return
    memory = local_tensor(value).untyped_storage()._cdata
    for unit in list(UNITS):
        for param in unit.params:
            if param.unsharded is None or param.is_borrowed or value is param.unsharded:
                continue
            if param.gathered.untyped_storage()._cdata == memory:
                raise RuntimeError(
                    f"{type(module).__name__}: {name} is to be a Parameter that has the memory of "
                    f"{param.fqn}, as unit {unit.name!r} has gathered it: that memory is emptied "
                    "behind forward. Register a copy of it, nn.Parameter(p.detach().clone()), or "
                    "register it before fully_shard"
                )


def sharded_behind(value: object) -> tuple[Unit, ShardedParam] | None:
    """The unit and the sharded parameter of which this is the sharded or the full form; None for
    anything else.
    """
    if not isinstance(value, nn.Parameter):
        return None
    for unit in list(UNITS):
        for param in unit.params:
            if value is param.sharded or value is param.unsharded:
                return unit, param
    return None


def named_in_trace(
    module: nn.Module, prefix: str, recurse: bool, remove_duplicate: bool
) -> Iterator[tuple[str, Any]]:
    """`named_parameters` of a sharded module in a trace: a parameter that several modules hold
    comes once.
    """
    members = (
        module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
        if recurse
        else [(prefix, module)]
    )
    known = set()
    for path, member in members:
        table: Any = member._parameters
        if isinstance(table, Watched):
            entries = table.seen(tells_apart=True)
        else:
            entries = [(name, value, value) for name, value in table.items()]
        for name, value, identity in entries:
            if value is None or (remove_duplicate and identity in known):
                continue
            known.add(identity)
            yield f"{path}.{name}" if path else name, value


def registered(module: nn.Module) -> Registered:
    """The `_parameters` of a module, from now on a `Registered`."""
    if not isinstance(module._parameters, Registered):
        module.__dict__["_parameters"] = Registered(module)
    found: Registered = module._parameters  # type: ignore[assignment]
    return found
