"""The classes that sharded modules get: `FSDPX` for the modules of a call, and reads of parameters
that trace to ops.

[Note: how a parameter is read]
The class of every module that owns a sharded parameter is replaced by a subclass with one property
per parameter. While Dynamo traces, the property yields an `fsdp::unshard` of the unit's flat
buffer; otherwise it yields what is registered under the name: the unsharded parameter inside an
eager forward, the sharded DTensor outside. So it does not matter how a compiled region is reached,
or how much of the model it covers: what is read is gathered, exactly once after `dedup_unshard`.
What a user has put in a parameter's place is what is read instead, and iterating over parameters
yields what an eager forward would find: `registered.py`. Inside an eager forward (a graph break in
the unit, a submodule compiled by itself) the full parameters are there already: compiled parts read
them as inputs, and the eager runtime reduces their gradients.
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from compiled_fsdp.torch_private.contains import look_at_every_item
from compiled_fsdp.torch_private.dtensors import movable
from compiled_fsdp.torch_private.dynamo import READS_DICTS, never_traced_alone, untraced
from compiled_fsdp.units.reads import traced, unshard_as
from compiled_fsdp.units.registered import Registered, Watched
from compiled_fsdp.units.unit import original_class, originals
from compiled_fsdp.wire.ops import TRACED

from .moved import noting
from .zero_grad import zeroing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from compiled_fsdp.units.handles import Handle
    from compiled_fsdp.units.unit import Unit

    from .state import State


WRITTEN_OVER = (
    "a forward puts a plain attribute in the place of a sharded parameter that no name is "
    "registered for (FullyShardedDataParallel without use_orig_params, object.__setattr__)"
)

_classes: dict[tuple[type, type | None], type] = {}
# Of every module that has been given a class here: what users call on it, if it is one of a call.
_roots: weakref.WeakKeyDictionary[nn.Module, type | None] = weakref.WeakKeyDictionary()


def swap_class(module: nn.Module, names: tuple[str, ...], root: type | None = None) -> None:
    """Give `module` the subclass of its original class that reads parameters as ops; modules of one
    class share it.

    root: for a module that a call was given, the class of what users call on it.
    """
    look_at_every_item()
    _roots[module] = root
    made = _class_for(original_class(module), root, names)
    module.__dict__.setdefault("_fsdp_handles", {})
    module.__dict__.setdefault("_fsdp_replaced", {})
    if not READS_DICTS:
        module.__dict__.setdefault("_fsdp_attributes", Attributes(module))
    object.__setattr__(module, "__class__", made)  # an OptimizedModule passes plain assignments on


def _class_for(original: type, root: type | None, names: Iterable[str]) -> type:
    if (original, root) not in _classes:
        _classes[original, root] = _make_class(original, root)
    made = _classes[original, root]
    for name in names:
        if name not in vars(made):
            setattr(made, name, property(*_accessors(name)))
    return made


def keep_classes(unit: Unit) -> None:
    """Before a call: a user may have given a module another class (`layer.__class__ = Other`), with
    which a trace would find sharded parameters. A class that comes from one of ours, as a
    parametrization's, reads as ours does.
    """
    for module in unit.own_modules():
        if module not in _roots or any(kind in originals for kind in type(module).__mro__):
            continue
        table = module._parameters
        names = table.owners if isinstance(table, Registered) else table
        own = tuple(name for name in names if not hasattr(type(module), name))
        swap_class(module, own, _roots[module])


class Attributes:
    """The `__dict__` of a module as attributes that no property hides: for traces where Dynamo sees
    the property even when the dict is asked.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        if module is not None:
            self.__dict__ = module.__dict__

    def __reduce__(self) -> Any:
        """A copy is empty: it would not be of the copied module."""
        return Attributes, ()


class _Unannounced:
    """Stands before a class of the user's, whose `__init_subclass__` is not to hear of another one:
    it may keep a table of classes by their names, or ask for arguments.
    """

    def __init_subclass__(cls) -> None:
        pass


