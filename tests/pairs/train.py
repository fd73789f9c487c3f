"""Trains a program of features: in a worker, by ours, by ours without a graph, and unsharded."""

from __future__ import annotations

import copy
import functools
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.compare import whole
from kit.extensions import Quantised
from kit.harness import mesh_of
from kit.offload import beside_host, negate
from kit.oracle import mesh_of as mesh_named
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    Muon,
    compile_step,
    dumped_to,
    explain,
    fully_shard,
    overlap_optimizer,
    planned,
)
from compiled_fsdp.frontend.states_at_rest import is_at_rest
from compiled_fsdp.planning import consensus
from compiled_fsdp.sharded_grad_scaler import ShardedGradScaler
from compiled_fsdp.torch_private.dtensors import local_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from pairs.features import Setting

WIDTH, HIDDEN, OUT, ROWS = 16, 36, 5, 8
LAYERS, STEPS = 4, 3
MIDDLE = 1  # the step before which something changes
LOW = {
    "": (None, None),
    "bf16": (torch.bfloat16, torch.float32),
    "bf16_reduced": (None, torch.bfloat16),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks, a head of an uneven number of rows, and, if a program has it, a layer that forward
    leaves out.
    """

    def __init__(self, calls: str, *, has_unused: bool) -> None:
        super().__init__()
        self.calls = calls
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.idle = nn.Linear(WIDTH, 3) if has_unused else None
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.calls == "checkpointed":
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(block(x)) if self.calls == "twice" else block(x)
        return self.head(x)


def built(setting: Setting, *, is_ours: bool) -> Model:
    """The model before it is sharded; ours cut over tensor-parallel ranks, on the meta device, or
    with extensions, where the setting says so.
    """
    with torch.device("meta" if is_ours and setting.is_meta else "cpu"):
        model = Model(setting.calls, has_unused=setting.weights == "unused")
    blocks: Any = model.blocks
    if is_ours and setting.mesh == "tp":
        for block in blocks:
            styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh_for(setting)["tp"], styles)
    if setting.weights == "tied":
        blocks[2].up.weight = blocks[0].up.weight
    if setting.weights == "frozen":
        blocks[1].requires_grad_(requires_grad=False)
    if setting.weights == "extension" and is_ours:
        for block in blocks:
            block.up.weight = nn.Parameter(Quantised(block.up.weight.detach().clone()))
    for parameter in model.parameters() if setting.grads else ():
        parameter.grad_dtype = setting.grads
    return model


def mesh_for(setting: Setting) -> Any:
    """Of all ranks."""
    if setting.mesh == "tp":
        return mesh_named(2, 2, names=("dp", "tp"))
    return mesh_of(setting.mesh)


def loss_fn(model: Callable[[Tensor], Tensor], *batches: Tensor) -> Tensor:
    losses = [model(x).float().square().mean() for x in batches]
    return sum(losses[1:], losses[0])


class Run:
    """A model of a setting, and how it is trained. `kind`: "unsharded" or "ours".

    losses: of each step, and in the end of a batch without gradients.
    """

    def __init__(self, setting: Setting, kind: str, folder: str) -> None:
        self.setting, self.folder = setting, folder
        self.is_ours = kind == "ours"
        self.losses: list[Tensor] = []
        self.step_at = -1  # none yet
        self.explained: Any = None
        torch.manual_seed(0)
        self.model: Any = built(setting, is_ours=self.is_ours)
        if self.is_ours:
            self._shard()
        self._set()
        self.optimizers = self._optimizers()
        self.scaler: Any = None
        if setting.scaler:
            kind_of = ShardedGradScaler if self.is_ours and setting.is_fsdp1 else None
            self.scaler = (kind_of or torch.amp.GradScaler)("cpu", init_scale=64.0)
        self.schedules = [
            LambdaLR(each, lambda step: 1.0 / (1 + step))
            for each in self.optimizers
            if setting.has_schedule
        ]
        if self.is_ours and setting.loop == "compiled_optimizer":
            for optimizer in self.optimizers:  # behind schedules, which want a method to wrap
                optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        self.call = self._compiled()

    # -- made

    def _fill(self) -> None:
        """The values that the model has where it is built on the CPU."""
        torch.manual_seed(0)
        values = built(self.setting, is_ours=False).state_dict()
        self.model.to_empty(device="cpu")
        full = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, values, options=full)

    def _ignored(self) -> set[nn.Parameter]:
        return {self.model.head.bias} if self.setting.ignores else set()

    def _shard(self) -> None:
        setting, model = self.setting, self.model
        param, reduced = LOW[setting.precision]
        ignored = self._ignored()
        mesh = mesh_for(setting)["dp"] if setting.mesh == "tp" else mesh_for(setting)
        if setting.is_fsdp1:
            self.model = self._wrapped(mesh, ignored)
        else:
            given: dict[str, Any] = {
                "mesh": mesh,
                "reshard_after_forward": setting.reshard,
                "mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduced),
                "ignored_params": ignored or None,
            }
            if setting.offloads:
                given["offload_policy"] = CPUOffloadPolicy()
            if setting.dim:
                given["shard_placement_fn"] = _other_dim
            for unit in self._units():
                fully_shard(unit, **given)
            assert self.model is model
        if setting.is_meta:
            self._fill()
        if setting.offloads:
            negate(self.model)
            with torch.no_grad():
                for param in ignored:  # which rest on the device
                    param.neg_()

    def _units(self) -> list[Any]:
        model, blocks = self.model, [*self.model.blocks]
        if self.setting.units == "list":
            return [blocks[:2], [*blocks[2:], model.head], model]
        return [model] if self.setting.units == "one" else [*blocks, model]

    def _wrapped(self, mesh: Any, ignored: set[nn.Parameter]) -> nn.Module:
        setting = self.setting
        param, reduced = LOW[setting.precision]
        keeps = setting.reshard is False
        strategy = "SHARD_GRAD_OP" if keeps else "FULL_SHARD"
        if setting.mesh == "hsdp":
            strategy = "_HYBRID_SHARD_ZERO2" if keeps else "HYBRID_SHARD"
        wraps = setting.units != "one"
        return FullyShardedDataParallel(
            self.model,
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block}) if wraps else None,
            mixed_precision=MixedPrecision(param, reduced) if param or reduced else None,
            cpu_offload=CPUOffload(offload_params=True) if setting.offloads else None,
            ignored_states=[*ignored] or None,
            use_orig_params=setting.front == "fsdp1",
            device_id=torch.device("cpu"),
        )

    def _set(self) -> None:
        if not self.is_ours:
            return
        units = [m for m in self.model.modules() if hasattr(m, "set_requires_gradient_sync")]
        if self.setting.setter == "prefetch_lists":
            blocks = self.model.blocks
            blocks[0].set_modules_to_forward_prefetch([blocks[1]])
            blocks[1].set_modules_to_backward_prefetch([blocks[0]])
        for unit in units:
            if self.setting.setter == "divide_factor":
                unit.set_gradient_divide_factor(2.0 * self._num_data())
            if self.setting.setter == "stay_gathered":
                unit.set_reshard_after_backward(False)

    def _num_data(self) -> int:
        return dist.get_world_size() // (2 if self.setting.mesh == "tp" else 1)

    def _optimizers(self) -> list[Any]:
        params = [p for p in self.model.parameters() if p.requires_grad]
        kind = self.setting.optimizer
        if kind == "muon":
            held = [p for p in params if p.ndim == 2]
            others = [p for p in params if p.ndim != 2]
            made: list[Any] = [_sgd(others)]
            made.append(Muon(held, lr=0.02, ns_dtype=torch.float32))
        elif kind == "two":
            held = [p for p in params if p.ndim == 2]
            others = [p for p in params if p.ndim != 2]
            made = [_sgd(held), torch.optim.AdamW(others, lr=0.01)]
        elif kind == "adamw":
            made = [torch.optim.AdamW(params, lr=0.01, foreach=False)]
        else:
            made = [_sgd(params, foreach=kind == "foreach")]
        if self.is_ours and self.setting.loop in ("overlap", "in_backward"):
            more = {"in_backward": True} if self.setting.loop == "in_backward" else {}
            overlap_optimizer(self.model, made[-1], **more)
        return made

    def _compiled(self) -> Callable[..., Any]:
        setting, model = self.setting, self.model
        options: dict[str, Any] = {"backend": setting.backend, "fullgraph": True}
        if setting.dynamic:
            options["dynamic"] = True
        if not self.is_ours or not setting.backend:
            return functools.partial(loss_fn, model)
        if setting.loop == "compile_step":
            del options["fullgraph"]
            more = {"accumulate": 2} if setting.micro in ("accumulate", "no_sync") else {}
            if setting.backend == "inductor":
                options["backend"] = "compiled_fsdp"
            made = self.optimizers
            return compile_step(
                model,
                made if len(made) > 1 else made[0],
                loss_fn,
                clip=setting.clip,
                scaler=self.scaler,
                schedule=self.schedules or None,
                reduce_once=setting.micro == "no_sync",
                **more,
                **options,
            )
        if setting.compiles == "function":
            return torch.compile(lambda *batches: loss_fn(model, *batches), **options)
        if setting.compiles == "blocks":
            wrapped = [m for m in model.modules() if isinstance(m, FullyShardedDataParallel)]
            for block in wrapped[1:] or _blocks_of(model):
                block.compile(**options)
            return functools.partial(loss_fn, model)
        return functools.partial(loss_fn, torch.compile(model, **options))

    # -- trained

    def train(self) -> None:
        """All steps."""
        for i in range(STEPS):
            self.step_at = i
            self._change(i)
            self.losses.append(self._step(i).detach())
            if self.setting.between == "evaluation":
                self.losses.append(self._evaluated(50 + i))
        self.losses.append(self._evaluated(49))
        for module in self.model.modules() if self.setting.setter == "unshard" else ():
            if self.is_ours and hasattr(module, "reshard"):  # a function's graph leaves them
                module.reshard()

    def _batches(self, i: int) -> list[Tensor]:
        """Of a step; different for each rank that has data of its own."""
        rank = dist.get_rank() // (2 if self.setting.mesh == "tp" else 1)
        rows = ROWS + 2 * (i % 3) if self.setting.varies else ROWS
        count = 2 if self.setting.micro else 1
        factor = 1e30 if i == 1 and self.setting.scaler == "overflow" else 1.0
        seeds = [1000 * i + 100 * n + rank for n in range(count)]
        return [
            torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)) * factor
            for seed in seeds
        ]

    def _step(self, i: int) -> Tensor:
        batches, setting = self._batches(i), self.setting
        if self.is_ours and setting.loop == "compile_step" and setting.backend:
            is_list = setting.micro in ("accumulate", "no_sync")
            found: Tensor = self.call(batches) if is_list else self.call(*batches)
            return found
        parts = [[x] for x in batches]
        if setting.micro == "two_forwards":
            parts = [batches]
        losses = []
        for n, part in enumerate(parts):
            is_last = n == len(parts) - 1
            with self._synced(is_last or setting.micro != "no_sync"):
                loss = self.call(*part) / len(parts)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            losses.append(loss.detach())
        if not self.is_ours:
            self._reduce()
        self._update()
        return sum(losses[1:], losses[0])

    def _synced(self, is_synced: bool) -> Any:
        if self.is_ours and self.setting.is_fsdp1:
            return nullcontext() if is_synced else self.model.no_sync()
        if self.is_ours and self.setting.micro == "no_sync":
            self.model.set_requires_gradient_sync(is_synced)
        return nullcontext()

    def _reduce(self) -> None:
        """What sharding does: the mean over the ranks, but of what is ignored."""
        ignored = self._ignored()
        factor = 0.5 if self.setting.setter == "divide_factor" else 1.0
        for p in self.model.parameters():
            if p.grad is not None and p not in ignored:
                dist.all_reduce(p.grad)
                p.grad *= factor / dist.get_world_size()

    def _update(self) -> None:
        setting = self.setting
        if setting.clip is not None:
            for optimizer in self.optimizers if self.scaler is not None else ():
                self.scaler.unscale_(optimizer)
            if self.is_ours and setting.is_fsdp1:
                self.model.clip_grad_norm_(setting.clip)
            elif self.is_ours and setting.mesh == "tp":
                _clip_over_meshes([*self.model.parameters()], setting.clip)
            else:
                nn.utils.clip_grad_norm_(self.model.parameters(), setting.clip)
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for schedule in self.schedules:
            schedule.step()

    def _evaluated(self, number: int) -> Tensor:
        self.model.eval()
        is_step = self.is_ours and self.setting.loop == "compile_step" and self.setting.backend
        call = functools.partial(loss_fn, self.model) if is_step else self.call
        with torch.no_grad():
            found: Tensor = call(*self._batches(number)[:1])
        self.model.train()
        return found

    def _change(self, i: int) -> None:
        """What happens between two steps."""
        between = self.setting.between
        if self.is_ours and self.setting.setter == "unshard":
            for module in (*_blocks_of(self.model)[:2], self.model):
                if hasattr(module, "unshard"):
                    module.unshard()
        if between == "freezing" and i in (MIDDLE, MIDDLE + 1):
            for p in _blocks_of(self.model)[1].parameters():
                p.requires_grad_(i != MIDDLE)
        if i == MIDDLE and self.is_ours and between == "checkpoint":
            self._there_and_back()
        if i == MIDDLE and self.is_ours and between == "state_dict":
            values = copy.deepcopy({k: v.clone() for k, v in self.model.state_dict().items()})
            at_rest = self._at_rest()
            states = [copy.deepcopy(each.state_dict()) for each in self.optimizers]
            self._step_that_is_lost()
            self.model.load_state_dict(values)
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict(state)
            for value in at_rest:  # plain copies, which did not negate what the host has
                value().neg_()

    def _at_rest(self) -> list[Callable[[], Tensor]]:
        """What looks up each tensor of optimizer state that rests on the host now."""
        return [
            functools.partial(lambda o, p, name: local_tensor(o.state[p][name]), o, p, name)
            for o in self.optimizers
            for p, state in o.state.items()
            for name, value in state.items()
            if isinstance(value, Tensor) and is_at_rest(local_tensor(value))
        ]

    def _there_and_back(self) -> None:
        """Saved, trained on something else, and loaded."""
        model, optimizers = self.model, self.optimizers
        values, states = get_state_dict(model, optimizers)
        dcp.save({"model": values, "optimizer": states}, checkpoint_id=self.folder)
        self._step_that_is_lost()
        values, states = get_state_dict(model, optimizers)
        torch.serialization.add_safe_globals([Quantised])
        into = {"model": values, "optimizer": states}
        dcp.load(into, checkpoint_id=self.folder)
        set_state_dict(
            model,
            optimizers,
            model_state_dict=into["model"],
            optim_state_dict=into["optimizer"],
        )

    def _step_that_is_lost(self) -> None:
        """What is loaded behind it has no schedules."""
        before = [copy.deepcopy(each.state_dict()) for each in self.schedules]
        self._step(90)
        for schedule, state in zip(self.schedules, before, strict=True):
            schedule.load_state_dict(state)

    # -- what came of it

    def values(self) -> dict[str, Tensor]:
        """Losses, and this rank's part of each parameter, as it would be on the device."""
        sign = -1 if self.setting.offloads and self.is_ours else 1
        found = {f"loss {i}": loss.clone() for i, loss in enumerate(self.losses)}
        for name, p in self.model.named_parameters():
            local = local_tensor(p.detach())
            own = getattr(local, "data_inside", local)
            is_there = name.endswith("head.bias") and self.setting.ignores
            found[name] = own.clone() if is_there else sign * own
        return found

    def wholes(self) -> dict[str, Tensor]:
        """Losses and full parameters, where they can be had without more code than this."""
        found = {f"loss {i}": loss for i, loss in enumerate(self.losses)}
        setting = self.setting
        if setting.is_fsdp1 or setting.offloads or setting.weights == "extension":
            return found
        return found | {name: whole(p) for name, p in self.model.named_parameters()}


def _sgd(params: list[Any], *, foreach: bool = False) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=foreach)


