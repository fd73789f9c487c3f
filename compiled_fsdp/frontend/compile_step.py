"""`compile_step`: what it takes, and what it refuses before anything is compiled; `step.py` has the
step that it returns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from compiled_fsdp.planning.planner import MAX_AHEAD_BYTES
from compiled_fsdp.torch_private.compiled import uncompiled
from compiled_fsdp.torch_private.groups import common_name

from .captures import check_made, patches_of
from .ignored import IgnoredParams
from .optimizers import LOOP, Optimizers
from .parts import check_ahead_bytes
from .scaling import Scaling
from .step import Step
from .warmup import sharded_below

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn, optim
    from torch.amp import GradScaler
    from torch.distributed.tensor import DTensor
    from torch.optim.lr_scheduler import LRScheduler

    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.units.unit import Unit

BACKENDS = ("compiled_fsdp", "compiled_fsdp_eager")


def compile_step(
    model: nn.Module,
    optimizer: optim.Optimizer | Sequence[optim.Optimizer],
    loss_fn: Callable[..., Tensor | tuple[Any, ...]] | None = None,
    *,
    clip: float | None = None,
    accumulate: int = 1,
    reduce_once: bool = False,
    max_ahead_bytes: int = MAX_AHEAD_BYTES,
    keep_grads: bool = False,
    scaler: GradScaler | None = None,
    schedule: LRScheduler | Sequence[LRScheduler] | None = None,
    backend: str = "compiled_fsdp",
    mode: str | None = None,
    dynamic: bool | None = None,
) -> Step:
    """Compile a whole training step: `loss = step(*batch)` does what the ordinary loop does, with
    the same numbers.

    The ordinary loop is

        loss = loss_fn(model, *batch)
        scaler.scale(loss).backward()                             # each if there is one
        scaler.unscale_(optimizer)                                # with clip
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)  # FSDP1: model.clip_grad_norm_
        scaler.step(optimizer)                                    # or optimizer.step()
        scaler.update()
        optimizer.zero_grad()
        schedule.step()

    With `accumulate=n` it is `loss = step(batches)`, of a list of n batches, and the gradients are
    those of the mean of their losses: `(loss_fn(model, *batch) / n).backward()` for each batch in
    turn, before the rest. Returned is the mean.

    Call it on every rank, after `fully_shard` and after building the optimizer. The first call
    compiles. Learning rates may change between steps, by hand or by a scheduler, without a
    recompile; state dicts and checkpoints are as ever. The model may run outside of it too, for
    evaluation or in ordinary steps. `.grad` is None afterwards: a gradient is dropped where it is
    used, which is what makes room for others (but see `keep_grads`).

    Args:
        model: the sharded module, or what `torch.compile` made of it.
        optimizer: of one of the classes in `parts.ONE_BY_ONE`, or a `Muon`, over all parameters of
            the model that are trained, and no others. Or a list of several, each parameter in one
            of them. Matrices of a `Muon` travel to their owners and back as nodes of the graph. Of
            parameters that no unit has (experts divided among ranks, `ignored_params`), each rank
            updates what it has with its own gradient.
        loss_fn: called with the model and the batch; returns the loss, a tensor of one element, or
            a tuple that begins with it, whose others (of any kind) are detached; has to be one
            graph. None: `model(*batch)` is that.
        clip: the largest global norm (2-norm) of the gradients, as `clip_grad_norm_` computes it.
            Nothing is updated before all gradients are reduced then.
        accumulate: micro-batches for each update. A batch among them is a tuple or list of
            arguments, a dict of arguments by name, or one tensor; shapes may differ. All are in the
            one graph, whose compilation takes longer the more they are; each backward stands behind
            its forward, so the activations of one are alive at a time.
        reduce_once: with `accumulate`, add gradients up before they are reduced, as
            `set_requires_gradient_sync(False)` in all but the last backward has it: one reduction
            instead of n, for the bytes of all unreduced gradients. Otherwise they are reduced for
            each micro-batch and their shards added, as the loop does that sets nothing.
        max_ahead_bytes: at most so many bytes of full parameters are gathered for the next step
            when this one has updated them; 0 for none. They are gathered again if a parameter is
            written to in between, which has to happen on every rank, and not through `.data` or by
            a foreach op: that raises from the next step.
        keep_grads: leave copies of the gradients, as the updates used them,
            in `.grad` until the next step.
        scaler: a `torch.amp.GradScaler` or `ShardedGradScaler`. Gradients are checked, on all
            ranks, and unscaled in the graph; a step with an inf or NaN is left out on every rank,
            of several optimizers by those whose own gradients have it.
            The scale and its state dict are the scaler's own.
        schedule: a learning rate scheduler of the optimizer, stepped after every step, also one
            that the scaler leaves out. Of several optimizers, a list of any number.
        backend: "compiled_fsdp" (Inductor with our passes), or "compiled_fsdp_eager" (our passes
            without Inductor).
        mode: as for `torch.compile`: "default", "reduce-overhead", "max-autotune", or
            "max-autotune-no-cudagraphs"; what it asks of Inductor, "compiled_fsdp" alone has. With
            "reduce-overhead" and "max-autotune" the whole step is one CUDA graph, of either
            backend: of each kind of batch (shapes) the first step is an ordinary one, the second is
            captured, and replayed from then on. Loss and metrics are copies. Hyperparameters that
            change should be tensors on the device (`lr=torch.tensor(1e-3, device="cuda")`), and
            the optimizer built with `capturable=True`; after a change of numbers, of state dicts or
            of what is trained, steps are captured anew. Nothing is gathered ahead then.
        dynamic: as for `torch.compile`.

    Returns:
        The step. `step(*batch, **more)`, or `step(batches)`, returns the loss, detached; of a
        `loss_fn` that returns more, a tuple of it and these, as it does, of several micro-batches
        a list of each.

    Raises:
        NotImplementedError: what is asked for is not supported in a whole step; from `step(...)`,
            the loss cannot be captured as one graph, or has gradients that no update takes.
        TypeError: the model has no sharded module, the optimizer is of another class, or a batch
            of several is none; from `step(...)`, `loss_fn` returns something else.
        BaseException: from `step(...)`, what `loss_fn` or the model raises, of its class; what
            Dynamo cannot follow (a constructor of its own, say) is the `NotImplementedError` above.
        ValueError: an argument is out of its range, an optimizer cannot be captured in a CUDA
            graph (from `step(...)`, too), two optimizers hold a parameter, or none holds
            one that the model trains, or there are other than `accumulate` batches.
        RuntimeError: from `step(...)`: gradients of an earlier backward are still there, or hooks
            would not be called.
        ChecksumError: from `step(...)`, with `Plan(check="checksums")`: something differs between
            ranks, and nothing was updated.
    """
    states = sharded_below(model, "compile_step")
    units = [state.unit for state in states]
    _check_arguments(clip, accumulate, backend)
    for name, value in (("reduce_once", reduce_once), ("keep_grads", keep_grads)):
        if not isinstance(value, bool):
            raise ValueError(f"compile_step: {name}={value!r}; should be True or False")
    check_ahead_bytes(max_ahead_bytes, "compile_step")
    patches, captures = patches_of(mode, dynamic)
    optimizers = Optimizers.of(optimizer)
    _check_units(units, clip, is_scaled=scaler is not None)
    optimizers.check_made(units)
    ignored = IgnoredParams(uncompiled(model), units, optimizers)
    schedules = optimizers.schedules(schedule)
    scaling = Scaling.of(scaler, optimizers.made, units, clips=clip is not None)
    if clip is not None or scaling is not None:
        ignored.refuse_plain()
    if captures:
        check_made(
            str(mode), optimizers, schedules, scaler=scaling is not None, keep_grads=keep_grads
        )
    wanted = {
        "clip": None if clip is None else float(clip),
        "batches": accumulate,
        "reduces_once": reduce_once and accumulate > 1,
        "max_ahead_bytes": max_ahead_bytes,
        "captures": captures,
        **({} if scaling is None else scaling.wanted()),
        **({"meshes": _meshes_of(units)} if clip is not None or scaling is not None else {}),
    }
    step = Step(model, units, optimizers, ignored, loss_fn, wanted, backend, dynamic, mode, patches)
    step.runtimes = [state.runtime for state in states]
    step.keeps_grads = keep_grads
    step.scaling, step.schedules = scaling, schedules
    return step


def _check_arguments(clip: object, accumulate: object, backend: object) -> None:
    is_number = isinstance(clip, int | float) and not isinstance(clip, bool)
    if clip is not None and not (is_number and 0 < clip < math.inf):  # type: ignore[operator]
        raise ValueError(f"compile_step: clip={clip!r}; should be None, or a norm larger than 0")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(
            f"compile_step: accumulate={accumulate!r}; should be a number of micro-batches, "
            "at least 1"
        )
    if backend not in BACKENDS:
        raise ValueError(f"compile_step: backend={backend!r}; should be one of {list(BACKENDS)}")


def _check_units(units: list[Unit], clip: float | None, *, is_scaled: bool) -> None:
    for unit in units:
        if why := unit.why_not_in_step(changes_grads=clip is not None or is_scaled):
            raise NotImplementedError(f"compile_step: {unit.name}: {why}, or: {LOOP}")


def _meshes_of(units: list[Unit]) -> tuple[tuple[Any, ...], ...]:
    """Of each mesh of parameters that are DTensors by themselves (tensor-parallel, or experts): the
    axes that cut any of them, and which parameter is cut by which; see `compiler/clip.py`.
    """
    meshes: dict[Any, list[tuple[ShardedParam, DTensor]]] = {}
    for p in (p for unit in units for p in unit.params if p.full is not None):
        sharded = cast("DTensor", p.sharded)
        meshes.setdefault(sharded.device_mesh, []).append((p, sharded))
    found = []
    for mesh, params in meshes.items():
        names = [common_name(mesh.get_group(axis).group_name) for axis in range(mesh.ndim)]
        cut = tuple(
            (
                (p.spec.unit, p.fqn),
                tuple(
                    n for n, at in zip(names, s.placements, strict=True) if not at.is_replicate()
                ),
            )
            for p, s in params
        )
        used = {name for _, by in cut for name in by}
        axes = tuple((name, mesh.size(i)) for i, name in enumerate(names) if name in used)
        found.append((axes, cut))
    return tuple(found)
