"""Which checksums stand around a communication, written once for graphs and for the eager runtime.

A checksum (`wire/checks.py`) is an integer that every bit of a parameter's part counts in. Whoever
sends sums up what it sends before the collective starts, whoever receives what has arrived. Both
sums go into the ledger of the unit, by `compare_`, and ranks compare them at the end of backward.

| communication | sent | received |
| --- | --- | --- |
| all-gather | this rank's part of each parameter: [1, P] | that of every rank: [N, P] |
| all-to-all, and a local sum | the rows for every rank: [N, P] | the rows of every rank: [N, P] |
| all-reduce over replicas | - | the result, the same on each: [1, P] |

A reduce-scatter adds floating-point numbers on its way, so there is nothing that an integer could
be compared with: gradients of checked units are exchanged,
and added where they arrive (`units/specs.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import collectives as comm
from . import quantized, transfers
from .schema import ALL_REDUCE, ALL_TO_ALL, CHECKSUM, COMPARE, traits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .spec import ParamSpec

    Value = Any
    Run = Callable[..., Value]

GATHERED, EXCHANGED, REPLICATED = "all-gather", "all-to-all", "all-reduce"


def is_checked(specs: Sequence[ParamSpec]) -> bool:
    """Whether a communication of these is to be checked: what several units share, if all are."""
    return all(spec.is_checked for spec in specs)


def is_of_slices(specs: Sequence[ParamSpec]) -> bool:
    """Whether a gather of these is one for backward, over a smaller group, of slices that forward
    has kept (an int `reshard_after_forward`): no flat buffer holds what it sends.
    """
    return specs[0].post_size > 1 and specs[0].group == specs[0].post_group


def kind_of(op: object) -> str:
    """What the checks call the collective that an op starts; "" for one that is not checked."""
    if op in (comm.ALL_REDUCE, ALL_REDUCE):
        return REPLICATED
    if op is ALL_TO_ALL:
        return EXCHANGED
    is_plain = traits_of(op).is_buffer and traits_of(op).starts == "gather"
    return GATHERED if is_plain else ""


def names_of(specs: Sequence[ParamSpec]) -> list[str]:
    """The parameters as `compare_` names them: "unit#number:name"."""
    return [f"{spec.unit}:{spec.fqn}" for spec in specs]


def width_of_gather(specs: Sequence[ParamSpec]) -> tuple[list[int], list[int]]:
    """The messages of a gather of these, and the columns of each parameter, in what travels."""
    bucket = transfers.GatheredBucket(specs)
    return [message.numel for message in bucket.messages], list(bucket.widths)


def widths_of_reduction(specs: Sequence[ParamSpec]) -> list[int]:
    """The columns of each parameter in the rows that are exchanged."""
    if quantized.reduces_bytes(specs):
        return quantized.reduced_payloads(specs)
    return [spec.shard_numel for spec in specs]


class Around:
    """The checksums around one collective that carries these parameters.

    kind: see `kind_of`.
    sent: the checksums of what is sent; None where nobody can compare them.
    """

    def __init__(self, kind: str, specs: Sequence[ParamSpec], phase: str) -> None:
        self.kind, self.specs, self.phase = kind, specs, phase
        self.sent: Value = None

    def before(self, run: Run, pieces: Sequence[Value], widths: Sequence[int]) -> None:
        """Sum up what is about to be sent: pieces of so many columns."""
        if self.kind == GATHERED:
            _, sizes = width_of_gather(self.specs)
            self.sent = run(CHECKSUM, list(pieces), 1, [sum(sizes)], sizes)
        elif self.kind == EXCHANGED:
            sizes, size = widths_of_reduction(self.specs), self.specs[0].group_size
            self.sent = run(CHECKSUM, list(pieces), size, list(widths), sizes)

    def at_rest(
        self, run: Run, flats: Sequence[tuple[Value, int]], sources: Sequence[int]
    ) -> list[Value]:
        """Sum up the shards that a gather was made of, where it did not send them as they are.

        flats: the flat buffers and their elements; sources: of each parameter, its flat buffer's
        place there.
        """
        sums = []
        for place, (flat, numel) in enumerate(flats):
            own = [s for s, at in zip(self.specs, sources, strict=True) if at == place]
            for start, run_of in _runs(own):
                total = sum(s.shard_numel for s in run_of)
                is_all = total == numel
                part = (
                    flat if is_all else run(comm.aten.slice.Tensor, flat, 0, start, start + total)
                )
                sizes = [s.shard_numel for s in run_of]
                sums.append(run(CHECKSUM, [part], 1, [total], sizes))
        return sums

    def after(
        self,
        run: Run,
        received: Value,
        rests: Sequence[Value] = (),
        flats: Sequence[tuple[Value, int]] = (),
    ) -> None:
        """Sum up what has arrived, and note it beside what was sent.

        rests: of what the gather was made of; empty: of what was sent. flats: the flat buffers,
        each with the number of its parameters.
        """
        size = self.specs[0].group_size
        if self.kind == GATHERED:
            messages, sizes = width_of_gather(self.specs)
            sums = run(CHECKSUM, [received], size, messages, sizes)
        elif self.kind == EXCHANGED:
            sizes = widths_of_reduction(self.specs)
            sums = run(CHECKSUM, [received], size, [sum(sizes)], sizes)
        else:
            sizes = [spec.shard_numel for spec in self.specs]
            sums = run(CHECKSUM, [received], 1, [sum(sizes)], sizes)
        run(
            COMPARE,
            sums if self.sent is None else self.sent,
            sums,
            list(rests),
            [flat for flat, _ in flats],
            [count for _, count in flats],
            self.kind,
            self.phase,
            names_of(self.specs),
        )


def _runs(specs: Sequence[ParamSpec]) -> list[tuple[int, list[ParamSpec]]]:
    """Neighbours in a flat buffer together, each with its start."""
    found: list[tuple[int, list[ParamSpec]]] = []
    end = -1
    for spec in specs:
        if spec.offset == end:
            found[-1][1].append(spec)
        else:
            found.append((spec.offset, [spec]))
        end = spec.offset + spec.shard_numel
    return found


class Watched:
    """Runs ops as `run` does, with checksums around the collectives that carry these parameters:
    the eager runtime's way.

    flats: of a gather, the flat buffers and their elements; sources: of each parameter, its flat
    buffer's place there.
    """

    def __init__(
        self,
        run: Run,
        specs: Sequence[ParamSpec],
        phase: str,
        flats: Sequence[tuple[Value, int]] = (),
        sources: Sequence[int] = (),
        *,
        is_cast: bool = False,
    ) -> None:
        self.run, self.specs, self.phase = run, specs, phase
        self.flats, self.sources, self.is_cast = flats, sources, is_cast
        self._around: dict[int, tuple[Value, Around, list[Value]]] = {}

    def __call__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        """Run an op; see `Run`."""
        if op is comm.WAIT and id(args[0]) in self._around:
            _, around, rests = self._around.pop(id(args[0]))
            received = self.run(op, *args, **kwargs)
            counts = [(f, self.sources.count(n)) for n, (f, _) in enumerate(self.flats)]
            around.after(self.run, received, rests, counts if around.kind == GATHERED else ())
            return received
        kind = kind_of(op) if traits_of(op).is_collective else ""
        if not kind:
            return self.run(op, *args, **kwargs)
        around = Around(kind, self.specs, self.phase)
        if kind == EXCHANGED:
            around.before(self.run, args[0], self._widths(len(args[0])))
        else:
            around.before(self.run, [args[0]], ())
        started = self.run(op, *args, **kwargs)
        rests = []
        if kind == GATHERED and self.is_cast:
            rests = around.at_rest(self.run, self.flats, self.sources)
        self._around[id(started)] = started, around, rests
        return started

    def _widths(self, num_pieces: int) -> list[int]:
        """The columns of the pieces of an exchange: one piece, or the messages of the bucket."""
        if num_pieces == 1:
            return [sum(widths_of_reduction(self.specs))]
        pieces = transfers.messages_of(self.specs, self.specs[0].reduce_dtype)
        return [piece.numel for piece in pieces]
