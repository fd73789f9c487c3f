"""Parameters whose local tensor is a subclass that says itself what is gathered
(`fsdp_pre_all_gather`, `fsdp_post_all_gather`).

Such a parameter keeps its tensor: it cannot be a view of a flat buffer. The subclass turns it into
plain tensors before the all-gather (quantised data and scales, for example) and builds the full
parameter from what arrives. Only its gradient is like any other's. Here is how the eager runtime
gathers it; `traced_extension.py` is how a graph does.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.torch_private.autograd import allocate, preserve_version
from compiled_fsdp.torch_private.dtensors import contiguous_stride

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from compiled_fsdp.wire.deferred import Deferred
    from compiled_fsdp.wire.deferred import Value as Recorded

    from .param import ShardedParam

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
# optional; known to stock since torch 2.15
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def has_extension(thing: Tensor | type[Tensor], name: str) -> bool:
    """Whether a parameter's local tensor, or its class, brings an all-gather of its own.

    Raises:
        AssertionError: it has one of the two methods without the other, or neither and says when to
            release what they gather.
    """
    has_pre, has_post = hasattr(thing, PRE), hasattr(thing, POST)
    if has_pre != has_post:
        kind = thing if isinstance(thing, type) else type(thing)
        raise AssertionError(
            f"fully_shard: parameter {name} is a {kind.__name__} with {PRE if has_pre else POST} "
            f"and without {POST if has_pre else PRE}; an all-gather extension needs both. Define "
            "the other, or neither"
        )
    if hasattr(thing, RELEASE) and not has_post:
        raise AssertionError(
            f"fully_shard: parameter {name} defines {RELEASE} and neither {PRE} nor {POST}. Define "
            "them, or leave it out"
        )
    return has_pre


def releases_outputs(local: Any, name: str) -> bool:
    """Whether a subclass says that what it has built does not need what was gathered.

    Raises:
        AssertionError: it says something else than a bool.
    """
    answer = getattr(local, RELEASE, lambda: False)()
    if not isinstance(answer, bool):
        raise AssertionError(
            f"fully_shard: {RELEASE} of parameter {name} returned {answer!r}; should return a bool"
        )
    return answer


def pre_all_gather(
    local: Any, param: ShardedParam, mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> tuple[tuple[Tensor, ...], Any]:
    """What a shard contributes, and what its subclass wants to be told again afterwards.

    Raises:
        AssertionError: another signature than stock accepts, or an unevenly cut parameter whose
            input is not padded.
    """
    signature = inspect.signature(local.fsdp_pre_all_gather)
    if len(signature.parameters) not in (1, 5):
        raise AssertionError(
            f"{param.fqn}: {type(local).__name__}.fsdp_pre_all_gather takes {signature}; "
            "should take (mesh, outer_size, outer_stride, module, mp_policy), or (mesh) alone"
        )
    if len(signature.parameters) == 1:
        tensors, metadata = local.fsdp_pre_all_gather(mesh)
        return tensors, metadata
    shape = torch.Size(param.layout.shape)
    module = param.owners[0][0]
    tensors, metadata = local.fsdp_pre_all_gather(
        mesh, shape, contiguous_stride(shape), module, policy
    )
    padded = param.layout.padded_shape
    if tuple(local.shape) != padded and any(tuple(t.shape) != padded for t in tensors):
        raise AssertionError(
            f"{param.fqn} of shape {tuple(shape)} is cut unevenly, and "
            f"{type(local).__name__}.fsdp_pre_all_gather returned "
            f"{[tuple(t.shape) for t in tensors]}; should return the padded size {padded}"
        )
    return tensors, metadata


class Extension:
    """The gathers of one such parameter.

    outputs: what arrived, one flat tensor for each input; like `inner`, the storage is emptied and
        filled again, since the full parameter may be a view of it.
    inner: tensors inside the full parameter that the subclass allocated.
    """

    def __init__(self, param: ShardedParam, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
        self.param = param
        self.mesh = mesh
        self.policy = policy
        self.metadata: Any = None
        self.sizes: list[torch.Size] = []
        self.outputs: list[Tensor] = []
        self.inner: tuple[Tensor, ...] = ()
        self.releases = releases_outputs(param.local, param.fqn)

    def inputs(self) -> list[Tensor]:
        """Returns what this rank contributes, as the subclass has it now.

        Raises:
            AssertionError: see `pre_all_gather`.
        """
        local: Any = self.param.local
        if self.param.spec.device:
            local = local.to(self.param.spec.device)
        tensors, self.metadata = pre_all_gather(local, self.param, self.mesh, self.policy)
        self.sizes = [t.shape for t in tensors]
        return [t.reshape(-1) for t in tensors]

    def fill(self, gathered: Sequence[Tensor]) -> None:
        """Build the full parameter, or fill it again, from one gathered tensor for each input."""
        self._build(gathered)
        for output in self.outputs if self.releases else ():
            output.untyped_storage().resize_(0)

    def _build(self, gathered: Sequence[Tensor]) -> None:
        if not self.outputs:
            self.outputs = [
                torch.empty_like(t, memory_format=torch.contiguous_format) for t in gathered
            ]
        for output, tensor in zip(self.outputs, gathered, strict=True):
            allocate(output, output.numel() * output.itemsize)
            with preserve_version(output):
                output.copy_(tensor)
        outputs = tuple(
            o.view(-1, *size[1:]) for o, size in zip(self.outputs, self.sizes, strict=True)
        )
        local: Any = self.param.local
        metadata, self.metadata = self.metadata, None
        if self.param.unsharded is None:
            full, inner = local.fsdp_post_all_gather(outputs, metadata, self.param.spec.dtype)
            self.inner = tuple(inner)
            shape = torch.Size(self.param.layout.shape)
            self.param.set_gathered(torch.as_strided(full, shape, contiguous_stride(shape), 0))
            return
        for tensor in self.inner:
            allocate(tensor, tensor.numel() * tensor.itemsize)
        with preserve_version(self.param.unsharded):
            local.fsdp_post_all_gather(
                outputs, metadata, self.param.spec.dtype, out=self.param.unsharded
            )

    def free(self) -> None:
        """Empty the storage of everything that was gathered or built."""
        for tensor in (*self.outputs, *self.inner):
            tensor.untyped_storage().resize_(0)


def gather_extensions(run: Deferred, members: Sequence[tuple[Extension, list[Tensor]]]) -> Recorded:
    """One all-gather for the inputs of several parameters, as bytes if their dtypes differ:
    [group_size, ...].
    """
    tensors = [tensor for _, inputs in members for tensor in inputs]
    if len({t.dtype for t in tensors}) > 1:
        tensors = [t.view(torch.uint8) for t in tensors]
    spec = members[0][0].param.spec
    joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    gathered = comm.all_gather(run, joined, spec)
    recorded: Recorded = run(comm.aten.view.default, gathered, [spec.group_size, joined.numel()])
    return recorded


def fill_all(gathered: Tensor, members: Sequence[tuple[Extension, list[Tensor]]]) -> None:
    """Give every parameter its columns of what arrived."""
    start = 0
    for extension, inputs in members:
        columns = []
        for tensor in inputs:
            width = tensor.numel() * tensor.itemsize // gathered.itemsize
            columns.append(gathered.narrow(1, start, width).reshape(-1).view(tensor.dtype))
            start += width
        extension.fill(columns)


def buckets(extensions: Iterable[Extension]) -> list[list[tuple[Extension, list[Tensor]]]]:
    """Returns what is gathered together: all that goes over one group; this asks every subclass for
    its inputs.
    """
    found: dict[str, list[tuple[Extension, list[Tensor]]]] = {}
    for extension in extensions:
        found.setdefault(extension.param.spec.group, []).append((extension, extension.inputs()))
    return list(found.values())
