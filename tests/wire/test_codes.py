"""Codes and scales of real tensors: any shape, dtype and values, beside the same by hand."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_fsdp.ir.quantized import BLOCK, ERROR, LEAST, NAMES, payload
from compiled_fsdp.ir.schema import DECODE, DECODE_SUM, ENCODE
from compiled_fsdp.wire import codes as module

INT8, FP8 = torch.int8, torch.float8_e4m3fn
LIMIT = {INT8: 127.0, FP8: 448.0}
KERNELS: Any = module._kernels  # before a fixture puts another in its place
ODD = (torch.nan, torch.inf, -torch.inf)


@pytest.fixture(autouse=True, params=["a row at a time", "all rows", "triton"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, and as on a device, without Triton and with it: its interpreter, if there is
    one.
    """
    if request.param != "a row at a time":
        monkeypatch.setattr(module, "_by_row", lambda table: False)
    if request.param == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("kernels are interpreted where TRITON_INTERPRET=1 was set at import")
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        monkeypatch.setattr(interpreter, "_convert_float", _as_a_device_rounds)
        from compiled_fsdp.wire import triton_codes

        monkeypatch.setattr(triton_codes, "OPTIONS", {})
        monkeypatch.setattr(module, "_kernels", lambda device, codes: triton_codes)


def _as_a_device_rounds(given: Any, old: Any, new: Any, _rounding: Any) -> Any:
    """To the nearest, a tie to the even one, as torch does; Triton's interpreter cuts off."""
    of = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8e4nv": FP8, "fp16": torch.float16}
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    x = torch.from_numpy(given.copy()).view(of[str(old)]).to(of[str(new)])
    return x.view(bits[x.itemsize]).numpy().view(f"uint{8 * x.itemsize}")


def through(x: Tensor, dtype: torch.dtype, codes: torch.dtype | None) -> Tensor:
    """[rows, n] as they arrive, in `dtype`."""
    sent = ENCODE([x], [NAMES[codes]])
    assert sent.shape == (x.shape[0], payload(x.shape[1], x.dtype, codes))
    return DECODE(sent, x.shape[1], dtype, NAMES[codes])


def by_hand(x: Tensor, codes: torch.dtype) -> Tensor:
    rows = []
    for row in x.float():
        for block in row.split(BLOCK):
            scale = (block.abs().max() * (1 / LIMIT[codes])).clamp_min(LEAST)
            ratio = block * scale.reciprocal()
            rows.append((ratio.round() if codes is INT8 else ratio).to(codes).float() * scale)
    return torch.cat(rows).view(x.shape)


@pytest.mark.parametrize("codes", [INT8, FP8], ids=str)
def test_random_tensors(codes: torch.dtype) -> None:
    """Exactly what is worked out by hand, and within the bound."""
    generator = torch.Generator().manual_seed(0)
    for case in range(60):
        rows, numel = (int(torch.randint(1, n, (), generator=generator)) for n in (4, 900))
        dtype = (torch.float32, torch.bfloat16, torch.float16)[case % 3]
        x = torch.randn(rows, numel, generator=generator)
        x *= 10.0 ** torch.randint(-4, 4, (rows, numel), generator=generator)
        x[torch.rand(rows, numel, generator=generator) < 0.2] = 0
        x = x.to(dtype)
        if case % 2:
            x = x.t().contiguous().t()  # as gradients may lie
        found = through(x, torch.float32, codes)
        assert torch.equal(found, by_hand(x, codes))
        for row, wrong in zip(x.float(), (found - x.float()).abs(), strict=True):
            for block, error in zip(row.split(BLOCK), wrong.split(BLOCK), strict=True):
                bound = ERROR[codes] * block.abs().max()
                assert error.max() <= bound * (1 + 1e-5)
        assert torch.equal(through(x, torch.bfloat16, codes), found.bfloat16())


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 7 * BLOCK + 30, generator=torch.Generator().manual_seed(0))
    whole = ENCODE([x], ["int8"])
    summed = DECODE_SUM(whole, x.shape[1], torch.float32, "int8")
    monkeypatch.setattr(module, "AT_ONCE", 2)
    assert torch.equal(ENCODE([x], ["int8"]), whole)
    assert torch.equal(DECODE_SUM(whole, x.shape[1], torch.float32, "int8"), summed)


