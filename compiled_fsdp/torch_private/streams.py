"""A kernel that occupies a stream of a device for a time.

Private torch used here (tried on 2.13): `torch.cuda._sleep`.
"""

from __future__ import annotations

import torch

SPINNING = ("cuda",)  # the types of devices that have such a kernel


def spin(cycles: int) -> None:
    """Let the current stream of the current CUDA device do nothing for so many cycles of its clock;
    nothing for none.
    """
    if cycles > 0:
        torch.cuda._sleep(cycles)
