"""One sharded GPT with its optimizer: training step, validation loss, and what a step costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, SIZES, Block
from measure import CommReport, PeakMemory, communication, peak_tensor_bytes
from moe import MOE_SIZES, MoEGPT, num_active, share_experts
from options import Options
from text import Text, even_crops, random_crops
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from usage import UsageError

WARMUP = 20
FLOOR = 0.1
SUFFIXES = {
    "inductor": "",
    "compiled_fsdp": "",
    "compiled_fsdp_eager": " without Inductor",
    "eager": " eager",
}
Phase = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train: whose `fully_shard`, and what is compiled, by which backend if any."""

    name: str
    impl: str
    backend: str
    is_per_block: bool = False

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile is used."""
        return self.backend != "eager"


def variants(options: Options) -> list[Variant]:
    """Return what to train, in order; the one the options ask for is last."""
    front_end = " FSDP1" if options.front_end == "fsdp1" else ""
    asked = Variant(
        options.impl + front_end + SUFFIXES[options.backend], options.impl, options.backend
    )
    if not options.compare:
        return [asked]
    return [
        Variant("stock eager", "stock", "eager"),
        Variant("stock per-block", "stock", "inductor", is_per_block=True),
        asked,
    ]


class Trainer:
    """The model of a variant in training; `horizon`, the length of the schedule, may be set late.

    Up to step WARMUP the schedule does not depend on it.
    """

    def __init__(self, options: Options, variant: Variant, text: Text) -> None:
        """Make the same weights on every rank and shard them."""
        self.options, self.variant, self.text = options, variant, text
        self.horizon = options.steps
        self.rank = dist.get_rank()
        share = options.sequences // options.world
        self.part = range(
            self.rank * share, (self.rank + 1) * share
        )  # of the sequences of a step, this rank's
        torch.manual_seed(options.seed)
        model = (
            MoEGPT(MOE_SIZES[options.size]) if options.model == "moe" else GPT(SIZES[options.size])
        )
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.num_active = num_active(model)
        self.model: nn.Module = (
            wrap(model, options, variant)
            if options.front_end == "fsdp1"
            else shard(model, options, variant)
        )
        self.forward: Callable[..., Tensor] = self.model
        if variant.is_compiled and not variant.is_per_block:
            whole = variant.impl == "compiled_fsdp"  # Stock FSDP2 breaks the graph at its hooks.
            self.forward = torch.compile(self.model, backend=variant.backend, fullgraph=whole)
        self.optimizers = make_optimizers(self.model, options, variant)
        self.whole_step: Callable[..., Tensor] | None = None
        if options.whole_step and variant.impl == "compiled_fsdp":
            from compiled_fsdp import compile_step

            backend = "compiled_fsdp_eager" if "eager" in variant.backend else "compiled_fsdp"
            self.whole_step = compile_step(
                self.model, self.optimizers, clip=options.clip or None, backend=backend
            )

    @property
    def tokens_per_step(self) -> int:
        """Bytes of text that all ranks together train on in a step."""
        return self.options.sequences * self.options.length

    def step(self, index: int, phase: Phase = nullcontext) -> Tensor:
        """Take optimizer step `index` and return this rank's loss; `phase` encloses the passes."""
        options = self.options
        for group in (group for each in self.optimizers for group in each.param_groups):
            group["lr"] = options.lr * self.schedule(index)
        tokens, targets = random_crops(
            self.text.train, options.seed, index, self.part, options.batch, options.length
        )
        if self.whole_step is not None:
            with phase("the step"):
                return self.whole_step(tokens, targets)
        with phase("forward"):
            loss = self.forward(tokens, targets)
        with phase("backward"):
            loss.backward()
        if options.clip and isinstance(self.model, FullyShardedDataParallel):
            self.model.clip_grad_norm_(options.clip)
        elif options.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), options.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def schedule(self, index: int) -> float:
        """Return the factor of the learning rate: linear warmup, then half a cosine to FLOOR."""
        if index < WARMUP:
            return (index + 1) / WARMUP
        assert self.horizon is not None, "past the warmup the horizon must be set"
        done = min(1.0, (index - WARMUP) / max(1, self.horizon - WARMUP))
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done))

    def validate(self, num_batches: int) -> float:
        """Return the mean loss over ranks and `num_batches` evenly spread validation batches.

        Without torch.compile for all variants: a graph for inference would take longer to compile
        than these few batches take to run.
        """
        options = self.options
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for index in range(num_batches):
                tokens, targets = even_crops(
                    self.text.validation,
                    index,
                    num_batches,
                    self.rank,
                    options.world,
                    len(self.part),
                    options.length,
                )
                total += self.model(tokens, targets)
        dist.all_reduce(total)
        return total.item() / num_batches / options.world

    def measure(self) -> tuple[PeakMemory, CommReport]:
        """Profile a few further steps; afterwards the weights are no longer those of the run."""
        index = self.horizon or WARMUP - 1  # stopped inside the warmup: its last step
        peak = peak_tensor_bytes(lambda: self.step(index))
        return peak, communication(lambda: self.step(index))


