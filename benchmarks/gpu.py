"""One GPU as one rank of many: a Llama in bf16 over wires that are timed, ours, stock's and the
unsharded model.

Each way to train is a process of its own (`gpu_rank.py`), rank 0 of a timed world, whose
collectives occupy a stream for as long as a wire of a given speed would need (`wire/timed.py`). The
ways of a batch compile beside each other; then they take turns, in rounds, and whoever has no turn
does nothing. What a rank computes, copies and launches is real, and so are its memory and what
waits for what; a network's noise, and what NCCL takes from the device's processors, are not there.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from gpu_rank import ANSWER, LATENCY, SIZES, VARIANTS, Size
from hosts import HostsError
from llama import Llama, LlamaConfig
from results import Panel, Report, Table, machine, ratio, spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from screen import Screen
    from settings import Settings

ROUNDS, STEPS = 4, 5
READY = 240.0  # seconds until a batch has compiled
ANSWERED = 60.0
NO_TIME = float("inf")
SLOW, FAST = 5e10, 3e11


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train, as one rank of so many.

    wires: bytes a second; what is captured as a CUDA graph keeps the time of the slowest.
    """

    variant: str
    world: int = 64
    size: str = "1b"
    wires: tuple[float, ...] = (NO_TIME, SLOW)

    @property
    def name(self) -> str:
        """For messages and files."""
        return f"{self.variant}_{self.size}_{self.world}"


def _ways(names: str, **more: Any) -> tuple[Way, ...]:
    return tuple(Way(name, **more) for name in names.split())


# Each batch compiles at once, and has to fit into the device's memory together.
BATCHES = {
    "base": _ways("local stock stock_kept ours ours_whole ours_whole_kept ours_fp8 ours_int8"),
    "more": (
        *_ways(
            "stock_loss ours_overlap ours_whole_split ours_whole_auto ours_half ours_whole_half "
            "ours_offload",
            wires=(SLOW,),
        ),
        *_ways("ours_graphs ours_whole_graphs", wires=(NO_TIME,)),
        *_ways("local stock ours ours_whole", world=8, wires=(FAST,)),
    ),
    "16b": _ways("stock_loss ours ours_whole", size="16b", wires=(SLOW,)),
    "8b": _ways("local stock_loss ours ours_whole", size="8b", wires=(SLOW,)),
}


@dataclass
class Found:
    """What a way has answered; times by wire."""

    way: Way
    first: dict[str, Any] = field(default_factory=dict)
    times: dict[float, list[dict[str, float]]] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def seconds(self, wire: float) -> list[float]:
        """Of a step, in each round."""
        return [each["seconds"] for each in self.times.get(wire, [])]


