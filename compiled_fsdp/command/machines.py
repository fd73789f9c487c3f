"""Machines that need not be here: what is published of their devices and wires, in files.

A file of `machines/` is JSON with the fields of `Machine`; one of somebody's own is named by its
path. Numbers are peaks of data sheets, dense, in one direction, and the file names its sources.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from compiled_fsdp.ir.collectives import shared_group
from compiled_fsdp.planning.costs import HOST_BANDWIDTH, Costs, Link
from compiled_fsdp.torch_private.groups import group_named
from compiled_fsdp.wire.timed import known_wire

from .asked import AskedError

if TYPE_CHECKING:
    from torch.fx import Node

# Seconds to launch a kernel: what planning assumes of any GPU; no data sheet says it.
LAUNCH = 5e-6


@dataclass(frozen=True)
class Machine:
    """Nodes of a kind of device.

    source: where the numbers come from.
    flops: operations a second of matmuls, by the dtype of their operands; "tf32" is what float32
        takes where `torch.set_float32_matmul_precision` allows it, "float8" stands for all of them.
    memory_bytes, memory_bandwidth: of a device, in bytes and bytes a second.
    host_bandwidth: bytes a second between a device and its host's memory, each way; what planning
        assumes of any, where a file does not say it.
    link_bandwidth, network_bandwidth: bytes a second that a device can send, to others of its node
        and to other nodes.
    """

    name: str
    source: str
    devices_per_node: int
    flops: dict[str, float]
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float = HOST_BANDWIDTH

    @property
    def peak_flops(self) -> float:
        """What a step's operations are compared with: those of the dtype that most are trained in,
        as usual, not of what has fewer bits.
        """
        return self.flops.get("bfloat16", self.flops["float32"])

    def costs(self, efficiency: float) -> Costs:
        """What computing and communicating cost on it, where kernels reach that share of peaks."""
        rates = tuple((name, rate * efficiency) for name, rate in self.flops.items())
        return PublishedCosts(
            self.flops["float32"] * efficiency,
            self.memory_bandwidth * efficiency,
            LAUNCH,
            (("", Link(0.0, self.network_bandwidth)),),  # never asked: see `link`
            host=self.host_bandwidth * efficiency,
            rates=rates,
        )


@dataclass(frozen=True, slots=True)
class PublishedCosts(Costs):
    """The costs of a machine in a timed world, where each group knows its wire.

    rates: operations a second by dtype, as in `Machine.flops`.
    """

    rates: tuple[tuple[str, float], ...] = ()

    def knows(self, group: str) -> bool:
        """All groups."""
        return True

    def link(self, group: str) -> Link:
        """That of the group's wire."""
        wire = known_wire(group_named(shared_group(group)))
        if wire is None:
            raise RuntimeError(f"the process group {group!r} is in no timed world")
        return Link(wire.latency, wire.bandwidth, issue=wire.issue)

    def rate(self, node: Node) -> float:
        """By the dtype of what is multiplied: the narrowest of what is read, since scales, biases
        and sums of attention may be wider. Where the file does not name it: of what has fewer bits
        than bfloat16, that of bfloat16, and of others that of float32.
        """
        values = [n.meta.get("val") for n in node.all_input_nodes]
        dtypes = [v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
        dtype = min(dtypes, key=lambda each: each.itemsize, default=torch.float32)
        name = str(dtype).removeprefix("torch.")
        if dtype.itemsize == 1:
            name = "float8"
        if name == "float32" and torch.get_float32_matmul_precision() != "highest":
            name = "tf32"
        rates = dict(self.rates)
        other = rates.get("bfloat16", self.flops) if dtype.itemsize == 1 else self.flops
        return rates.get(name, other)


def machine_named(name: str) -> Machine:
    """One of the package's, or from a file.

    Raises:
        AskedError: there is none, or the file says other things.
    """
    own = files(__package__) / "machines"
    known = sorted(entry.name.removesuffix(".json") for entry in own.iterdir())
    try:
        if name in known:
            text = (own / f"{name}.json").read_text(encoding="utf-8")
        else:
            text = Path(name).read_text(encoding="utf-8")
        return Machine(**json.loads(text))
    except OSError as error:
        raise AskedError(
            f"--machine: there is no machine {name!r}, and no such file: known are {known}"
        ) from error
    except (TypeError, ValueError) as error:
        needed = [field.name for field in fields(Machine)]
        raise AskedError(
            f"--machine: {name} should be JSON with the fields {needed}: {error}"
        ) from error
