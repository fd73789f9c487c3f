"""Activations that a memory budget has on the host from forward to backward: the same numbers, bit
for bit, for fewer bytes on the device.

The CPU plays a device beside the host (`kit.offload`): a copy holds values of the other sign, is
NaN until it is awaited, and reads its source only then. So what is read too early, written over too
early, or copied once too often gives other numbers.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.compare import whole
from kit.harness import SLOW
from kit.offload import Copies, beside_host
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import (
    FullyShardedDataParallel,
    compile_step,
    errors,
    explain,
    fully_shard,
    planned,
)
from compiled_fsdp.compiler import budget
from compiled_fsdp.compiler.peaks import most
from compiled_fsdp.planning import consensus
from compiled_fsdp.planning.costs import Costs, Link

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kit.pool import Pool

WIDTH, ROWS, LAYERS, MANY = 16, 64, 2, 4
# A host that is as fast as its memory, so that copies hide behind small matmuls too.
FAST = Costs(1e9, 1e9, 1e-6, (("", Link(1e-6, 1e9)),), host=1e10)
OFFLOAD: dict[str, Any] = {"memory_budget": 0.0, "offload": "budget", "costs": FAST}
RECOMPUTE: dict[str, Any] = {"memory_budget": 0.0, "recompute": "budget", "costs": FAST}
BOTH: dict[str, Any] = {**OFFLOAD, "recompute": "budget"}


class Block(nn.Module):
    """kind: what is special about it; several, joined by "+".

    dropout: random numbers, whose masks are saved.
    checkpointed: the user has its activations computed again.
    views: queries, keys and values are views of one storage that is saved.
    counted: it writes to a buffer that it computes with.
    complex: complex numbers are saved.
    put: rows are put into what is saved, which nothing reads later: Inductor does so in place.
    routed: what is computed with has as many rows as only data decides.
    replicated: over the second axis of a mesh of four ranks, the same over the first.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH) if "views" in kind else None
        self.dropout = nn.Dropout(0.3 if kind == "dropout" else 0.0)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "checkpointed":
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.qkv is not None:
            q, k, v = self.qkv(h).view(4, -1, 3, WIDTH).unbind(2)
            h = nn.functional.scaled_dot_product_attention(q, k, v).reshape(x.shape)
        if "counted" in self.kind:
            h = (h + self.scale).tanh()
            self.scale.mul_(1.5)
        if self.kind == "routed":
            chosen = (h[:, 0] > 0).nonzero().flatten()
            routed = self.down(nn.functional.gelu(self.up(h[chosen])))
            return x.index_add(0, chosen, routed) + h.tanh()
        if self.kind == "complex":
            turning = torch.view_as_complex(self.up(h).view(len(x), -1, 2))
            turning = turning * torch.exp(1j * turning.real)
            return x + self.down(torch.view_as_real(turning).flatten(1).tanh())
        if self.kind == "put":
            a = self.up(h)
            y = x + self.down(nn.functional.gelu(a))
            put = a.index_put((torch.arange(3),), torch.zeros(3, 4 * WIDTH))
            return y + put[:, :WIDTH]
        h = nn.functional.gelu(self.up(self.dropout(h)))
        return x + self.dropout(self.down(h))


