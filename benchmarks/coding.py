"""What codes on the wire cost a processor: nanoseconds of one core for each element that is coded,
read, or read and added up, beside a copy of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from results import Report, Table, machine
from screen import Screen
from settings import Settings

from compiled_fsdp.wire import codes

ROWS, NUMEL, REPEATS = 2, 1 << 20, 9
COLUMNS = ("codes", "encode", "decode to fp32", "decode to bf16", "decode and add up")
NOTES = (
    "ns of one core for an element, the least of some repetitions: other processes take turns with "
    "it. **encode**: of two rows in fp32. **decode**: to memory that was used before. **decode and "
    "add up**: what two ranks sent. **copy**: an element of fp32 to another place.",
)


def run(settings: Settings, screen: Screen) -> Report:
    """A row for each kind of codes, and a copy."""
    screen.line("coding")
    torch.set_num_threads(1)
    numel = 1 << 12 if settings.quick else NUMEL
    x = torch.randn(ROWS, numel)
    rows = [row_of(name, x) for name in ("int8", "float8_e4m3fn")]
    there = torch.empty_like(x)
    rows.append(["copy", f"{nanoseconds(lambda: there.copy_(x), x.numel()):.2f}", "", "", ""])
    facts = [machine(), f"{ROWS} rows of {numel} elements, one thread."]
    title = "What codes on the wire cost a processor"
    return Report("coding", title, [Table("By codes", facts, COLUMNS, rows)], [], NOTES)


def row_of(name: str, x: torch.Tensor) -> list[str]:
    """The cells of one kind."""
    numel = x.shape[1]
    sent = codes.encode([x], [name])
    calls: list[Callable[[], object]] = [
        lambda: codes.encode([x], [name]),
        lambda: codes.decode(sent, numel, torch.float32, name),
        lambda: codes.decode(sent, numel, torch.bfloat16, name),
        lambda: codes.decode_sum(sent, numel, torch.float32, name),
    ]
    return [name, *(f"{nanoseconds(call, x.numel()):.2f}" for call in calls)]


def nanoseconds(call: Callable[[], object], numel: int) -> float:
    """Processor time of a call, for each of so many elements."""
    call()
    seconds = []
    for _ in range(REPEATS):
        start = time.thread_time()
        call()
        seconds.append(time.thread_time() - start)
    return 1e9 * min(seconds) / numel
