"""On a GPU, where there is one: NCCL of one rank against the CPU, CUDA graphs, and streams under
slow collectives.

Every check runs in a process of its own, since each needs another process group. One GPU holds one
NCCL rank, so the tests of streams bring a communication of their own (`SlowGather`, `SlowReduce`):
it runs on a side stream, far later than it was asked for, and hands out buffers full of NaN. What
reads too early, or frees too early, computes NaN or something else than a run that synchronizes
with the device after every collective.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpt import GPT, GPTConfig
from kit.timed import ranks
from llama import Llama, LlamaConfig
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from compiled_fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    Plan,
    compile_step,
    fully_shard,
    planned,
    set_plan,
)
from compiled_fsdp.planning.costs import Costs, Link
from compiled_fsdp.torch_private.dtensors import local_tensor
from compiled_fsdp.torch_private.streams import spin
from compiled_fsdp.wire import copies, symmetric

if TYPE_CHECKING:
    from compiled_fsdp.eager.runtime import Runtime

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CONFIG = GPTConfig(num_layers=3, width=64, num_heads=4, hidden=160, max_length=64)
REPEATS = 100
STEPS = 4


def in_process(fn: Callable[..., None], *args: object) -> None:
    """Run a check in a new process; its exception is raised here."""
    mp.spawn(_entry, args=(fn, args), nprocs=1)


def _entry(_index: int, fn: Callable[..., None], args: tuple[object, ...]) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    fn(*args)
    if dist.is_initialized():
        dist.destroy_process_group()


def make(device: str, apply: Callable[..., Any] | None) -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG).to(device)
    if apply is not None:
        for unit in (*model.layers, model):
            apply(unit)
    return model


def train(model: GPT, call: Callable[..., Tensor], steps: int = STEPS) -> list[float]:
    """Losses of a few steps on the same bytes everywhere."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(256, (2, 33), generator=generator).to(device)
        loss = call(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- NCCL


@pytest.mark.parametrize("mode", ["eager", "default", "reduce-overhead"])
def test_nccl_agrees_with_the_cpu(mode: str) -> None:
    in_process(nccl_and_cpu, mode)


def nccl_and_cpu(mode: str) -> None:
    expected = train(model := make("cpu", None), model)
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    model = make("cuda", fully_shard)
    call = (
        model if mode == "eager" else torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
    )
    # Another order of sums in other matmuls, in fp32; three steps of Adam amplify it.
    torch.testing.assert_close(train(model, call), expected, atol=2e-4, rtol=2e-4)


def test_nccl_agrees_with_the_unsharded_model() -> None:
    in_process(nccl_and_unsharded)


def nccl_and_unsharded() -> None:
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    torch.use_deterministic_algorithms(True)  # the embedding's gradient adds atomically
    expected = train(plain := make("cuda", None), plain)
    sharded = make("cuda", fully_shard)
    assert train(sharded, sharded) == expected


def test_collectives_in_symmetric_memory() -> None:
    in_process(collectives_in_symmetric_memory)


def collectives_in_symmetric_memory() -> None:
    """Of one rank, which `set_symm_mem_for_comm` has nothing to do for: as the ops call them."""
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    symmetric.begin("NCCL", [dist.group.WORLD])
    x = torch.randn(1 << 16, device="cuda")
    for comm, more in (
        (symmetric.ALL_GATHER, {"async_op": True}),
        (symmetric.REDUCE_SCATTER, {"op": dist.ReduceOp.SUM}),
    ):
        for _ in range(3):  # memory that was freed is met over once
            sent, received = (
                comm.allocate(x.shape, dtype=x.dtype, device=x.device) for _ in range(2)
            )
            sent.copy_(x)
            comm(output_tensor=received, input_tensor=sent, group=dist.group.WORLD, **more).wait()
            assert torch.equal(received, x)


# -- CUDA graphs


@pytest.mark.parametrize("world", [1, 8])
def test_cuda_graphs_change_nothing(world: int) -> None:
    in_process(cuda_graphs, world)


def cuda_graphs(world: int) -> None:
    """Gathers of a fake group bring nothing, so both sides train on the same nonsense, of zeros
    rather than of old memory.
    """
    if world == 1:
        dist.init_process_group(
            "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
        )
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        torch.utils.deterministic.fill_uninitialized_memory = True
    losses, replayed = {}, {}
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        model = make("cuda", fully_shard)
        call = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            losses[mode] = train(model, call, 8)
        replayed[mode] = sum(event.name == "cudaGraphLaunch" for event in profiler.events())
    if world == 1:
        assert losses["reduce-overhead"] == losses["default"]
    assert replayed["default"] == 0
    assert replayed["reduce-overhead"] > 0, "no CUDA graph was replayed"


@pytest.mark.parametrize("backend", ["compiled_fsdp", "compiled_fsdp_eager"])
def test_a_captured_step_changes_nothing(backend: str) -> None:
    in_process(captured_step, backend)


def captured_step(backend: str) -> None:
    """Two micro-batches a step, clipped, with a rate that falls; losses are kept and read at the
    end. Memory at other addresses may have other kernels, so that bits may differ; what a replay
    leaves as it was when it was captured (a rate, a count of steps, a batch) differs by more.
    """
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    found, launched = {}, {}
    for mode in (None, "reduce-overhead"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*[Layer() for _ in range(3)], nn.Linear(256, 16)).cuda()
        for unit in (*model[:3], model):
            fully_shard(unit)
        rate = torch.tensor(1e-2, device="cuda")
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate, eps=1e-3, fused=True, capturable=True
        )
        step = compile_step(
            model,
            optimizer,
            lambda model, x: model(x).square().mean(),
            clip=0.5,
            accumulate=2,
            schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i)),
            backend=backend,
            mode=mode,
            dynamic=False,
        )
        generator = torch.Generator().manual_seed(2)
        losses = []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(8):
                batches = [torch.randn(32, 256, generator=generator).cuda() for _ in range(2)]
                losses.append(step(batches))
        launched[mode] = sum(event.name == "cudaGraphLaunch" for event in profiler.events())
        params = [local_tensor(param).detach().clone() for param in model.parameters()]
        found[mode] = [[loss.item() for loss in losses], params]
        assert len(set(found[mode][0])) == 8
        assert (0 if step.captures is None else step.captures.num_replays) == (7 if mode else 0)
    assert launched[None] == 0
    assert launched["reduce-overhead"] > 0, "no CUDA graph was replayed"
    torch.testing.assert_close(found["reduce-overhead"], found[None], rtol=1e-4, atol=1e-4)


