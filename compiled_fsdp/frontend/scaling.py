"""What a `GradScaler` does in a compiled step: the graph checks gradients and unscales them
(`compiler/scaling.py`); scale, growth and state dict stay the scaler's own.

As in the loop, an optimizer that unscales by itself (`fused=True`) is given scaled gradients,
unless they are clipped in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.cpu.amp.grad_scaler import GradScaler as CPUGradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from compiled_fsdp.torch_private.groups import common_name, default_group
from compiled_fsdp.torch_private.scaling import is_ready, note_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from compiled_fsdp.units.unit import Unit

    from .optimizers import Told

KNOWN = (
    torch.amp.GradScaler,
    torch.cuda.amp.GradScaler,
    CPUGradScaler,
    ShardedGradScaler,
)


class Scaling:
    """A scaler beside the optimizers of a whole step.

    unscales: whether the graph unscales, not the optimizers.
    """

    def __init__(
        self,
        scaler: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        units: list[Unit],
        *,
        clips: bool,
    ) -> None:
        self.scaler, self.optimizers = scaler, optimizers
        self._device = next(flat.device for unit in units for flat in unit.flats)
        self._is_by_optimizer = [
            bool(getattr(each, "_step_supports_amp_scaling", False)) for each in optimizers
        ]
        self.unscales = clips or not all(self._is_by_optimizer)
        self._scale: Tensor | None = None
        self._found_inf: tuple[Tensor, ...] = ()  # of each optimizer, 0 or 1
        self._told: list[dict[str, Any] | None] = []

    @staticmethod
    def of(
        scaler: object,
        optimizers: Sequence[torch.optim.Optimizer],
        units: list[Unit],
        *,
        clips: bool,
    ) -> Scaling | None:
        """None for no scaler, and for one that is not enabled.

        Raises:
            TypeError: it is of another class than torch's.
            ValueError: it does not unscale gradients in float16, and there would be some.
            NotImplementedError: gradients would rest on another device than is computed on.
        """
        if scaler is None:
            return None
        if type(scaler) not in KNOWN:
            kind = type(scaler)
            raise TypeError(
                f"compile_step: scaler={kind.__module__}.{kind.__qualname__}; should be a "
                "torch.amp.GradScaler or a ShardedGradScaler, no subclass, since the graph does "
                "what their unscale_ and step do. Write the loop with "
                "scaler.scale(loss).backward(), scaler.step(optimizer) and scaler.update()"
            )
        if not scaler.is_enabled():  # type: ignore[attr-defined]
            return None
        made = Scaling(scaler, optimizers, units, clips=clips)
        flats = [flat for unit in units for flat in unit.flats]
        half = [
            p.fqn
            for flat in flats
            for p in flat.params
            if p.spec.kept_dtype(flat.data.dtype) == torch.float16
        ]
        if half and made.unscales and type(scaler) is not ShardedGradScaler:
            raise ValueError(
                f"compile_step: Attempting to unscale FP16 gradients, of {half[0]}: as in the "
                "loop, a GradScaler wants parameters in float32. Cast by MixedPrecisionPolicy("
                "param_dtype=torch.float16), or use a ShardedGradScaler"
            )
        if away := [flat for flat in flats if flat.data.device != flat.device]:
            raise NotImplementedError(
                f"compile_step: scaler={type(scaler).__name__}, and {away[0].params[0].fqn} "
                f"rests on {away[0].data.device}, but is computed with on {away[0].device}: "
                "gradients of two devices are not checked in one graph yet. Leave the offload "
                "out, or write the loop with scaler.scale(loss).backward(), "
                "scaler.step(optimizer) and scaler.update()"
            )
        return made

    def wanted(self) -> dict[str, Any]:
        """What the graph has to know."""
        group = ("", 1)
        if type(self.scaler) is ShardedGradScaler:
            own = self.scaler.process_group or default_group()
            group = common_name(own.group_name), dist.get_world_size(own)
        return {"is_scaled": True, "unscales": self.unscales, "scaler_group": group}

    def begin(self) -> Tensor:
        """The scale of the step that begins.

        Raises:
            RuntimeError: gradients were unscaled, or used, since the scaler's last update.
        """
        if not all(is_ready(self.scaler, each) for each in self.optimizers):
            raise RuntimeError(
                "compile_step: unscale_() or step() of the scaler was called with an optimizer "
                "since its last update(). Call scaler.update() before the compiled step, which "
                "makes all three calls by itself"
            )
        self._found_inf, self._told = (), []
        self._scale = self.scaler.scale(torch.ones((), device=self._device))
        return self._scale

    def told(self, found_inf: Tensor) -> Told:
        """What each optimizer has to know. found_inf: what the graph has computed.

        One that unscales, or skips, by itself reads two attributes; of others the step is left out.
        """
        if not self._found_inf:
            own = found_inf.clone()  # a compiler may write over the graph's own
            self._found_inf = own.unbind() if own.dim() else (own,)
            scale = None if self.unscales else self._scale
            self._told = [
                {"grad_scale": scale, "found_inf": found}
                if is_by_optimizer
                else None
                if found.item()
                else {}
                for is_by_optimizer, found in zip(
                    self._is_by_optimizer, self._found_inf, strict=True
                )
            ]
        return self._told

    def end(self) -> list[bool]:
        """Update the scale as the loop does; returns which optimizers were called."""
        assert self._found_inf, "a graph with a scaler updates with found_inf"
        for optimizer, found in zip(self.optimizers, self._found_inf, strict=True):
            note_step(self.scaler, optimizer, found)
        self.scaler.update()
        return [told is not None for told in self._told]
