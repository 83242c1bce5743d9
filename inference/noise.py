"""Random numbers keyed by what they decide, so that a row draws the same alone and in any batch.

One float64 uniform a decision, from a hash of (row seed, committed length at the round's start,
node, purpose).  Each round starts at another length, so no coin is used twice.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from hashlib import blake2b

from torch import Tensor, nn

from ..heads.errors import InputError
from ..heads.protocols import Purpose

BLOCK = 256  # tokens summed up at once in a draw


@dataclass
class RowNoise:
    """`heads.protocols.Noise` of one round.

    Attributes:
        seeds: one a row.
        lengths: committed tokens of each row at the start of the round.
        names: what an error calls each row, where that is not its place here.
    """

    seeds: list[int]
    lengths: list[int]
    names: list[int] | None = None

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
        """See `heads.protocols.Noise`; by inverse CDF, so equal laws and keys draw equal tokens.

        The running sum over a large vocabulary is taken block by block, and inside one block alone.

        Raises:
            InputError: a law without mass, or one that is not finite.
        """
        law_V, rest = law_V.double(), -len(law_V) % BLOCK
        blocks_NK = (nn.functional.pad(law_V, (0, rest)) if rest else law_V).view(-1, BLOCK)
        cdf = blocks_NK.sum(1).cumsum(0).cpu().numpy()
        if not 0 < cdf[-1] < math.inf:
            name = row if self.names is None else self.names[row]
            raise InputError(
                f"no token of row {name} can be drawn: its law has mass {cdf[-1]}",
                "See that logits processors leave a token, and that the logits are finite.",
            )
        threshold = cdf[-1] * self.uniform(row, node, purpose)
        block = int(cdf.searchsorted(threshold, side="right"))
        # Rounding can put the threshold on the last step: never beyond the support.
        block = min(block, int(cdf.searchsorted(cdf[-1])))
        inside = blocks_NK[block].cumsum(0).cpu().numpy()
        threshold -= cdf[block - 1] if block else 0.0
        index = int(inside.searchsorted(threshold, side="right"))
        return block * BLOCK + min(index, int(inside.searchsorted(inside[-1])))