# -- plans from costs


@pytest.mark.parametrize("memory_budget", [None, 0.5])
def test_plans_from_costs(memory_budget: float | None) -> None:
    in_process(plans_from_costs, memory_budget)


def plans_from_costs(memory_budget: float | None) -> None:
    """Fused attention whose keys have fewer heads than its queries: torch 2.11's formula for its
    FLOPs refuses it.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    costs = Costs(4e14, 2.5e12, 4e-6, (("", Link(2e-5, 5e10)),))
    distances = {"prefetch": None, "backward_prefetch": None, "reduces_in_flight": None}
    set_plan(
        Plan(
            bucket_bytes=None,
            split_bytes=None,
            costs=costs,
            memory_budget=memory_budget,
            **distances,
        )
    )
    with torch.device("cuda"):
        model = Llama(
            LlamaConfig(num_layers=2, width=256, num_heads=8, hidden=512, max_length=512, vocab=512)
        )
        tokens = torch.randint(512, (2, 513))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*model.layers, model):
        fully_shard(unit, mp_policy=policy)
    call = torch.compile(model, fullgraph=True, dynamic=False)
    for _ in range(2):
        call(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
    assert all(p.grad is not None for p in model.parameters())


# -- streams


class LateWork(dist._Work):  # type: ignore[name-defined,misc]
    def __init__(self, event: torch.cuda.Event, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.event = event
        self.tensors: tuple[Tensor, ...] = tensors

    def wait(self, timeout: object = None) -> bool:
        torch.cuda.current_stream().wait_event(self.event)
        self.tensors = ()
        return True


class Slow:
    """Two ranks that hold the same: done by a side stream, `cycles` after it was asked for."""

    def __init__(self, cycles: int) -> None:
        self.cycles = cycles
        self.stream = torch.cuda.Stream()
        self.works: list[LateWork] = []

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.full(size, torch.nan, dtype=dtype, device=device)

    def later(self, do: Callable[[], object], *tensors: Tensor) -> LateWork:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(self.cycles)
            do()
            event = torch.cuda.Event()
            event.record()
        if not self.cycles:
            torch.cuda.synchronize()
        work = LateWork(event, tensors)
        self.works = [
            *self.works[-50:],
            work,
        ]  # torch keeps no reference to the Python half of a Work
        return work


class SlowGather(Slow):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False
    ) -> LateWork:
        half = output_tensor.numel() // 2
        return self.later(
            lambda: output_tensor[half:].copy_(output_tensor[:half]), output_tensor, input_tensor
        )


class SlowReduce(Slow):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: object,
        op: object,
        async_op: bool = False,
    ) -> LateWork:
        half = input_tensor.numel() // 2
        return self.later(
            lambda: torch.add(input_tensor[:half], input_tensor[half:], out=output_tensor),
            output_tensor,
            input_tensor,
        )


@pytest.mark.parametrize("compiled", [False, True])
def test_streams_race_with_nothing(compiled: bool) -> None:
    in_process(streams, compiled)


def streams(compiled: bool) -> None:
    from compiled_fsdp.eager import runtime

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    reshard = runtime.Runtime.reshard

    def poisoned(self: Runtime, **how: Any) -> None:
        if self.is_unsharded:
            for param in self.unit.params:
                with (
                    torch.no_grad(),
                    torch.autograd._unsafe_preserve_version_counter(param.gathered),
                ):
                    param.gathered.fill_(torch.nan)
        reshard(self, **how)

    runtime.Runtime.reshard = poisoned  # type: ignore[method-assign]
    expected = mlp_losses(0, compiled)
    assert all(value == value for value in expected), expected
    for repeat in range(REPEATS if not compiled else REPEATS // 10):
        torch._dynamo.reset()
        assert mlp_losses(200_000, compiled) == expected, f"repeat {repeat}"


def mlp_losses(cycles: int, compiled: bool) -> list[float]:
    """Losses of three steps of a model whose collectives take so long."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)]).cuda()
    gather, reduce = SlowGather(cycles), SlowReduce(cycles)
    for unit in (*model, model):
        fully_shard(unit)
    for unit in model:
        unit.set_custom_all_gather(gather)  # type: ignore[operator]
        unit.set_custom_reduce_scatter(reduce)  # type: ignore[operator]
    call: Any = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)).cuda()
    losses = []
    for _ in range(3):
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("front", ["fsdp2", "fsdp1"])
def test_a_host_that_runs_ahead_takes_no_more(front: str) -> None:
    in_process(runs_ahead, front)


