"""What the command line of `bench.py` says, for every benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from variants import BY_DEFAULT, with_floors


@dataclass(frozen=True, slots=True)
class Settings:
    """Options that several benchmarks read.

    quick: everything end to end in small; the numbers mean nothing.
    rounds: None for each benchmark's own.
    size: of the model of `wire`, by its name in `gpt.SIZES`; None for its own.
    steps: timed ones of `wire`, for each variant in each round; None for its own.
    batches: of `gpu`, and models of `gpu_memory`; all of them if empty.
    """

    quick: bool = False
    rates: tuple[float | None, ...] = (0.5, 1.0, 2.0, 4.0, None)
    rounds: int | None = None
    size: str | None = None
    steps: int | None = None
    variants: tuple[str, ...] = BY_DEFAULT
    depths: tuple[int, ...] = (4, 12, 24, 48)
    layers: tuple[int, ...] = (8, 16, 32, 63, 126)
    batches: tuple[str, ...] = ()

    def sides(self) -> tuple[str, ...]:
        """The variants asked for, with their floors."""
        return tuple(with_floors(list(self.variants)))
