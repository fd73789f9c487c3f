"""`--report`: the graphs of a run as they were compiled, a profiled step laid over them, and the
page made of both.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist
from measure import record_step
from trainer import WARMUP, Trainer

from compiled_fsdp import current_plan, dumped_to, set_plan
from compiled_fsdp.planning.calibrate import calibrate
from compiled_fsdp.report import add_profile, write_report, write_trace

DUMP, PAGE, TRACE = "dump", "report.html", "trace.json"


class StepReport:
    """The report of one run: `dumped` around what compiles, `write` when the run is over."""

    def __init__(self, trainer: Trainer) -> None:
        """Take the run; nothing is compiled yet."""
        self.trainer = trainer
        self.dump: Path = trainer.options.out / DUMP
        self.trace: Path = trainer.options.out / TRACE

    @contextmanager
    def dumped(self) -> Iterator[None]:
        """Dump what is compiled inside, with costs that all ranks measured; they change no
        schedule, which goes by distance.
        """
        info = self.trainer.model._get_fsdp_state().unit.mesh_info  # type: ignore[operator]
        set_plan(replace(current_plan(), costs=calibrate([info])))
        shutil.rmtree(self.dump / f"rank{self.trainer.rank}", ignore_errors=True)
        with dumped_to(self.dump):
            yield

    def write(self) -> Path:
        """Profile a further step on every rank, and write the page and the trace on rank 0; returns
        the page.
        """
        trainer, page = self.trainer, self.trainer.options.out / PAGE
        with TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            record_step(lambda: trainer.step(trainer.horizon or WARMUP - 1), path)
            add_profile(self.dump, path, trainer.rank)
        dist.barrier()
        if trainer.rank == 0:
            write_report(self.dump, page)
            write_trace(self.dump, self.trace)
        return page
