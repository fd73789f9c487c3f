"""`Plan(check="checksums")` in the graph of a whole step, and steps that are taken again after a
fault: bit for bit what they would have been without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.bit_flips import flip, in_exchange
from kit.compare import check_equal, plain
from kit.harness import ROUNDING, SLOW
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from compiled_fsdp import ChecksumError, compile_step, fully_shard, planned

if TYPE_CHECKING:
    from kit.pool import Pool

CHECKED: dict[str, Any] = {"check": "checksums", "bucket_bytes": 0}
WIDTHS = (40, 56)  # each unit has messages of its own size
STEPS = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 32, bias=False))
            for width in WIDTHS
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def sent_of(unit: int) -> tuple[int, ...]:
    width = WIDTHS[unit]
    return 32 * width + width // 2, 32 * width


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).pow(2).mean()
    return loss


class Whole:
    """A model that trains by whole steps."""

    def __init__(
        self, *, backend: str = "compiled_fsdp_eager", shard: Any = None, **options: Any
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(3)
        self.model = Model()
        for block in self.model.blocks:
            fully_shard(block, **(shard or {}))
        fully_shard(self.model, **(shard or {}))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.count = options.get("accumulate", 1)
        self.take = compile_step(self.model, self.optimizer, loss_of, backend=backend, **options)

    def step(self, number: int) -> float:
        torch.manual_seed(100 * number + dist.get_rank())
        batches = [torch.randn(4, 32) for _ in range(self.count)]
        return self.take(batches if self.count > 1 else batches[0]).item()

    def values(self) -> list[torch.Tensor]:
        params = list(self.model.parameters())
        both = [*params, *(v for p in params for v in self.optimizer.state[p].values())]
        return [(t._local_tensor if isinstance(t, DTensor) else t).clone() for t in both]

    def refused(self, number: int) -> ChecksumError:
        """What a step raises, on all ranks alike; it changes nothing."""
        before = self.values()
        with pytest.raises(ChecksumError) as caught:
            self.step(number)
        assert all(map(torch.equal, self.values(), before))
        assert all(p.grad is None for p in self.model.parameters())
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, str(caught.value))
        assert len(set(said)) == 1, said
        assert caught.value.step == number + 1
        return caught.value


def check_whole_step(options: dict[str, Any]) -> None:
    with planned(**{**CHECKED, "check": None}):
        other = Whole(**options)
        wanted = [other.step(number) for number in range(STEPS)]
    with planned(**CHECKED):
        run = Whole(**options)
        losses = [run.step(number) for number in range(3)]
        for collective, where, unit, lasts in (
            ("all_to_all", "received", 1, False),
            ("all_to_all", "sent", 0, True),
            ("all_gather", "received", 1, False),
        ):
            place = where, 1, sent_of(unit), 0, -1
            with in_exchange(collective, *place, lasts=lasts) as done:
                error = run.refused(3)
            assert bool(done) == (dist.get_rank() == 1)
            fault, *more = error.faults
            assert not more
            words = collective.replace("_", "-")
            assert (fault.unit, fault.collective) == (f"blocks.{unit}", words)
            phase = "forward" if collective == "all_gather" else "backward"
            assert (fault.phase, 1 in fault.among) == (phase, True)
            assert fault.again == ("wrong" if lasts else "right")
        if options:
            losses.append(run.step(3))
        else:  # the second time, for the next step
            with in_exchange("all_gather", "received", 1, sent_of(1)[:1], 1, 3) as done:
                losses.append(run.step(3))
                (fault,) = run.refused(4).faults
            assert bool(done) == (dist.get_rank() == 1)
            assert (fault.rank, fault.phase, fault.again) == (1, "forward", "right")
        name, param = list(run.model.named_parameters())[4]
        for what, rests in (
            ("shard at rest", param),
            ("optimizer state at rest: AdamW exp_avg", run.optimizer.state[param]["exp_avg"]),
        ):
            if dist.get_rank() == 1:
                flip(rests, 77)
            error = run.refused(4)
            fault = next(f for f in error.faults if "at rest" in f.collective)
            assert (fault.rank, fault.parameter, fault.collective) == (1, name, what)
            assert fault.again == "wrong"
            assert "the last update" in fault.text
            if dist.get_rank() == 1:
                flip(rests, 77)
        losses += [run.step(number) for number in range(4, STEPS)]
        assert losses == wanted
        assert all(map(torch.equal, run.values(), other.values()))


def check_inductor() -> None:
    """A flip on the way is found before anything is updated, and the step taken again is right."""
    other = Whole()
    wanted = [other.step(number) for number in range(3)]
    with planned(**CHECKED):
        run = Whole(backend="compiled_fsdp")
        losses = [run.step(number) for number in range(2)]
        with in_exchange("all_to_all", "received", 1, sent_of(1), 0, -1) as done:
            error = run.refused(2)
        assert bool(done) == (dist.get_rank() == 1)
        (fault,) = error.faults
        assert (fault.unit, fault.collective, fault.again) == ("blocks.1", "all-to-all", "right")
        losses.append(run.step(2))
    torch.testing.assert_close(losses, wanted, rtol=ROUNDING[0], atol=ROUNDING[1])


def test_inductor(two: Pool) -> None:
    two.run(check_inductor, timeout=SLOW)


@pytest.mark.parametrize(
    "options",
    [{}, {"clip": 0.05, "accumulate": 2, "keep_grads": True, "max_ahead_bytes": 0}],
)
def test_whole_steps(two: Pool, options: dict[str, Any]) -> None:
    """Bits that flip on the way, once and for good, and at rest: the step is not applied, and taken
    again it is what it would have been. Clipped, of two micro-batches, too.
    """
    two.run(check_whole_step, options, timeout=SLOW)


def check_parts(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    more: dict[str, Any] = {"mesh": mesh} if kind == "hsdp" else {"reshard_after_forward": 2}
    with planned(**CHECKED):
        run = Whole(shard=more)
        losses = [run.step(number) for number in range(2)]
        with in_exchange("all_to_all", "received", 2, range(1, 1 << 20), 0, 3):
            (fault,) = run.refused(2).faults
        assert (fault.rank, fault.phase, fault.again) == (2, "backward", "right")
        losses += [run.step(number) for number in range(2, 4)]
    with planned(bucket_bytes=0):
        other = Whole(shard=more)
        assert losses == [other.step(number) for number in range(4)]


@pytest.mark.parametrize("kind", ["hsdp", "slices"])
def test_whole_steps_of_four(four: Pool, kind: str) -> None:
    """A fault in one replica, or a group of neighbours: all ranks refuse the step."""
    four.run(check_parts, kind, timeout=SLOW)


# -- taken again


class Noisy(nn.Module):
    """Draws random numbers, and writes to buffers of its own in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, width), nn.Dropout(0.3), nn.Linear(width, 32))
            for width in WIDTHS
        )
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


