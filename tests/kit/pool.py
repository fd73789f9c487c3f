"""A pool of worker processes, one per rank, that lives for a whole test session.

The workers are started once and asked again and again. A worker that raises, or does not answer in
time, costs its pool: all ranks' stacks and output are put into the failure, the processes are
killed, and the next call gets new ones. `import torch` costs seconds, so every worker is forked
from one process that has only imported, before it has any thread or group.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from kit import shuffled

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from multiprocessing.connection import Connection

    from compiled_fsdp import Plan

GRACE = 5.0  # seconds that the other ranks get once one has failed
_numbers = itertools.count()  # of what a worker has run
START = 120.0  # seconds for a pool to import torch and meet
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # Of what workers are forked from, which imports `kit.shuffled` before anything else.
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
}
EVERY_PASS = "TESTS_VERIFY_EVERY_PASS"
# What a worker has imported once it has compiled a model; what is not there, it imports by itself.
IMPORTS = [
    "kit.shuffled",
    "torch",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.lowering",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "compiled_fsdp.passes.pipeline",
    "compiled_fsdp.compiler.splitting",
]


class WorkerError(AssertionError):
    """A rank raised, died or hung; the text holds what every rank was doing."""


class Pool:
    """`world_size` processes in one gloo group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = Path()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        """Call a module-level function on every rank; what each returned, by rank."""
        if not self._processes:
            self._start()
        sizes = [self._log(rank).stat().st_size for rank in range(self.world_size)]
        place = (fn.__module__, sys.modules[fn.__module__].__file__, fn.__qualname__)
        for pipe in self._pipes:
            pipe.send((*place, pickle.dumps(args)))
        answers = self._collect(timeout)
        if all(kind == "ok" for kind, _ in answers):
            return [value for _, value in answers]
        report = [f"{fn.__qualname__}{args} failed at world size {self.world_size}"]
        for rank, (kind, value) in enumerate(answers):
            report.append(f"--- rank {rank}: {kind}")
            report.append(
                str(value) if kind == "error" else "" if kind == "ok" else self._stack(rank)
            )
            output = self._log(rank).read_text(errors="replace")[sizes[rank] :].strip()
            report.append(f"--- rank {rank}, its output: {output[-3000:]}" if output else "")
        self.close()
        raise WorkerError("\n".join(line for line in report if line))

    def close(self) -> None:
        """Kill the workers; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._processes:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="compiled_fsdp_pool"))
        context = _context()
        for rank in range(self.world_size):
            self._log(rank).touch()
            here, there = context.Pipe()
            arguments = (there, rank, self.world_size, str(self._folder))
            process = context.Process(
                target=_serve, args=arguments, daemon=True, name=f"rank{rank}"
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        answers = self._collect(START)
        if any(kind != "ok" for kind, _ in answers):
            texts = [
                f"rank {r}: {kind} {value}\n{self._stack(r)}"
                for r, (kind, value) in enumerate(answers)
            ]
            self.close()
            raise WorkerError("the pool did not start\n" + "\n".join(texts))

    def _collect(self, timeout: float) -> list[tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.world_size:
            open_pipes = [p for r, p in enumerate(self._pipes) if r not in answers]
            ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = ("died", None)
                if answers[rank][0] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE)
            if not ready:
                break
        missing = [rank for rank in range(self.world_size) if rank not in answers]
        for rank in missing:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5 if missing else 0.0)  # for the stacks to be written
        return [
            answers.get(rank, (f"no answer within {timeout} s", None))
            for rank in range(self.world_size)
        ]

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _stack(self, rank: int) -> str:
        path = self._folder / f"rank{rank}.stack"
        return path.read_text() if path.exists() else ""


def alone(fn: Callable[..., Any], *args: Any, timeout: float = 600.0) -> Any:
    """Call a module-level function in a process of its own, forked as workers are, without a group;
    what it returned. As good as an interpreter that starts anew, but for what that reads at its
    start.
    """
    context = _context()
    here, there = context.Pipe()
    place = (fn.__module__, sys.modules[fn.__module__].__file__, fn.__qualname__)
    process = context.Process(target=_alone, args=(there, *place, pickle.dumps(args)))
    process.start()
    there.close()
    try:
        kind, value = here.recv() if here.poll(timeout) else ("no answer", timeout)
    except EOFError:
        kind, value = "died", None
    process.kill()
    process.join()
    if kind != "ok":
        raise WorkerError(f"{fn.__qualname__}{args}, in a process of its own: {kind} {value}")
    return value


def _alone(pipe: Connection, module: str, path: str, name: str, payload: bytes) -> None:
    try:
        pipe.send(("ok", getattr(_load(module, path), name)(*pickle.loads(payload))))
    except BaseException:  # noqa: BLE001  # the parent raises it
        pipe.send(("error", traceback.format_exc()))


def _context() -> Any:
    """What starts processes that have imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    with mock.patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    return context


