"""`Plan(check="checksums")` beside everything else: random models in which nothing happens, codes
on the wire, FSDP1, activation checkpointing, what is refused, and graphs without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit import random_models
from kit.bit_flips import flip, in_exchange
from kit.graphs import captured
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import (
    ChecksumError,
    FullyShardedDataParallel,
    Plan,
    explain,
    fully_shard,
    overlap_optimizer,
    planned,
)
from compiled_fsdp.eager import spread
from compiled_fsdp.frontend.state import states_below
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.printer import show
from compiled_fsdp.ir.schema import CHECKSUM, COMPARE

if TYPE_CHECKING:
    from kit.pool import Pool

CHECKED: dict[str, Any] = {"check": "checksums"}


def random_steps(first: int, number: int, steps: int) -> int:
    """How many steps were taken, of each kind of execution in turn; evaluations among them."""
    taken = 0
    for seed in range(first, first + number):
        program = random_models.make(seed)
        torch._dynamo.reset()
        with planned(bucket_bytes=random_models.BUCKETS[seed % 3], **CHECKED):
            model: Any = random_models.shard(random_models.build(program), program)
            call = model
            if seed % 4:
                call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = (torch.optim.AdamW, torch.optim.SGD)[seed % 2](trained, lr=0.01)
            for step in range(steps):
                for micro in range(program.micro_batches):
                    model.set_requires_gradient_sync(micro == program.micro_batches - 1)
                    batch = random_models.batch(10 * step + micro)
                    call(batch).float().square().mean().backward()
                if step % 3 == 1:
                    torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                taken += 1
                if step % 4 == 2:
                    with torch.no_grad():
                        call(batch)
    return taken


def test_random_models_in_which_nothing_happens(two: Pool) -> None:
    assert two.run(random_steps, 300, 2, 4) == [8, 8]


def test_200_steps_of_random_models(two: Pool) -> None:
    assert two.run(random_steps, 320, 20, 10) == [200, 200]


def fsdp1(is_compiled: bool, use_orig_params: bool) -> list[str]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)) for _ in range(2)))
    found = []
    with planned(bucket_bytes=0, **CHECKED):
        model: Any = FullyShardedDataParallel(
            net,
            auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
        )
        call = torch.compile(model, backend="compiled_fsdp_eager") if is_compiled else model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step() -> None:
            torch.manual_seed(dist.get_rank())
            call(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        numel = (2 * 16 * 24 + 24 + 16) // 2
        for collective, where in (("all_gather", "received"), ("all_to_all", "received")):
            with in_exchange(collective, where, 1, (numel,), 0, -1):
                with pytest.raises(ChecksumError) as caught:
                    step()
            assert all(p.grad is None for p in model.parameters())
            found += [f"{f.rank} {f.unit} {f.collective}" for f in caught.value.faults]
            optimizer.zero_grad()
            step()
        handles = FullyShardedDataParallel.fsdp_modules(model)
        flat = handles[-1]._handle.flat_param
        if dist.get_rank() == 0:
            flip(flat.detach(), 100)
        with pytest.raises(ChecksumError) as caught:
            step()
        found += [f"{f.rank} {f.unit} {f.collective}" for f in caught.value.faults]
    return found


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_fsdp1(two: Pool, is_compiled: bool, use_orig_params: bool) -> None:
    gathered, exchanged, rests = two.run(fsdp1, is_compiled, use_orig_params)[0]
    assert gathered.split()[0] == exchanged.split()[0] == "1"
    assert gathered.endswith("all-gather")
    assert exchanged.endswith("all-to-all")
    assert (rests.split()[0], rests[-13:]) == ("0", "shard at rest")


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def coded(is_compiled: bool, codes: dict[str, Any]) -> list[str]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Checkpointed()
    found: list[str] = []
    with planned(bucket_bytes=0, **CHECKED, **codes):
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        call = torch.compile(model, backend="compiled_fsdp_eager") if is_compiled else model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step() -> None:
            torch.manual_seed(dist.get_rank())
            call(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        for collective in ("all_gather", "all_to_all"):
            sizes = [range(1, 1 << 20)]
            with in_exchange(collective, "received", 1, sizes[0], 1, -70):
                with pytest.raises(ChecksumError) as caught:
                    step()
            found += [f"{f.rank} {f.collective}" for f in caught.value.faults]
            step()
    return found


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    "codes", [{}, {"gather_quantized": torch.int8, "reduce_quantized": torch.int8}]
)
def test_codes_and_activation_checkpointing(
    two: Pool, is_compiled: bool, codes: dict[str, Any]
) -> None:
    assert two.run(coded, is_compiled, codes)[0] == ["1 all-gather", "1 all-to-all"]


def graphs_of(check: str | None) -> list[Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Checkpointed()
    with planned(check=check, reductions="all_to_all"), captured() as graphs:
        for block in model.blocks:
            fully_shard(block)
        call = torch.compile(fully_shard(model), backend="compiled_fsdp_eager", fullgraph=True)
        call(torch.ones(2, 64)).sum().backward()
        told = str(explain(model))
    return [graphs, told]


def graphs_with_and_without() -> None:
    (with_checks, told), (without, silent) = graphs_of("checksums"), graphs_of(None)
    assert len(with_checks) == len(without) == 2
    for graph, plain in zip(with_checks, without, strict=True):
        added = find(graph, CHECKSUM, COMPARE)
        assert added
        assert not find(plain, CHECKSUM, COMPARE)
        for node in reversed(added):
            graph.erase_node(node)
        assert _shape(graph) == _shape(plain), "without the sums it is the same graph"
    assert "checked: 4 parameters (gathers" in told
    assert "checked: " not in silent


def _shape(graph: Any) -> list[str]:
    return [line.split("#")[0] for line in show(graph).splitlines() if "agree(" not in line]


def test_nothing_is_in_the_graph_without_it(two: Pool) -> None:
    two.run(graphs_with_and_without)


class Plain(Checkpointed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def slices(is_compiled: bool) -> list[str]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Plain()
    found: list[str] = []
    with planned(bucket_bytes=0, **CHECKED):
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=2)
        fully_shard(model)
        call = torch.compile(model, backend="compiled_fsdp_eager") if is_compiled else model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step() -> None:
            torch.manual_seed(dist.get_rank())
            call(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        whole = 2 * (64 * 64 + 64)
        for numels in ((whole // 4,), (whole // 2, 64 * 64, 64 * 64 // 2, 64 * 64 + 32)):
            with in_exchange("all_gather", "received", 3, numels, 0, 3) as done:
                with pytest.raises(ChecksumError) as caught:
                    step()
            assert bool(done) == (dist.get_rank() == 3)
            found += [f"{f.rank} {f.among} {f.phase} {f.again}" for f in caught.value.faults]
            step()
    return found


@pytest.mark.parametrize("is_compiled", [False, True])
def test_slices(four: Pool, is_compiled: bool) -> None:
    """An int `reshard_after_forward`: backward gathers slices over a part of the ranks."""
    first, second = four.run(slices, is_compiled)[0]
    assert first == "3 (3, 0) forward right"
    assert second == "3 (3, 2) backward "


class Several:
    """Two blocks that are spread otherwise than one shard a rank; which parts rank 3 shares with
    which rank is the mesh's.
    """

    def __init__(self, what: str, *, is_compiled: bool) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model: Any = Plain()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        first, second = self.model.blocks
        if what == "tensor parallelism":
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            for block in (first, second):
                fully_shard(parallelize_module(block, mesh["b"], plan), mesh=mesh["a"])
            fully_shard(self.model, mesh=mesh["a"])
        else:
            fully_shard(first, mesh=mesh["b"])
            fully_shard(second)
            fully_shard(self.model)
        backend = "compiled_fsdp_eager"
        self.call = torch.compile(self.model, backend=backend) if is_compiled else self.model
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.count, self.what = 0, what

    def step(self) -> float:
        rank = dist.get_rank() // (2 if self.what == "tensor parallelism" else 1)
        torch.manual_seed(100 * self.count + rank)
        loss = self.call(torch.randn(4, 64)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1
        return loss.item()


def several(what: str, is_compiled: bool) -> list[str]:
    found: list[str] = []
    with planned(bucket_bytes=0):
        other = Several(what, is_compiled=is_compiled)
        wanted = [other.step() for _ in range(5)]
    with planned(bucket_bytes=0, **CHECKED):
        run = Several(what, is_compiled=is_compiled)
        losses = [run.step() for _ in range(2)]
        for collective in ("all_gather", "all_to_all"):
            with in_exchange(collective, "received", 3, range(1, 1 << 20), 0, 3) as done:
                with pytest.raises(ChecksumError) as caught:
                    run.step()
            assert bool(done) == (dist.get_rank() == 3)
            found += [f"{f.rank} {f.unit} {f.again}" for f in caught.value.faults]
            losses.append(run.step())
        param = list(run.model.parameters())[2]
        if dist.get_rank() == 2:
            flip(param, 77)
        with pytest.raises(ChecksumError) as caught:
            run.step()
        if dist.get_rank() == 2:
            flip(param, 77)
        found += [f"{f.rank} {f.unit} {f.again}" for f in caught.value.faults]
        losses.append(run.step())
    assert losses == wanted
    return found


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("what", ["tensor parallelism", "several meshes"])
def test_all_ranks_hear_of_it(four: Pool, what: str, is_compiled: bool) -> None:
    """Ranks that have no part in a communication, nor in the mesh of its unit,
    refuse the step too.
    """
    found = four.run(several, what, is_compiled)
    assert found == [found[0]] * 4
    gathered, exchanged, rests = found[0]
    assert gathered == "3 blocks.0 right"
    assert (exchanged[:8], exchanged[-5:]) == ("3 blocks", "right")
    assert rests == "2 blocks.0 wrong"


def far_apart() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    groups = [mesh.get_group(axis) for axis in range(2)]
    steps = [groups[:1], groups, groups]  # as if one were too few
    units = [state.unit for state in states_below(fully_shard(nn.Linear(8, 8)))]
    with mock.patch.object(spread, "_passes", side_effect=steps):
        with pytest.raises(NotImplementedError) as error:
            spread.check_reach(units, groups, torch.device("cpu"))
    spread.check_reach(units, groups, torch.device("cpu"))
    return str(error.value)


def test_ranks_too_far_apart(four: Pool) -> None:
    assert "some ranks would not hear of what others find" in four.run(far_apart)[0]


# -- what it is not combined with


def refused(what: str) -> str:
    """The text of the error."""
    torch._dynamo.reset()
    model: Any = fully_shard(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "set_custom_all_gather":
        model.set_custom_all_gather(_Comm())
    elif what == "set_custom_reduce_scatter":
        model.set_custom_reduce_scatter(_Comm())
    elif what == "overlap_optimizer":
        overlap_optimizer(model, optimizer)
    call = model
    if what == "without our passes":
        call = torch.compile(model, backend="aot_eager")
    if what == "inside of backward":
        model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with planned(**CHECKED), pytest.raises(NotImplementedError) as error:
        call(torch.ones(2, 64)).sum().backward()
    return str(error.value)


class _Comm:
    def allocate(self, size: Any, **kind: Any) -> torch.Tensor:
        return torch.empty(size, **kind)

    def __call__(self, **_: Any) -> None: ...


@pytest.mark.parametrize(
    "what",
    [
        "set_custom_all_gather",
        "set_custom_reduce_scatter",
        "overlap_optimizer",
        "inside of backward",
        "without our passes",
    ],
)
def test_what_is_refused(two: Pool, what: str) -> None:
    text = two.run(refused, what)[0]
    assert what in text
    assert "Plan(check='checksums')" in text


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r"check='sums'; should be one of \(None, 'checksums'\)"):
        Plan(check="sums")
    with pytest.raises(ValueError, match="cannot be compared with what was sent"):
        Plan(check="checksums", reductions="reduce_scatter")
