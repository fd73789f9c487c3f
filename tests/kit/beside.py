"""A script beside itself: trained unsharded, with the mean of all ranks' gradients, then by ours.

def script(side):
    model = side.shard(Net())
    side.train(side.compile(model), model)

two.run(beside, script)     # losses, gradients and parameters of each step are compared
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from kit.compare import check_equal, whole
from kit.oracle import BACKENDS, KINDS
from torch import Tensor, nn

import compiled_fsdp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WIDTH = 6
CLOSE = (1e-5, 1e-6)


class Net(nn.Module):
    """Three layers; `a` and `b` have weights of one shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.a, self.b, self.c = (nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.c(self.b(self.a(x).tanh()).tanh())
        return result


class Side:
    """How a script shards, compiles and trains; `kind` is "unsharded" or one of ours.

    notes: what is compared, with a name.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_ours = kind != "unsharded"
        self.notes: list[list[Any]] = []

    def shard(self, model: Any, *units: str, **options: Any) -> Any:
        """The model, with these of its modules as units of their own."""
        for name in (*units, "") if self.is_ours else ():
            compiled_fsdp.fully_shard(model.get_submodule(name), **options)
        return model

    def wrap(self, model: Any, *units: str, **options: Any) -> Any:
        """The same by `FullyShardedDataParallel`."""
        if not self.is_ours:
            return model
        options = {"device_id": torch.device("cpu"), "use_orig_params": True, **options}
        for name in units:
            inner = compiled_fsdp.FullyShardedDataParallel(model.get_submodule(name), **options)
            setattr(model, name, inner)
        return compiled_fsdp.FullyShardedDataParallel(model, **options)

    def compile(self, model: Any, **options: Any) -> Any:
        """What to call."""
        if self.kind not in BACKENDS:
            return model
        return torch.compile(model, backend=BACKENDS[self.kind], **options)

    def sgd(self, params: Iterable[Any], lr: float = 0.1) -> torch.optim.Optimizer:
        """An optimizer that steps by the mean of the ranks."""
        optimizer = torch.optim.SGD(params, lr=lr)

        def mean(*_: object) -> None:
            for p in optimizer.param_groups[0]["params"]:
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()

        if not self.is_ours:
            optimizer.register_step_pre_hook(mean)
        return optimizer

    def note(self, name: str, value: Any) -> None:
        """Compare this."""
        self.notes.append([name, whole(value) if isinstance(value, Tensor) else value])

    def note_params(self, model: Any) -> None:
        """Compare all parameters."""
        manager: Any = contextlib.nullcontext()
        if isinstance(model, compiled_fsdp.FullyShardedDataParallel):
            manager = compiled_fsdp.FullyShardedDataParallel.summon_full_params(model)
        with manager:
            for name, param in model.named_parameters():
                self.note(name.replace("_fsdp_wrapped_module.", ""), param)

    def batch(self, step: int) -> Tensor:
        """Another on each rank."""
        seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
        return torch.randn(4, WIDTH, generator=seed)

    def train(
        self,
        call: Callable[..., Tensor],
        model: Any,
        num_steps: int = 3,
        before: Callable[[int], Any] = lambda step: None,
        *args: Any,
    ) -> None:
        """Steps of SGD, of which losses and parameters are compared."""
        optimizer = self.sgd(model.parameters())
        for step in range(num_steps):
            before(step)
            loss = call(self.batch(step), *args).square().mean()
            self.note("loss", loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.note_params(model)


def beside(
    script: Callable[..., None],
    *args: Any,
    kinds: tuple[str, ...] = KINDS,
    within: tuple[float, float] = CLOSE,
) -> None:
    """Run a script unsharded and as each of these kinds, and compare its notes."""
    results = {}
    for kind in ("unsharded", *kinds):
        torch._dynamo.reset()
        side = Side(kind)
        script(side, *args)
        results[kind] = side.notes
    for kind in kinds:
        check_equal(results[kind], results["unsharded"], f"{kind}", *within)