def _serve(pipe: Connection, rank: int, world_size: int, folder: str) -> None:
    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with open(f"{folder}/rank{rank}.stack", "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
        faulthandler.enable(stack)
        import torch
        import torch._dynamo
        import torch.distributed as dist

        import compiled_fsdp

        shuffled.shuffle(rank)
        torch.set_num_threads(1)
        use_scalar_kernels()
        compile_quickly()
        lower_as_for_a_device()
        verify_once()
        settings = torch._dynamo.config.get_config_copy()
        _measure_little()
        _share_device()
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
        _share_groups()
        compiled_fsdp.set_plan(
            compiled_fsdp.Plan(bucket_bytes=0)
        )  # models of tests are so small that all units would share
        plan = compiled_fsdp.current_plan()
        gc.freeze()  # or every test pays for looking through all of torch again
        gc.set_threshold(
            500_000, 20, 100
        )  # a compilation allocates much and leaves little in cycles; `forget` collects
        pipe.send(("ok", None))
        while True:
            try:
                module, path, name, payload = pipe.recv()
            except EOFError:
                return
            begin()
            answer = _answer(module, path, name, payload)
            forget()
            torch._dynamo.config.load_config(settings)  # a test may set what others are about
            set_plan_again(plan)
            pipe.send(answer)


def use_scalar_kernels() -> None:
    """Have Inductor write loops without vectors: half the C++ to compile. What we hand to Inductor,
    and the order that it keeps, are the same. Lines for a debugger are another tenth.
    """
    import torch._inductor.config as inductor_config

    inductor_config.cpp.simdlen = 1
    if hasattr(inductor_config.aot_inductor, "enable_line_tables"):  # since torch 2.13
        inductor_config.aot_inductor.enable_line_tables = False


def compile_quickly() -> None:
    """Leave out what Dynamo does beside compiling. It times each function's guards once, for its
    logs, and first empties the caches of the processor: 30 ms of a compilation. It looks for
    garbage after each: a tenth of what workers do; `forget` collects after each test. AOTAutograd
    prints each graph, for logs that nobody has turned on: 2 %.
    """
    import torch._dynamo.config
    from torch._dynamo import guards
    from torch._functorch._aot_autograd import graph_compile

    for name, texts in (("_log_joint_graph", None), ("_log_fw_bw_graphs", (None, None))):
        if hasattr(graph_compile, name):
            setattr(graph_compile, name, lambda *_, texts=texts: texts)
    torch._dynamo.config.run_gc_after_compile = False
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0


def lower_as_for_a_device() -> None:
    """Inductor looks at more of a graph where a device may want padding; on a CPU it leaves that
    out, and a graph that only a device refuses would pass. What tests compile is too small to be
    padded, but for `test_padding.py`.
    """
    import torch._inductor.config

    torch._inductor.config.disable_padding_cpu = False


def verify_once() -> None:
    """Check a graph's invariants when it is finished, as always, and after every pass only in
    `make test-all`: 4 % of what workers do. Tests of passes have it after every pass.
    """
    from compiled_fsdp.compiler import driver

    if EVERY_PASS not in os.environ:
        driver.is_verifying = lambda: False


def _measure_little() -> None:
    """Costs in one round and of small tensors: on a machine that runs tests, repeats scatter."""
    from compiled_fsdp.planning import calibrate

    calibrate.ROUNDS, calibrate.REPEATS = 1, 3
    calibrate.MATMUL["cpu"], calibrate.OPERANDS["cpu"], calibrate.STREAM["cpu"] = 128, 4, 1 << 18


def begin() -> None:
    """Count messages, runs and units from a new number: a test in which only some ranks fail, or
    shard something, leaves them at different ones. Groups that tests share are called what the next
    mesh calls its axes.
    """
    from compiled_fsdp import errors
    from compiled_fsdp.torch_private import groups
    from compiled_fsdp.units import unit
    from compiled_fsdp.wire import gloo, members

    groups._common.clear()
    number = next(_numbers) << 16
    for name, (process_group, _) in list(gloo._tags.items()):
        gloo._tags[name] = process_group, itertools.count(number)
    for group in members.members.values():
        group.number = number
        group.runs.clear()
    unit._unit_numbers = itertools.count(number)
    errors._on_every_rank = True
    errors._said.clear()  # what another test was told once must not be missing from this one


def set_plan_again(plan: Plan) -> None:
    """A test may have left another: those behind it would compile for that."""
    import compiled_fsdp

    if compiled_fsdp.current_plan() is not plan:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # graphs were compiled before
            compiled_fsdp.set_plan(plan)


def forget() -> None:
    """Drop what a test has compiled and left behind."""
    import torch

    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


def _share_device() -> None:
    """Give all groups one gloo device: each has a thread that wakes up a hundred times a second."""
    from torch.distributed import distributed_c10d as c10d

    device = c10d.ProcessGroupGloo.create_device(interface="lo")

    class Gloo(c10d.ProcessGroupGloo):
        def __init__(
            self, store: Any, rank: int, size: int, timeout: timedelta, **fields: Any
        ) -> None:
            options = self._Options()
            options._devices, options._timeout = [device], timeout
            for name, value in fields.items():  # since torch 2.15: enable_reconfigure
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = Gloo  # type: ignore[misc]


def _share_groups() -> None:
    """Give meshes of the same ranks the same groups: each has threads, and hundreds slow down every
    test.
    """
    import torch.distributed as dist
    from torch.distributed import device_mesh

    groups: dict[tuple[object, ...], Any] = {}
    make = device_mesh.new_group

    def new_group(
        ranks: list[int], *, backend: str | None = None, pg_options: object = None, **options: Any
    ) -> Any:
        key = (*ranks, backend)
        alive = (*dist.distributed_c10d._world.pg_map, dist.GroupMember.NON_GROUP_MEMBER)
        if pg_options is not None or groups.get(key) not in alive:
            groups[key] = make(ranks, backend=backend, pg_options=pg_options, **options)
        return groups[key]

    device_mesh.new_group = new_group


def _answer(module: str, path: str, name: str, payload: bytes) -> tuple[str, Any]:
    import torch
    import torch.distributed as dist

    try:
        dist.barrier()
        torch.manual_seed(0)
        fn = getattr(_load(module, path), name)
        return "ok", pickle.loads(pickle.dumps(fn(*pickle.loads(payload))))
    except BaseException:  # noqa: BLE001  # the parent raises it
        return "error", traceback.format_exc()


def _load(name: str, path: str) -> Any:
    """A test module by its file: pytest's importlib mode gives it a name that a plain import need
    not find.
    """
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
