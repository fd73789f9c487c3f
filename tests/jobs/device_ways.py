"""Ways to train on a device, one after the other, as one line of JSON: where parameters and the
loss are in the end, or the error. On a GPU, or under the double of a driver of
`benchmarks/phantom`, which computes nothing: there it is only seen whether everything is called
with what a device takes.

    python tests/jobs/device_ways.py              # all
    python tests/jobs/device_ways.py offload step # those with one of these in their names
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    Muon,
    compile_step,
    fully_shard,
    overlap_optimizer,
    planned,
)

GPU = torch.device("cuda", 0)
GRAPH = "compiled_fsdp_eager"
LEAST: dict[str, Any] = {"memory_budget": 0.0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 64), nn.Linear(64, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.checkpoints = checkpoints

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


class Joins(Net):
    """Lays many values side by side, which a GPU copies by one kernel."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(
                torch.cat([x * number for number in range(12)], -1).unflatten(-1, (12, 64)).sum(-2)
            )
        return self.head(x)


def sharded(net: nn.Module | None = None, *, rests: str = "cuda", **options: Any) -> Any:
    """The blocks and the rest as units."""
    model: Any = (net or Net()).to(rests)
    for module in (*model.blocks, model):
        fully_shard(module, **options)
    return model


def replicated() -> DeviceMesh:
    return init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicas", "shards"))


def loss_fn(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids).float().square().mean()
    return loss


def ids(device: str = "cpu") -> Tensor:
    """Tokens; those on the CPU are to be moved."""
    return torch.zeros(2, 8, dtype=torch.long, device=device)


def trained(
    model: Any,
    backend: str,
    optimizer: Any = None,
    *,
    given: str = "cpu",
    scaler: Any = None,
    clip: float | None = None,
    **options: Any,
) -> list[str]:
    """Two steps."""
    torch._dynamo.reset()
    call = torch.compile(model, backend=backend, **options) if backend else model
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        loss = loss_fn(call, ids(given))
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        (scaler.step(optimizer), scaler.update()) if scaler else optimizer.step()
        optimizer.zero_grad()
    return [*sorted({p.device.type for p in model.parameters()}), loss.device.type]


def overlapping(backend: str, *, in_backward: bool) -> list[str]:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    overlap_optimizer(model, optimizer, in_backward=in_backward)
    return trained(model, backend, optimizer)


def with_muon(backend: str) -> list[str]:
    model = sharded()
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    return trained(model, backend, Muon(matrices))


def with_wide_gradients(backend: str) -> list[str]:
    net = Net().to(torch.bfloat16)
    for parameter in net.parameters():
        parameter.grad_dtype = torch.float32
    model = sharded(net)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return trained(model, backend, sgd)


def offloaded(backend: str) -> list[str]:
    model = sharded(rests="cpu", offload_policy=CPUOffloadPolicy())
    return trained(model, backend, torch.optim.AdamW(model.parameters()))


def without_reducing(backend: str) -> list[str]:
    model = sharded()
    torch._dynamo.reset()
    call = torch.compile(model, backend=backend) if backend else model
    for is_last in (False, False, True):
        model.set_requires_gradient_sync(is_last)
        loss_fn(call, ids()).backward()
    return sorted({p.grad.device.type for p in model.parameters()})


