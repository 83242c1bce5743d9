"""Rows of unlike numbers of tokens in one forward, without paying for their padding.

Every layer but attention treats tokens alone: it reads those of all rows as one row of T.
Attention, and the cache, lay them out as rows again, padding included.

Shape suffixes: B rows, N tokens a row with padding, T tokens of all rows, H heads, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Ragged:
    """Where the tokens of right-padded rows stand.

    Args:
        valid_BN: True for tokens, False for padding; on the host.
    """

    def __init__(self, valid_BN: Tensor, device: torch.device | None = None) -> None:
        self.shape = valid_BN.shape
        self.place_T = valid_BN.flatten().nonzero()[:, 0].to(device)

    def close(self, padded_BN: Tensor) -> Tensor:
        """[B, N, ..] to [1, T, ..]."""
        return padded_BN.flatten(0, 1).index_select(0, self.place_T)[None]

    def open(self, packed_1T: Tensor) -> Tensor:
        """[1, T, ..] to [B, N, ..], zero at the padding."""
        rest = packed_1T.shape[2:]
        padded = packed_1T.new_zeros(self.shape.numel(), *rest)
        return padded.index_copy_(0, self.place_T, packed_1T[0]).view(*self.shape, *rest)

    def open_heads(self, packed_1HTD: Tensor) -> Tensor:
        """[1, H, T, D] to [B, H, N, D]."""
        return self.open(packed_1HTD.transpose(1, 2)).transpose(1, 2)


def ragged(valid_BN: Tensor | None, device: torch.device) -> Ragged | None:
    """None where there is no padding to leave out."""
    if valid_BN is None or bool(valid_BN.all()):
        return None
    return Ragged(valid_BN, device)
