"""Which ranks run the same program.

Most graphs are the same on every rank. Tensor parallelism has exceptions: a rank's part of the
vocabulary, or of the sequence, begins at a number that stands in its graph. So a call is traced as
ranks of every place on the axes that are not data-parallel, and each graph that comes out is
compiled once. Of ranks that differ in data-parallel axes alone the first and the last are traced: a
forward that asks which of them it is on is refused.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from compiled_fsdp.torch_private.ranks import as_rank, places

from . import facts as of_code
from .capture import Call, capture, graphs, refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compiled_fsdp.units.unit import Unit

    from .program import Program


def programs_of(call: Call, files: dict[str, bytes]) -> tuple[list[Program], dict[str, str]]:
    """A program for each set of ranks that need one of their own, and hashes of the functions that
    they go through.

    Raises:
        NotImplementedError: the graph depends on a rank in another way.
    """
    found: list[tuple[Program, list[str]]] = []
    sources: dict[str, str] = {}
    for ranks in classes(call.units):
        first, last = ranks[0], ranks[-1]
        of_last = _as(call, last) if found else []  # this process first: its errors are the user's
        known = next((i for i, (_, texts) in enumerate(found) if texts == of_last), None)
        if known is None:
            name = f"{call.mode}.rank{first}" if found else call.mode
            with as_rank(first) if first != dist.get_rank() else nullcontext():
                program, seen = capture(call, name, files)
            sources = of_code.together(sources, seen.sources)
            found.append((replace(program, ranks=ranks), seen.graphs))
            of_first, of_last = seen.graphs, of_last or _as(call, last)
        else:
            program, texts = found[known]
            found[known] = replace(program, ranks=[*program.ranks, *ranks]), texts
            of_first = _as(call, first)
        if of_first != of_last:
            raise refuse(
                f"the graph of rank {last} is not that of rank {first}",
                "forward asks which data-parallel rank it is on; " + _difference(of_first, of_last),
            )
    return [program for program, _ in found], sources


def _as(call: Call, rank: int) -> list[str]:
    """The graphs that a rank has."""
    with as_rank(rank):
        try:
            return graphs(call)
        except NotImplementedError:
            raise
        except Exception as error:
            raise refuse(
                f"forward cannot be traced as rank {rank}", f"{type(error).__name__}: {error}"
            ) from error


def _difference(first: Sequence[str], second: Sequence[str]) -> str:
    for a, b in zip(first, second, strict=False):
        for line, other in zip(a.splitlines(), b.splitlines(), strict=False):
            if line != other:
                return f"{line.strip()!r} there, {other.strip()!r} here"
    return "one of them is longer"


def classes(units: Sequence[Unit]) -> list[list[int]]:
    """The ranks, by their places on all axes that are not data-parallel; this process first."""
    meshes = {
        (param.full.spec.mesh, param.full.dp_axes): None
        for unit in units
        for param in unit.params
        if param.full is not None
    }
    found: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    here = [(places(mesh), set(dp_axes)) for mesh, dp_axes in meshes]
    own = dist.get_rank()
    for rank in (own, *(r for r in range(dist.get_world_size()) if r != own)):
        key = tuple(
            tuple(n for axis, n in enumerate(place.get(rank, ())) if axis not in dp_axes)
            for place, dp_axes in here
        )
        found.setdefault(key, []).append(rank)
    return list(found.values())
