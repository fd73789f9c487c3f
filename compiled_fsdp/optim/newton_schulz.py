"""The Newton-Schulz iteration of Muon, and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def newton_schulz(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Returns U V^T of a matrix U S V^T, about: singular values come out near 1 (Jordan et al.,
    2024, https://kellerjordan.github.io/posts/muon/).

    The ops of torch.optim.Muon in its order, so that the bits are the same, in the dtype of
    `matrix` [m, n], which is not written to.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def flops(shape: tuple[int, ...], steps: int) -> float:
    """Floating-point operations of `newton_schulz`: three products a step, over the shorter side
    m twice of 2 m^2 n and once of 2 m^3.
    """
    short, long = sorted(shape)
    return steps * (4.0 * short * short * long + 2.0 * short**3)
