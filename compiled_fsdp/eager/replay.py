"""What was communicated wrongly is communicated once more, before the step is given up: does the
fault last?

[Note: what can be tried again]
At the end of backward nothing is updated yet.

- A gather is made of shards, and these are where they were: all ranks of its group gather the same
  parameters again, with checksums on both sides as the first time.
- Gradients are not there any more: what was sent lay in memory that backward has used again, and to
  keep it would take as much as the unsharded gradients of the model. Instead of them a pattern
  travels the same way, as many bytes from each rank to each; then the same with every bit the other
  way around, so that each has been 0 and 1. For the all-reduce over replicas likewise, as integers,
  whose sum is known.
- Slices that forward has kept for backward (an int `reshard_after_forward`) are gone too, and are
  not tried.
- What rests is read again.

All ranks of a group take part, also those that have nothing to do with the fault: what is tried
follows from sums that all of them have. A collective that fails (`CommunicationError`) ends nothing
here; the fault says so. All of a unit's bytes are there once more, for a moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir import transfers
from compiled_fsdp.ir.checksums import EXCHANGED, GATHERED, Watched, widths_of_reduction
from compiled_fsdp.ir.quantized import reduces_bytes
from compiled_fsdp.ir.schema import ALL_TO_ALL, COMPARE
from compiled_fsdp.units.registered import UNITS
from compiled_fsdp.wire import launch
from compiled_fsdp.wire.checks import ODD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from compiled_fsdp.units.flat import FlatBuffer
    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.wire.checks import Entry

    Again = dict[str, Any]  # one rank's, in JSON

SLICES = "what it was gathered from, slices kept since forward, is no longer in memory"
GONE = "its units are no longer those that have communicated"


def again(entry: Entry, rank: int, size: int) -> Again:
    """What this rank finds when the collective of an entry is tried again,
    by all ranks of its group together.

    rank, size: in that group.

    Returns `sent` [P] and `received` [size, P] of a gather, with `is_written`: its shards were
    written to since; of an exchange and an all-reduce, `wrong`: the ranks whose pattern came wrong;
    or `failed`: why it could not be tried.
    """
    try:
        members = _members(entry.names)
        if members is None:
            return {"failed": GONE}
        if entry.collective == GATHERED and entry.received.shape[0] != size:
            return {"failed": SLICES}
        if entry.collective == GATHERED:
            return _gathered(entry, members)
        if entry.collective == EXCHANGED:
            return {"wrong": _exchanged(members, entry.sent.device, rank, size)}
        return {"wrong": _added_up(members, entry.sent.device, size)}
    except RuntimeError as error:  # a card or a rank that is gone: the others say what they saw
        return {"failed": str(error).splitlines()[0]}


def _members(names: Sequence[str]) -> list[tuple[FlatBuffer, ShardedParam]] | None:
    """The parameters "unit#number:name"."""
    units = {unit.key: unit for unit in list(UNITS)}
    found: list[tuple[FlatBuffer, ShardedParam]] = []
    for name in names:
        key, _, fqn = name.partition(":")
        unit = units.get(key)
        flats = unit.flats if unit is not None else []
        found += [(flat, p) for flat in flats for p in flat.params if p.fqn == fqn][:1]
    return found if len(found) == len(names) else None


def _gathered(entry: Entry, members: Sequence[tuple[FlatBuffer, ShardedParam]]) -> Again:
    sums: list[tuple[Tensor, Tensor]] = []

    def run(op: Any, *args: Any, **kwargs: Any) -> Any:
        if op is not COMPARE:
            return launch.call(op, *args, **kwargs)
        sums.append((args[0], args[1]))
        return None

    sources = {
        id(f): transfers.Source(f.data.detach(), f.layout.numel, f.data.dtype) for f, _ in members
    }
    specs = [param.spec for _, param in members]
    bucket = [(sources[id(f)], spec) for (f, _), spec in zip(members, specs, strict=True)]
    transfers.gather_bucket(Watched(run, specs, entry.phase), bucket)
    ((sent, received),) = sums
    flats = dict.fromkeys(flat for flat, _ in members)
    now = tuple(version for flat in flats for version in flat.written())
    is_written = now != entry.versions
    return {"sent": sent[0].tolist(), "received": received.tolist(), "is_written": is_written}


def _exchanged(
    members: Sequence[tuple[FlatBuffer, ShardedParam]], device: torch.device, rank: int, size: int
) -> list[int]:
    """The senders of this rank's group whose pattern did not come as it is."""
    specs = [param.spec for _, param in members]
    dtype = torch.uint8 if reduces_bytes(specs) else specs[0].reduce_dtype
    columns = sum(widths_of_reduction(specs))
    wrong = set()
    for flipped in (False, True):
        rows = _pattern(rank, columns, dtype, device, flipped=flipped).expand(size, columns)
        started = launch.call(ALL_TO_ALL, [rows.contiguous()], size, specs[0].reduce_group)
        received = launch.call(comm.WAIT, started)
        for sender in range(size):
            expected = _pattern(sender, columns, dtype, device, flipped=flipped)
            if not torch.equal(_bytes(received[sender]), _bytes(expected)):
                wrong.add(sender)
    return sorted(wrong)


