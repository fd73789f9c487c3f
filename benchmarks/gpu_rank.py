"""One way to train the Llama of `bench gpu`, as rank 0 of a timed world, in a process that answers
one request after the other.

    python benchmarks/gpu_rank.py VARIANT --world 64 --size 1b

A request is a line on stdin, an answer a line on stdout that begins with `ANSWER`:

    ready              (asked for by nobody) it has trained a few steps
    time BYTES STEPS   seconds of a step and of the host's part of one, over a wire of so many bytes
                       a second
    trace PATH         a step under the profiler, as a gzipped Chrome trace
    end                peak of memory, and what was planned
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepseek import DeepSeek, DeepSeekConfig, share_experts, tiny_deepseek
from gpt import RMSNorm, rotary_table
from job import part_of
from llama import Llama, LlamaConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard

from compiled_fsdp import (
    Plan,
    compile_step,
    explain,
    fully_shard,
    overlap_optimizer,
    set_plan,
)
from compiled_fsdp.command.simulate import as_rank
from compiled_fsdp.planning.costs import Costs, Link
from compiled_fsdp.torch_private.dtensors import local_tensor
from compiled_fsdp.wire.world import Wire, World

if TYPE_CHECKING:
    from torch.optim import Optimizer

ANSWER = "@answer "
WARM_UP = 4
LATENCY = 2e-5
AUTO: dict[str, Any] = dict.fromkeys(
    ("prefetch", "backward_prefetch", "reduces_in_flight", "bucket_bytes"), "auto"
)
# What an H100 does, roughly, so that plans do not depend on what else it does while they are made.
FLOPS, BANDWIDTH, OVERHEAD = 4e14, 2.5e12, 4e-6

Step = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and the batch of one rank.

    expert_ranks: of a mixture, on how many ranks the experts of a layer are.
    """

    config: LlamaConfig | DeepSeekConfig
    batch: int
    expert_ranks: int = 1

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.config.max_length