@pytest.mark.parametrize("codes", [INT8, FP8], ids=str)
@pytest.mark.parametrize("odd", ODD, ids=str)
def test_what_is_no_number_is_loud_in_its_block_alone(codes: torch.dtype, odd: float) -> None:
    x = torch.randn(2, 3 * BLOCK + 5, generator=torch.Generator().manual_seed(0))
    x[1, BLOCK + 7] = odd
    found = through(x, torch.float32, codes)
    assert found[1, BLOCK : 2 * BLOCK].isnan().all()
    found[1, BLOCK : 2 * BLOCK] = 0
    assert not found.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_code_of_fp8(dtype: torch.dtype) -> None:
    """What torch's own cast reads, whatever the scale, where denormal numbers are zeros too; the
    two codes of nan stand beside a scale of nan alone.
    """
    table = torch.arange(BLOCK, dtype=torch.int32).to(torch.uint8)
    is_nan = table.view(FP8).float().isnan()
    table[is_nan] = 0
    for scale in (LEAST, 3e-5, 1.0, torch.finfo(torch.float32).max / 448, torch.nan):
        scales = torch.tensor([scale, 0.0])  # filled up to a multiple of eight bytes
        sent = torch.cat([table, scales.view(torch.uint8)]).unsqueeze(0)
        wanted = (table.view(FP8).float() * scale).to(dtype)
        found = DECODE(sent, BLOCK, dtype, "float8_e4m3fn")[0]
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
        assert found.isnan().all() == (scale != scale)
    halves = module._halves(table.view(FP8))
    try:
        torch.set_flush_denormal(True)
        assert torch.equal(halves.float() * module.HALVES, table.view(FP8).float())
    finally:
        torch.set_flush_denormal(False)
    with_nan = through(torch.full((1, BLOCK), torch.nan), dtype, FP8)
    assert with_nan.isnan().all()


@pytest.mark.parametrize("codes", [INT8, FP8], ids=str)
def test_extremes(codes: torch.dtype) -> None:
    """Zeros are zeros; the largest and the smallest numbers neither overflow nor turn around."""
    largest = torch.finfo(torch.float32).max
    x = torch.stack(
        [torch.zeros(BLOCK), torch.full((BLOCK,), largest), torch.full((BLOCK,), -1e-44)]
    )
    found = through(x, torch.float32, codes)
    assert torch.equal(found[0], x[0])
    assert torch.allclose(found[1], x[1], rtol=1e-6)
    assert ((found[2] - x[2]).abs() <= LEAST / 2).all()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_exact_values_travel_beside_codes(dtype: torch.dtype) -> None:
    """With their bits, aligned, wherever they lie among others, expanded or not."""
    a = torch.randn(2, 300).to(dtype)
    pieces = [torch.randn(2, 5).to(dtype), a, torch.ones(2, 1, dtype=dtype).expand(2, 3)]
    names = ["", "int8", ""]
    sent, start = ENCODE(pieces, names), 0
    for piece, name in zip(pieces, names, strict=True):
        width = payload(piece.shape[1], dtype, INT8 if name else None)
        part = sent[:, start : start + width]
        start += width
        found = DECODE(part, piece.shape[1], dtype, name)
        summed = DECODE_SUM(part, piece.shape[1], dtype, name)
        if name:
            assert torch.equal(found, by_hand(piece, INT8).to(dtype))
            values = by_hand(piece, INT8)
            assert torch.equal(summed, (values[0] + values[1]).to(dtype)), "added in fp32"
        else:
            assert torch.equal(found, piece)
            assert torch.equal(summed, piece.sum(0))
    assert start == sent.shape[1]


@pytest.mark.parametrize(
    ("codes", "capability", "said"),
    [(FP8, (8, 0), "compute capability 8.9"), (INT8, (8, 0), "not installed")],
)
def test_a_device_without_kernels_is_told(
    codes: torch.dtype, capability: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match=said):
        assert KERNELS.__wrapped__(torch.device("cuda"), codes) is None
    assert KERNELS.__wrapped__(torch.device("cpu"), codes) is None


def test_ops() -> None:
    """Schemas and fake kernels against real ones."""
    x = torch.randn(2, 300)
    sent = ENCODE([x, x], ["int8", ""])
    torch.library.opcheck(ENCODE, ([x, x], ["int8", ""]))
    part = sent[:, :528]
    for op in (DECODE, DECODE_SUM):
        torch.library.opcheck(op, (part, 300, torch.bfloat16, "int8"))


@pytest.mark.parametrize("codes", [INT8, FP8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_wider_has_the_same_codes(codes: torch.dtype, dtype: torch.dtype) -> None:
    """So that gradients need not be cast before they are coded."""
    x = (torch.randn(3, 3 * BLOCK + 5) * 10.0 ** torch.arange(-3.0, 0.0)[:, None]).to(dtype)
    x[1, 7] = torch.inf
    narrow, wide = (ENCODE([each], [NAMES[codes]]) for each in (x, x.float()))
    assert torch.equal(narrow, wide)