def runs_ahead(front: str) -> None:
    """Nothing limits how far the host runs ahead of the device in eager mode, and no gather is
    freed later for it.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    peaks = [active_peak(front, is_ahead) for is_ahead in (False, True)]
    assert peaks[1] <= peaks[0], peaks


def active_peak(front: str, is_ahead: bool) -> int:
    """Bytes of a step that the allocator can give to nobody else, at most."""
    model: Any = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    if front == "fsdp1":
        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    else:
        for unit in (*model, model):
            fully_shard(unit)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not is_ahead:
        for linear in linears:
            linear.register_forward_hook(lambda *_: torch.cuda.synchronize())
    x = torch.ones(8, 1024, device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_stats()["active_bytes.all.current"]
        if is_ahead:
            torch.cuda._sleep(1_000_000_000)
            slept = torch.cuda.Event()
            slept.record()
        model(x).sum().backward()
        if is_ahead:
            assert not slept.query(), "the device was not behind"
        peak = torch.cuda.memory_stats()["active_bytes.all.peak"] - held
        model.zero_grad()
    return int(peak)


# -- CPU offload

# Of SGD: a power of two, so that a step on the host rounds as one on the device does.
RATE = 0.25


class Layer(nn.Module):
    """A layer whose output is small enough for any number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def offloaded(front: str, is_offloaded: bool, pin_memory: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(4)], nn.Linear(256, 16))
    if front == "fsdp1":
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cuda", 0),
            cpu_offload=CPUOffload(offload_params=is_offloaded),
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            use_orig_params=True,
        )
    policy: Any = {"offload_policy": CPUOffloadPolicy(pin_memory)} if is_offloaded else {}
    for unit in (*model[:4], model):
        fully_shard(unit, reshard_after_forward=True, **policy)
    return model