SIZES = {
    "1b": Size(LlamaConfig(16, 2048, 32, 8192, max_length=2048, vocab=32768), 4),
    # Llama 3 8 B, half as deep.
    "8b": Size(LlamaConfig(16, 4096, 32, 14336, max_length=4096, vocab=128256), 2),
    # DeepSeek-V2-Lite in its shapes, with the attention of DeepSeek-V3.
    "16b": Size(
        DeepSeekConfig(
            27,
            2048,
            16,
            10944,
            max_length=4096,
            vocab=102400,
            num_dense=1,
            num_experts=64,
            top=6,
            expert_hidden=1408,
        ),
        1,
        expert_ranks=8,
    ),
    "tiny_experts": Size(tiny_deepseek(), 2, expert_ranks=8),
    "tiny": Size(LlamaConfig(2, 64, 8, 128, max_length=64, vocab=512), 2),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train.

    plan: fields of the plan that differ from its defaults, and costs if it asks for any.
    steps: "loop", "overlap" (`overlap_optimizer`) or "whole" (`compile_step`).
    """

    summary: str
    plan: dict[str, Any] = field(default_factory=dict)
    steps: str = "loop"
    mode: str | None = None
    reshards: bool | None = None
    is_stock: bool = False
    is_loss_compiled: bool = False
    is_offloaded: bool = False
    ahead: int | None = None


GIB = 1 << 30
KEPT: dict[str, Any] = {"memory_budget": 1.0, "prefetch": 6.0, "reduces_in_flight": 2.0}
FP8, INT8 = torch.float8_e4m3fn, torch.int8
VARIANTS = {
    "local": Variant("unsharded, compiled, AdamW on a rank's part (floor of computing)"),
    "stock": Variant("FSDP2, blocks compiled", is_stock=True),
    "stock_loss": Variant("FSDP2, blocks and loss compiled", is_stock=True, is_loss_compiled=True),
    "stock_kept": Variant(
        "FSDP2, blocks compiled, reshard_after_forward=False", is_stock=True, reshards=False
    ),
    "stock_loss_kept": Variant(
        "FSDP2, blocks and loss compiled, reshard_after_forward=False",
        is_stock=True,
        reshards=False,
        is_loss_compiled=True,
    ),
    "ours": Variant("torch.compile(fully_shard(model)), default plan"),
    "ours_overlap": Variant("the same, with overlap_optimizer", steps="overlap"),
    "ours_whole": Variant("compile_step, default plan", steps="whole"),
    "ours_whole_ahead": Variant("compile_step, 1 GiB gathered ahead", steps="whole", ahead=GIB),
    "ours_kept": Variant("memory_budget=1.0, more ahead", plan=KEPT),
    "ours_whole_kept": Variant(
        "compile_step, memory_budget=1.0, 1 GiB gathered ahead", KEPT, "whole", ahead=GIB
    ),
    "ours_whole_split": Variant(
        "the same, units of more than 64 MiB in parts",
        {**KEPT, "split_bytes": 64 << 20},
        "whole",
        ahead=GIB,
    ),
    "ours_whole_auto": Variant(
        "compile_step, memory_budget=1.0, the rest from costs",
        {"memory_budget": 1.0, **AUTO},
        "whole",
        ahead=GIB,
    ),
    "ours_half": Variant(
        "memory_budget of 6 GiB, recompute='budget'",
        {"memory_budget": 6 * GIB, "recompute": "budget"},
    ),
    "ours_whole_half": Variant(
        "compile_step, the same", {"memory_budget": 6 * GIB, "recompute": "budget"}, "whole"
    ),
    "ours_fp8": Variant(
        "parameters gathered and gradients reduced as fp8",
        {"gather_quantized": FP8, "reduce_quantized": FP8},
    ),
    "ours_int8": Variant("the same as int8", {"gather_quantized": INT8, "reduce_quantized": INT8}),
    "ours_offload": Variant("parameters and optimizer on the host", is_offloaded=True),
    "ours_graphs": Variant("mode='reduce-overhead'", mode="reduce-overhead"),
    "ours_whole_graphs": Variant(
        "compile_step(mode='reduce-overhead')", steps="whole", mode="reduce-overhead"
    ),
}


class Rank:
    """This process: a step, and what it costs."""

    def __init__(self, name: str, size: Size, world: int, bandwidth: float, device: str) -> None:
        self.variant, self.size, self.device = VARIANTS[name], size, device
        self.wire = Wire("network", bandwidth, LATENCY)
        self.world = World(world, 0, self.wire, self.wire)
        self.model: nn.Module | None = None
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(0)

    # building

    def build(self) -> Step:
        """The training step."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.size.batch, self.size.length + 1)
        tokens = torch.randint(self.size.config.vocab, shape, generator=generator).to(self.device)
        batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        if self.variant is VARIANTS["local"]:
            return self._local(batch)
        bandwidth = min(self.wire.bandwidth, 1e15)  # bytes a second of a wire that takes no time
        costs = Costs(FLOPS, BANDWIDTH, OVERHEAD, (("", Link(LATENCY, bandwidth)),))
        set_plan(Plan(**self.variant.plan, costs=costs))
        self.model = model = self._sharded()
        if self.variant.steps == "whole":
            return self._whole(model, batch)
        call: Any = model
        if not self.variant.is_stock:
            call = torch.compile(model, fullgraph=True, dynamic=False, mode=self.variant.mode)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if self.variant.steps == "overlap":
            overlap_optimizer(model, optimizer, **self._ahead())
        return _loop(call, batch, optimizer)

    def _sharded(self) -> Llama | DeepSeek:
        config, v = self.size.config, self.variant
        with torch.device("meta"):
            model = DeepSeek(config) if isinstance(config, DeepSeekConfig) else Llama(config)
        if v.is_stock:
            is_whole = not isinstance(model, DeepSeek)  # a graph ends where experts are a unit
            for layer in model.layers:
                layer.compile(fullgraph=is_whole, dynamic=False if is_whole else None)
        if v.is_loss_compiled:
            compiled: Any = torch.compile(model.loss, fullgraph=True, dynamic=False)
            model.loss = compiled  # type: ignore[method-assign]
        more: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        }
        if v.is_offloaded:
            more["offload_policy"] = CPUOffloadPolicy(self.device == "cuda")
        if v.reshards is not None:
            more["reshard_after_forward"] = v.reshards
        apply: Any = stock_fully_shard if v.is_stock else fully_shard
        mesh = self._with_experts(model, apply, more)
        for unit in (model.embedding, *model.layers, [model.norm, model.head], model):
            apply(unit, mesh=mesh, **more)
        model.to_empty(device="cpu" if v.is_offloaded else self.device)
        width = config.width // config.num_heads
        if isinstance(config, DeepSeekConfig):
            width = config.rotated
        model.table = rotary_table(config.max_length, width).to(self.device)
        for module in model.modules():
            for param in module.parameters(recurse=False):
                with torch.no_grad():
                    local = local_tensor(param)
                    local.fill_(1.0) if isinstance(module, RMSNorm) else local.normal_(0.0, 0.02)
        return model

    def _with_experts(
        self, model: Llama | DeepSeek, apply: Callable[..., object], more: dict[str, Any]
    ) -> DeviceMesh:
        """The mesh of all ranks, once experts are divided among some and sharded over the rest."""
        world, each = self.world.size, self.size.expert_ranks
        if not isinstance(model, DeepSeek):
            return init_device_mesh(self.device, (world,))
        torch._dynamo.config.capture_scalar_outputs = True
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
        shape = (world // each, each)
        mesh = init_device_mesh(self.device, shape, mesh_dim_names=("efsdp", "ep"))
        for experts in share_experts(model, mesh["ep"]):
            apply(experts, mesh=mesh["efsdp"], **more)
            experts.set_gradient_divide_factor(float(world))  # type: ignore[operator]
        return mesh._flatten("dp")

    def _ahead(self) -> dict[str, Any]:
        return {} if self.variant.ahead is None else {"max_ahead_bytes": self.variant.ahead}

    def _whole(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
        mode = self.variant.mode
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=mode is not None)
        whole = compile_step(model, optimizer, mode=mode, dynamic=False, **self._ahead())
        return partial(whole, *batch)

    def _local(self, batch: tuple[Tensor, Tensor]) -> Step:
        """Without communication; the optimizer steps fp32 parts of 1/world."""
        config = self.size.config
        if not isinstance(config, LlamaConfig):
            raise NotImplementedError("a mixture of experts needs other ranks")
        with torch.device(self.device):
            model = Llama(config).bfloat16()
        call = torch.compile(model, fullgraph=True, dynamic=False)
        parts = [nn.Parameter(part_of(p.detach()).float()) for p in model.parameters()]
        optimizer = torch.optim.AdamW(parts, fused=True)

        def step() -> Tensor:
            loss = call(*batch)
            loss.backward()
            for part, parameter in zip(parts, model.parameters(), strict=True):
                assert parameter.grad is not None
                part.grad = part_of(parameter.grad).float()
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
            return loss.detach()  # type: ignore[no-any-return]

        return step

    # measuring

    def serve(self) -> None:
        """Build, and answer."""
        with as_rank(self.world):
            dist.init_process_group("nccl" if self.device == "cuda" else "gloo")
            begin = time.perf_counter()
            step = self.build()
            step()
            self._sync()
            first = time.perf_counter() - begin
            self._reset_peak()
            for _ in range(WARM_UP):  # what is captured is captured here
                loss = step()
            self._sync()
            peak = self._peak()
            self._rest()
            answer(first=first, ready=time.perf_counter() - begin, loss=loss.item())
            for line in sys.stdin:
                word, *more = line.split()
                if word == "time":
                    self.wire.bandwidth = float(more[0])
                    answer(**self._time(step, int(more[1])))
                elif word == "trace":
                    self._trace(step, more[0])
                    answer()
                else:
                    break
            answer(**peak, **self._planned())

    def _time(self, step: Step, count: int) -> dict[str, float]:
        for _ in range(2):
            step()
        self._sync()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        self._sync()
        whole = time.perf_counter() - begin
        begin = time.perf_counter()
        step()
        host = time.perf_counter() - begin
        self._sync()
        self._rest()
        return {"seconds": whole / count, "host": host}

    def _trace(self, step: Step, path: str) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            for _ in range(2):
                step()
            self._sync()
        profile.export_chrome_trace(path)

    def _planned(self) -> dict[str, Any]:
        if self.model is None or self.variant.is_stock:
            return {}
        found = explain(self.model)
        step = asdict(found.step)
        largest = max(found.graphs, key=lambda graph: graph.peak)
        predicted = {name: step[name] for name in step if name.startswith("predicted")}
        return {**predicted, "at": largest.peak_at, "kinds": largest.peak_kinds}

    def _sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _rest(self) -> None:
        """Let others of this device have what is not needed while they compile or take turns."""
        self._sync()
        if self.device == "cuda":
            self.world.settle()
            torch.cuda.empty_cache()
        self.world.carried.clear()

    def _reset_peak(self) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> dict[str, float]:
        if self.device != "cuda":
            return {"peak": 0.0, "reserved": 0.0, "at_rest": 0.0}
        return {
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "at_rest": torch.cuda.memory_allocated(),
        }


def _loop(call: Callable[..., Any], batch: tuple[Tensor, Tensor], optimizer: Optimizer) -> Step:
    def step() -> Tensor:
        loss = call(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    return step


def answer(**found: Any) -> None:
    """Say it to whoever has asked."""
    sys.stdout.write(f"{ANSWER}{json.dumps(found)}\n")
    sys.stdout.flush()


def main(kind: type[Rank] = Rank) -> None:
    """Answer for the way that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--bandwidth", type=float, default=5e10)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    size = SIZES[asked.size]
    kind(asked.variant, size, asked.world, asked.bandwidth, asked.device).serve()


if __name__ == "__main__":
    main()