class Child:
    """A process of one way; what it writes to stderr is in `said`."""

    def __init__(
        self,
        way: Way,
        device: str,
        said: IO[bytes],
        script: str = "gpu_rank.py",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        command = [
            *(sys.executable, str(Path(__file__).parent / script)),
            way.variant,
            *("--world", str(way.world), "--size", way.size, "--device", device),
            *("--bandwidth", str(min(way.wires))),  # for what is planned from costs
        ]
        self._said = said
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "4"} | dict(variables or {}),
        )
        self._seen = b""

    def ask(self, request: str) -> None:
        """Send a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(request.encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        """Wait for an answer.

        Raises:
            TimeoutError: none came.
            RuntimeError: the process has ended; says what it wrote last.
        """
        end = time.monotonic() + seconds
        out = self._process.stdout
        assert out is not None
        while True:
            while b"\n" in self._seen:
                line, _, self._seen = self._seen.partition(b"\n")
                if line.startswith(ANSWER.encode()):
                    found: dict[str, Any] = json.loads(line[len(ANSWER) :])
                    return found
            if not select.select([out], [], [], max(end - time.monotonic(), 0.0))[0]:
                raise TimeoutError(f"no answer in {seconds:.0f} s: {self._tail()}")
            more = os.read(out.fileno(), 1 << 16)
            if not more:
                raise RuntimeError(self._tail())
            self._seen += more

    def _tail(self) -> str:
        self._said.seek(0)
        return self._said.read()[-3000:].decode(errors="replace")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def run(settings: Settings, screen: Screen) -> Report:
    """The batches that are asked for, or all, one after the other.

    Raises:
        HostsError: there is no device, or no such batch.
    """
    batches = [BATCHES[name] for name in asked_for(settings.batches, BATCHES)]
    has_device = torch.cuda.is_available()
    if not has_device and not settings.quick:
        raise HostsError("it needs a CUDA device")
    if settings.quick:
        quick = " ".join(VARIANTS) if has_device else "local ours_whole"
        batches = [_ways(quick, size="tiny", wires=(SLOW,))]
    folder = Path(__file__).resolve().parent.parent / "out" / "gpu"
    device = "cuda" if has_device else "cpu"
    return report(measure(batches, screen, device, folder, settings.rounds or ROUNDS))


def asked_for(names: Sequence[str], known: Iterable[str]) -> list[str]:
    """The names of batches; all that are known if there are none.

    Raises:
        HostsError: one of them is not known.
    """
    known = list(known)
    for name in names:
        if name not in known:
            raise HostsError(f"--batches {name}: there are {', '.join(known)}")
    return list(names) or known


def measure(
    batches: Sequence[Sequence[Way]],
    screen: Screen,
    device: str,
    folder: Path,
    rounds: int = ROUNDS,
) -> list[Found]:
    """What each way of each batch has answered. It is written to `raw.json` in the folder behind
    each batch, beside a trace of each way.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Found] = []
    for batch in batches:
        screen.line(f"gpu: {', '.join(way.name for way in batch)}")
        found += _together(batch, screen, device, folder, rounds)
        (folder / "raw.json").write_text(json.dumps([asdict(each) for each in found]))
    return found


def report(found: Sequence[Found]) -> Report:
    """A table for each model, size of the world and wire; ratios are to its floor and stock's."""
    tables, panels = [], []
    kinds = [(each.way.size, each.way.world, wire) for each in found for wire in each.way.wires]
    for size, world, wire in dict.fromkeys(kinds):
        mine = [
            each
            for each in found
            if (each.way.size, each.way.world) == (size, world) and each.seconds(wire)
        ]
        if not mine:
            continue
        table = _table(size, world, wire, mine)
        tables.append(table)
        bars = {e.way.variant: {"step": 1e3 * statistics.median(e.seconds(wire))} for e in mine}
        panels.append(Panel(table.title, "ms", bars))
    notes = [
        f"**{name}**: {VARIANTS[name].summary}."
        for name in dict.fromkeys(each.way.variant for each in found)
    ]
    notes += [f"{each.way.name}: failed." for each in found if each.error]
    notes += [
        "peak and reserved: GiB that the allocator had handed out, and had taken from the device, "
        "at most, behind the first step; predicted: by the planner, with what is at rest. host: "
        "until a step that begins on an idle device is issued. first: seconds of the first step, "
        "of several ways that compile beside each other."
    ]
    return Report("gpu", "One GPU as one rank of many", tables, panels, notes)


def _table(size: str, world: int, wire: float, found: Sequence[Found]) -> Table:
    medians = {each.way.variant: statistics.median(each.seconds(wire)) for each in found}
    stock, local = medians.get("stock", medians.get("stock_loss")), medians.get("local")
    rows = []
    for each in found:
        times = each.seconds(wire)
        median, between = spread([1e3 * s for s in times], ".1f")
        host = 1e3 * statistics.median(time["host"] for time in each.times[wire])
        predicted = each.last.get("predicted_peak")
        rest = each.last.get("at_rest", 0.0)
        rows.append(
            [
                each.way.variant,
                median,
                between,
                ratio(statistics.median(times), local),
                ratio(statistics.median(times), stock),
                f"{host:.1f}",
                *(gib(each.last.get(name)) for name in ("peak", "reserved")),
                gib(None if predicted is None else predicted + rest),
                f"{each.first.get('first', 0.0):.0f}",
            ]
        )
    model = SIZES[size]
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    speed = "no time" if wire == NO_TIME else f"{wire / 1e9:g} GB/s, {1e6 * LATENCY:g} us"
    facts = [
        machine(),
        f"{name}.",
        f"{described(model)}; bf16 parameters, fp32 reductions, fused AdamW; median and quartiles "
        f"of {max(len(each.seconds(wire)) for each in found)} rounds of {STEPS} steps.",
    ]
    if wire != NO_TIME and isinstance(model.config, LlamaConfig):
        twice, once = (1e3 * _on_the_wire(model.config, world, wire, n) for n in (2, 1))
        facts.append(
            f"The wire alone needs {twice:.1f} ms with every parameter gathered twice, "
            f"{once:.1f} once."
        )
    columns = ["", "step, ms", "quartiles", "over local", "over stock", "host, ms"]
    columns += ["peak", "reserved", "predicted", "first, s"]
    return Table(f"{size}, {world} ranks, {speed}", facts, columns, rows)


