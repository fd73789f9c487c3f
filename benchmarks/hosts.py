"""Two hosts on one machine: two network namespaces joined by a wire of a chosen rate.

    python benchmarks/hosts.py --rate 1 -- python script.py --its --options
    python benchmarks/hosts.py --rate 1        # no command: measure what gloo gets out of the wire

starts the command once on each host, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
and GLOO_SOCKET_IFNAME set, on one core and one thread each. The wire is a veth pair; each end sends
through a token bucket (`tc tbf`), so the rate holds per direction and both directions at once.

The bucket is small (a millisecond's worth), because a cable has none: what a large bucket lends at
the start of every transfer hides that gloo moves a lone collective in one direction at a time. It
tells its peer "ready to receive" on the connection that its own data already fills; with a second
collective in flight both directions are busy. The probe prints both rates.

Whatever was made is removed on the way out, also after an exception, Ctrl-C, SIGTERM and SIGHUP;
what a killed run left behind is removed by the next one. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "cfsdp"
INTERFACE = "wire"
ADDRESSES = ("10.213.0.1", "10.213.0.2")
WORLD_SIZE = len(ADDRESSES)
# The bucket must hold one 64 KiB segment, else the kernel splits segments and the CPU becomes the
# wire. A millisecond's worth keeps the rate when the timer is late, as it is on a busy core.
MIN_BURST_KIB = 128
QUEUE_MS = 50
GRACE_S = 5.0

_wires = itertools.count()


class HostsError(RuntimeError):
    """The two hosts cannot be made here; the message says what is missing and what to do."""


class ProcessError(RuntimeError):
    """A process on one of the hosts failed or did not end in time."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Two hosts that are up; `cores[rank]` is the only core of host `rank`."""

    namespaces: tuple[str, ...]
    cores: tuple[int, ...]
    rate_gbit: float | None

    def run(self, argv: Sequence[str], *, timeout_s: float | None = None) -> None:
        """Run one process per host and wait for both; when one fails, end the other and raise."""
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(WORLD_SIZE):
                processes.append(self._start(rank, argv))
            _wait(processes, timeout_s)
        finally:
            _end(processes)

    def _start(self, rank: int, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(WORLD_SIZE),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            # Silences a warning per connection: the addresses of the wire have no names.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
        # `ip netns exec` becomes the command itself, so the pid is the command's. Its own session
        # keeps a Ctrl-C from reaching it before us. The core is inherited, so we step onto it.
        ours = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self.cores[rank]})
        try:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespaces[rank], *argv],
                env=environment,
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, ours)