def offload_losses(
    front: str, mode: str, is_offloaded: bool, pin_memory: bool = True
) -> tuple[list[float], list[Tensor]]:
    """Losses of four steps, the third of which adds two backwards; and the parameters."""
    torch._dynamo.reset()
    model = offloaded(front, is_offloaded, pin_memory)
    call: Any = model
    if mode != "eager":
        backend = "compiled_fsdp_eager" if mode == "compiled" else "inductor"
        call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for step in range(4):
        for _ in range(2 if step == 2 else 1):
            loss = call(torch.randn(32, 256, generator=generator).cuda()).square().mean()
            loss.backward()
            losses.append(loss.detach())
        rests = "cpu" if is_offloaded else "cuda"
        for param in model.parameters():
            if param.numel():
                assert param.grad is not None
                assert local_tensor(param).device.type == rests
                assert local_tensor(param.grad).device.type == rests
                assert local_tensor(param).is_pinned() == (is_offloaded and pin_memory)
        optimizer.step()
        optimizer.zero_grad()
    found = [local_tensor(param).detach().cpu().clone() for param in model.parameters()]
    return [loss.item() for loss in losses], found


@pytest.mark.parametrize("mode", ["eager", "compiled", "inductor"])
@pytest.mark.parametrize("front", ["fsdp2", "fsdp1"])
def test_offload_changes_nothing(front: str, mode: str) -> None:
    in_process(offload_and_without, front, mode)


def offload_and_without(front: str, mode: str) -> None:
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    expected = offload_losses(front, mode, False)
    assert all(value == value for value in expected[0]), expected[0]
    for pin_memory in (True, False) if front == "fsdp2" else (True,):
        found = offload_losses(front, mode, True, pin_memory)
        if mode == "eager":
            _check_same(found, expected)
        else:  # memory at other addresses may have other kernels
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _check_same(
    found: tuple[list[float], list[Tensor]], expected: tuple[list[float], list[Tensor]]
) -> None:
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("front", ["fsdp2", "fsdp1"])
def test_slow_copies_race_with_nothing(front: str, mode: str) -> None:
    in_process(slow_copies, front, mode)


def slow_copies(front: str, mode: str) -> None:
    """Copies run far later than they were asked for, into memory full of NaN."""
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    expected = offload_losses(front, mode, True)
    assert all(value == value for value in expected[0]), expected[0]
    with late_copies(400_000):
        for _ in range(10 if mode == "eager" else 3):
            _check_same(offload_losses(front, mode, True), expected)


@pytest.mark.parametrize("is_clipped", [False, True])
def test_state_on_the_host_changes_nothing(is_clipped: bool) -> None:
    in_process(state_on_the_host, is_clipped)


def state_on_the_host(is_clipped: bool) -> None:
    """Also where copies run far later than they were asked for."""
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    torch.use_deterministic_algorithms(True)
    clip = 0.5 if is_clipped else None
    expected = stepped(clip, is_hosted=False)
    with late_copies(400_000):
        found = stepped(clip, is_hosted=True)
    _check_same(found, expected)