def gib(value: float | None) -> str:
    return "" if value is None else f"{value / 2**30:.2f}"


def described(size: Size) -> str:
    c = size.config
    name = "Llama"
    if not isinstance(c, LlamaConfig):
        name = f"A mixture of {c.num_experts} experts, divided among {size.expert_ranks} ranks,"
    return (
        f"{name} of {c.num_layers} layers, width {c.width}, hidden {c.hidden}, vocabulary "
        f"{c.vocab}; {size.batch} sequences of {size.length}"
    )


def _on_the_wire(config: LlamaConfig, world: int, wire: float, gathers: int) -> float:
    """Seconds of all collectives of a step, without latencies, with bf16 gathers and fp32
    reductions; the embedding is gathered once in any case.
    """
    with torch.device("meta"):
        model = Llama(config)
    numel = sum(p.numel() for p in model.parameters())
    gathered = gathers * numel - (gathers - 1) * model.embedding.weight.numel()
    return (2 * gathered + 4 * numel) * (world - 1) / world / wire


def _together(
    batch: Sequence[Way], screen: Screen, device: str, folder: Path, rounds: int
) -> list[Found]:
    with ExitStack() as stack:
        processes = Processes(batch, screen, device, stack)
        for wire in dict.fromkeys(wire for way in batch for wire in way.wires):
            over = [way for way in batch if wire in way.wires]
            for _ in range(rounds):
                for way, answer in processes.ask(over, f"time {wire} {STEPS}"):
                    processes.found[way].times.setdefault(wire, []).append(answer)
        list(processes.ask(batch, "trace {}", folder))
        for way, answer in processes.ask(batch, "end"):
            processes.found[way].last = answer
        return list(processes.found.values())


class Processes:
    """The processes of a batch, once they have compiled; what has failed is left out from then on,
    which is said.
    """

    def __init__(self, batch: Sequence[Way], screen: Screen, device: str, stack: ExitStack) -> None:
        self.found = {way: Found(way) for way in batch}
        self._screen = screen
        self._children: dict[Way, Child] = {}
        for way in batch:
            said = stack.enter_context(tempfile.TemporaryFile())
            self._children[way] = child = Child(way, device, said)
            stack.callback(child.close)
        begin = time.monotonic()
        for way in batch:
            left = READY - (time.monotonic() - begin)
            self.found[way].first = self._answer(way, max(left, 1.0))
        screen.line(f"  ready after {time.monotonic() - begin:.0f} s")

    def ask(
        self, ways: Sequence[Way], request: str, folder: Path | None = None
    ) -> Iterator[tuple[Way, dict[str, Any]]]:
        """Each in its turn; `{}` in a request is the way's file in `folder`."""
        for way in [way for way in ways if way in self._children]:
            self._children[way].ask(request.format(folder and folder / f"{way.name}.json.gz"))
            answer = self._answer(way, ANSWERED)
            if way in self._children:
                yield way, answer

    def _answer(self, way: Way, seconds: float) -> dict[str, Any]:
        try:
            return self._children[way].answer(seconds)
        except (RuntimeError, TimeoutError) as error:
            self.found[way].error = str(error)
            self._screen.line(f"  {way.name} failed: {error}")
            self._children.pop(way).close()
            return {}
