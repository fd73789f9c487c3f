"""What torch's FSDP and ours do with devices, beside each other, as one line of JSON: the rows that
need two kinds of device. On a GPU, or under the double of a driver of `benchmarks/phantom`, which
computes nothing.

    python tests/jobs/device_rows.py fsdp1
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from kit.extensions import Quantised
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_fsdp
import compiled_fsdp.sharded_grad_scaler

GPU = torch.device("cuda", 0)


def told(run: Callable[[], Any]) -> list[Any]:
    """What comes of it, or the error; and torch's warnings (ours are about values, which the double
    does not compute).
    """
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            result = run()
        except (RuntimeError, ValueError) as error:
            result = [type(error).__name__, str(error)]
    texts = sorted({str(w.message) for w in seen})
    return [result, [text for text in texts if not text.startswith("compiled_fsdp")]]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def where(model: nn.Module) -> list[str]:
    return [str(p.device) for p in model.parameters()]


def fsdp1(api: Any) -> dict[str, Any]:
    wrap: Any = api.FullyShardedDataParallel

    def mixed(**options: Any) -> list[str]:
        model = net()
        model[0].to(GPU)
        return where(wrap(model, **options))

    def on_meta_too() -> list[str]:
        model = net().to(GPU)
        model[0].to("meta")
        return where(wrap(model))

    def rests_on_cpu() -> list[Any]:
        model = wrap(net())
        return [where(model), told(lambda: str(model(torch.ones(2, 4)).device))]

    def moved() -> list[Any]:
        model = wrap(net()).to(GPU)
        return [where(model), str(model(torch.ones(2, 4, device=GPU)).device)]

    def scaled() -> list[Any]:
        """Where the scaler has found infinite gradients, which rest on the host, and its scale."""
        offload = api.CPUOffload(offload_params=True)
        model = wrap(net(), device_id=0, cpu_offload=offload, use_orig_params=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler: Any = api.sharded_grad_scaler.ShardedGradScaler("cuda")
        scaler.scale(model(torch.ones(2, 4, device=GPU)).sum()).backward()
        scaler.unscale_(optimizer)
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        infinite = sorted([str(place), str(number.device)] for place, number in found.items())
        scaler.step(optimizer)
        scaler.update()
        return [infinite, str(scaler._scale.device), where(model)]

    return {
        "1.5": [told(mixed), told(lambda: mixed(device_id=0)), told(on_meta_too)],
        "1.7": [
            told(lambda: where(wrap(net(), device_id=torch.device("cuda")))),
            told(lambda: where(wrap(net().to(GPU), device_id=torch.device("cpu")))),
        ],
        "1.10": [told(rests_on_cpu), told(moved)],
        "4.11": [
            told(lambda: where(wrap(net(), sync_module_states=True))),
            told(lambda: where(wrap(net(), sync_module_states=True, device_id=0))),
        ],
        "16.11": told(scaled),
    }


class Placed(Quantised):
    """Notes on which device it is when it is gathered."""

    seen: list[str] = []  # noqa: RUF012

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Any:
        Placed.seen.append(str(self.data_inside.device))
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)


class Takes(nn.Module):
    """Notes where its inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[str] = []

    def forward(self, x: Tensor, more: Any = None, *, counts: Tensor | None = None) -> Tensor:
        self.seen = [str(x.device), str(more["a"][0].device) if more else ""]
        self.seen.append(str(counts.device) if counts is not None else "")
        out: Tensor = self.layer(x)
        return out


class Two(nn.Module):
    """The second gets counts that rest on the host, as forward has made them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Takes(), Takes()

    def forward(self, x: Tensor, more: Any = None) -> Tensor:
        out: Tensor = self.second(self.first(x, more), counts=torch.ones(2))
        return out


class CountsRecorded(TorchDispatchMode):
    """How often a tensor was recorded on a stream."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += "record_stream" in str(func)
        return func(*args, **(kwargs or {}))


def fsdp2(api: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cuda", (2,))

    def sharded() -> Two:
        model = Two()
        for module in (model.first, model.second, model):
            api.fully_shard(module, mesh=mesh)
        return model

    def of_another_mesh() -> None:
        model, cpu = net(), init_device_mesh("cpu", (2,))
        weight = distribute_tensor(model[0].weight.detach(), cpu, [Shard(0)])
        model[0].weight = nn.Parameter(weight)
        api.fully_shard(model, mesh=mesh)

    def inputs(compiles: str) -> list[Any]:
        """Of the model, and of a unit that is called by itself."""
        model, given = sharded(), {"a": [torch.ones(2)], "b": 3}
        call: Any = model
        if compiles and api is compiled_fsdp:
            function = model if compiles == "model" else (lambda x, more: model(x, more))
            call = torch.compile(function, backend="compiled_fsdp_eager")
        out = call(torch.ones(2, 4), given)
        out.sum().backward()
        seen = [model.first.seen, model.second.seen]
        alone = model.second(torch.ones(2, 4))
        return [str(out.device), [] if compiles else seen, model.second.seen[0], str(alone.device)]

    def recorded() -> int:
        model = sharded()
        with CountsRecorded() as mode:
            for _ in range(2):
                model(torch.ones(2, 4, device=GPU)).sum().backward()
        return mode.number

    def extended() -> list[Any]:
        """With CPU offload."""
        Placed.seen.clear()
        model = nn.Sequential(nn.Linear(4, 4, bias=False)).to(GPU)
        model[0].weight = nn.Parameter(Placed(model[0].weight.detach().clone()))
        offload = api.CPUOffloadPolicy(pin_memory=False)
        api.fully_shard(model, mesh=mesh, offload_policy=offload)
        out = model(torch.ones(2, 4, device=GPU))
        return [str(out.device), Placed.seen[:1], where(model)]

    return {
        "1.27": told(of_another_mesh)[0][0],
        "6.11": [told(lambda how=how: inputs(how)) for how in ("", "model", "function")],
        "15.15": told(recorded),
        "4c.10": told(extended),
    }


def main() -> None:
    front = {"fsdp1": fsdp1, "fsdp2": fsdp2}[sys.argv[1]]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.cuda.set_device(0)
    found = {"stock": front(stock), "ours": front(compiled_fsdp)}
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
