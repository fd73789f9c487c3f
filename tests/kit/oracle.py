"""Run the same observation on stock FSDP2 and on ours, and compare everything it returns.

    @rows("7.1", "7.2")
    def test_reshard_after_forward(two):
        two.run(same, reshard_after_forward)

    def reshard_after_forward(api):          # stock's `Api`, then ours eager, then ours compiled
        model = api.fully_shard(net())
        out = api.compile(model)(batch())
        return out, api.is_sharded(model)    # compared bit for bit

`rows` names the rows of the specification (`compat/fsdp2/rows.tsv`) that the test pins; the table
in `docs/fsdp2.md` is made from these marks. What a test knows to differ is not returned but
asserted for each kind, under the status "improved".
"""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from kit.compare import check_equal, plain
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor

import compiled_fsdp
from compiled_fsdp import errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool

KINDS = ("eager", "compiled")
BACKENDS = {"compiled": "compiled_fsdp_eager", "inductor": "inductor"}
ShardPlacementResult: Any = getattr(_fsdp_common, "ShardPlacementResult", None)
needs_meshes_of_their_own = pytest.mark.skipif(
    ShardPlacementResult is None, reason="in torch 2.11 a parameter cannot have a mesh of its own"
)
STATUSES = ("both", "eager", "compiled", "improved")


def rows(*ids: str, status: str = "both") -> Callable[[Any], Any]:
    """Mark a test with the rows that it pins. status: where they hold, or "improved" where ours
    differs on purpose.
    """
    assert status in STATUSES, status

    def mark(test: Any) -> Any:
        test.rows = (*getattr(test, "rows", ()), *((i, status) for i in ids))
        return test

    return mark


class AnyApi:
    """Stock FSDP or ours, and how to run a model with it.

    kind: "stock", or of ours "eager", "compiled" (without Inductor: exact, and compiles in a
        second), "inductor".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_stock = kind == "stock"
        self.is_compiled = kind in BACKENDS
        self.package: Any = stock if self.is_stock else compiled_fsdp

    def compile(self, model: Any, **options: Any) -> Any:
        """What to call: the model, or it compiled into whole graphs."""
        if not self.is_compiled:
            return model
        return torch.compile(model, backend=BACKENDS[self.kind], **{"fullgraph": True, **options})


class Api(AnyApi):
    """`fully_shard`, and everything else of the package."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.package, name)

    def units(self, model: Any, *names: str, **options: Any) -> Any:
        """Shard the submodules of these names, one unit each, and then the model."""
        for name in names:
            self.fully_shard(model.get_submodule(name), **options)
        return self.fully_shard(model, **options)


def same(
    observe: Callable[..., Any],
    *args: Any,
    kinds: tuple[str, ...] = KINDS,
    rtol: float = 0.0,
    atol: float = 0.0,
    of: type[AnyApi] = Api,
) -> None:
    """Worker function: every kind of ours observes what stock does."""
    torch.manual_seed(0)
    expected = plain(observe(of("stock"), *args))
    for kind in kinds:
        torch._dynamo.reset()
        torch.manual_seed(0)
        found = plain(observe(of(kind), *args))
        check_equal(found, expected, f"{kind} against stock", rtol, atol)


def inductor_same(observe: Callable[..., Any], *args: Any, is_low: bool = False) -> None:
    """Worker function: ours under the default backend observes what stock does, but for rounding;
    in 16 bits Inductor rounds less often.
    """
    rtol, atol = (0.03, 3e-3) if is_low else (1e-5, 1e-6)
    same(observe, *args, kinds=("inductor",), rtol=rtol, atol=atol)


