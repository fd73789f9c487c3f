"""Parameters that no unit has in a whole step (`compile_step`): which the optimizers hold, and what
is refused of them. What they are to a graph stands in `wire/ignored.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from compiled_fsdp.errors import shortened
from compiled_fsdp.optim.muon import Muon
from compiled_fsdp.units.registered import sharded_behind, unwatched
from compiled_fsdp.wire.ignored import Ignored

from .optimizers import LOOP

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.units.unit import Unit
    from compiled_fsdp.wire.ignored import OnUpdate

    from .optimizers import Optimizers


class IgnoredParams:
    """The parameters of a model that no unit has.

    found: all, in the order of the model.
    """

    def __init__(self, model: nn.Module, units: list[Unit], optimizers: Optimizers) -> None:
        self._model, self._optimizers = model, optimizers
        self._join: tuple[str, OnUpdate, Callable[[], None]] | None = None
        self._refuses_plain = False
        self.found: list[Ignored] = []
        self._find({id(each) for unit in units for p in unit.params for each in p.held_as})

    def _find(self, sharded: set[int]) -> None:
        with unwatched():  # among them full ones, which a forward has left for a backward
            others = [(n, p) for n, p in self._model.named_parameters() if id(p) not in sharded]
        named = [(n, p) for n, p in others if sharded_behind(p) is None]
        for name, param in named:
            if param.requires_grad and isinstance(param, DTensor):
                _check_placements(name, param)
        self.found = [Ignored.of(param, name) for name, param in named]
        if self._refuses_plain:
            self.refuse_plain()
        self._attach()

    def _attach(self) -> None:
        for each in self.found:
            each.attach()
            if self._join is not None:
                name, on_update, on_verdict = self._join
                each.on_update[name] = on_update
                each.on_verdict[name] = on_verdict

    def join(self, name: str, on_update: OnUpdate, on_verdict: Callable[[], None]) -> None:
        """Let graphs of the step of this name call these for them."""
        self._join = name, on_update, on_verdict
        self._attach()

    def refuse_plain(self) -> None:
        """Check that the gradients of all that are trained have a norm,
        and a check for infinity, over ranks.

        Raises:
            NotImplementedError: one is no DTensor,
                so that nobody knows what other ranks have of it.
        """
        self._refuses_plain = True
        plain = [each.fqn for each in self.found if each.param.requires_grad and not each.axes]
        if plain:
            raise NotImplementedError(
                f"compile_step: clip or a scaler, and {shortened(plain)} are trained, which no "
                "unit has and which are plain tensors: what other ranks have of them is not known, "
                "so that there is no global norm nor a common check (clip_grad_norm_ and "
                "GradScaler raise for DTensors and tensors together). Make them DTensors on the "
                "mesh of their ranks (DTensor.from_local(own, mesh, [Shard(0)])), shard them, "
                "freeze them, or write the loop and clip each kind by itself"
            )

    def check(self, units: list[Unit], params: list[tuple[ShardedParam, nn.Parameter]]) -> None:
        """Check that the optimizers hold what the model trains, as `Optimizers.check_params`, and
        let graphs find the parameters, also where others have taken their places since.

        Raises:
            ValueError: they do not.
            NotImplementedError: one is updated whole.
        """
        sharded = {id(own) for _, own in params}
        held = self._optimizers.held() - sharded
        if not held <= {id(each.param) for each in self.found}:
            self._find(sharded)
        self._attach()
        self._optimizers.check_params(units, params, self.found)
        for optimizer in self._optimizers.made:
            if held and isinstance(optimizer, Muon):
                of_muon = {id(p) for group in optimizer.param_groups for p in group["params"]}
                if names := [each.fqn for each in self.found if id(each.param) in of_muon]:
                    raise NotImplementedError(
                        f"compile_step: a Muon holds {shortened(names)}, which no unit has: only "
                        "matrices of units go to owners in the graph. Give them to another "
                        f"optimizer in the list. {LOOP}"
                    )


def _check_placements(name: str, param: DTensor) -> None:
    mesh = param.device_mesh
    whole = [at for axis, at in enumerate(param.placements) if mesh.size(axis) > 1]
    if any(at.is_replicate() or at.is_partial() for at in whole):
        raise NotImplementedError(
            f"compile_step: {name} is a DTensor that no unit has, with placements "
            f"{list(param.placements)} on {mesh}: its gradient would have to be added up over "
            "the ranks that have the same of it, which the step does not do. Let fully_shard "
            "shard or replicate it (a mesh of two axes is HSDP), or put it on the axes alone "
            f"that cut it. {LOOP}"
        )
