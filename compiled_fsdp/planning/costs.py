"""Costs of computing and communicating: constants of this machine, measured once, and the time of a
node under them.

A node costs the larger of what its arithmetic and what its memory traffic take (the roofline of
Williams et al., 2009). A collective costs `latency + bytes / bandwidth` of its group's link (the
model of Hockney, 1994), with the bytes that one rank sends.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.expected import hint
from compiled_fsdp.ir.flops import formula_of
from compiled_fsdp.ir.graph import argument, is_matmul, is_view
from compiled_fsdp.ir.meta import get_seconds
from compiled_fsdp.ir.schema import EXCHANGE, ORTHOGONALIZE, UPDATE, traits_of
from compiled_fsdp.ir.subgraphs import unit_called_by
from compiled_fsdp.torch_private.groups import group_named

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch.fx import Node

log = logging.getLogger(__name__)

# An update reads a shard, its gradient and two states, and writes all but the gradient (Adam's).
UPDATE_PASSES = 7
# Bytes a second between a device and pinned host memory, each way, where nothing is known of it:
# what torch assumes (`torch._functorch.config.activation_offload_cpu_gpu_bw`), of PCIe 5.0 with 16
# lanes, which carries 63 GB/s; and what a core of a CPU copies.
HOST_BANDWIDTH = 5e10
COPIED_ON_CPU = 1e10
WITH_BIAS = {"addmm": "mm", "baddbmm": "bmm"}


@dataclass(frozen=True, slots=True)
class Link:
    """One process group's connection.

    latency: seconds until the first byte.
    bandwidth: bytes a second from then on, of all-gathers.
    message: seconds for each further message of the same collective.
    scatter, exchange: bytes a second of the backend's reduce-scatter and of all-to-alls; 0 where
        they were not measured.
    start, issue: seconds, for each collective and for each byte, by which it delays what is
        computed while it is under way: gloo sends and receives on cores, and needs the training
        thread's if the process has no other.
    """

    latency: float
    bandwidth: float
    message: float = 0.0
    scatter: float = 0.0
    exchange: float = 0.0
    start: float = 0.0
    issue: float = 0.0

    def seconds(self, sent: float, bandwidth: float = 0.0) -> float:
        """For a collective in which each rank sends that many bytes; `bandwidth` for another kind
        than all-gathers.
        """
        return self.latency + sent / (bandwidth or self.bandwidth)


@dataclass(frozen=True, slots=True)
class Costs:
    """Constants of the machine, the same on every rank.

    flops: floating-point operations a second, of a large matmul of fp32; other dtypes are taken
        relative to it.
    bandwidth: bytes read or written a second, by kernels that do little else.
    overhead: seconds for launching a kernel.
    links: for each process group, by name; groups that are not there cost what the first one does.
    is_fused: whether a compiler fuses pointwise kernels, so that what passes between them costs
        nothing.
    kernels: seconds of matmuls and attentions that were measured inside the model
        (`measure_kernels`), by `kernel`.
    host: bytes a second that are copied between the device and pinned host memory, each way.
    """

    flops: float
    bandwidth: float
    overhead: float
    links: tuple[tuple[str, Link], ...]
    is_fused: bool = True
    kernels: tuple[tuple[str, float], ...] = ()
    host: float = HOST_BANDWIDTH

    def link(self, group: str) -> Link:
        """The link of a group."""
        known = dict(self.links)
        return known.get(group) or known.get(comm.shared_group(group)) or self.links[0][1]

    def knows(self, group: str) -> bool:
        """Whether there is a link of this very group."""
        return group in dict(self.links)

    def rate(self, node: Node) -> float:
        """Operations a second of a matmul or an attention like this one."""
        return self.flops

    def fused(self, is_fused: bool) -> Costs:
        """The same machine, under a compiler that fuses or one that does not."""
        return replace(self, is_fused=is_fused)

    def compute(self, node: Node) -> float:
        """Seconds that the training thread spends on a node; 0 for views and for what only
        orders.
        """
        settled = get_seconds(node)
        if settled is not None:
            return settled
        if (body := unit_called_by(node)) is not None:
            return sum(map(self.compute, body.nodes))
        if (
            node.op != "call_function"
            or traits_of(node.target).price == "none"
            or node.target is operator.getitem
            or is_view(node)
        ):
            return 0.0
        if traits_of(node.target).is_collective:
            sent, group = traffic(node)
            link = self.link(group)
            return max(self.overhead, link.start) + sent * link.issue
        if is_matmul(node):
            known = _by_key(self.kernels).get(kernel_of(node)) if self.kernels else None
            if known is not None:
                return known
            seconds = flops(node) / self.rate(node)
            return self.overhead + max(seconds, self._traffic(node))
        if node.target is ORTHOGONALIZE:
            work: float = argument(node, "flops")  # of the owner that has most
            return self.overhead + max(work / self.flops, self._traffic(node))
        if node.target is UPDATE:
            return self.overhead + UPDATE_PASSES * nbytes(node.args[1]) / self.bandwidth  # type: ignore[arg-type]
        if self.is_fused and is_fusible(node):
            return self._traffic(node)
        return self.overhead + self._traffic(node)

    def compute_part(self, node: Node, number: int, whole: Collection[Node]) -> float:
        """The same for one of `number` equal parts of the rows that a node computes; each part
        launches it, and reads and writes what is in `whole` anew.
        """
        seconds = self.compute(node)
        if number == 1 or not seconds or (node in whole and not is_matmul(node)):
            return seconds / number  # what no row is in is computed once
        traffic = self._traffic(node, number, whole)
        if is_matmul(node):
            known = _by_key(self.kernels).get(kernel_of(node)) if self.kernels else None
            arithmetic = flops(node) / self.rate(node) if known is None else known - self.overhead
            return self.overhead + max(arithmetic / number, traffic)
        return traffic if self.is_fused and is_fusible(node) else self.overhead + traffic

    def _traffic(self, node: Node, number: int = 1, whole: Collection[Node] = ()) -> float:
        """Seconds for what a node reads and writes; inside a fused kernel only what crosses its
        border counts. Of `number` parts, one: of all but what is in `whole`.
        """
        fuses = self.is_fused and is_fusible(node)
        moved = [n for n in node.all_input_nodes if not (fuses and is_fusible(n))]
        if not fuses or any(not is_fusible(user) for user in node.users):
            moved.append(node)
        moved_bytes = [nbytes(n) if n in whole else nbytes(n) / number for n in moved]
        return sum(moved_bytes) / self.bandwidth

    def wire(self, start: Node) -> float:
        """Seconds that a collective is on the wire."""
        sent, group = traffic(start)
        link = self.link(group)
        return link.seconds(sent, getattr(link, traits_of(start.target).price))

    def copy(self, num_bytes: float) -> float:
        """Seconds that so many bytes take to the host or back, beside what the device computes."""
        return self.overhead + num_bytes / self.host


def assumed(device: str) -> Costs:
    """Round numbers for where nothing was measured: a core of a CPU over a fast network, or a
    data-centre GPU over NVLink.
    """
    if device == "cpu":
        return Costs(5e10, 1e10, 5e-6, (("", Link(1e-4, 1e9)),), host=COPIED_ON_CPU)
    return Costs(3e14, 2e12, 5e-6, (("", Link(2e-5, 1e11)),))


def flops(node: Node) -> float:
    """Floating-point operations of a matmul or an attention, by their formulas; an estimate for
    what they reject.
    """
    args, kwargs = torch.fx.node.map_arg(
        (node.args, node.kwargs), lambda n: _as_now(n.meta.get("val"))
    )
    formula: Any = formula_of(node.target.overloadpacket)  # type: ignore[union-attr]
    try:
        return float(formula(*args, **kwargs, out_val=_as_now(node.meta.get("val"))))
    except Exception as error:  # noqa: BLE001  # formulas are torch's or anybody's, and assert what they like
        log.debug("no formula for the FLOPs of %%%s (%s): %s", node.name, node.target, error)
        return _attention_flops(
            node, [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 4]
        )


def _attention_flops(node: Node, heads: Sequence[torch.Tensor]) -> float:
    """Counts an attention by its sizes alone: keys may have fewer heads than queries, which torch's
    formula takes for an error.

    The first is the gradient in backward, then query, key and value [batch, heads, length, size]; 0
    for what is no attention.
    """
    is_backward = "backward" in str(node.target)
    query, key, value = [*heads[is_backward:][:3], None, None, None][:3]
    if query is None or key is None or value is None:
        return 0.0
    forward = (
        2.0
        * query.shape[0]
        * query.shape[1]
        * query.shape[2]
        * key.shape[2]
        * (query.shape[3] + value.shape[3])
    )
    return 2.5 * forward if is_backward else forward  # five products in the place of two


def _as_now(val: Any) -> Any:
    """A value with the sizes that it has now in the place of symbols: to compute with a symbol
    could fix it.
    """
    if isinstance(val, list | tuple):
        return [_as_now(v) for v in val]
    if isinstance(val, torch.Tensor):
        is_fixed = not any(isinstance(size, torch.SymInt) for size in val.shape)
        return (
            val
            if is_fixed
            else torch.empty([hint(size) for size in val.shape], dtype=val.dtype, device="meta")
        )
    return hint(val) if isinstance(val, torch.SymInt) else val


def kernel(op: torch._ops.OpOverload, args: Sequence[Any]) -> str:
    """Returns what takes the same time: "mm float32[8, 4] float32[4, 2]". The bias of a matmul does
    not count.
    """
    name = op.overloadpacket.__name__
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if name in WITH_BIAS:
        name, tensors = WITH_BIAS[name], tensors[1:]
    return " ".join(
        [
            name,
            *(
                f"{str(t.dtype).removeprefix('torch.')}{[hint(size) for size in t.shape]}"
                for t in tensors
            ),
        ]
    )


def kernel_of(node: Node) -> str:
    """The same of a node."""
    return kernel(node.target, torch.fx.node.map_arg(node.args, lambda n: n.meta.get("val")))  # type: ignore[arg-type]


@cache
def _by_key(kernels: tuple[tuple[str, float], ...]) -> dict[str, float]:
    return dict(kernels)


def is_fusible(node: Node) -> bool:
    """Whether compilers fuse this with its neighbours: pointwise operations and reductions, and
    views between them.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target.namespace in ("aten", "prims") and not is_matmul(node)


