"""Train a byte-level GPT on the standard library, sharded over ranks and compiled as one graph.

    python benchmarks/train.py                       # starts 2 ranks, about five minutes
    python benchmarks/train.py --compare             # beside stock FSDP2, about twelve minutes
    torchrun --nproc-per-node 2 benchmarks/train.py  # the same, started by hand

    # survives lost ranks
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 benchmarks/train.py --save-every 50

At the end: a table, a picture of the losses, results as JSON, and a sharded checkpoint in --out.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import checkpoint
import torch
import torch.distributed as dist
from loop import Budget, Loop, Outcome
from options import Options, check_machine, job, num_cores, parse
from report import PICTURE, RESULTS, draw, table, verdict, write_results
from rich.console import Console
from screen import Screen, leave
from step_report import StepReport
from text import Text
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from trainer import Trainer, variants
from usage import UsageError

from compiled_fsdp.wire.meeting import meet

USAGE_ERROR = 2
START_S = 300.0  # in which the ranks have to find each other
# With --compare, what a compiling variant needs beyond what an eager one does, in minutes.
COMPILE_MINUTES = 0.75


def main(argv: list[str]) -> int:
    """Run as a rank where torchrun has set the environment, else start the ranks."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        options = parse(argv)
        text = check_machine(options)
        if "RANK" not in os.environ:
            return launch(options, argv)
        work(options, text)
    except UsageError as error:
        if rank == 0:
            Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False)
        else:
            time.sleep(2)  # torchrun ends all ranks with the first, which must not be this one.
        return USAGE_ERROR
    return 0


def launch(options: Options, argv: list[str]) -> int:
    """Run this script on `options.world` ranks under torchrun and return the exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads(options.world)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # The profiler's allocator warns.
    logging.disable(logging.ERROR)  # The ranks report their failures themselves.
    ranks = ["--standalone", "--nproc-per-node", str(options.world)]
    try:
        run(parse_args([*ranks, str(Path(__file__)), *argv]))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if USAGE_ERROR in codes.values():
            return USAGE_ERROR
        Console(stderr=True).print(f"error: exit codes by rank: {codes}", markup=False)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def work(options: Options, text: Text) -> None:
    """Train every variant on this rank and report on rank 0."""
    torch.set_num_threads(num_threads(options.world))
    connect()
    screen = Screen(dist.get_rank())
    outcomes: list[Outcome] = []
    horizon, minutes = options.steps, options.minutes
    if options.compare and minutes:
        minutes = max(minutes / 9, minutes / 3 - COMPILE_MINUTES)
    screen.line(describe(options, text))
    for variant in variants(options):
        trainer = Trainer(replace(options, steps=horizon), variant, text)
        outcomes.append(train(trainer, screen, minutes))
        horizon = trainer.horizon
        if outcomes[-1].stopped_by:
            break
        del trainer
        torch.compiler.reset()
        gc.collect()
    if dist.get_rank() == 0:
        report(options, text, screen, outcomes, horizon)
    leave()


def connect() -> None:
    """Start the process group, in a part of the store that no rank of before a restart has written
    to.

    torchrun keeps its store over restarts, and gloo takes the addresses that dead ranks left there
    for those of the living (torch 2.13): ranks fail to connect, or hang.
    """
    store, rank, world = next(rendezvous("env://"))
    name = meet(store, rank, world, START_S)
    dist.init_process_group("gloo", store=PrefixStore(name, store), rank=rank, world_size=world)


def train(trainer: Trainer, screen: Screen, minutes: float | None) -> Outcome:
    """Train one variant, save it if it is the one asked for, validate and measure it."""
    options, variant = trainer.options, trainer.variant
    outcome = Outcome(variant.name)
    active = (
        f", {trainer.num_active:,} for each byte"
        if trainer.num_active < trainer.num_parameters
        else ""
    )
    screen.line(f"training with {variant.name}, {trainer.num_parameters:,} parameters{active}")
    if options.resume:
        run = checkpoint.read_run(options.out)
        checkpoint.load(options.out, trainer.model, trainer.optimizers)
        outcome.losses = run["history"]["losses"]
        outcome.validation = [(step, loss) for step, loss in run["history"]["validation"]]
        screen.line(f"resuming from {options.out} at step {run['step']}")
    loop = Loop(trainer, screen, Budget(options, minutes), outcome, lambda: save(trainer, outcome))
    step_report = (
        StepReport(trainer) if options.report and variant == variants(options)[-1] else None
    )
    with step_report.dumped() if step_report else nullcontext():
        loop.run()
    if variant == variants(options)[-1]:
        path = save(trainer, outcome)
        screen.line(f"saved the checkpoint {path}")
    loop.finish()
    loop.measure()
    if step_report:
        screen.line(
            f"report of a step: {step_report.write()}; for https://ui.perfetto.dev: "
            f"{step_report.trace}"
        )
    return outcome


def save(trainer: Trainer, outcome: Outcome) -> Path:
    """Write the checkpoint of a run, on all ranks together."""
    options = replace(trainer.options, steps=trainer.horizon)
    history = {"losses": outcome.losses, "validation": outcome.validation}
    run = {
        "job": job(),
        "options": options.saved(),
        "step": len(outcome.losses),
        "text": trainer.text.digest,
        "history": history,
    }
    return checkpoint.save(options.out, trainer.model, trainer.optimizers, run)


def report(
    options: Options, text: Text, screen: Screen, outcomes: list[Outcome], horizon: int | None
) -> None:
    """Show the table, write picture and results, and say whether the goal was reached."""
    title = (
        f"{options.model.upper()} {options.size} on Python's standard library, "
        f"{options.world} ranks"
    )
    write_results(options.out, outcomes, options, text)
    draw(options.out / PICTURE, outcomes, title)
    screen.show(table(outcomes))
    screen.line(f"loss curves: {options.out / PICTURE}, all numbers: {options.out / RESULTS}")
    screen.line(verdict(outcomes[-1], horizon, is_saved=not options.compare))


def describe(options: Options, text: Text) -> str:
    """Return the first line of a run."""
    return (
        f"{options.model.upper()} {options.size} on {options.world} ranks with "
        f"{torch.get_num_threads()} thread(s) each; text of {text.num_files} files, "
        f"{len(text.train):,} bytes to train on, {len(text.validation):,} to validate on"
    )


def num_threads(world: int) -> int:
    """Return the threads of each rank, all ranks on this machine."""
    return max(1, num_cores() // world)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
