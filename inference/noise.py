"""Random numbers keyed by what they decide, so that a row draws the same alone and in any batch.

One float64 uniform a decision, from a hash of (row seed, committed length at the round's start,
node, purpose).  Each round starts at another length, so no coin is used twice.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from ..heads.protocols import Purpose


@dataclass
class RowNoise:
    """`heads.protocols.Noise` of one round.

    Attributes:
        seeds: one a row.
        lengths: committed tokens of each row at the start of the round.
    """

    seeds: list[int]
    lengths: list[int]

    def uniform(self, row: int, node: int, purpose: Purpose) -> float:
        """A float64 in [0, 1) with 53 random bits."""
        seed = self.seeds[row] % 2**64
        key = struct.pack("<QqqB", seed, self.lengths[row], node, purpose)
        bits = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
        return (bits >> 11) * 2.0**-53

    def bernoulli(self, probability: float, row: int, node: int) -> bool:
        """See `heads.protocols.Noise`."""
        return self.uniform(row, node, Purpose.ACCEPT) < probability

    def categorical(self, law_V: Tensor, row: int, node: int, purpose: Purpose) -> int:
        """See `heads.protocols.Noise`; by inverse CDF, so equal laws and keys draw equal tokens."""
        cdf_V = law_V.double().cumsum(0)
        threshold = cdf_V[-1:] * self.uniform(row, node, purpose)
        index = int(torch.searchsorted(cdf_V, threshold, right=True))
        # Rounding can put the threshold on the last step: never beyond the support.
        return index if index < len(law_V) else int(law_V.nonzero()[-1])