@contextmanager
def two_hosts(rate_gbit: float | None, burst_kib: int | None = None) -> Iterator[Hosts]:
    """Make two hosts whose wire carries `rate_gbit` Gbit/s each way, None for as fast as it goes.

    `burst_kib` is the size of the token bucket, by default what the wire carries in a millisecond.
    To be entered from the main thread, since it turns SIGTERM and SIGHUP into `SystemExit`.
    """
    _require_tools()
    _remove_stale()
    wire = next(_wires)
    namespaces = tuple(f"{PREFIX}-{os.getpid()}-{wire}-{host}" for host in range(WORLD_SIZE))
    before = {sign: signal.signal(sign, _leave) for sign in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    try:
        _connect(namespaces, rate_gbit, burst_kib)
        cores = sorted(os.sched_getaffinity(0))
        yield Hosts(namespaces, (cores[0], cores[1 % len(cores)]), rate_gbit)
    finally:
        for sign in before:
            signal.signal(sign, signal.SIG_IGN)
        for name in namespaces:
            _remove(name)
        for sign, handler in before.items():
            signal.signal(sign, handler)


def sent_bytes() -> int:
    """Bytes this host has put on the wire so far, headers included; 0 where there is no wire."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    return 0


def gloo_rate(num_in_flight: int, megabytes: int = 6, repeats: int = 10) -> float:
    """Gbit/s of payload each way in a raw loop of gloo all-gathers; needs a default group."""
    import torch
    import torch.distributed as dist

    shard = torch.zeros(megabytes * 2**20, dtype=torch.uint8)
    outputs = torch.empty(num_in_flight, WORLD_SIZE * shard.numel(), dtype=torch.uint8)
    dist.all_gather_into_tensor(outputs[0], shard)
    dist.barrier()
    start = time.perf_counter()
    in_flight(
        lambda i: dist.all_gather_into_tensor(outputs[i], shard, async_op=True),
        num_in_flight,
        repeats,
    )
    return 8e-9 * repeats * shard.numel() / (time.perf_counter() - start)


def in_flight(begin: Callable[[int], Any], most: int, repeats: int) -> None:
    """Call `begin(place)` so often, which returns a collective under way, with places in turn from
    0 to `most`, excluded; a place is free once its collective was awaited. Waits for all.
    """
    works: list[Any] = []
    for index in range(repeats):
        if len(works) == most:
            works.pop(0).wait()
        works.append(begin(index % most))
    for work in works:
        work.wait()


def rate_name(rate_gbit: float | None) -> str:
    """How a rate is written in reports."""
    return "unshaped" if rate_gbit is None else f"{rate_gbit:g} Gbit/s"


def default_burst_kib(rate_gbit: float) -> int:
    """Size of the token bucket: a millisecond's worth, and never less than two segments."""
    return max(MIN_BURST_KIB, round(rate_gbit * 1e9 / 8 / 1000 / 1024))


def parse_rate(text: str) -> float | None:
    """Read a rate from the command line: Gbit/s, or `none` for an unshaped wire."""
    if text == "none":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.001 <= rate <= 100:
        message = f"{text!r} is not a rate: use Gbit/s from 0.001 to 100, or 'none' for unshaped"
        raise argparse.ArgumentTypeError(message)
    return rate


def parse_burst(text: str) -> int:
    """Read a size of the token bucket from the command line."""
    if not text.isdecimal() or not MIN_BURST_KIB <= int(text) <= 2**20:
        message = f"{text!r} is not a burst: use whole KiB from {MIN_BURST_KIB} to {2**20}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def _leave(sign: int, _frame: object) -> None:
    raise SystemExit(128 + sign)


def _require_tools() -> None:
    if sys.platform != "linux":
        raise HostsError("network namespaces need Linux; there is no other way to run this here")
    if os.geteuid() != 0:
        raise HostsError("making network namespaces needs root: run the same command with sudo")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise HostsError(f"{' and '.join(missing)} not found: install the package iproute2")


def _connect(namespaces: tuple[str, ...], rate_gbit: float | None, burst_kib: int | None) -> None:
    first, second = namespaces
    for name in namespaces:
        _do("ip", "netns", "add", name)
    # Made inside the namespace, so that the machine's own interfaces never see the pair.
    pair = ("type", "veth", "peer", "name", INTERFACE, "netns", second)
    _do("ip", "-n", first, "link", "add", INTERFACE, *pair)
    for name, address in zip(namespaces, ADDRESSES, strict=True):
        _do("ip", "-n", name, "address", "add", f"{address}/30", "dev", INTERFACE)
        _do("ip", "-n", name, "link", "set", "lo", "up")
        _do("ip", "-n", name, "link", "set", INTERFACE, "up")
        if rate_gbit is not None:
            _shape(name, rate_gbit, burst_kib or default_burst_kib(rate_gbit))


def _shape(namespace: str, rate_gbit: float, burst_kib: int) -> None:
    rate, burst = f"{rate_gbit * 1e6:.0f}kbit", str(burst_kib * 1024)
    bucket = ("rate", rate, "burst", burst, "latency", f"{QUEUE_MS}ms")
    _do("tc", "-n", namespace, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *bucket)


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise HostsError(
            f"`{' '.join(command)}` said: {' '.join(done.stderr.split())} (this needs root with "
            "CAP_NET_ADMIN and CAP_SYS_ADMIN, and the kernel's veth and sch_tbf: give a container "
            "those capabilities, or run on the machine itself)"
        )
    return done.stdout


def _remove_stale() -> None:
    for line in _do("ip", "netns", "list").splitlines():
        name = line.split()[0]
        match = re.fullmatch(rf"{PREFIX}-(\d+)-\d+-\d", name)
        if match and not Path(f"/proc/{match[1]}").exists():
            _remove(name)


def _remove(namespace: str) -> None:
    # Not through _do: removing what another run has just removed, or was never made, is fine.
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    for pid in listed.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float | None) -> None:
    deadline = time.monotonic() + (timeout_s or float("inf"))
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            raise ProcessError(f"no end after {timeout_s:g} s: both hosts were stopped")
        _raise_if_failed(processes)
        time.sleep(0.1)
    _raise_if_failed(processes)


def _raise_if_failed(processes: list[subprocess.Popen[bytes]]) -> None:
    for rank, process in enumerate(processes):
        if process.returncode:
            raise ProcessError(f"the process on host {rank} ended with code {process.returncode}")


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _probe() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rates = [(num, gloo_rate(num)) for num in (1, 2, 4)]
    if dist.get_rank() == 0:
        sys.stdout.write("gloo all-gather, Gbit/s of payload each way:\n")
        sys.stdout.writelines(f"{num:3d} in flight {rate:8.3f}\n" for num, rate in rates)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Run the command on both hosts, or the probe when there is none."""
    arguments = sys.argv[1:]
    if arguments == ["--probe"]:
        _probe()
        return 0
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description="Run a command on two hosts joined by a shaped wire.",
        usage="hosts.py [-h] [--rate GBIT] [--burst KIB] [-- COMMAND ...]",
    )
    parser.add_argument("--rate", type=parse_rate, default=1.0, metavar="GBIT", help="or 'none'")
    parser.add_argument("--burst", type=parse_burst, metavar="KIB", help="size of the bucket")
    options = parser.parse_args(arguments[:split])
    command = arguments[split + 1 :] or [sys.executable, str(Path(__file__).resolve()), "--probe"]
    try:
        with two_hosts(options.rate, options.burst) as hosts:
            sys.stdout.write(f"two hosts, wire {rate_name(options.rate)}, cores {hosts.cores}\n")
            sys.stdout.flush()
            hosts.run(command)
    except (HostsError, ProcessError) as error:
        sys.stderr.write(f"hosts: {error}\n")
        return 2 if isinstance(error, HostsError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
