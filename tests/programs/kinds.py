"""One script run in many ways: what `fully_shard`, `compiled`, `record`, ... mean for each kind.

unsharded    the model as it is; what a backward adds to gradients is averaged over the ranks
plain        the same, compiled: what Dynamo itself refuses is no fault of ours;
             "plain inductor": nor what Inductor does
stock        torch.distributed.fsdp.fully_shard, eager
eager        ours, eager
compiled     ours with the backend "compiled_fsdp_eager"; also "aot_eager" and "inductor"
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import math
import pickle
import tempfile
import time
import traceback
import types
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from kit.harness import local, mean_over_ranks, mesh_of
from kit.pool import begin, forget
from kit.written_out import WrittenOut
from programs.given import Scaled, disabled, raise_error, save_products
from programs.planted import planted
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_rows
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import compiled_fsdp
from compiled_fsdp.frontend.state import get_state
from compiled_fsdp.wire.absence import RAISED_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BACKENDS = {
    "plain": "aot_eager",
    "plain inductor": "inductor",
    "compiled": "compiled_fsdp_eager",
    "aot_eager": "aot_eager",
    "inductor": "inductor",
}
UNSHARDED = ("unsharded", "plain", "plain inductor")
SLOW = {"inductor": 4, "plain inductor": 4}  # times the seconds that another kind gets
GRACE = RAISED_S + 10.0  # seconds for the other ranks, once one has raised: they wait for it first
PARTED = {"DivergenceError", "CommunicationError"}
Entry = tuple[str, "Tensor | None"]


@dataclass
class Outcome:
    """What a kind did on one rank.

    entries: losses, gradients, parameters and buffers in the order in which they were recorded;
        this rank's shards.
    error: type and text of what ended it, with the innermost file of ours, or of torch, that
        raised.
    num_eager: forwards of units that ran on the eager runtime.
    """

    entries: list[Entry] = field(default_factory=list)
    error: str = ""
    text: str = ""
    is_ours: bool = False
    warnings: list[str] = field(default_factory=list)
    num_eager: int = 0


class Run:
    """The names that a script uses, for one kind."""

    def __init__(self, kind: str, folder: str = "", mesh: str = "1d") -> None:
        self.kind, self.outcome = kind, Outcome()
        self.folder, self.mesh = folder, mesh_of(mesh)
        self.roots: list[nn.Module] = []
        self.sharded: dict[str, nn.Parameter] = {}  # also while full parameters are registered

    def names(self) -> dict[str, Any]:
        """Everything that a script does not define."""
        return {
            "torch": torch, "nn": nn, "F": F, "dist": dist, "funcol": funcol, "copy": copy,
            "checkpoint": checkpoint, "MixedPrecisionPolicy": MixedPrecisionPolicy,
            "world": dist.get_world_size(), "rank": dist.get_rank(),
            "group_name": dist.group.WORLD.group_name,
            "fully_shard": self.fully_shard, "compiled": self.compiled,
            "compile_in_place": self.compile_in_place,
            "overlap_optimizer": self.overlap_optimizer, "whole_step": self.whole_step,
            "batch": batch, "record": self.record, "note": self.note,
            "disabled": disabled, "raise_error": raise_error, "scaled": Scaled.apply,
            "scan": scan, "while_loop": while_loop, "map_rows": map_rows,
            "checkpoint_wrapper": checkpoint_wrapper, "save_products": save_products,
            "dcp": dcp, "folder": f"{self.folder}/saved by {self.kind}",
            "StateDictOptions": StateDictOptions,
            "get_state_dict": get_state_dict, "set_state_dict": set_state_dict,
            "get_model_state_dict": get_model_state_dict,
            "set_model_state_dict": set_model_state_dict,
            "muon": compiled_fsdp.Muon,
            "flex_attention": flex_attention, "create_block_mask": create_block_mask,
        }  # fmt: skip

    # -- what scripts call

    def fully_shard(self, module: nn.Module, **options: Any) -> nn.Module:
        self.roots.append(module)
        if self.kind not in UNSHARDED:
            apply: Callable[..., Any] = (
                stock_fully_shard if self.kind == "stock" else compiled_fsdp.fully_shard
            )
            apply(module, mesh=self.mesh, **options)
            self.sharded |= dict(getattr(module, "_orig_mod", module).named_parameters())
            return module
        for name in dir(compiled_fsdp.FSDPModule):
            if name.startswith(("set_", "unshard", "reshard")):
                module.__dict__[name] = _nothing
        return module

    def compiled(self, fn: Any, **options: Any) -> Any:
        return (
            torch.compile(fn, backend=BACKENDS[self.kind], **options)
            if self.kind in BACKENDS
            else fn
        )

    def compile_in_place(self, module: nn.Module, **options: Any) -> None:
        if self.kind in BACKENDS:
            module.compile(backend=BACKENDS[self.kind], **options)

    def overlap_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
    ) -> None:
        if self.kind not in (*UNSHARDED, "stock"):
            compiled_fsdp.overlap_optimizer(model, optimizer, **options)

    def whole_step(
        self, model: nn.Module, optimizer: Any, loss_fn: Callable[..., Tensor], **options: Any
    ) -> Callable[..., Tensor]:
        """A compiled step, or the loop that it stands for."""
        if self.kind == "compiled":
            backend = BACKENDS["compiled"]
            return compiled_fsdp.compile_step(model, optimizer, loss_fn, backend=backend, **options)
        syncs = self.kind not in UNSHARDED
        return WrittenOut(model, optimizer, loss_fn, syncs, **options)

    def record(self, model: nn.Module, loss: Tensor | None = None) -> None:
        """Loss, gradients, parameters and buffers of this moment."""
        if loss is not None:
            self.note(loss)
        model = getattr(model, "_orig_mod", model)
        behind = {} if self.kind in (*UNSHARDED, "stock") else _behind_full(model)
        for name, p in model.named_parameters():
            if isinstance(p, DTensor) or self.kind in UNSHARDED:
                self.sharded[name] = p
            held = behind.get(id(p), self.sharded[name])
            self.outcome.entries.append((f"param {name}", self._shard(held)))
            grad = held.grad
            if loss is not None:
                self.outcome.entries.append(
                    (f"grad {name}", None if grad is None else self._shard(grad))
                )
        self.outcome.entries.extend(
            (f"buffer {name}", local(b)) for name, b in model.named_buffers()
        )

    def note(self, *tensors: Tensor | None) -> None:
        """Whole tensors."""
        for t in tensors:
            whole = t.full_tensor() if isinstance(t, DTensor) else t
            self.outcome.entries.append(
                ("value", None if whole is None else whole.detach().clone())
            )

    def _shard(self, tensor: Tensor) -> Tensor:
        mine = local(tensor)
        assert mine is not None
        if isinstance(tensor, DTensor):
            return mine
        axis = self.mesh.ndim - 1
        rows, rank = math.ceil(mine.shape[0] / self.mesh.size(axis)), self.mesh.get_local_rank(axis)
        return mine[rank * rows : (rank + 1) * rows].clone()

    # -- averaging, for the unsharded model

    def params(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for root in self.roots for p in root.parameters()))

    def averaging(self, backward: Callable[..., None]) -> Callable[..., None]:
        """`torch.autograd.backward` that averages what it adds to gradients."""

        def wrapped(*args: Any, **kwargs: Any) -> None:
            before = [(p, p.grad) for p in self.params()]
            for p, _ in before:
                p.grad = None
            try:
                backward(*args, **kwargs)
            finally:
                found = [p.grad for p, _ in before]
                for p, grad in before:
                    p.grad = grad
            for (p, grad), new in zip(before, found, strict=True):
                if new is not None:
                    mean = mean_over_ranks(new, self.mesh)
                    p.grad = mean if grad is None else grad + mean

        return wrapped


def _behind_full(model: nn.Module) -> dict[int, nn.Parameter]:
    """The sharded parameter behind each full one that is registered in its place; names may have
    changed since sharding.
    """
    units = {
        id(state.unit): state.unit for m in model.modules() if (state := get_state(m)) is not None
    }
    params = [param for unit in units.values() for param in unit.params]
    return {
        id(module._parameters[name]): param.sharded
        for param in params
        for module, name in param.owners
    }


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Different on every rank, the same for every kind."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(4, Settings.dim, generator=generator).to(dtype).requires_grad_()
    return x, torch.randint(0, 8, (4,), generator=generator)


class Settings:
    dim = 4


def _nothing(*_: object, **__: object) -> Any:
    return types.SimpleNamespace(wait=_nothing)


def run_kinds(kinds: tuple[str, ...], folder: str, limit: float, *arguments: Any) -> bool:
    """Worker function: a script as each kind in turn; what each did is left in the folder, by kind
    and rank.

    A kind that takes too long ends this process, and so this call. Ranks part, and False is
    returned, after a kind that ended on some of them with another error; and nothing else is asked
    of a script that the unsharded model does not run.
    """
    for kind in kinds:
        faulthandler.dump_traceback_later(limit * SLOW.get(kind, 1), exit=True)
        outcome = run(kind, *arguments, folder=folder)
        is_same = _ended_alike(Path(folder), kind, outcome)
        faulthandler.cancel_dump_traceback_later()
        if not is_same or (outcome.error and kind == "unsharded"):
            return is_same
        forget()
        begin()
    return True


def _ended_alike(folder: Path, kind: str, outcome: Outcome) -> bool:
    """Whether it ended on all ranks with the same error, or none; not by a collective: who raised
    may owe some. After an error about ranks that part, their connections are broken.
    """
    mine = place_of(folder, kind, dist.get_rank())
    part = folder / f"{mine.name}.part"
    part.write_bytes(pickle.dumps(outcome))
    part.rename(mine)
    places = [place_of(folder, kind, rank) for rank in range(dist.get_world_size())]
    patience = time.monotonic() + GRACE if outcome.error else math.inf
    while missing := [place for place in places if not place.exists()]:
        if time.monotonic() > patience:
            whose = "ours" if outcome.is_ours else "not ours"
            text = f"this rank raised {outcome.error} ({whose}): {outcome.text}"
            raise TimeoutError(f"{text}; nothing from {[p.name for p in missing]}")
        time.sleep(0.001)
    errors = {pickle.loads(place.read_bytes()).error for place in places}
    return len(errors) == 1 and not errors & PARTED


def place_of(folder: Path, kind: str, rank: int) -> Path:
    """Where a rank leaves the outcome of a kind."""
    return folder / f"{kind}.{rank}"


def run(
    kind: str,
    source: str,
    dim: int,
    bucket: int,
    budget: float | None = None,
    plant: str = "",
    mesh: str = "1d",
    folder: str = "",
) -> Outcome:
    """A script as one kind. folder: one that all ranks have, for what scripts save."""
    this = Run(kind, folder, mesh)
    Settings.dim = dim
    torch.manual_seed(1)
    before = torch._dynamo.config.get_config_copy()
    with (
        _script(source) as path,
        warnings.catch_warnings(record=True) as caught,
        compiled_fsdp.planned(bucket_bytes=bucket, memory_budget=budget),
    ):
        warnings.simplefilter("always")
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(planted(plant))
                if kind in UNSHARDED:
                    averaging = this.averaging(torch.autograd.backward)
                    stack.enter_context(mock.patch.object(torch.autograd, "backward", averaging))
                exec(compile(source, path, "exec"), this.names())
        except Exception as error:  # noqa: BLE001
            _fill(this.outcome, error)
        torch._dynamo.config.load_config(before)
    this.outcome.warnings = [str(w.message) for w in caught if "compiled_fsdp" in str(w.message)]
    modules = dict.fromkeys(m for root in this.roots for m in root.modules())
    units = dict.fromkeys(state.unit for m in modules if (state := get_state(m)) is not None)
    this.outcome.num_eager = sum(unit.num_eager_forwards for unit in units)
    return this.outcome


def _fill(outcome: Outcome, error: Exception) -> None:
    root: BaseException = error
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "compiled_fsdp/" in f.filename or "/passes/" in f.filename]
    outcome.error = type(root).__name__
    outcome.text = str(root)
    outcome.is_ours = bool(ours) and frames[-1].filename == ours[-1].filename
    last = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}"
    outcome.text += f"\n(raised at {last}; last of ours: {ours[-1].name if ours else None})"


@contextlib.contextmanager
def _script(source: str) -> Iterator[str]:
    """A file: Dynamo and warnings want lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(source)
        yield str(path)
