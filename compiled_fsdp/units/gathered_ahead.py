"""Gathers of a flat buffer that are under way since the optimizer's step,
before the forward that uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir import schema
from compiled_fsdp.torch_private.groups import register_work
from compiled_fsdp.wire import launch

from .unwritten import BEFORE_FORWARD, check_unwritten, checksum, plain_sum

if TYPE_CHECKING:
    from torch import Tensor

    from compiled_fsdp.wire.kernels import Piece

    from .flat import FlatBuffer


@dataclass(frozen=True)
class UnderWay:
    """One gather.

    version: of the buffer when it was started.
    total: a checksum of the buffer then.
    plain: of a checked unit, a sum that moving values does not change; see `check_unwritten`.
    gathered: what it writes to, before it is awaited.
    work: what is awaited.
    """

    version: tuple[int, ...]
    total: Tensor
    plain: Tensor | None
    gathered: Tensor
    work: Any


@dataclass
class GatheredAhead:
    """Those of one buffer, by the piece of it that is gathered."""

    pieces: dict[Piece, UnderWay] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)

    def start(self, flat: FlatBuffer, piece: Piece) -> None:
        """Gather a piece for the next forward."""
        version = flat.version()
        for other in [p for p in self.pieces if p == piece or self.pieces[p].version != version]:
            self.pieces.pop(other).work.wait()  # of values that are no longer these
        with torch.no_grad():
            rests = flat.data.detach()[piece.start : piece.start + piece.numel]
            here = comm.from_host(launch.call, rests, flat.params[0].spec)
            shard = _payload(here, piece) if piece.codes else here.to(piece.dtype)
            gathered, work = launch.start_gather(
                shard,
                piece.sizes,
                piece.group_size,
                piece.group,
                name_of(flat, piece),
                "forward",
            )
            plain = plain_sum(flat.data) if flat.unit.settings.check else None
            self.pieces[piece] = UnderWay(version, checksum(flat.data), plain, gathered, work)

    def take(self, flat: FlatBuffer, piece: Piece) -> Tensor | None:
        """The gather of a piece that is under way, to be awaited as any other; None if there is
        none, or its parameters have been written to since.
        """
        if piece not in self.pieces:
            return None
        under_way = self.pieces.pop(piece)
        if under_way.version != flat.version():
            under_way.work.wait()
            return None
        check_unwritten(flat.unit.name, flat.data, under_way.total, BEFORE_FORWARD, under_way.plain)
        register_work(under_way.gathered, under_way.work)
        return under_way.gathered

    def drop(self) -> None:
        """Await those that no forward has used, and forget them."""
        pieces, self.pieces = self.pieces, {}
        for under_way in pieces.values():
            under_way.work.wait()


def name_of(flat: FlatBuffer, piece: Piece) -> str:
    """The unit and the parameters of a piece, for errors."""
    stop = piece.start + piece.numel
    names = [p.fqn for p in flat.params if piece.start <= p.layout.offset < stop]
    return f"{flat.unit.name} ({', '.join(names)})"


def _payload(shard: Tensor, piece: Piece) -> Tensor:
    """What a rank sends of a piece of which bytes travel: [bytes]."""
    parts = [
        (part if name else part.to(piece.dtype)).view(1, -1)
        for part, name in zip(shard.split(list(piece.numels)), piece.codes, strict=True)
    ]
    payload: Tensor = schema.ENCODE(parts, list(piece.codes))
    return payload.view(-1)