def _clip_over_meshes(params: list[Any], max_norm: float) -> None:
    """`clip_grad_norm_`, which wants all parameters on one mesh, where the head is not on that of
    the blocks.
    """
    norms = [whole(torch.linalg.vector_norm(p.grad)) for p in params if p.grad is not None]
    total = torch.linalg.vector_norm(torch.stack(norms))
    nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach=False)


def _other_dim(p: nn.Parameter) -> Shard | None:
    return Shard(1) if p.ndim == 2 else None


def _blocks_of(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, Block)]


def trained(setting: Setting, kind: str, folder: str, made: list[Run] | None = None) -> Run:
    """A run; it is added to `made` before it trains, for who asks after an exception."""
    torch._dynamo.reset()
    consensus._settled.clear()  # by the structure of parameters, which many programs share
    with ExitStack() as stack:
        stack.enter_context(planned(**setting.plan))
        if setting.is_apart and kind == "ours":
            stack.enter_context(beside_host())
        if setting.is_dumped:
            stack.enter_context(dumped_to(Path(folder) / f"dump{dist.get_rank()}"))
        run = Run(setting, kind, folder)
        (made if made is not None else []).append(run)
        run.train()
        if kind == "ours":
            run.explained = explain(run.model)
            str(run.explained)
    return run
