"""Parameters that bring an all-gather of their own (`extension.py`), read in a graph.

[Note: extensions in graphs]
The methods of the subclass are traced where the parameter is read, with the tensors inside of its
shard as inputs of the graph:

    %codes, %scale = ... what fsdp_pre_all_gather makes of %inner ...
    %all_codes = unshard(%codes, "w:0")
    %all_scales = unshard(%scale, "w:1")
    %w = ... what fsdp_post_all_gather makes of %all_codes and %all_scales ...

So its gathers are bucketed, scheduled, freed and repeated in backward like any, and what stands
around them is compiled. A full parameter that is a subclass itself (float8, say) is taken apart by
AOTAutograd, as everywhere. The gradient goes to the parameter's place in the unit's flat gradient;
the flat buffer takes one element of memory, since nothing rests there.

A subclass that a graph cannot have keeps its unit out of graphs, announced with the reason: it does
not say all that is inside (`__tensor_flatten__`), its methods belong to one object, ask for values,
or write to what outlives them: a graph has them once a step, where eager mode calls them again in
backward. What the methods read besides the shard and their arguments (globals, attributes of the
module) is taken as it is when the graph is made.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.schema import UNSHARD
from compiled_fsdp.torch_private.fakes import as_fakes, tells_what_is_inside, writes_to
from compiled_fsdp.wire.ops import TRACED

from .extension import PRE, pre_all_gather
from .handles import APART, Handle
from .precision import policy_of
from .specs import traced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from compiled_fsdp.ir.spec import ParamSpec

    from .flat import FlatBuffer
    from .param import ShardedParam
    from .unit import Unit

WHY_EAGER = "an all-gather extension (fsdp_pre_all_gather) that no graph can have"


class TracedExtension:
    """How a graph gathers one such parameter, under the current settings of its unit.

    spec: of the parameter; its gathers have others, with their own shapes and dtypes.
    was_tried: whether it is known that its methods can be traced.
    names, context: what the shard said of itself (`__tensor_flatten__`).
    aside: its other attributes.
    key: what a graph knows it by.
    """

    def __init__(
        self,
        param: ShardedParam,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        spec: ParamSpec,
    ) -> None:
        self.param = param
        self.mesh = mesh
        self.policy = policy
        self.spec = spec
        self.was_tried = False
        local: Any = param.local
        self.names, self.context = local.__tensor_flatten__()
        self.aside = _aside(local, self.names)
        kind: Any = type(local)
        self.methods = kind, kind.fsdp_pre_all_gather, kind.fsdp_post_all_gather
        self.key = f"{spec.key()}, version {next(_versions)}"

    def is_like(self, other: TracedExtension) -> bool:
        """Whether a graph that was made with the other one does for this one too."""
        names = ("spec", "mesh", "policy", "methods", "names", "context", "aside")
        return all(_is_same(getattr(self, name), getattr(other, name)) for name in names)

    def is_current(self) -> bool:
        """Whether the shard says of itself what it said, and has the tensors of the handle."""
        local: Any = self.param.local
        names, context = local.__tensor_flatten__()
        said = names, context, _aside(local, names)
        return _is_same(said, (self.names, self.context, self.aside)) and all(
            map(operator.is_, inner_of(local), self.param.handle.inner)
        )

    def gather(self, inner: Sequence[Tensor], shard: Any = None) -> Tensor:
        """The full parameter, from the tensors inside of this rank's shard."""
        shard = self.shard_of(inner) if shard is None else shard
        tensors, metadata = pre_all_gather(shard, self.param, self.mesh, self.policy)
        gathered = tuple(self._gather_one(i, tensor) for i, tensor in enumerate(tensors))
        full, _ = shard.fsdp_post_all_gather(gathered, metadata, self.spec.dtype)
        shape = self.param.layout.shape
        made: Tensor = full if tuple(full.shape) == shape else full.as_strided(shape, full.stride())
        return made

    def shard_of(self, inner: Sequence[Tensor]) -> Tensor:
        """A shard like the parameter's, around other tensors. What `__tensor_unflatten__` forgets
        of them, as that of torchao's float8 weights forgets the scale, is put back.
        """
        local: Any = self.param.local
        inside = dict(zip(self.names, inner, strict=True))
        made: Tensor = type(local).__tensor_unflatten__(
            inside, self.context, local.shape, local.stride()
        )
        for name, tensor in inside.items():
            if getattr(made, name, None) is not tensor:
                setattr(made, name, tensor)
        return made

    def _forgotten(self, shard: Tensor) -> str:
        """An attribute that is another one after `__tensor_unflatten__`; "" if there is none."""
        local = self.param.local
        names = (*self.aside, *_aside(shard, self.names))
        before, after = ({n: getattr(t, n, None) for n in names} for t in (local, shard))
        return _differing(before, after)

    def _gather_one(self, place: int, tensor: Tensor) -> Tensor:
        """An input's gather, [group_size * rows, ...]; 8-bit floats travel as bytes, since not
        every backend knows them.
        """
        rows = tensor.shape or torch.Size([1])
        is_narrow = tensor.is_floating_point() and tensor.itemsize == 1
        sent = tensor.view(torch.uint8) if is_narrow else tensor
        spec = replace(
            self.spec,
            offset=0,
            shape=(self.spec.group_size * rows[0], *rows[1:]),
            dim=0,
            dtype=sent.dtype,
            fqn=f"{self.spec.fqn}:{place}",
            is_extended=True,
        )
        full: Tensor = UNSHARD(sent.reshape(-1), *spec.args())
        return full.view(tensor.dtype) if is_narrow else full

    def why_not(self) -> str:
        """Why a trace of the methods fails; "" if it does not. They run once, on fake tensors."""
        was_traced = self.spec.unit in TRACED
        kind = type(self.param.local).__name__
        module = self.param.owners[0][0]
        holds = vars(module), module._buffers
        before = [dict(held) for held in holds]
        try:
            with as_fakes(inner_of(self.param.local)) as inner, torch.no_grad():
                shard = self.shard_of(inner)
                held = dict(vars(shard))
                if name := self._forgotten(shard):
                    return f"{kind}.__tensor_unflatten__ forgets {name}"
                with writes_to(inner) as written:
                    full = self.gather(inner, shard)
        except Exception as error:  # noqa: BLE001  # the methods are anybody's
            said = (str(error).splitlines() or [""])[0][:200]
            return f"tracing the one of {kind} ends in {type(error).__name__}: {said}"
        finally:
            changed = [_put_back(*pair) for pair in zip(holds, before, strict=True)]
            if not was_traced:
                TRACED.discard(self.spec.unit)
        if not _is_plain(full) and not tells_what_is_inside(full):
            return f"{kind} becomes a {type(full).__name__} without __tensor_flatten__"
        if name := _differing(held, vars(shard)) or "".join(changed) or "".join(written[:1]):
            return f"the one of {kind} writes to what outlives it ({name})"
        return ""