def eager_same(observe: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Worker function: only ours eager observes what stock does."""
    same(observe, *args, kinds=("eager",), **options)


def ours_alike(observe: Callable[..., Any], *args: Any) -> None:
    """Worker function: for what the installed stock lacks; ours compiled observes what ours eager
    does.
    """
    found = []
    for kind in KINDS:
        torch._dynamo.reset()
        torch.manual_seed(0)
        found.append(plain(observe(Api(kind), *args)))
    check_equal(found[1], found[0], "compiled against eager")


def ours_eager(observe: Callable[..., Any], *args: Any) -> None:
    """Worker function: for what the installed stock lacks; ours eager can be observed."""
    each(observe, *args, kinds=("eager",))


def stock_has(*methods: str) -> bool:
    """Whether the `FSDPModule` of the installed torch has all of these methods."""
    return not lacking(*methods)


def lacking(*methods: str) -> list[str]:
    """Which of these methods the `FSDPModule` of the installed torch lacks."""
    return [method for method in methods if not hasattr(stock.FSDPModule, method)]


def skip_without(*methods: str) -> None:
    """End a test where its comparison with stock begins, if the installed stock lacks one of these
    methods.
    """
    missing = lacking(*methods)
    if missing:
        pytest.skip(f"stock of this torch has no {', '.join(missing)}; ours have run without it")


def against_stock(
    pool: Pool, worker: Callable[..., None], observe: Callable[..., Any], *needs: str
) -> None:
    """Run `same` or `eager_same`; where stock lacks what the observation needs, ours among
    themselves, and skip the rest.
    """
    alone = {same: ours_alike, eager_same: ours_eager}[worker]
    pool.run(worker if stock_has(*needs) else alone, observe)
    skip_without(*needs)


def same_or_reason(observe: Callable[..., Any], expected: str, *args: Any) -> str | None:
    """Worker function: `same`; if the installed stock raises what is expected of it, ours among
    themselves, and what it said.
    """
    try:
        torch.manual_seed(0)
        observe(Api("stock"), *args)
    except (RuntimeError, ValueError) as error:
        if expected not in str(error):
            raise
        ours_alike(observe, *args)
        return str(error).splitlines()[0]
    same(observe, *args)
    return None


def unless_stock_raises(pool: Pool, observe: Callable[..., Any], expected: str, *args: Any) -> None:
    """Run `same`; where the installed stock raises this, ours among themselves, and skip the
    rest.
    """
    reasons = pool.run(same_or_reason, observe, expected, *args)
    if reasons[0] is not None:
        pytest.skip(
            f"stock of this torch raises here: {reasons[0]}; ours have run, and were compared"
        )


def close(observe: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Worker function: on four ranks, where gloo's reduce-scatter and our all-to-all add in
    different orders.
    """
    same(observe, *args, rtol=1e-5, atol=1e-7, **options)


def close_eager(observe: Callable[..., Any], *args: Any) -> None:
    """Worker function: as `close`, for ours eager alone."""
    close(observe, *args, kinds=("eager",))


def each(
    observe: Callable[..., Any], *args: Any, kinds: tuple[str, ...] = KINDS, of: type[AnyApi] = Api
) -> None:
    """Worker function: the observation asserts by itself, for each kind of ours."""
    for kind in kinds:
        torch._dynamo.reset()
        torch.manual_seed(0)
        errors._said.clear()
        observe(of(kind), *args)


@cache
def traces_alpha() -> bool:
    """Whether Dynamo takes `add_(x, alpha=a)` into its graphs as it is. In torch 2.11 it takes
    `add_(x * a)`, which is rounded twice: with whichever backend, of whichever parameters.
    """
    found = []

    def look(gm: Any, inputs: Any) -> Any:
        found.extend(node.kwargs for node in gm.graph.nodes)
        return gm.forward

    torch.compile(lambda a, b: a.add_(b, alpha=0.1), backend=look, fullgraph=True)(
        torch.ones(1), torch.ones(1)
    )
    return any("alpha" in kwargs for kwargs in found)


def raised(run: Callable[[], Any]) -> str | None:
    """The type of what `run` raises, by name; None if it returns."""
    try:
        run()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__
    return None


def message(run: Callable[[], Any]) -> str:
    """The text of what `run` raises."""
    try:
        run()
    except Exception as error:  # noqa: BLE001
        return str(error)
    raise AssertionError("nothing was raised")


def grads(model: nn.Module) -> dict[str, Any]:
    """Every parameter's gradient."""
    return {name: p.grad for name, p in model.named_parameters()}


def params(model: nn.Module) -> dict[str, Any]:
    """Every parameter."""
    return dict(model.named_parameters())


def is_sharded(module: nn.Module) -> list[bool]:
    """Which registered parameters are DTensors now."""
    return [
        isinstance(p, DTensor)
        for m in module.modules()
        for p in m._parameters.values()
        if p is not None
    ]


# What the process group is asked for, under any of its names.
_COMMUNICATIONS = {
    "c10d::_allgather_base_": "gather",
    "fsdp::all_gather": "gather",
    "c10d::_reduce_scatter_base_": "reduce",
    "fsdp::all_to_all": "reduce",
    "c10d::allreduce_": "all_reduce",
}


class Event(NamedTuple):
    """What was recorded, with what ran directly inside of it."""

    name: str
    thread: int
    end: int
    inside: list[Event]


def recorded(profiler: torch.profiler.profile) -> list[Event]:
    """What a profiler has recorded on the CPU. Its own `events()` makes an object of thirty fields
    for each op that a compilation calls, which takes a third as long as the compilation.
    """
    rows = sorted(
        (e.start_thread_id(), e.start_ns(), -e.start_ns() - e.duration_ns(), e.name())
        for e in profiler.profiler.kineto_results.events()
        if e.device_type() == torch.autograd.DeviceType.CPU
    )
    found, open_ones = [], []
    for thread, start, end, name in rows:
        event = Event(name, thread, -end, [])
        while open_ones and not (
            open_ones[-1].thread == thread and start < open_ones[-1].end >= event.end
        ):
            open_ones.pop()
        if open_ones:
            open_ones[-1].inside.append(event)
        open_ones.append(event)
        found.append(event)
    return _without_doubles(found)


def _without_doubles(events: list[Event]) -> list[Event]:
    """An op that does nothing but call itself, for another dispatch key, ran once."""
    gone = set()
    for event in reversed(events):
        while [c.name for c in event.inside] == [event.name]:
            gone.add(id(event.inside[0]))
            event.inside[:] = event.inside[0].inside
    return [event for event in events if id(event) not in gone]


def communications(run: Callable[[], Any]) -> dict[str, int]:
    """How many gathers, reductions and all-reduces `run` starts on this rank."""
    with torch.profiler.profile() as profiler:
        run()
    found: Counter[str] = Counter()
    for event in recorded(profiler):
        named = [
            c for c in event.inside if c.name.startswith("compiled_fsdp::")
        ]  # the range that our op opens
        inside = [*event.inside, *(c for entry in named for c in entry.inside)]
        is_run = not event.name.startswith("fsdp::") or any(
            c.name == "aten::copy_" for c in inside
        )  # of the rank's own piece
        if (
            event.name in _COMMUNICATIONS and is_run
        ):  # else a fake one, or one that a dispatch mode passes on
            found[_COMMUNICATIONS[event.name]] += 1
    return {kind: found[kind] for kind in ("gather", "reduce", "all_reduce")}


_meshes: dict[tuple[tuple[int, ...], tuple[str, ...] | None], DeviceMesh] = {}


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A CPU mesh; process groups are costly, so one of a kind for all tests of a worker."""
    key = (shape or (dist.get_world_size(),), names)
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", key[0], mesh_dim_names=names)
    return _meshes[key]


def net(width: int = 6, depth: int = 2, seed: int = 7) -> nn.Sequential:
    """Linear layers of odd sizes with tanh in between: `0`, `2`, `4`, ... have parameters."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Linear(width if i == 0 else width + 1, width + 1), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width + 1, 3))


class Own(nn.Module):
    """A parameter registered before the children, so that `named_parameters` and a group's order
    differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(3.0) + 1)
        self.register_buffer("shift", torch.ones(3))
        self.inner = net()

    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.scale + self.shift


def net_of_units(api: Api, **options: Any) -> tuple[Any, Any]:
    """`net()` as three units, and what to call: the model, or it compiled."""
    model = api.units(net(), "0", "2", **options)
    return model, api.compile(model)


def batch(width: int = 6, step: int = 0, *, requires_grad: bool = False) -> Tensor:
    """Different on every rank and step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, width, generator=generator).requires_grad_(requires_grad)


def train_step(call: Any, step: int = 0) -> Tensor:
    """Forward and backward of one batch; the loss."""
    loss = call(batch(step=step)).square().mean()
    loss.backward()
    return loss.detach()


def input_step(call: Any, step: int = 0) -> Any:
    """As `train_step`; every weight is needed in backward, also the first."""
    x = batch(step=step, requires_grad=True)
    call(x).square().mean().backward()
    return x.grad


@contextlib.contextmanager
def no_recompiles() -> Any:
    """Every compilation inside is an error."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
