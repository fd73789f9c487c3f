"""What codes on the wire stand for, computed here in plain torch: an oracle for `wire/codes.py`."""

from __future__ import annotations

import torch
from torch import Tensor

LIMIT = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
BLOCK = 256


def coded(x: Tensor, codes: torch.dtype) -> Tensor:
    """What codes of the elements of `x` stand for, block by block."""
    blocks = []
    for block in x.flatten().split(BLOCK):
        scale = (block.abs().max() * (1 / LIMIT[codes])).clamp_min(2.0**-126)
        ratio = block * scale.reciprocal()
        code = ratio.round() if codes is torch.int8 else ratio
        blocks.append(code.to(codes).float() * scale)
    return torch.cat(blocks).view(x.shape)
