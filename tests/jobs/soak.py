"""2,000 steps that alternate eager, compiled, evaluation, accumulation, checkpoint and restore,
beside the unsharded model.

    make soak                                # two ranks; a line every 200 steps, and a verdict
    make soak ARGS="--front-end fsdp1"       # through `FullyShardedDataParallel`
    make soak ARGS="--front-end fsdp1_orig"  # with `use_orig_params`
    make soak ARGS="--routed --steps 200"    # a mixture of experts, routed at random in each step
    make soak ARGS="--whole"                 # every second step is a graph (`compile_step`)
    make soak ARGS="--whole --checked"       # and ranks compare checksums, of each step
    make soak ARGS="--kinds adamw muon"      # every step is a graph; see `soak_steps.py`

No growth in memory, no recompile after warm-up, and the losses of the unsharded run.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import soak_steps
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit import random_fsdp1, routed
from kit.oracle_fsdp1 import Api
from kit.random_models import Model, Program, batch, build, shard
from soak_steps import PROGRAM
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType

from compiled_fsdp import FullyShardedDataParallel, Plan, compile_step, set_plan

FRONT_ENDS = ("fully_shard", "fsdp1", "fsdp1_orig")
WARM_UP = 100
EVERY = 200  # steps, a line
NUM_MICRO = 3  # micro-batches of every fifth step


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def live_bytes() -> int:
    """Bytes in tensor storages that Python can reach, each once."""
    gc.collect()
    sizes = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter):
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def program_of(front_end: str) -> Program:
    """FSDP1 takes the layers that share a weight into one instance, the root: the model's own specs
    say so.
    """
    if front_end == "fully_shard":
        return PROGRAM
    use_orig_params = front_end == "fsdp1_orig"
    return random_fsdp1.legal(
        random_fsdp1.Wrapped(0, PROGRAM.specs, policy="custom", use_orig_params=use_orig_params)
    )


def sharded(model: Model, program: Program) -> Any:
    """A model of this program through its front end."""
    if isinstance(program, random_fsdp1.Wrapped):
        return random_fsdp1.shard(Api("eager"), model, program)
    return shard(model, program)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def synced(model: Any, is_last: bool) -> AbstractContextManager[None]:
    """Reduce after the last micro-batch only."""
    if isinstance(model, FullyShardedDataParallel):
        return nullcontext() if is_last else model.no_sync()
    model.set_requires_gradient_sync(is_last)
    return nullcontext()


class Soak:
    """Ours and the unsharded model, step by step."""

    def __init__(self, folder: str, front_end: str, *, is_whole: bool = False) -> None:
        self.folder = folder
        program = program_of(front_end)
        self.reference = build(program)
        self.model = sharded(copy.deepcopy(self.reference), program)
        self.compiled = torch.compile(self.model, backend="compiled_fsdp_eager", fullgraph=True)
        self.ours = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.theirs = torch.optim.AdamW(self.reference.parameters(), lr=1e-3)
        counts = (1, NUM_MICRO) if is_whole else ()
        self.whole = {
            count: compile_step(
                self.model, self.ours, loss_of, accumulate=count, backend="compiled_fsdp_eager"
            )
            for count in counts
        }

    def step(self, number: int) -> float:
        """One of the ways to train; the largest difference of a loss."""
        call = self.compiled if number % 2 else self.model
        num_micro = NUM_MICRO if number % 5 == 0 else 1
        gap = 0.0
        is_whole = bool(self.whole and number % 2)
        if is_whole:
            gap = self._whole_step([NUM_MICRO * number + micro for micro in range(num_micro)])
        else:
            for micro in range(num_micro):
                is_last = micro == num_micro - 1
                with nullcontext() if self.whole else synced(self.model, is_last):
                    gap = max(gap, self._backward(call, NUM_MICRO * number + micro))
        for q in self.reference.parameters():
            dist.all_reduce(q.grad)
            q.grad /= dist.get_world_size()
        for optimizer in (self.theirs,) if is_whole else (self.ours, self.theirs):
            optimizer.step()
            optimizer.zero_grad()
        if number % 7 == 0:
            with torch.no_grad():
                gap = max(
                    gap, (call(batch(number)) - self.reference(batch(number))).abs().max().item()
                )
        if number % 50 == 0:
            self._save_and_restore()
        return gap

    def _whole_step(self, numbers: list[int]) -> float:
        """The mean of the losses of these batches; the reference is left with its gradients."""
        wanted = 0.0
        for number in numbers:
            loss = loss_of(self.reference, batch(number)) / len(numbers)
            loss.backward()
            wanted += loss.item()
        batches: Any = [batch(number) for number in numbers]
        step = self.whole[len(numbers)]
        return abs(step(batches if len(numbers) > 1 else batches[0]).item() - wanted)

    def _backward(self, call: Any, number: int) -> float:
        losses = [loss_of(m, batch(number)) for m in (call, self.reference)]
        for loss in losses:
            loss.backward()
        return (losses[0] - losses[1]).abs().item()

    def _save_and_restore(self) -> None:
        if isinstance(self.model, FullyShardedDataParallel):
            self._save_and_restore_fsdp1()
            return
        state = {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.ours),
        }
        dcp.save(state, checkpoint_id=self.folder, no_dist=False)
        with torch.no_grad():
            for p in self.model.parameters():
                p.to_local().zero_()
        dcp.load(state, checkpoint_id=self.folder)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.ours, state["optimizer"])

    def _save_and_restore_fsdp1(self) -> None:
        """By FSDP1's own methods: torch 2.13 cannot load what it has saved of FSDP1's sharded
        optimizer state, stock's either.
        """
        fsdp, whole = FullyShardedDataParallel, FullOptimStateDictConfig(rank0_only=False)
        with fsdp.state_dict_type(
            self.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), whole
        ):
            optimizer = fsdp.optim_state_dict(self.model, self.ours)
        with fsdp.state_dict_type(self.model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": self.model.state_dict()}
            dcp.save(state, checkpoint_id=self.folder, no_dist=False)
            self._forget()
            dcp.load(state, checkpoint_id=self.folder)
            self.model.load_state_dict(state["model"])
        with fsdp.state_dict_type(
            self.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), whole
        ):
            self.ours.load_state_dict(
                fsdp.optim_state_dict_to_load(self.model, self.ours, optimizer)
            )

    @torch.no_grad()
    def _forget(self) -> None:
        averages = [
            entry[name] for entry in self.ours.state.values() for name in ("exp_avg", "exp_avg_sq")
        ]
        for tensor in (*self.model.parameters(), *averages):
            tensor.zero_()


def _soak_routing(steps: int) -> bool:
    """Whether something is wrong."""
    recompiles, gap, num_empty = routed.train(steps)
    is_wrong = recompiles > 0 or gap > 1e-4
    if dist.get_rank() == 0:
        sys.stdout.write(
            f"{steps} steps, {num_empty} times an expert without tokens: {recompiles} recompiles "
            f"after the first, losses differ by at most {gap:.1e}\n"
        )
    dist.destroy_process_group()
    return is_wrong


def _soak_kinds(kinds: list[str], steps: int) -> bool:
    """Whether something is wrong with any of them."""

    def counts() -> tuple[int, int, int]:
        return counters["stats"]["unique_graphs"], live_bytes(), resident()

    wrong = [soak_steps.soak(kind, steps, WARM_UP, EVERY, counts, problems_of) for kind in kinds]
    dist.destroy_process_group()
    return any(wrong)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, help=f"more than {WARM_UP}")
    parser.add_argument("--front-end", choices=FRONT_ENDS, default=FRONT_ENDS[0])
    parser.add_argument("--routed", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--checked", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=soak_steps.KINDS, default=[])
    options = parser.parse_args()
    if options.whole and options.front_end != FRONT_ENDS[0]:
        parser.error(
            f"--whole: compile_step takes no {options.front_end}; leave out one of the two"
        )
    if options.steps <= WARM_UP and not options.routed:
        parser.error(
            f"--steps {options.steps}: what grows is looked for behind step {WARM_UP}; take more"
        )
    return options


def problems_of(worst: float, graphs: int, live: int, memory: int) -> list[str]:
    """What is wrong in the end, beside what there was after the warm-up."""
    problems = []
    if worst > 1e-4:
        problems.append(f"losses differ by {worst:.1e}")
    if counters["stats"]["unique_graphs"] != graphs:
        problems.append(
            f"{counters['stats']['unique_graphs'] - graphs} recompiles after step {WARM_UP}"
        )
    if live_bytes() > live:
        problems.append(f"live tensor bytes grew from {live:,} to {live_bytes():,}")
    if resident() > 1.1 * memory:
        problems.append(
            f"resident memory grew from {memory / 2**20:.0f} to {resident() / 2**20:.0f} MiB"
        )
    return problems


def main() -> None:
    options = arguments()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if options.checked:
        set_plan(Plan(check="checksums"))
    if options.routed:
        sys.exit(_soak_routing(options.steps))
    if options.kinds:
        sys.exit(_soak_kinds(options.kinds, options.steps))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    soak = Soak(folder[0], options.front_end, is_whole=options.whole)
    worst, start = 0.0, time.perf_counter()
    graphs = live = memory = 0
    for number in range(1, options.steps + 1):
        worst = max(worst, soak.step(number))
        if number == WARM_UP:
            graphs, live, memory = counters["stats"]["unique_graphs"], live_bytes(), resident()
        if number % EVERY == 0 and dist.get_rank() == 0:
            now, bytes_ = counters["stats"]["unique_graphs"], live_bytes()
            elapsed = time.perf_counter() - start
            sys.stdout.write(
                f"step {number}: loss differs by at most {worst:.1e}, {now} graphs, {bytes_:,} "
                f"live tensor bytes, resident {resident() / 2**20:.0f} MiB, {elapsed:.0f} s\n"
            )
            sys.stdout.flush()
    problems = problems_of(worst, graphs, live, memory)
    if dist.get_rank() == 0:
        sys.stdout.write(
            "; ".join(problems) + "\n"
            if problems
            else "no growth, no recompile, the losses of the unsharded run\n"
        )
    dist.destroy_process_group()
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