def make_optimizers(
    model: nn.Module, options: Options, variant: Variant
) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters, or Muon for the matrices of the blocks and AdamW for the others.

    Muon's updates are scaled to the size of AdamW's, so that one learning rate does for both. It
    iterates in fp32: a CPU without instructions for bfloat16 takes thirty times longer in that.
    """
    trained = dict(model.named_parameters())
    matrices = {
        name: p
        for name, p in trained.items()
        if options.optimizer == "muon" and name.startswith("layers.") and p.ndim == 2
    }
    others = [p for name, p in trained.items() if name not in matrices]
    adamw = torch.optim.AdamW(
        others, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    if not matrices:
        return [adamw]
    settings: dict[str, Any] = {"lr": options.lr, "adjust_lr_fn": "match_rms_adamw"}
    if variant.impl == "stock":
        return [adamw, torch.optim.Muon(matrices.items(), **settings)]
    from compiled_fsdp import Muon

    return [adamw, Muon(matrices.items(), ns_dtype=torch.float32, **settings)]


def wrap(model: GPT, options: Options, variant: Variant) -> nn.Module:
    """Make each block and the embedding an instance of FSDP1, and the whole model one around."""
    library = "torch.distributed.fsdp" if variant.impl == "stock" else "compiled_fsdp"
    if variant.is_per_block:
        for block in model.layers:
            block.compile(backend=variant.backend)
    precision = MixedPrecision(
        getattr(torch, options.param_dtype), getattr(torch, options.reduce_dtype)
    )
    wrapped: nn.Module = import_module(library).FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.FULL_SHARD
        if options.reshard
        else ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({Block, nn.Embedding}),
        mixed_precision=precision,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        device_mesh=init_device_mesh("cpu", (options.world,)),
    )
    return wrapped


def set_codes(options: Options) -> None:
    """Let what travels be codes, where that is asked for."""
    from compiled_fsdp import current_plan, set_plan

    gathers, reduces = (
        None if name is None else getattr(torch, name)
        for name in (options.gather_quantized, options.reduce_quantized)
    )
    set_plan(replace(current_plan(), gather_quantized=gathers, reduce_quantized=reduces))


def shard(model: GPT, options: Options, variant: Variant) -> nn.Module:
    """Make each block, the embedding, and norm with head a unit; compile blocks before if asked.
    Experts stay with the ranks that they belong to.
    """
    library = "torch.distributed.fsdp" if variant.impl == "stock" else "compiled_fsdp"
    fully_shard = import_module(library).fully_shard
    if variant.impl != "stock":
        set_codes(options)
    mesh = init_device_mesh("cpu", (options.world,))
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, options.param_dtype),
        reduce_dtype=getattr(torch, options.reduce_dtype),
    )
    experts = share_experts(model, mesh)
    if variant.is_per_block:
        for block in model.layers:
            block.compile(backend=variant.backend)
    units = [*model.layers, model.embedding, [model.norm, model.head]]
    try:
        for unit in units:
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=options.reshard,
                mp_policy=policy,
                ignored_params=experts,
            )
        fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=experts)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"sharding the model with --impl {variant.impl}: {error}") from error
    return model
