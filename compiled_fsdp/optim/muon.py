"""`Muon`: torch.optim.Muon for sharded parameters, each matrix orthogonalized at one rank."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import optim

from compiled_fsdp.errors import shortened
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.torch_private.dtensors import local_tensor
from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.torch_private.muon import adjusted_lr

from .cut import cut_of
from .newton_schulz import flops, newton_schulz
from .owners import BUCKET_BYTES, Item
from .pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim.optimizer import ParamsT

DTYPES = (torch.bfloat16, torch.float32)


class Muon(optim.Muon):
    """torch.optim.Muon whose parameters may be sharded: the numbers of the unsharded model, with
    each matrix orthogonalized once, by one of the ranks that have its pieces.

    Arguments, parameter groups and state dict are those of torch.optim.Muon. What it does for a
    matrix [m, n] that is cut over N ranks: each rank updates its part of the momentum, which stays
    sharded; the matrix owner gets all parts, in bfloat16, in which torch.optim.Muon iterates
    anyway; it orthogonalizes the matrix, and sends each rank its part of the update back, in
    bfloat16 again. Owners are balanced by work over the ranks of the shard group (with HSDP, in
    each replica), and matrices travel in buckets: while one is orthogonalized, the next are on
    their way. A rank sends 2 (N-1)/N m n bytes for each matrix that it owns, and 2 (N-1)/N^2 m n on
    average for the parts. Where all work is less than an exchange's latency, every rank gets and
    updates all (`owners.is_cheaper_everywhere`).

    Parameters with other than two dims (norms, biases, convolutions) go to another optimizer, as
    embeddings and heads usually do:

        matrices = [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]
        muon = compiled_fsdp.Muon(matrices, lr=0.02)
        others = [p for p in model.parameters() if all(p is not each for each in matrices)]
        adamw = torch.optim.AdamW(others, lr=3e-4)

    Args:
        params: iterable of parameters, of named parameters, or groups of either. DTensors that one
            mesh axis cuts, as `fully_shard` makes them (also torch's), or plain tensors, which
            every rank updates by itself.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as for
            torch.optim.Muon of the installed torch.
        ns_dtype: in which a matrix is orthogonalized and travels: torch.bfloat16, as in
            torch.optim.Muon, or torch.float32, which is closer to the exact iteration, and some
            thirty times faster on CPUs without instructions for bfloat16.
        bucket_bytes: matrices up to so many bytes, in `ns_dtype`, travel together.

    Raises:
        ValueError: a parameter is not a matrix, or an argument is out of its range.
        NotImplementedError: from `step()`: a parameter is cut over several mesh axes, as with
            tensor parallelism.
        DivergenceError: from `step()`: ranks have gradients for different parameters.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if ns_dtype not in DTYPES:
            raise ValueError(f"Muon: ns_dtype={ns_dtype!r}; should be one of {list(DTYPES)}")
        self.ns_dtype, self.bucket_bytes = ns_dtype, bucket_bytes
        self._planned: tuple[list[Tensor], Pipeline] | None = None
        super().__init__(
            params,
            lr,
            weight_decay,
            momentum,
            nesterov,
            ns_coefficients,
            eps,
            ns_steps,
            adjust_lr_fn,
        )

    def __getstate__(self) -> dict[str, Any]:
        more = {"ns_dtype": self.ns_dtype, "bucket_bytes": self.bucket_bytes, "_planned": None}
        return {**super().__getstate__(), **more}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices; see the class."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        wrong = [
            f"{name} of shape {tuple(p.shape)}"
            for name, p in zip(
                _names(group, len(self.param_groups) - 1), group["params"], strict=True
            )
            if p.ndim != 2
        ]
        if wrong:
            self.param_groups.pop()
            raise ValueError(
                f"Muon: {len(wrong)} of the parameters are no matrices: "
                f"{shortened(wrong)}. Muon only supports 2D parameters: give the others to "
                "AdamW, say. FullyShardedDataParallel keeps parts of matrices, of one dim: "
                "use fully_shard instead"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step, on every rank of the parameters' meshes together; returns what
        `closure` does.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @untraced
    def _step(self) -> None:
        for _ in self.updates():
            pass

    @torch.no_grad()
    def updates(self) -> Iterator[Tensor]:
        """Update every parameter that has a gradient, and yield each one as soon as it is; hooks on
        steps are not called. To be iterated to the end, by every rank.
        """
        params = [(group, p) for group in self.param_groups for p in group["params"]]
        params = [(group, p) for group, p in params if p.grad is not None]

        def prepare(number: int) -> Sequence[Tensor]:
            return [self.direction(*params[number])]

        def orthogonalize(number: int, matrix: Tensor) -> Sequence[Tensor]:
            return [orthogonalized(params[number][0], matrix)]

        for number, (update,) in self._pipeline(params).run(prepare, orthogonalize):
            group, p = params[number]
            apply(group, p, update)
            yield p

    def direction(self, group: dict[str, Any], p: nn.Parameter) -> Tensor:
        """Add this rank's piece of a gradient to the momentum, and return the piece of what is to
        be orthogonalized.
        """
        assert p.grad is not None
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        grad, buffer = local_tensor(p.grad), local_tensor(state["momentum_buffer"])
        buffer.lerp_(grad, 1 - group["momentum"])
        direction = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return direction.to(self.ns_dtype)

    def _pipeline(self, params: Sequence[tuple[dict[str, Any], nn.Parameter]]) -> Pipeline:
        """That of the last step, if the same parameters have gradients."""
        tensors: list[Tensor] = [p for _, p in params]
        if self._planned is not None:
            before, pipeline = self._planned
            if len(before) == len(tensors) and all(map(operator.is_, before, tensors)):
                return pipeline
        names = {
            id(p): name
            for number, group in enumerate(self.param_groups)
            for name, p in zip(_names(group, number), group["params"], strict=True)
        }
        items = []
        for group, p in params:
            _check(p, names[id(p)])
            cut = cut_of(p, names[id(p)], "Muon", self.ns_dtype)
            items.append(Item(names[id(p)], (cut,), work_of(group, p)))
        pipeline = Pipeline(items, "Muon", self.bucket_bytes, current_plan().costs)
        self._planned = tensors, pipeline
        return pipeline


def orthogonalized(group: dict[str, Any], matrix: Tensor) -> Tensor:
    """What is made of a whole matrix of a group, in its dtype."""
    return newton_schulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])


def apply(group: dict[str, Any], p: nn.Parameter, update: Tensor) -> None:
    """Move this rank's piece of a parameter by its piece of the update."""
    local, lr = local_tensor(p), group["lr"]
    local.mul_(1 - lr * group["weight_decay"])
    local.add_(update, alpha=-adjusted_lr(lr, group["adjust_lr_fn"], p.shape))


def work_of(group: dict[str, Any], p: nn.Parameter) -> float:
    """Floating-point operations of a matrix at its owner."""
    return flops(tuple(p.shape), group["ns_steps"])


def _names(group: dict[str, Any], number: int) -> list[str]:
    """What errors call a group's parameters: their names, if the optimizer was given them."""
    names: list[str] | None = group.get("param_names")
    return names or [f"group {number}, parameter {i}" for i in range(len(group["params"]))]


def _check(p: nn.Parameter, name: str) -> None:
    if torch.is_complex(p) or (p.grad is not None and p.grad.is_sparse):
        raise RuntimeError(
            f"Muon: {name} is complex, or has a sparse gradient, neither of which torch.optim.Muon "
            "supports. Give it to another optimizer"
        )
