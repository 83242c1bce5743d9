"""Building blocks that several head kinds share.

Shape suffixes: M rows of any kind, K taps, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight (arXiv 1910.07467), computed in float32 or wider."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Args: x [.., D].  Returns [.., D] in the dtype of x."""
        wide = x.to(torch.promote_types(torch.float32, x.dtype))
        scale = wide.pow(2).mean(-1, keepdim=True).add(self.eps).rsqrt()
        return (wide * scale * self.weight).to(x.dtype)


class TapNorm(nn.Module):
    """RMS-norms each tapped state on its own and concatenates them: taps of unlike depth differ
    in scale by orders of magnitude."""

    def __init__(self, taps: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(taps))

    def forward(self, taps_MKD: Tensor) -> Tensor:
        """Args: taps [.., K, D].  Returns [.., K*D]."""
        normed = [norm(taps_MKD[..., i, :]) for i, norm in enumerate(self.norms)]
        return torch.cat(normed, -1)


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), W and b zero at the start: Medusa's block (arXiv 2401.10774, eq. 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Args: x [.., D].  Returns [.., D]."""
        return x + nn.functional.silu(self.linear(x))