def stepped(clip: float | None, *, is_hosted: bool) -> tuple[list[float], list[Tensor]]:
    """Losses of whole steps, and what the optimizer remembers."""
    torch._dynamo.reset()
    model = make("cuda", fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = compile_step(model, optimizer, clip=clip, backend="compiled_fsdp_eager")
    generator, losses = torch.Generator().manual_seed(1), []
    with planned(memory_budget=0.0, optimizer_state="budget" if is_hosted else None):
        for _ in range(STEPS):
            tokens = torch.randint(256, (2, 33), generator=generator).cuda()
            losses.append(step(tokens[:, :-1], tokens[:, 1:]).item())
    state = [
        local_tensor(optimizer.state[p][name])
        for p in model.parameters()
        for name in ("exp_avg", "exp_avg_sq")
    ]
    assert {each.device.type for each in state} == {"cpu" if is_hosted else "cuda"}
    assert not is_hosted or all(each.is_pinned() for each in state)
    return losses, [each.cpu() for each in state]


@contextmanager
def late_copies(cycles: int) -> Iterator[None]:
    """Let a copy's stream sleep before each copy, and what is copied to be NaN until then."""
    empty, stream_of = copies._empty, copies._stream

    def slow_stream(device: torch.device, is_to_host: bool) -> Any:
        stream = stream_of(device, is_to_host)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
        return stream

    def poisoned(like: Tensor, device: torch.device, pins: bool) -> Tensor:
        return empty(like, device, pins).fill_(torch.nan)

    copies._stream = slow_stream  # type: ignore[assignment]
    copies._empty = poisoned
    try:
        yield
    finally:
        copies._stream, copies._empty = stream_of, empty


@pytest.mark.parametrize("is_to_host", [False, True])
def test_a_copy_runs_beside_computation(is_to_host: bool) -> None:
    in_process(copy_beside, is_to_host)


def copy_beside(is_to_host: bool) -> None:
    """Asked for while the device computes, a copy lets the host go on; awaited, it is there."""
    numbers = torch.arange(1 << 20, dtype=torch.float32)
    source = numbers.cuda() if is_to_host else numbers.pin_memory()
    to = "host" if is_to_host else "cuda"
    # The first makes streams and allocates, for which the host may wait.
    torch.ops._c10d_functional.wait_tensor(torch.ops.fsdp.start_copy(source, to, is_to_host))
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    copied = torch.ops.fsdp.start_copy(source, to, is_to_host)
    assert not torch.cuda.current_stream().query(), "the host has waited for the device"
    copied = torch.ops._c10d_functional.wait_tensor(copied)
    assert torch.cuda.current_stream().query() == is_to_host
    assert copied.device.type == ("cpu" if is_to_host else "cuda")
    assert copied.is_pinned() == is_to_host
    if is_to_host:
        assert torch.equal(copied, numbers)  # read by the host at once
    assert torch.equal(copied.cpu(), numbers)


def test_parameters_that_were_moved_off_the_host() -> None:
    in_process(moved_off)


def moved_off() -> None:
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    x = torch.ones(2, 256, device="cuda")
    for move in (lambda m: m.to("cuda"), lambda m: m.to_empty(device="cuda")):
        for is_first in (True, False):
            model = offloaded("fsdp2", True, True)
            if not is_first:
                model(x)
            move(model)
            with pytest.raises(RuntimeError, match="should be materialized on CPU"):
                model(x)


# -- a timed world


def test_a_timed_world_occupies_a_stream() -> None:
    in_process(timed_world_on_the_device)


def timed_world_on_the_device() -> None:
    """A collective takes its time on a stream, which is hidden by what is computed meanwhile, and
    no time of the host.
    """
    with ranks(8, bandwidth=7e7, latency=0.0) as world:
        mine, everyones = (
            torch.ones(1_000_000, device="cuda"),
            torch.zeros(8_000_000, device="cuda"),
        )
        dist.all_gather_into_tensor(everyones, mine)  # its kernel is compiled
        assert torch.equal(everyones, torch.ones_like(everyones))
        world.settle()
        (first,) = world.carried
        assert first.seconds == pytest.approx(0.4)  # 28 MB are sent
        assert first.blocked == pytest.approx(0.4, rel=0.2)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        begin = time.perf_counter()
        marks[0].record()
        work = dist.all_gather_into_tensor(everyones, mine, async_op=True)
        spin(0.2)
        work.wait()
        marks[1].record()
        assert time.perf_counter() - begin < 0.2, "the host does not wait"
        world.settle()
        assert marks[0].elapsed_time(marks[1]) == pytest.approx(400, rel=0.2)
        assert world.carried[1].blocked == pytest.approx(0.2, rel=0.4)