def from_meta(backend: str) -> list[str]:
    with torch.device("meta"):
        net = Net()
    model = sharded(net, rests="meta", mesh=init_device_mesh("cuda", (4,))).to_empty(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return trained(model, backend)


def as_fsdp1(backend: str, **options: Any) -> list[str]:
    model = FullyShardedDataParallel(Net(), device_id=0, use_orig_params=True, **options)
    return trained(model, backend, torch.optim.AdamW(model.parameters()))


def under_plan(backend: str, **plan: Any) -> list[str]:
    with planned(**plan):
        return trained(sharded(), backend)


def whole(
    plan: dict[str, Any] | None = None, net: Callable[[], nn.Module] = Net, **options: Any
) -> list[str]:
    """Two steps, each a graph."""
    torch._dynamo.reset()
    with planned(**(plan or {})):
        model = sharded(net())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step = compile_step(model, optimizer, loss_fn, **{"backend": GRAPH, **options})
        batches = [(ids(),)] * options.get("accumulate", 1)
        for _ in range(2):
            loss = step(batches) if "accumulate" in options else step(ids())
    return [loss.device.type]


def loaded() -> list[str]:
    """Full state dicts on the CPU and back; the model to the CPU and back."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trained(model, "", optimizer)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state, remembered = get_state_dict(model, optimizer, options=full)
    rested = sorted({value.device.type for value in state.values()})
    set_state_dict(
        model, optimizer, model_state_dict=state, optim_state_dict=remembered, options=full
    )
    found = trained(model.to("cpu").to("cuda"), "", optimizer)
    return [*rested, *found]


def ways() -> dict[str, Callable[[], list[str]]]:
    """Each by its name."""
    found: dict[str, Callable[[], list[str]]] = {}
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    half = MixedPrecisionPolicy(torch.float16)
    int8 = {"gather_quantized": torch.int8, "reduce_quantized": torch.int8}
    for name, backend in (("eager", ""), ("graph", GRAPH)):
        of: dict[str, Callable[[], Any]] = {
            "plain": lambda: sharded(),
            "bf16": lambda: sharded(mp_policy=low),
            "checkpointed": lambda: sharded(Net(checkpoints=True)),
            "hsdp": lambda: sharded(mesh=replicated()),
            "slices": lambda: sharded(reshard_after_forward=2),
            "kept": lambda: sharded(reshard_after_forward=False),
            "built on the CPU": lambda: sharded(rests="cpu"),
        }
        for what, make in of.items():
            found[f"{what}, {name}"] = lambda make=make, backend=backend: trained(make(), backend)
        more: dict[str, Callable[[str], list[str]]] = {
            "given on the device": lambda backend: trained(sharded(), backend, given="cuda"),
            "clipped": lambda backend: trained(sharded(), backend, clip=1.0),
            "scaled": lambda backend: trained(
                sharded(mp_policy=half), backend, scaler=torch.amp.GradScaler("cuda"), clip=1.0
            ),
            "overlap": partial(overlapping, in_backward=False),
            "overlap in backward": partial(overlapping, in_backward=True),
            "muon": with_muon,
            "wide gradients": with_wide_gradients,
            "offload": offloaded,
            "no sync": without_reducing,
            "from meta": from_meta,
            "fsdp1": as_fsdp1,
            "fsdp1 offload": partial(as_fsdp1, cpu_offload=CPUOffload(offload_params=True)),
            "int8": partial(under_plan, **int8),
            "checksums": partial(under_plan, check="checksums"),
        }
        for what, way in more.items():
            found[f"{what}, {name}"] = partial(way, backend)
    for what, plan in (
        ("budget", {"memory_budget": 0.5}),
        ("recompute", {**LEAST, "recompute": "budget"}),
        ("offload of activations", {**LEAST, "offload": "budget"}),
    ):
        found[f"{what}, graph"] = partial(under_plan, GRAPH, **plan)
    everything = dict.fromkeys(("recompute", "offload", "optimizer_state"), "budget")
    found |= {
        "step": whole,
        "step, clipped": partial(whole, clip=1.0),
        "step, micro-batches": partial(whole, accumulate=2),
        "step, scaled": lambda: whole(scaler=torch.amp.GradScaler("cuda")),
        "step, all budgets": partial(whole, {**LEAST, **everything}),
        "step, Inductor": partial(whole, backend="compiled_fsdp"),
        "state": loaded,
        "plain, Inductor": lambda: trained(sharded(), "inductor"),
        "joins, Inductor": lambda: trained(sharded(Joins()), "inductor"),
        "joins, step, Inductor": partial(whole, net=Joins, backend="compiled_fsdp"),
        "offload, Inductor": lambda: offloaded("inductor"),
        "plain, CUDA graphs": lambda: trained(sharded(), "inductor", mode="reduce-overhead"),
    }
    return found


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    torch.cuda.set_device(0)
    warnings.simplefilter("ignore")
    asked, found = sys.argv[1:], dict[str, Any]()
    for name, way in ways().items():
        if asked and not any(word in name for word in asked):
            continue
        try:
            found[name] = way()
        except Exception as error:  # noqa: BLE001  # whatever it is, it is to be looked at
            found[name] = "".join(traceback.format_exception(error)[-3:])
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