def nbytes(node: Node) -> float:
    """Bytes of a node's tensors; symbolic sizes count as their hints."""
    found = node.meta.get("val")
    tensors = (
        [found]
        if isinstance(found, torch.Tensor)
        else found
        if isinstance(found, list | tuple)
        else []
    )
    return float(sum(hint(t.numel()) * t.itemsize for t in tensors if isinstance(t, torch.Tensor)))


def _others(group: str) -> float:
    """The part of what a group holds together that is not this rank's: 1 where nobody knows the
    group, as in a graph by hand.
    """
    try:
        size = group_named(comm.shared_group(group)).size()
    except (RuntimeError, ValueError):
        return 1.0
    return (size - 1) / size


def traffic(start: Node) -> tuple[float, str]:
    """Bytes that each rank sends in a collective, by the best algorithm for it, and the name of the
    group.
    """
    group, kind = comm.group_of(start), traits_of(start.target).starts
    if kind == "all_reduce":
        return 2 * nbytes(start) * _others(group), group
    if kind == "gather":
        return nbytes(start) - nbytes(start.all_input_nodes[0]), group
    if start.target is EXCHANGE:  # tokens of the user's: a rank keeps those of its own experts
        pieces: Any = start.args[2]
        return nbytes(start.all_input_nodes[0]) * (len(pieces) - 1) / max(1, len(pieces)), group
    if argument(start, "owners"):  # pieces of matrices, to their owners or back
        size = int(argument(start, "group_size"))
        pieces = min(nbytes(start), nbytes(start.all_input_nodes[0]))
        return pieces * (size - 1) / size, group
    if kind == "all_to_all":
        size = int(start.args[1])  # type: ignore[arg-type]
        return nbytes(start) * (size - 1) / size, group
    return sum(map(nbytes, start.all_input_nodes)) - nbytes(start), group
