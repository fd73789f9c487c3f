"""The optimizers of a whole step (`compile_step`), each parameter in one of them.

Private torch used here (tried on 2.13): what learning rate schedulers leave on optimizers, and the
hooks of their steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from compiled_fsdp.eager import optimizer_steps
from compiled_fsdp.errors import shortened
from compiled_fsdp.optim.muon import Muon

from .parts import check_one_by_one, step_part

if TYPE_CHECKING:
    from torch import nn

    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.units.unit import Unit
    from compiled_fsdp.wire.ignored import Ignored

LOOP = (
    "Write the loop instead: loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()"
)


# What each optimizer has to know of a scaler, by name, for a step; None: it leaves this one out.
Told = Sequence[dict[str, Any] | None]


class Optimizers:
    """The optimizers of a whole step, in the order in which the loop steps them.

    made: the user's own.
    """

    def __init__(self, made: Sequence[optim.Optimizer]) -> None:
        self.made = tuple(made)

    @classmethod
    def of(cls, given: object) -> Optimizers:
        """From what `compile_step` was given.

        Raises:
            TypeError: it is neither an optimizer nor a list of some.
            ValueError: the list is empty, or has one of them twice.
        """
        made: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        wrong = [type(each).__name__ for each in made if not isinstance(each, optim.Optimizer)]
        if wrong:
            raise TypeError(
                f"compile_step: optimizer={shortened(wrong)}; should be an optimizer of "
                "torch.optim, or a list of several"
            )
        if not made or len({id(each) for each in made}) < len(made):
            raise ValueError(
                f"compile_step: optimizer={[type(each).__name__ for each in made]}; should be an "
                "optimizer, or a list of several, each once"
            )
        return cls(made)

    @property
    def name(self) -> str:
        """What errors call them."""
        return " and the ".join(dict.fromkeys(type(each).__name__ for each in self.made))

    def check_made(self, units: list[Unit]) -> None:
        """Check that a whole step of these can be taken.

        Raises:
            TypeError: one is of another class than those of which that is known.
            ValueError: one overlaps already, or two hold the same parameter.
        """
        overlaps = any(unit.settings.overlap for unit in units)
        if overlaps or any(hasattr(each, "_fsdp_overlap") for each in self.made):
            raise ValueError(
                "compile_step: the model has an optimizer that overlaps already "
                "(overlap_optimizer). A whole step does all of that; call one of the two"
            )
        for each in self.made:
            if type(each) is not Muon:
                check_one_by_one(each, "compile_step")
        self._check_owners([(p, held) for u in units for p in u.params for held in p.held_as])

    def schedules(self, given: object) -> tuple[LRScheduler, ...]:
        """What `compile_step` was given as `schedule`.

        Raises:
            TypeError: it is no scheduler whose step takes no argument, nor a list of some.
            ValueError: one is of another optimizer, or given twice.
        """
        found = () if given is None else given if isinstance(given, list | tuple) else (given,)
        for each in found:
            kind = type(each).__name__
            if isinstance(each, ReduceLROnPlateau) or not isinstance(each, LRScheduler):
                raise TypeError(
                    f"compile_step: schedule={kind}; should be a learning rate scheduler whose "
                    "step takes no argument (ChainedScheduler or SequentialLR for several), or a "
                    "list of them, each of one of the optimizers. Call what else there is behind "
                    "the compiled step"
                )
            if all(each.optimizer is not one for one in self.made):
                raise ValueError(
                    f"compile_step: schedule={kind} is of another optimizer than the {self.name} "
                    "that was given. Build it with this one"
                )
        if len({id(each) for each in found}) < len(found):
            raise ValueError(
                "compile_step: schedule has one scheduler twice, which would step it twice. Give "
                "each once"
            )
        return tuple(found)

    def check_ready(self) -> None:
        """Check that nothing would be left out that the optimizers' own steps do.

        Raises:
            RuntimeError: one has hooks on its step, or all optimizers have, or one has another
                step than its class.
        """
        if names := optimizer_steps.hooks_of_others():
            raise RuntimeError(
                "compile_step: hooks on the steps of all optimizers (register_optimizer_step_"
                f"pre_hook or _post_hook: {shortened(names)}) would not be called: a step is taken "
                f"inside of a graph, unit by unit. Remove them, or call them around it. {LOOP}"
            )
        for optimizer in self.made:
            name = type(optimizer).__name__
            if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
                raise RuntimeError(
                    f"compile_step: the {name} has hooks on its step, which is taken inside of a "
                    "graph, unit by unit. Remove them, or call them around the step. " + LOOP
                )
            own: Any = vars(optimizer).get("step")
            if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
                raise RuntimeError(
                    f"compile_step: step of this {name} was replaced, and a whole step does not "
                    f"call it. Leave it as it is. {LOOP}"
                )

    def check_params(
        self,
        units: list[Unit],
        params: list[tuple[ShardedParam, nn.Parameter]],
        ignored: Sequence[Ignored] = (),
    ) -> None:
        """Check that the optimizers hold what the model trains, each parameter once, and nothing
        else. ignored: what the model has that is in no unit.

        Raises:
            ValueError: they do not.
        """
        held = self._check_owners([*params, *((each, each.param) for each in ignored)])
        missing = [p for p, own in params if own.requires_grad and p.owners and id(own) not in held]
        if missing:
            used = set().union(*(unit.in_use() for unit in units))
            missing = [p for p in missing if p.is_held_in(used)]  # not if taken out of the model
        names = [p.fqn for p in missing]
        names += [p.fqn for p in ignored if p.param.requires_grad and id(p.param) not in held]
        if names:
            raise ValueError(
                f"compile_step: the {self.name} does not hold {shortened(names)}, which the model "
                "trains. Give it all of model.parameters(), give the step a list of the optimizers "
                "that hold the others, or freeze what is not to be trained"
            )
        known = {id(own) for _, own in params} | {id(each.param) for each in ignored}
        if strange := len(held - known):
            raise ValueError(
                f"compile_step: the {self.name} holds {strange} parameters that the model does not "
                "have, or did not when the step was made, which a whole step does not update. If "
                f"they were put into the model since, call compile_step again. {LOOP}"
            )

    def held(self) -> set[int]:
        """The identities of all parameters that are held."""
        groups = [group for each in self.made for group in each.param_groups]
        return {id(p) for group in groups for p in group["params"]}

    def _check_owners(
        self, params: Sequence[tuple[ShardedParam | Ignored, nn.Parameter]]
    ) -> set[int]:
        """The identities of all parameters that are held; each by one optimizer."""
        held: set[int] = set()
        twice: set[int] = set()
        for optimizer in self.made:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            twice |= held & own
            held |= own
        if twice:
            names = [p.fqn for p, own in params if id(own) in twice] or [
                f"{len(twice)} parameters that are in none of the model's units"
            ]
            raise ValueError(
                f"compile_step: two of the optimizers ({self.name}) hold {shortened(names)}, "
                "which both would update. Give each parameter to one of them"
            )
        return held

    def holders(self) -> dict[int, int]:
        """Of each parameter that is held, by its identity: which of the optimizers holds it."""
        groups = [(number, g) for number, each in enumerate(self.made) for g in each.param_groups]
        return {id(p): number for number, group in groups for p in group["params"]}

    def step_part(self, params: set[int], told: Told) -> None:
        """Each optimizer's own step for those of these parameters that it holds, and does not need
        whole; see `parts.step_part`.
        """
        for optimizer, given in zip(self.made, told, strict=True):
            if given is not None:
                step_part(optimizer, type(optimizer), params, **given)