def _make_class(original: type, root: type | None) -> type:
    body: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "zero_grad": zeroing(original),
    }
    # A user's class may come from one of ours, as torch's parametrizations of a sharded layer do.
    is_ours = issubclass(original, _Unannounced)
    bases: tuple[type, ...] = (original,) if is_ours else (_Unannounced, original)
    name = original.__name__
    if root is not None:
        name = f"FSDP{name}"
        bases = (root, *bases)
        body |= {"__qualname__": name, "__deepcopy__": _no_deepcopy}
        if original.__module__.startswith("torch.nn."):
            body["forward"] = _own_forward(original)
    else:
        body |= {"_compiled_call_impl": _checked_call, "__reduce_ex__": _as_original}
        body["_apply"] = noting(original)
    kind: Any = type
    # Torch has made it for one module, and put this there; of an abstract class, its module is abc.
    if getattr(vars(original).get("__getstate__"), "__module__", "") == parametrize.__name__:
        own = type(original)
        kind = _Parametrized if own is type else type(own.__name__, (_Parametrized, own), {})
    made: type = kind(name, bases, body)
    originals[made] = original
    return made


class _Parametrized(type):
    """The class of what stands for a class that torch has made for a parametrized module:
    `remove_parametrizations` deletes a property of the module's class, and gives the module that
    class's first base.
    """

    def __delattr__(cls, name: str) -> None:
        if name in vars(cls) or cls not in originals:
            super().__delattr__(name)
        else:
            delattr(originals[cls], name)

    @property
    def __bases__(cls) -> tuple[type, ...]:  # type: ignore[override]
        """That of the class that it stands for; of a module of a call, what stands for that one."""
        if cls not in originals:  # it is being made, or comes from one of ours
            bases: tuple[type, ...] = vars(type)["__bases__"].__get__(cls)
            return bases
        base = originals[cls].__bases__[0]
        root = next(root for (_, root), made in _classes.items() if made is cls)
        if root is None:
            return (base,)
        names = (name for name, value in vars(cls).items() if isinstance(value, property))
        return (_class_for(base, root, names),)


def _own_forward(original: Any) -> Callable[..., Any]:
    """A forward outside torch's own files: for those, `torch.compile` starts its graph inside our
    `__call__`.
    """

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original.forward(self, *args, **kwargs)

    return forward


def _accessors(
    name: str,
) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None], Callable[[Any], None]]:
    """Get, set and delete for a property; on an object of the class whose `name` is not a sharded
    parameter, as if without it.
    """

    def read(self: nn.Module) -> Any:
        owner: Any = self
        if torch.compiler.is_dynamo_compiling():
            handles = owner._fsdp_handles
            # Where `functional_call` writes, or Dynamo takes it for another dict once a function of
            # `torch.cond` has read the module: what it found there it keeps by where it was found.
            # As `owner.__dict__["_parameters"]`, each call would compare five things less for a
            # layer, but what was replaced after such a function would be missed.
            table = owner._parameters
            is_replaced = isinstance(table, Watched) and name in table.replaced
            if READS_DICTS and isinstance(table, Registered) and name in owner.__dict__:
                return _held(self, name)
            if name in handles and not is_replaced:
                handle = handles[name]
                if handle.is_plain:  # as `traced` would, with nothing that Dynamo has to follow
                    return unshard_as(handle.flat, handle.key)
                if handle.key:
                    return traced(owner, name)
        return _held(self, name)

    def write(self: nn.Module, value: object) -> None:
        _check_written_over(self, name)
        self.__dict__[name] = value

    def delete(self: nn.Module) -> None:
        _check_written_over(self, name)
        self.__dict__.pop(name)

    # A read by itself would be a graph, and what is written to its result is lost.
    for accessor in (read, write, delete):
        never_traced_alone(accessor)
    return read, write, delete


