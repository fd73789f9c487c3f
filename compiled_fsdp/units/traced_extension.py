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
not say what is inside (`__tensor_flatten__`), its methods belong to one object, or they ask for
values. What the methods read besides the shard and their arguments (globals, attributes of the
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

from compiled_fsdp.ir.schema import UNSHARD
from compiled_fsdp.torch_private.fakes import as_fakes, tells_what_is_inside
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
        kind: Any = type(local)
        self.methods = kind, kind.fsdp_pre_all_gather, kind.fsdp_post_all_gather
        self.key = f"{spec.key()}, version {next(_versions)}"

    def is_like(self, other: TracedExtension) -> bool:
        """Whether a graph that was made with the other one does for this one too."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("spec", "mesh", "policy", "methods", "names", "context")
        )

    def gather(self, inner: Sequence[Tensor]) -> Tensor:
        """The full parameter, from the tensors inside of this rank's shard."""
        shard: Any = self._shard_of(inner)
        tensors, metadata = pre_all_gather(shard, self.param, self.mesh, self.policy)
        gathered = tuple(self._gather_one(i, tensor) for i, tensor in enumerate(tensors))
        full, _ = shard.fsdp_post_all_gather(gathered, metadata, self.spec.dtype)
        shape = self.param.layout.shape
        made: Tensor = full if tuple(full.shape) == shape else full.as_strided(shape, full.stride())
        return made

    def _shard_of(self, inner: Sequence[Tensor]) -> Tensor:
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
        try:
            with as_fakes(inner_of(self.param.local)) as inner, torch.no_grad():
                full = self.gather(inner)
        except Exception as error:  # noqa: BLE001  # the methods are anybody's
            said = (str(error).splitlines() or [""])[0][:200]
            return f"tracing the one of {kind} ends in {type(error).__name__}: {said}"
        finally:
            if not was_traced:
                TRACED.discard(self.spec.unit)
        if not _is_plain(full) and not tells_what_is_inside(full):
            return f"{kind} becomes a {type(full).__name__} without __tensor_flatten__"
        return ""


_versions = itertools.count()

# By the keys that stand in graphs, for as long as the parameter has it.
EXTENSIONS: WeakValueDictionary[str, TracedExtension] = WeakValueDictionary()


def inner_of(local: Any) -> tuple[Tensor, ...]:
    """The tensors inside of a shard."""
    return tuple(getattr(local, name) for name in local.__tensor_flatten__()[0])


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
    if param.extension is None or not made.is_like(param.extension):
        param.extension = made
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
    if param.spec.device:
        return "CPU offload beside an accelerator"
    if param.full is not None:
        return "tensor parallelism"
    return ""


def follow_extensions(unit: Unit) -> None:
    """Before a graph is made or called: find out, once, whether one can have the unit's extensions,
    and follow what is inside of their shards.
    """
    if not unit.has_extensions:
        return
    is_old = False
    for param in unit.params:
        extension = param.extension
        if extension is None:
            continue
        if not extension.was_tried:
            extension.was_tried = True
            param.why_apart = extension.why_not()
        local: Any = param.local
        names, context = local.__tensor_flatten__()
        is_same = (names, context) == (extension.names, extension.context) and all(
            map(operator.is_, inner_of(local), param.handle.inner)
        )
        is_old = is_old or bool(param.why_apart) or not is_same
    if is_old:
        unit.publish()


def why_extensions(unit: Unit) -> str:
    """Which all-gather extension keeps a unit out of graphs, and why; "" if none does."""
    found = [f"{p.fqn}: {p.why_apart}" for p in unit.params if p.extends and p.why_apart]
    return f"{WHY_EAGER} ({found[0]})" if found else ""


def no_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat buffer in which nothing rests, and to which gradients of its size belong."""
    return torch.zeros(1, dtype=dtype, device=device).expand(numel)
