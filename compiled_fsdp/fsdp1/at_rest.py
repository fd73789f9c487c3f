"""Parameters at rest as stock FSDP1 treats them, where ours has to prepare it, or does the
evidently right thing instead.

Summoning, saving and loading are stock's own; before each, the modules hold sharded parameters
again. Differences: the settings of `state_dict_type` are restored after an exception too, and what
is to be offloaded to the CPU may be there already.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from compiled_fsdp.eager.tree import in_backward
from compiled_fsdp.wire import copies

from .stock import FlatParamHandle, StockFSDP, TrainingState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


class Keeper(FlatParamHandle):
    """Stock's handle of a flat parameter.

    What is offloaded has one gradient, as any other: stock's second buffer for it is dropped.
    """

    def init_flat_param_attributes(self) -> None:
        """Before the first forward; what is offloaded is pinned then,
        and rests there from now on.
        """
        super().init_flat_param_attributes()
        if self._offload_params:
            del self.flat_param._cpu_grad
            self._use_sharded_flat_param()

    def _writeback_orig_params(self) -> bool:
        """What users put in the place of originals; under NO_SHARD stock asks the second buffer."""
        flat: Any = self.flat_param
        is_asked = self._offload_params and not self.uses_sharded_strategy
        if is_asked:
            flat._cpu_grad = flat.grad
        try:
            return bool(super()._writeback_orig_params())
        finally:
            if is_asked:
                del flat._cpu_grad

    @contextmanager
    def to_cpu(self) -> Iterator[None]:
        """Show the unsharded flat parameter on the CPU; nothing to do where it is (stock frees it
        there).
        """
        if self.device.type == "cpu":
            yield
            return
        with super().to_cpu():
            yield


def rest(module: nn.Module) -> None:
    """Let every instance in `module` hold sharded parameters, unless a forward or backward is
    running.

    Raises:
        AssertionError: a backward is running.
    """
    for instance in StockFSDP.fsdp_modules(module):
        state = instance.__dict__.get("_fsdp_state")
        if state is None or instance.training_state == TrainingState.FORWARD_BACKWARD:
            continue
        if in_backward():
            raise AssertionError("Cannot manually unshard parameters during forward/backward")
        state.runtime.drop_pending()
        state.runtime.reshard()
        copies.settle()
        state.unit.hide()


class AtRest(StockFSDP):
    """The methods of the wrapper that are about parameters at rest."""

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Show the full parameters of every instance in `module`, in full precision; see torch's
        own class.
        """
        rest(module)
        with StockFSDP.summon_full_params(
            module, recurse, writeback, rank0_only, offload_to_cpu, with_grads
        ):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """`fn` on every module, with its full parameters."""
        rest(self)
        return super().apply(fn)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """On the flat parameters: `to`, `half` and the like."""
        rest(self)
        result = super()._apply(*args, **kwargs)
        for instance in self.fsdp_modules(self):
            instance._fsdp_state.unit.take_over()
        return result

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Iterator[None]:
        """Use these settings inside; restored afterwards, after an exception too."""
        before = StockFSDP.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            if before.state_dict_type is not None:
                StockFSDP.set_state_dict_type(
                    module,
                    before.state_dict_type,
                    before.state_dict_config,
                    before.optim_state_dict_config,
                )

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: Any = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The optimizer's state by parameter names, as the current state-dict type says."""
        rest(model)
        with _copied(model):
            return StockFSDP.optim_state_dict(model, optim, optim_state_dict, group)

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """The old way to get the whole state, by default on rank 0."""
        StockFSDP._warn_legacy_optim_state_dict(
            "full_optim_state_dict", "optim_state_dict", stacklevel=2
        )
        rest(model)
        return StockFSDP._optim_state_dict_impl(
            model=model,
            optim=optim,
            optim_state_dict=optim.state_dict(),
            optim_input=optim_input,
            rank0_only=rank0_only,
            group=group,
            full_state_dict=True,
            cpu_offload=not _is_on_cpu(model),
            _stacklevel=2,
        )


def _is_on_cpu(model: nn.Module) -> bool:
    return all(str(instance.compute_device) == "cpu" for instance in StockFSDP.fsdp_modules(model))


@contextmanager
def _copied(model: nn.Module) -> Iterator[None]:
    """On the CPU nothing is to be offloaded, and stock copies only what it does not offload."""
    configs = (
        [instance._optim_state_dict_config for instance in StockFSDP.fsdp_modules(model)]
        if _is_on_cpu(model)
        else []
    )
    before = [(config, config.offload_to_cpu) for config in configs]
    try:
        for config in configs:
            config.offload_to_cpu = False
        yield
    finally:
        for config, value in before:
            config.offload_to_cpu = value