_versions = itertools.count()
NUM_KEPT = 63  # of one parameter: coming back to settings of before finds the graphs made for them

# By the keys that stand in graphs, for as long as the parameter has it.
EXTENSIONS: WeakValueDictionary[str, TracedExtension] = WeakValueDictionary()


def inner_of(local: Any) -> tuple[Tensor, ...]:
    """The tensors inside of a shard."""
    return tuple(getattr(local, name) for name in local.__tensor_flatten__()[0])


def _aside(local: Any, names: Sequence[str]) -> dict[str, Any]:
    """The attributes of a shard that are no tensors inside; not those that Dynamo gives it."""
    own = vars(local).items()
    return {k: v for k, v in own if k not in names and not k.startswith("_dynamo")}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal; where they cannot be compared, whether they are one."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # a tensor has no truth value
        return False


def _differing(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The first name under which two dicts hold different values; "" if they hold the same."""
    names = dict.fromkeys((*before, *after))
    missing = object()
    return next(
        (n for n in names if not _is_same(before.get(n, missing), after.get(n, missing))), ""
    )


def _put_back(held: dict[str, Any], before: dict[str, Any]) -> str:
    """Let a dict hold what it held; returns the first name that had changed, "" if none had."""
    if name := _differing(before, held):
        held.clear()
        held.update(before)
    return name


def _is_plain(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and not tells_what_is_inside(tensor)


def handle_of(unit: Unit, flat: FlatBuffer, param: ShardedParam, *, is_frozen: bool) -> Handle:
    """What a traced read of such a parameter finds under the current settings."""
    param.why_apart = param.why_apart or _why_apart(param)
    if param.why_apart:
        param.extension = None
        return APART
    spec = replace(traced(unit, param.spec), overlap="")
    policy = policy_of(unit.mp_policy, param.compute)
    made = TracedExtension(param, flat.mesh_info.shard_mesh, policy, spec)
    param.extension = next(filter(made.is_like, param.extensions), made)
    if param.extension is made:
        param.extensions = [*param.extensions[-NUM_KEPT:], made]
        EXTENSIONS[made.key] = made
    inner = inner_of(param.local)
    for tensor in inner:
        torch._dynamo.mark_static(tensor)
    units = (f"#{unit.number}", *unit.shared_with)
    return Handle(flat.data, param.extension.key, is_frozen, units=units, inner=inner)


def _why_apart(param: ShardedParam) -> str:
    """Why no graph can have it, as far as that is known without a trace; "" if one can."""
    local: Any = param.local
    kind = type(local).__name__
    if PRE in vars(local):
        return f"{PRE} is a method of one {kind} alone"
    if not tells_what_is_inside(local):
        return f"{kind} has no __tensor_flatten__"
    if not all(map(_is_plain, inner_of(local))):
        return f"the tensors inside of {kind} are subclasses themselves"
    if not _is_same(local.__tensor_flatten__()[1], local.__tensor_flatten__()[1]):
        return f"what {kind}.__tensor_flatten__ says besides names is equal to nothing"
    if param.spec.device:
        return "CPU offload beside an accelerator"
    if param.full is not None:
        return "tensor parallelism"
    return ""


def follow_extensions(unit: Unit, *, is_traced: bool) -> None:
    """Before a graph is made or called: find out, once, whether one can have the unit's extensions,
    and follow what is inside of their shards. is_traced: a larger graph is being made.
    """
    if not unit.has_extensions:
        return
    extensions = [p.extension for p in unit.params if p.extension is not None]
    if old := [extension for extension in extensions if not extension.is_current()]:
        if is_traced and any(extension.was_tried for extension in old):
            warn_once(
                f"compiled_fsdp: what is inside of the shard of {old[0].spec.fqn} was replaced "
                "since a larger function than the model was compiled, which is compiled again each "
                "time. Compile the sharded module itself, which follows, or write in place"
            )
        unit.publish()
    is_refused = False
    for param in unit.params:
        if param.extension is not None and not param.extension.was_tried:
            param.extension.was_tried = True
            param.why_apart = param.extension.why_not()
            is_refused = is_refused or bool(param.why_apart)
    if is_refused:
        unit.publish()


def why_extensions(unit: Unit) -> str:
    """Which all-gather extension keeps a unit out of graphs, and why; "" if none does."""
    found = [f"{p.fqn}: {p.why_apart}" for p in unit.params if p.extends and p.why_apart]
    return f"{WHY_EAGER} ({found[0]})" if found else ""


def no_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat buffer in which nothing rests, and to which gradients of its size belong."""
    return torch.zeros(1, dtype=dtype, device=device).expand(numel)