def _check_written_over(module: Any, name: str) -> None:
    """A graph break where a traced read of this name yields a unit's parameter."""
    handle = module._fsdp_handles.get(name)
    if (
        torch.compiler.is_dynamo_compiling()
        and handle is not None
        and handle.key
        and name not in module._fsdp_replaced
    ):
        torch._dynamo.graph_break(msg=WRITTEN_OVER)


def _held(module: Any, name: str) -> Any:
    """What a module has under a name, if that is no sharded parameter at rest in a trace.

    As in any module, what is in its `__dict__` hides a parameter of the name.
    """
    if name in module.__dict__:
        if torch.compiler.is_dynamo_compiling() and not READS_DICTS:
            return getattr(module._fsdp_attributes, name)
        return module.__dict__[name]
    if name in module._parameters:
        return module._parameters[name]
    return nn.Module.__getattr__(module, name)


never_traced_alone(_check_written_over)
never_traced_alone(_held)


def _checked_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a call runs of a module that owns sharded parameters and is not a unit's own: in eager
    mode they must be gathered.

    As `_compiled_call_impl` of the class, not as a `__call__`: where `__call__` is `nn.Module`'s
    own, and there are no hooks, Dynamo goes straight to `forward`.
    """
    if not torch.compiler.is_dynamo_compiling():
        _check_gathered(self, args)
    return self._call_impl(*args, **kwargs)


never_traced_alone(_checked_call)


@untraced
def _check_gathered(module: nn.Module, args: tuple[Any, ...]) -> None:
    handles: dict[str, Handle] = module.__dict__.get("_fsdp_handles", {})
    closed = [
        name
        for name, handle in handles.items()
        if handle.key and isinstance(module._parameters.get(name), DTensor)
    ]
    if not closed or any(isinstance(a, DTensor) for a in args):
        return
    if isinstance(module, parametrize.ParametrizationList):
        return  # computes of its parameters alone: `layer.weight`, as DTensor can
    state: State = module.__dict__["_fsdp_owner"]
    sharded = [
        p
        for p in state.unit.params
        for name in closed
        if (module, name) in p.owners and module._parameters[name] is p.sharded
    ]
    if not sharded:
        return
    raise RuntimeError(
        f"{type(module).__name__} was called while its parameter {sharded[0].fqn} is sharded: its "
        f"unit {state.unit.name!r} {_why_sharded(state)}"
    )


def _why_sharded(state: State) -> str:
    """Of a unit that was freed before somebody came to one of its modules; what to do."""
    if state.unit.key in TRACED:
        return (
            "is in a graph, which leaves nothing gathered behind it. Give this module a unit of "
            "its own, by fully_shard before its parent's; or compile what calls it together with "
            "the model; or, for another method of a sharded module, call "
            "register_fsdp_forward_method(sharded_module, name)"
        )
    return (
        "was not called, but another method of it, or its forward(...) by name, which passes over "
        "the hooks that gather; or its call has ended, which leaves nothing gathered where no "
        "gradient is asked for. Call the module itself; or call "
        "register_fsdp_forward_method(sharded_module, name) for that method, or "
        "sharded_module.unshard() before and .reshard() after it"
    )


def _as_original(self: Any, _protocol: object) -> tuple[Any, ...]:
    """To copy and to pickle: a module of the original class that holds what is registered, DTensors
    at rest, and is no part of a unit, as with torch's `fully_shard`.
    """
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    if isinstance(state, dict):
        state = {
            name: value
            for name, value in state.items()
            if not name.startswith(("_fsdp_", "_is_fsdp_"))
        }
        state["_parameters"] = {
            name: movable(value) if isinstance(value, DTensor) else value
            for name, value in dict.items(self._parameters)
        }
    return copyreg._reconstructor, (original_class(self), object, None), state  # type: ignore[attr-defined]


def _no_deepcopy(*_: object) -> NoReturn:
    raise AssertionError(
        "FSDP does not support deepcopy: a sharded module shares flat buffers and process groups. "
        "Copy its state_dict; for a second model, as AveragedModel makes, build and shard another "
        "one and load that into it"
    )