class Loop:
    """A stranger's loop: two micro-batches, clipping, a schedule; a step that is refused is taken
    again, with the buffers and random numbers of before.
    """

    def __init__(self, *, is_compiled: bool) -> None:
        torch._dynamo.reset()
        torch.manual_seed(3)
        self.model = Noisy()
        for block in self.model.blocks:
            fully_shard(block)
        self.call: Any = fully_shard(self.model)
        if is_compiled:
            self.call = torch.compile(self.model, backend="compiled_fsdp_eager", fullgraph=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.refused: list[ChecksumError] = []
        torch.manual_seed(dist.get_rank())

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        batches = [torch.randn(4, 32, generator=generator) for _ in range(2)]
        buffers = [(b, b.clone()) for b in self.model.buffers()]
        random = torch.get_rng_state()
        while True:
            try:
                return self._try(batches)
            except ChecksumError as error:
                self.refused.append(error)
                for buffer, before in buffers:
                    buffer.copy_(before)
                torch.set_rng_state(random)

    def _try(self, batches: list[torch.Tensor]) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for place, batch in enumerate(batches):
            self.model.set_requires_gradient_sync(place == len(batches) - 1)
            loss = self.call(batch).pow(2).mean() / len(batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.schedule.step()
        return total


def check_taken_again(is_compiled: bool) -> None:
    with planned(**CHECKED):
        other = Loop(is_compiled=is_compiled)
        wanted = [other.step(number) for number in range(4)]
        states = [plain(other.model.state_dict()), plain(other.optimizer.state_dict()["state"])]
        run = Loop(is_compiled=is_compiled)
        losses = [run.step(0)]
        numel = 32 * WIDTHS[1] + (WIDTHS[1] + 32) // 2
        with in_exchange("all_gather", "received", 0, (numel,), 0, 3):
            losses.append(run.step(1))  # of the first micro-batch, whose backward reduces nothing
        with in_exchange("all_to_all", "sent", 1, (numel,), 0, -1):
            losses.append(run.step(2))
        losses.append(run.step(3))
        assert [fault.again for error in run.refused for fault in error.faults] == ["right"] * 2
        assert [error.step for error in run.refused] == [2, 3]
        assert losses == wanted
        now = [plain(run.model.state_dict()), plain(run.optimizer.state_dict()["state"])]
        for before, after in zip(states, now, strict=True):
            check_equal(after, before, "the step that was taken again")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_step_is_taken_again(two: Pool, is_compiled: bool) -> None:
    two.run(check_taken_again, is_compiled, timeout=SLOW)