def _added_up(
    members: Sequence[tuple[FlatBuffer, ShardedParam]], device: torch.device, size: int
) -> list[int]:
    """Whether the sum of all replicas' patterns is another than it should be: [] or [-1]."""
    spec = members[0][1].spec
    num_bytes = sum(p.spec.shard_numel for _, p in members) * spec.reduce_dtype.itemsize
    for flipped in (False, True):
        words = _pattern(0, -(-num_bytes // 8), torch.int64, device, flipped=flipped)
        started = launch.call(comm.ALL_REDUCE, words.clone(), "sum", spec.replicate_group)
        if not torch.equal(launch.call(comm.WAIT, started), words * size):
            return [-1]
    return []


def _pattern(
    rank: int, numel: int, dtype: torch.dtype, device: torch.device, *, flipped: bool
) -> Tensor:
    """Bits that are each rank's own."""
    num = -(-numel * dtype.itemsize // 8)
    words = torch.arange(1 + rank * num, 1 + (rank + 1) * num, device=device) * ODD
    words = ~words if flipped else words
    return words.view(torch.uint8)[: numel * dtype.itemsize].view(dtype)


def _bytes(row: Tensor) -> Tensor:
    """Numbers are compared by their bits: a pattern may be no number."""
    return row.contiguous().view(torch.uint8)


# -- in words


def of_gather(
    sender: int, at: int, first: int, said: Sequence[Again], ranks: Sequence[int]
) -> tuple[str, str]:
    """`Fault.again` of what one rank has sent of the parameter at a place, and a sentence.

    first: the sum of what it sent; said: what each rank found again; ranks: their global numbers.
    """
    if failed := _failed(said):
        return "", f"it could not be gathered again: {failed}"
    second = said[sender]["sent"][at]
    wrong = [ranks[r] for r, each in enumerate(said) if each["received"][sender][at] != second]
    came = f"it came wrong again on ranks {wrong}" if wrong else "it came right on all ranks"
    if second == first:
        text = f"gathered again from the same shards, {came}"
        return ("wrong", text) if wrong else ("right", f"{text}: the fault did not last")
    if said[sender]["is_written"]:
        return "wrong" if wrong else "", (
            "what was sent then cannot be gathered again, since the parameter was written to after "
            f"it; gathered as it is now, {came}"
        )
    return "wrong", (
        f"rank {ranks[sender]} still holds something else than it had summed up, and would send it "
        "again: its memory"
    )


def of_exchange(sender: int, said: Sequence[Again], ranks: Sequence[int]) -> tuple[str, str]:
    """The same of a gradient that one rank has sent."""
    gone = (
        "the gradient itself is no longer in memory; of a pattern of as many bytes, sent instead, "
    )
    if failed := _failed(said):
        return "", f"{gone}nothing is known: {failed}"
    wrong = [ranks[r] for r, each in enumerate(said) if sender in each["wrong"]]
    if wrong:
        return "wrong", f"{gone}some came wrong again on ranks {wrong} from rank {ranks[sender]}"
    return "right", f"{gone}all came right: the fault did not last"


def of_all_reduce(said: Sequence[Again]) -> tuple[str, str]:
    """The same of an all-reduce over replicas."""
    gone = "the gradients are no longer in memory; of a pattern of as many bytes, "
    if failed := _failed(said):
        return "", f"{gone}nothing is known: {failed}"
    if any(each["wrong"] for each in said):
        return "wrong", f"{gone}the sum was wrong again"
    return "right", f"{gone}the sum was right: the fault did not last"


def of_rest(is_still: bool) -> tuple[str, str]:
    """The same of what rests in memory."""
    if is_still:
        return "wrong", "read again, it is still so"
    return "right", "read again, it is as it was: it was read wrongly"


def _failed(said: Sequence[Again]) -> str:
    return next((each["failed"] for each in said if "failed" in each), "")
