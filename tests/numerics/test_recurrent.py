"""Recurrent modules, of which Dynamo traces no call unless it is told to: as units of their own or
inside of one, compiled in each way, beside the unsharded model.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.compare import check_equal
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import compiled_fsdp
from compiled_fsdp import errors, explain, fully_shard

if TYPE_CHECKING:
    from kit.pool import Pool

KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class Tagger(nn.Module):
    """A layer before and one behind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.rnn = KINDS[kind](4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(torch.tanh(self.embed(x)))[0])


def trained(kind: str, how: str, units: tuple[str, ...], *, allow: bool) -> tuple[Any, list[str]]:
    """Parameters after three steps, and what was announced; the same batches on all ranks."""
    torch._dynamo.reset()
    errors._said.clear()
    torch.manual_seed(0)
    model = Tagger(kind)
    for name in units if how != "unsharded" else ():
        fully_shard(model.get_submodule(name))
    call: Any = model
    if how == "model":
        call = torch.compile(model, backend="compiled_fsdp_eager")
    if how == "unit":
        model.rnn.compile(backend="compiled_fsdp_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with (
        warnings.catch_warnings(record=True) as said,
        torch._dynamo.config.patch(allow_rnn=allow),
    ):
        warnings.simplefilter("always")
        for step in range(3):
            x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(step))
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if how == "model":
        said_of_rnn = next(
            (line for line in str(explain(model)).splitlines() if line.startswith("    rnn:")), ""
        )
        assert said_of_rnn == "" or "Dynamo traces no" in said_of_rnn, said_of_rnn
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach() for p in full], [str(w.message) for w in said]


def compare(kind: str, units: tuple[str, ...]) -> None:
    """Worker function."""
    wanted, _ = trained(kind, "unsharded", units, allow=False)
    for how in ("eager", "model", "unit"):
        found, said = trained(kind, how, units, allow=False)
        check_equal(wanted, found, f"{kind}, {how}, {units}", rtol=1e-5, atol=1e-6)  # sums by rank
        announced = [text for text in said if "unit 'rnn' runs eagerly" in text]
        assert len(announced) == (how != "eager" and "rnn" in units), said
        assert all("Dynamo traces no" in text for text in announced)
    found, said = trained(kind, "model", units, allow=True)
    check_equal(wanted, found, f"{kind}, allow_rnn, {units}", rtol=1e-5, atol=1e-6)
    assert not [text for text in said if "runs eagerly" in text], said


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_as_unsharded(two: Pool, kind: str) -> None:
    two.run(compare, kind, ("rnn", ""))


def test_inside_of_a_unit_as_unsharded(two: Pool) -> None:
    two.run(compare, "LSTM", ("",))


def refused() -> None:
    """Worker function."""
    compiled_fsdp.set_fallback("error")
    try:
        with pytest.raises(Exception, match=r"Dynamo broke the graph|Dynamo traces no LSTM"):
            trained("LSTM", "model", ("rnn", ""), allow=False)
    finally:
        compiled_fsdp.set_fallback("warn")


def test_an_error_where_asked_for(two: Pool) -> None:
    two.run(refused)
