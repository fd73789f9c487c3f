"""Whole steps that are captured as CUDA graphs (`compile_step(mode="reduce-overhead")`): which can
be, and what their updates depend on beside tensors; see `wire/captured.py`.

Private torch used here (tried on 2.11, 2.13 and 2.15): `torch._inductor.list_mode_options`, which
`torch.compile(mode=...)` asks; the mark that an optimizer has warned of `capturable=True`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.ir.collectives import asked_by
from compiled_fsdp.optim.muon import Muon
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.torch_private.dtensors import local_tensor
from compiled_fsdp.wire.captured import CAPTURES, RECORDERS, Captures, Refused, on_device

from .parts import give_zeros, step_alone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn, optim

    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.units.unit import Unit
    from compiled_fsdp.wire.captured import Signature
    from compiled_fsdp.wire.ignored import Ignored

    from .optimizers import Optimizers

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
GRAPHS = "triton.cudagraphs"
WITHOUT = "leave mode out, or give mode='max-autotune-no-cudagraphs'"
# An optimizer that can be captured warns of its first step, which is not.
TOLD = {"_warned_capturable_if_run_uncaptured": True}


def patches_of(mode: str | None, dynamic: bool | None) -> tuple[dict[str, Any], bool]:
    """What a mode of `torch.compile` asks of Inductor, without its CUDA graphs; and whether it asks
    for those.

    Raises:
        ValueError: there is no such mode.
    """
    if mode is None:
        return {}, False
    if mode not in MODES:
        raise ValueError(f"compile_step: mode={mode!r}; should be None, or one of {list(MODES)}")
    from torch._inductor import list_mode_options

    patches = dict(list_mode_options(mode, dynamic))
    captures = bool(patches.pop(GRAPHS, False))
    return patches | ({GRAPHS: False} if captures else {}), captures


def captures_of(
    mode: str, units: Sequence[Unit], optimizers: Optimizers, name: str
) -> Captures | None:
    """Those of the step of this name; None, which is announced, on a device that has none."""
    devices = [flat.mesh_info.device for unit in units for flat in unit.flats]
    device = devices[0] if devices else torch.device("cpu")
    if device.type not in RECORDERS:
        warn_once(
            f"compile_step(mode={mode!r}): the model computes on {device.type}, where there are no "
            "CUDA graphs, so that each step is run as it is"
        )
        return None
    captures = Captures(mode, device, lambda: signature(units, optimizers))
    CAPTURES[name] = captures
    return captures


def check_made(mode: str, optimizers: Optimizers, schedules: Sequence[Any], **given: bool) -> None:
    """Check what a captured step was given.

    given: arguments that it cannot have, and whether they are there.

    Raises:
        NotImplementedError: it has one of them, or a `Muon`.
        ValueError: a schedule changes a number that would be captured.
    """
    doing = f"compile_step(mode={mode!r})"
    for argument in (argument for argument, is_there in given.items() if is_there):
        raise NotImplementedError(
            f"{doing}: {argument} does something on the host in every step, which a CUDA graph "
            f"cannot. Leave {argument} out, or {WITHOUT}"
        )
    if any(type(each) is Muon for each in optimizers.made):
        raise NotImplementedError(
            f"{doing}: a Muon exchanges matrices by lists that the host makes in every step, which "
            f"a CUDA graph cannot; {WITHOUT}"
        )
    for schedule in schedules:
        rates = [group["lr"] for group in schedule.optimizer.param_groups]
        if not all(isinstance(rate, Tensor) for rate in rates):
            kind = type(schedule.optimizer).__name__
            raise ValueError(
                f"{doing}: schedule={type(schedule).__name__}, and the {kind} has a learning rate "
                "that is a number: a CUDA graph keeps the one that it was captured with. Build the "
                "optimizer with a tensor on the parameters' device, lr=torch.tensor(1e-3, "
                "device='cuda'), which the schedule writes to"
            )


def check_ready(mode: str, units: Sequence[Unit], ignored: Sequence[Ignored]) -> None:
    """Check that the units' kernels have nothing to do on the host, and that all that is trained is
    in units.

    Raises:
        NotImplementedError: one has, or something is not.
    """
    plan = current_plan()
    if names := [each.fqn for each in ignored if each.param.requires_grad]:
        raise NotImplementedError(
            f"compile_step(mode={mode!r}): {shortened(names)} are trained, which no unit has: how "
            "a CUDA graph would update them was not tried. Shard or freeze them, or " + WITHOUT
        )
    for unit in units:
        settings = unit.settings
        why = {
            "parameters that rest on the host (offload_policy, CPUOffload)": unit.offload,
            asked_by(settings.all_gather, "set_custom_all_gather"): settings.all_gather,
            asked_by(settings.reduce_scatter, "set_custom_reduce_scatter"): settings.reduce_scatter,
            "set_all_reduce_hook": settings.all_reduce_hook,
            "Plan(check=...)": settings.check or plan.check,
            "Plan(optimizer_state=...)": plan.optimizer_state,
            "Plan(record_routing=True)": plan.record_routing,
        }
        if found := [name for name, value in why.items() if value]:
            raise NotImplementedError(
                f"compile_step(mode={mode!r}): {unit.name}: {found[0]} has the host do something "
                f"in every step, which a CUDA graph cannot. Leave it out, or {WITHOUT}"
            )


class Capturable:
    """Which optimizers were found to step on the device alone."""

    def __init__(self, mode: str, device: torch.device) -> None:
        self._mode, self._device = mode, device
        self._known: set[tuple[object, ...]] = set()

    def check(self, optimizers: Optimizers) -> None:
        """Check each group of each optimizer that was not checked yet, by two steps of it for a
        parameter of its own.

        Raises:
            ValueError: the host takes part in its step; says how to build it.
        """
        for number, optimizer in enumerate(optimizers.made):
            for group in optimizer.param_groups:
                kinds = tuple(
                    (name, type(value), value if isinstance(value, bool) else None)
                    for name, value in group.items()
                    if name != "params"
                )
                if not group["params"] or (number, kinds) in self._known:
                    continue
                if why := self._why_not(optimizer, group):
                    raise ValueError(
                        f"compile_step(mode={self._mode!r}): the {type(optimizer).__name__} cannot "
                        f"be captured in a CUDA graph: {why}. Build it with capturable=True, with "
                        "fused=True if lr is a tensor (SGD), and with tensors on the parameters' "
                        f"device (lr=torch.tensor(1e-3, device='cuda')), or {WITHOUT}"
                    )
                self._known.add((number, kinds))

    def _why_not(self, optimizer: optim.Optimizer, group: dict[str, Any]) -> str:
        if not group.get("capturable", True):
            return "it has capturable=False"
        if group.get("differentiable"):
            return "it has differentiable=True"
        param = group["params"][0]
        shape = (2,) if param.ndim else ()
        dtype = local_tensor(param).dtype
        alone = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=self._device))
        give_zeros(alone, param)
        state: dict[Any, dict[str, Any]] = defaultdict(dict)
        if made := optimizer.state.get(param):
            state[alone] = {name: _like(each, param, alone) for name, each in made.items()}
        step_alone(optimizer, {**group, "params": [alone]}, state, **TOLD)
        before = {name: _value(each) for name, each in state[alone].items()}
        try:
            with on_device(self._device):
                step_alone(optimizer, {**group, "params": [alone]}, state, **TOLD)
        except Refused as error:
            return str(error)
        after = {name: _value(each) for name, each in state[alone].items()}
        changed = [name for name in after if before.get(name, "") != after[name]]
        return f"it makes {shortened(changed)} anew in every step" if changed else ""


def signature(units: Sequence[Unit], optimizers: Optimizers) -> Signature:
    """All that an update depends on beside what is in tensors: numbers, where tensors lie, which
    parameters are trained.
    """
    found: dict[tuple[str, str, int], object] = {}
    names: dict[int, str] = {}
    for p, held in _held(units):
        names[id(held)] = p.fqn
        found["requires_grad or memory", p.fqn, id(held)] = held.requires_grad, _value(held)
    for number, optimizer in enumerate(optimizers.made):
        kind = type(optimizer).__name__
        for place, group in enumerate(optimizer.param_groups):
            where = f"group {place} of the {kind}"
            found["params", where, number] = tuple(map(id, group["params"]))
            for name, value in group.items():
                if name != "params":
                    found[name, where, number] = _value(value)
            for param in group["params"]:
                state: Any = optimizer.state.get(param) or {}
                of = names.get(id(param), "a parameter")
                for name, value in state.items():
                    found[name, of, id(param)] = _value(value)
    return found


def _like(value: object, param: Tensor, alone: Tensor) -> object:
    """What is remembered of a parameter, for the one that is stepped alone. Adagrad's constructor
    makes it on torch 2.11, and no step does.
    """
    if not isinstance(value, Tensor):
        return value
    if value.shape == param.shape:
        return torch.zeros_like(alone, dtype=value.dtype)
    return local_tensor(value).clone()


def _held(units: Sequence[Unit]) -> list[tuple[ShardedParam, nn.Parameter]]:
    return [(p, held) for unit in units for p in unit.params for held in p.held_as]


def _value(thing: Any) -> object:
    """What a graph keeps of something: a tensor's place, all else as it is."""
    if isinstance(thing, Tensor):
        local = local_tensor(thing)
        return "at", local.data_ptr(), local.dtype, tuple(local.shape), local.device
    if isinstance(thing, tuple | list):
        return tuple(map(_value, thing))
    return thing
