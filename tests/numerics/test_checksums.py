"""`Plan(check="checksums")`: bits that flip are found and blamed right, the step is not applied,
and nothing is found where nothing has happened.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.bit_flips import flip, in_all_reduce, in_exchange
from kit.harness import SLOW
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from compiled_fsdp import ChecksumError, fully_shard, planned
from compiled_fsdp.eager import replay
from compiled_fsdp.frontend.state import states_below

if TYPE_CHECKING:
    from kit.pool import Pool

WIDTHS = (40, 56, 72)  # each unit has messages of its own size
CHECKED: dict[str, Any] = {"check": "checksums", "bucket_bytes": 0}
BACKENDS = {"graph": "compiled_fsdp_eager", "inductor": "compiled_fsdp"}
KINDS = ("eager", "graph")
FIRST, LAST, SIGN = 3, -9, -1  # bits of the first parameter of a unit, and of the last


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


class Run:
    """A model that trains: `forward` and `backward` apart, or a whole `step`."""

    def __init__(self, kind: str, mesh: Any = None, policy: Any = None) -> None:
        torch._dynamo.reset()
        torch.manual_seed(3)
        self.model = Model()
        more = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
        for block in self.model.blocks:
            fully_shard(block, **more)
        fully_shard(self.model, **more)
        self.call = self.model
        if kind != "eager":
            self.call = torch.compile(self.model, backend=BACKENDS[kind], fullgraph=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.count = 0

    def forward(self) -> torch.Tensor:
        torch.manual_seed(100 * self.count + dist.get_rank())
        return self.call(torch.randn(4, 32)).pow(2).mean()

    def step(self) -> float:
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1
        return loss.item()

    def shards(self) -> list[torch.Tensor]:
        return [p._local_tensor.clone() for p in self.model.parameters()]

    def state(self) -> list[torch.Tensor]:
        found = [v for s in self.optimizer.state.values() for v in s.values()]
        return [t._local_tensor.clone() if isinstance(t, DTensor) else t.clone() for t in found]


def sent_of(unit: int) -> tuple[int, ...]:
    """Elements that a rank of two sends of a unit; to gather it for backward, without the bias."""
    width = WIDTHS[unit]
    return 32 * width + width // 2, 32 * width


def found(run: Run, act: Any) -> ChecksumError:
    """What `act` raises on this rank; on all, the same."""
    before = run.shards(), run.state()
    with pytest.raises(ChecksumError) as caught:
        act()
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, str(caught.value))
    assert len(set(said)) == 1, said
    assert all(p.grad is None for p in run.model.parameters())
    assert "nothing of it is applied" in said[0]
    now = run.shards(), run.state()
    pairs = [*zip(before[0], now[0], strict=True), *zip(before[1], now[1], strict=True)]
    flipped = sum(not torch.equal(a, b) for a, b in pairs)
    assert flipped <= 1, "a step that is refused changes nothing"
    return caught.value


def check_exchange(
    kind: str,
    collective: str,
    where: str,
    unit: int,
    occurrence: int,
    bit: int,
    dtype: Any,
    lasts: bool = False,
) -> None:
    with planned(**CHECKED):
        run = Run(kind, policy=MixedPrecisionPolicy(param_dtype=dtype))
        run.step()
        run.step()
        culprit = 1
        place = where, culprit, sent_of(unit), occurrence, bit
        with in_exchange(collective, *place, lasts=lasts) as done:
            error = found(run, run.step)
        assert bool(done) == (dist.get_rank() == culprit)
        last = "2" if bit < 0 else "0"
        words = {"all_gather": "all-gather", "all_to_all": "all-to-all"}[collective]
        phase = "forward" if collective == "all_gather" and occurrence == 0 else "backward"
        blamed = [f for f in error.faults if f.collective == words]
        assert error.step == 3
        fault, *more = blamed if phase == "backward" else reversed(blamed)
        assert len(more) == (lasts and collective == "all_gather")  # gathered twice
        assert (fault.unit, fault.parameter) == (
            f"blocks.{unit}",
            f"blocks.{unit}.{last}.weight",
        )
        assert fault.phase == phase
        assert culprit in fault.among
        if where == "received" or collective == "all_gather":
            assert fault.rank == culprit, fault
        is_at_rest = (collective, where, dtype) == ("all_gather", "sent", None)
        assert fault.again == ("wrong" if lasts or is_at_rest else "right"), fault
        assert ("a pattern of as many bytes" in fault.text) == (collective == "all_to_all")
        assert ("a second time" in str(error)) == (lasts and not is_at_rest)
        others = [f for f in error.faults if f not in blamed]
        for other in others:  # what is sent as it rests has changed at rest too
            assert (other.rank, other.parameter) == (culprit, fault.parameter)
            assert is_at_rest
        if not others:  # nothing that lasts: the step can be taken again
            for _ in range(2):
                run.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("collective", ["all_gather", "all_to_all"])
def test_a_fault_that_lasts(two: Pool, kind: str, collective: str) -> None:
    """Tried again, it comes wrong again; nobody hangs, and later steps are as ever."""
    two.run(check_exchange, kind, collective, "received", 1, 0, SIGN, None, True)


def check_what_cannot_be_tried_again() -> None:
    with planned(**CHECKED):
        run = Run("eager")
        run.step()
        exchange = "received", 1, sent_of(1), 0, FIRST
        with in_exchange("all_gather", *exchange), torch.no_grad():
            run.forward()
            for param in run.model.parameters():
                param.mul_(0.99)
        error = found(run, run.step)
        (fault,) = error.faults
        assert (fault.rank, fault.phase, fault.again) == (1, "forward", "")
        assert "was written to after it; gathered as it is now, it came right" in fault.text
        for collective in ("all_gather", "all_to_all"):
            broken = mock.Mock()
            broken.call.side_effect = RuntimeError("no such card")
            with in_exchange(collective, *exchange), mock.patch.object(replay, "launch", broken):
                error = found(run, run.step)
            (fault,) = error.faults
            assert (fault.rank, fault.again) == (1, "")
            assert "no such card" in fault.text
        run.step()


def test_what_cannot_be_tried_again(two: Pool) -> None:
    """A parameter was written to since; the collective fails: the error says so."""
    two.run(check_what_cannot_be_tried_again)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "position",
    [
        ("all_gather", "received", 0, 0, FIRST, None),
        ("all_gather", "received", 1, 1, SIGN, None),
        ("all_gather", "sent", 1, 0, LAST, None),
        ("all_gather", "sent", 1, 1, FIRST, torch.bfloat16),
        ("all_gather", "received", 2, 0, SIGN, torch.bfloat16),
        ("all_to_all", "received", 2, 0, SIGN, None),
        ("all_to_all", "sent", 0, 0, LAST, None),
        ("all_to_all", "sent", 1, 0, FIRST, torch.bfloat16),
    ],
)
def test_a_bit_that_flips_on_the_way(two: Pool, kind: str, position: tuple[Any, ...]) -> None:
    """position: collective, where, unit, which of its exchanges, bit, dtype."""
    two.run(check_exchange, kind, *position)


def check_rest(kind: str, what: str, when: str) -> None:
    with planned(**CHECKED):
        run = Run(kind)
        run.step()
        run.step()
        name, param = list(run.model.named_parameters())[4]
        state = run.optimizer.state[param]["exp_avg_sq"]
        loss = run.forward() if when == "before backward" else None
        if dist.get_rank() == 1:
            flip(param if what == "shard" else state, 77)

        def act() -> None:
            (run.forward() if loss is None else loss).backward()

        error = found(run, act)
        (fault,) = error.faults
        assert (fault.rank, fault.parameter, fault.unit) == (1, name, "blocks.1")
        assert fault.collective.startswith("shard" if what == "shard" else "optimizer state")
        assert (fault.again, "read again, it is still so" in fault.text) == ("wrong", True)
        assert ("exp_avg_sq" in fault.collective) == (what == "state")
        since = {"before backward": "its all-gather in forward", "between steps": "the last update"}
        assert since[when if what == "shard" else "between steps"] in fault.text or (
            what == "shard" and "the last update" in fault.text
        )
        found(run, lambda: run.forward().backward())  # it is still there
        if dist.get_rank() == 1:
            flip(param if what == "shard" else state, 77)
        run.step()  # as it was


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["shard", "state"])
@pytest.mark.parametrize("when", ["between steps", "before backward"])
def test_a_bit_that_flips_at_rest(two: Pool, kind: str, what: str, when: str) -> None:
    two.run(check_rest, kind, what, when)


def check_beside_another() -> None:
    with planned(**CHECKED):
        run, other = Run("eager"), Run("eager")
        run.step()
        other.step()
        name, param = list(run.model.named_parameters())[4]
        if dist.get_rank() == 1:
            flip(param, 77)
        other.step()
        (fault,) = found(run, lambda: run.forward().backward()).faults
        assert (fault.rank, fault.parameter) == (1, name)
        assert "the last update" in fault.text


def test_another_optimizer_accepts_nothing(two: Pool) -> None:
    """Of two models in one process, as in a GAN."""
    two.run(check_beside_another)


def mesh_of_replicas(num_shards: int) -> Any:
    shape = (dist.get_world_size() // num_shards, num_shards)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


class Faulty(torch.optim.AdamW):
    """Rank `rank` computes a wrong value in step `at`, before anybody could sum it up."""

    rank, at, name_of = -1, -1, ""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.at -= 1
        if self.at == 0 and dist.get_rank() == self.rank:
            flip(self.param_groups[0]["params"][0], 5)


def check_replicas(kind: str) -> None:
    with planned(**CHECKED):
        run = Run(kind, mesh=mesh_of_replicas(2))
        run.optimizer = Faulty(run.model.parameters(), lr=1e-2)
        run.optimizer.rank, run.optimizer.at = 3, 2
        run.step()
        run.step()
        error = found(run, lambda: run.forward().backward())
        (fault,) = error.faults
        assert (fault.rank, fault.among, fault.collective) == (-1, (1, 3), "replicas"), fault
        assert fault.again == "wrong"
        assert (fault.unit, fault.parameter) == ("blocks.0", "blocks.0.0.weight")
        if dist.get_rank() == 3:
            flip(next(run.model.parameters()), 5)
            for flat in (f for s in states_below(run.model) for f in s.unit.flats):
                flat.resting.forget()
        run.step()


def check_wire_of_one_replica(kind: str) -> None:
    """All ranks refuse the step, also those that have no part in the communication."""
    with planned(**CHECKED):
        run = Run(kind, mesh=mesh_of_replicas(2))
        run.step()
        with in_exchange("all_to_all", "received", 2, sent_of(1), 0, FIRST):
            error = found(run, run.step)
        (fault,) = [f for f in error.faults if f.collective == "all-to-all"]
        assert (fault.rank, fault.among, fault.unit) == (2, (2, 3), "blocks.1")
        assert fault.again == "right"
        run.step()
        if kind != "eager":
            return
        with in_all_reduce(3, sent_of(1)[0]) as done:
            error = found(run, run.step)
        assert bool(done) == (dist.get_rank() == 3)
        (fault,) = error.faults
        assert (fault.among, fault.collective, fault.unit) == ((1, 3), "all-reduce", "blocks.1")
        assert "the sum was right" in fault.text
        run.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", [check_replicas, check_wire_of_one_replica])
def test_replicas(four: Pool, kind: str, check: Any) -> None:
    four.run(check, kind)


def losses(kind: str, *, is_checked: bool, steps: int, **more: Any) -> Any:
    plan = CHECKED if is_checked else {**CHECKED, "check": None}
    with planned(**plan):
        run = Run(kind, **more)
        return [run.step() for _ in range(steps)], run.shards()


def check_same_numbers(kind: str, policy: Any) -> None:
    with_checks = losses(kind, is_checked=True, steps=4, policy=policy)
    without = losses(kind, is_checked=False, steps=4, policy=policy)
    assert with_checks[0] == without[0]
    assert all(map(torch.equal, with_checks[1], without[1]))


@pytest.mark.parametrize(
    "kind", [*KINDS, pytest.param("inductor", marks=pytest.mark.timeout(SLOW))]
)
def test_the_same_numbers(two: Pool, kind: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    two.run(check_same_numbers, kind, policy, timeout=SLOW)


class Between:
    """What people do between steps, one thing a time; under `torch.no_grad()`."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.params = list(run.model.parameters())
        self.saved = {name: value.clone() for name, value in run.model.state_dict().items()}
        self.states = copy.deepcopy(run.optimizer.state_dict())

    def write(self) -> None:
        self.params[0].mul_(0.99)

    def write_uncounted(self) -> None:
        self.params[4].data.mul_(0.99)

    def write_by_foreach(self) -> None:
        torch._foreach_mul_(self.params, 0.99)

    def evaluate(self) -> None:
        for _ in range(3):
            self.run.forward()

    def load(self) -> None:
        self.run.model.load_state_dict(self.saved)

    def load_states(self) -> None:
        self.run.optimizer.load_state_dict(self.states)

    def write_states(self) -> None:
        for state in self.run.optimizer.state.values():
            state["exp_avg"].mul_(0.5)

    @torch.enable_grad()
    def accumulate(self) -> None:
        self.run.model.set_requires_gradient_sync(False)
        self.run.forward().backward()
        self.run.model.set_requires_gradient_sync(True)

    @torch.enable_grad()
    def leave_a_forward_alone(self) -> None:
        self.run.forward()

    def freeze(self) -> None:
        self.params[1].requires_grad_(False)

    def take_another_optimizer(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, 0.1)
        self.run.optimizer = torch.optim.SGD([p for p in self.params if p.requires_grad], 0.1)


def check_nothing_is_found(kind: str) -> None:
    with planned(**CHECKED):
        run = Run(kind)
        run.step()
        between = Between(run)
        for act in [name for name in vars(Between) if not name.startswith("_")]:
            with torch.no_grad():
                getattr(between, act)()
            run.step()
            run.step()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_found_where_nothing_happened(two: Pool, kind: str) -> None:
    two.run(check_nothing_is_found, kind)