class Tied(nn.Module):
    """The first weight is the last one too."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block("plain") for _ in range(layers))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def model_of(kind: str, layers: int = LAYERS) -> nn.Module:
    torch._dynamo.reset()
    consensus._settled.clear()  # by the structure of parameters, which most kinds share
    errors._said.clear()
    torch.manual_seed(0)
    is_tied = kind == "tied"
    model: nn.Module = Tied(layers) if is_tied else nn.Sequential(*map(Block, [kind] * layers))
    if kind == "fsdp1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    mesh = None
    if kind == "replicated":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks if isinstance(model, Tied) else model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(rows: int = ROWS, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank() + 10 * step)
    return torch.randn(rows, WIDTH, generator=generator)


def choices_of(model: nn.Module) -> list[dict[str, Any]]:
    return [choice for graph in explain(model).graphs for choice in graph.choices]


def offloaded(model: nn.Module) -> list[str]:
    return [c["name"] for c in choices_of(model) if c["what"] == "offload" and not c["is_kept"]]


def peak_of(model: nn.Module) -> int:
    return max(graph.peak for graph in explain(model).graphs)


Result = tuple[list[Tensor], int, list[str], Copies]


def loop(
    kind: str,
    plan: dict[str, Any],
    backend: str,
    dynamic: bool | None = None,
    layers: int = LAYERS,
) -> Result:
    """Two steps: losses and gradients, the peak, what went to the host, and how often."""
    model = model_of(kind, layers)
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    found = []
    with beside_host() as copies, planned(**plan):
        for step in range(2):
            torch.manual_seed(step)
            rows = ROWS * (1 + step) if dynamic else ROWS
            x = batch(rows, step).requires_grad_("held" in kind)
            loss = call(x).square().mean()
            loss.backward()
            found += [loss.detach(), *([x.grad] if "held" in kind else [])]
    found += [whole(p.grad) for p in model.parameters() if p.grad is not None]
    return [*found, *model.buffers()], peak_of(model), offloaded(model), copies


def whole_step(kind: str, plan: dict[str, Any], backend: str, accumulate: int = 1) -> Result:
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    step = compile_step(
        model,
        optimizer,
        lambda m, x: m(x).square().mean(),
        backend=backend,
        accumulate=accumulate,
        clip=1.0,
    )
    found = []
    with beside_host() as copies, planned(**plan):
        for i in range(2):
            batches = [batch(step=i * accumulate + n) for n in range(accumulate)]
            found.append((step(batches) if accumulate > 1 else step(*batches)).detach())
    found += [whole(p.detach()) for p in model.parameters()]
    return found, peak_of(model), offloaded(model), copies


def as_without(
    plans: Sequence[dict[str, Any]], run: Callable[..., Result], *arguments: Any
) -> list[str]:
    """Compare plans that offload with the one that does not; returns what went to the host."""
    kind, *others = arguments
    least = {"memory_budget": 0.0, "costs": FAST}
    expected, before, _, none = run(kind, least, *others)
    assert none.num_begun == 0
    names: list[str] = []
    for plan in plans:
        found, peak, moved, copies = run(kind, plan, *others)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected)), (kind, plan)
        assert copies.num_begun == 4 * len(moved), "there and back, in two steps"
        # What is computed again for the user is the peak, whatever is saved.
        assert peak < before or (kind == "checkpointed" and peak == before), (peak, before)
        names += moved
    return names


EAGER = "compiled_fsdp_eager"


KINDS = ("plain", "dropout", "views+counted+held", "tied", "fsdp1", "complex")


@pytest.mark.parametrize("kind", KINDS)
def test_same_numbers(two: Pool, kind: str) -> None:
    """Recomputing as well is for the plain model: what is special about others is on the host in
    either; but for masks, which are drawn again. These two have layers between the first and the
    last.
    """
    plans = (OFFLOAD, BOTH) if kind in ("plain", "dropout") else (OFFLOAD,)
    layers = MANY if len(plans) > 1 else LAYERS
    for moved in two.run(as_without, plans, loop, kind, EAGER, None, layers):
        assert any("addmm" in name for name in moved), moved


def test_a_users_checkpoints(two: Pool) -> None:
    """What is computed again for them is theirs; their inputs go to the host."""
    for moved in two.run(as_without, (OFFLOAD,), loop, "checkpointed", EAGER, None, MANY):
        assert moved
        assert not any("addmm" in name for name in moved), moved


@pytest.mark.parametrize("kind", ["plain", "put"])
def test_inductor(two: Pool, kind: str) -> None:
    """Beside the same plan without copies: what is saved decides what Inductor fuses."""
    two.run(inductor, kind, timeout=SLOW)


def inductor(kind: str) -> None:
    expected, before, *_ = loop(kind, {"memory_budget": 0.0, "costs": FAST}, "inductor")
    found, peak, moved, copies = loop(kind, OFFLOAD, "inductor")
    assert moved
    assert copies.num_begun == 4 * len(moved)
    assert peak < before
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # fused otherwise


@pytest.mark.parametrize(("accumulate", "plan"), [(1, BOTH), (2, OFFLOAD)], ids=["1", "2"])
def test_whole_step(two: Pool, accumulate: int, plan: dict[str, Any]) -> None:
    for moved in two.run(as_without, (plan,), whole_step, "plain", EAGER, accumulate):
        assert moved


def test_dynamic_shapes(two: Pool) -> None:
    """One graph for several sizes: what goes to the host has the size of the batch."""
    for moved in two.run(as_without, (BOTH,), loop, "plain", EAGER, True):
        assert moved


BESIDE: dict[str, dict[str, Any]] = {
    "codes": {"gather_quantized": torch.int8, "reduce_quantized": torch.int8},
    "checksums": {"check": "checksums"},
    "parts": {"split_bytes": 1 << 11},
}


@pytest.mark.parametrize("beside", BESIDE)
def test_beside_other_options(two: Pool, beside: str) -> None:
    two.run(as_beside, "plain", BESIDE[beside])


def test_replicated(four: Pool) -> None:
    for moved in four.run(as_beside, "replicated", {}):
        assert moved


def test_sizes_that_only_data_decides(two: Pool) -> None:
    """They stay on the device: nobody knows their bytes; others go."""
    for moved in two.run(as_beside, "routed", {}):
        assert moved


def as_beside(kind: str, more: dict[str, Any]) -> list[str]:
    """Under other options too, as without copies."""
    expected, before, *_ = loop(kind, {"memory_budget": 0.0, "costs": FAST, **more}, EAGER)
    found, peak, moved, copies = loop(kind, {**OFFLOAD, **more}, EAGER)
    assert moved
    assert copies.num_begun == 4 * len(moved)
    assert all(map(torch.equal, found, expected))
    assert peak < before
    return moved


def twice(plan: dict[str, Any]) -> list[Tensor]:
    """Gradients of two backwards over what one forward has saved, and of a forward without any."""
    model = model_of("plain")
    call = torch.compile(model, backend=EAGER, fullgraph=True)
    with beside_host() as copies, planned(**plan):
        call(batch())
        loss = call(batch(step=1)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        moved = len(offloaded(model))
        del loss
    assert copies.num_begun == 4 * moved, "two forwards, and two ways back of the second's"
    return [whole(p.grad) for p in model.parameters()]


def two_backwards() -> None:
    expected, found = twice({"memory_budget": 0.0, "costs": FAST}), twice(OFFLOAD)
    assert all(map(torch.equal, found, expected))


def test_two_backwards(two: Pool) -> None:
    """What is on the host comes back for each."""
    two.run(two_backwards)


def within(budget: int) -> tuple[int, int, int]:
    """Bytes that the host has at once under a budget for it: decided, seen;
    and those at the peak.
    """
    seen: list[int] = []
    model = model_of("plain")
    call = torch.compile(model, backend=EAGER, fullgraph=True)
    with beside_host() as copies, planned(**OFFLOAD, host_budget=budget):
        call(batch()).square().mean().backward()
        seen.append(copies.most_on_host)
    moved = [c for c in choices_of(model) if c["what"] == "offload" and not c["is_kept"]]
    return sum(c["num_bytes"] for c in moved), seen[0], peak_of(model)


@pytest.mark.usefixtures("fake_world")
def test_the_hosts_budget() -> None:
    """It bounds what is there at once, and the less there is, the more stays on the device."""
    free = within(1 << 30)
    some = within(free[0] // 2)
    none = within(0)
    for decided, seen, _ in (free, some, none):
        assert decided == seen
    assert free[0] > some[0] > none[0] == 0
    assert some[0] <= free[0] // 2
    assert free[2] < some[2] < none[2]


def ranks_differ() -> tuple[list[str], list[str]]:
    """Ranks have batches of other sizes: each has on its host what suits it, and all compute the
    same again.
    """
    model = model_of("plain")
    call = torch.compile(model, backend=EAGER, fullgraph=True)
    with beside_host(), planned(**{**BOTH, "memory_budget": 0.3}):
        call(batch(ROWS // (1 + dist.get_rank()))).square().mean().backward()
    again = [c["name"] for c in choices_of(model) if c["what"] == "save" and not c["is_kept"]]
    return again, offloaded(model)


def test_ranks_with_other_shapes(two: Pool) -> None:
    (mine, moved), (theirs, _) = two.run(ranks_differ)
    assert sorted(mine) == sorted(theirs)
    assert moved


def said(plays_device: bool) -> tuple[str, list[str]]:
    model = model_of("plain")
    call = torch.compile(model, backend=EAGER, fullgraph=True)
    with (
        warnings.catch_warnings(record=True) as caught,
        beside_host() if plays_device else nullcontext(),
        planned(**OFFLOAD, host_budget=1 << 20),
    ):
        warnings.simplefilter("always")
        call(batch()).square().mean().backward()
        text = str(explain(model))
    return text, [str(w.message) for w in caught if "compiled_fsdp" in str(w.message)]


@pytest.mark.usefixtures("fake_world")
def test_explain() -> None:
    text, warned = said(True)
    (line,) = (line for line in text.splitlines() if "on the host from forward" in line)
    assert "costs" in line
    assert "*.up addmm" in line
    assert "Plan.offload='budget': fit_budget" in text
    assert "Plan.host_budget=1048576: fit_budget" in text
    assert not any("same memory" in each for each in warned)


@pytest.mark.usefixtures("fake_world")
def test_where_host_and_device_are_the_same_memory() -> None:
    """Nothing is copied, as with `CPUOffloadPolicy`, and that is said once."""
    text, warned = said(False)
    assert "on the host from forward" not in text
    (said_once,) = (each for each in warned if "same memory" in each)
    assert "Plan(offload='budget') on cpu" in said_once


def expected_and_tried(kind: str, plan: dict[str, Any]) -> list[tuple[int, int]]:
    """For each number of things that stay and was tried: the peak by the model of it, and by the
    trial.
    """
    found: list[tuple[int, int]] = []

    def spy(
        peak: Callable[[int], int],
        expected: Sequence[int],
        room: float,
        patience: int,
        known: dict[int, int],
    ) -> tuple[int, int]:
        numbers = range(0, len(expected), max(1, len(expected) // 8))
        found.extend((expected[num], peak(num)) for num in numbers)
        return most(peak, expected, room, patience, known)

    with mock.patch.object(budget, "most", spy):
        loop(kind, plan, EAGER, layers=MANY)
    return found


@pytest.mark.parametrize("kind", ["plain", "tied"])
@pytest.mark.parametrize("plan", [OFFLOAD, RECOMPUTE, BOTH], ids=["offload", "recompute", "both"])
@pytest.mark.usefixtures("fake_world")
def test_the_model_of_the_peak(kind: str, plan: dict[str, Any]) -> None:
    """What it expects is what a trial finds, or numbers are tried that are far from what fits."""
    found = expected_and_tried(kind, plan)
    assert len(found) > 8
    assert all(0.99 < expected / tried < 1.1 for expected, tried in found), found
