"""Which loss rows weigh more: those that decoding with the head, as it is now, would come to.

A head is trained at every row t and depth k of a text, as if all were met alike.  In decoding,
depth k is of use only where the k - 1 tokens before it were right, and a round starts only behind
the token that corrected the round before: in the states where the head was wrong.  On text that
the target wrote greedily, a draft's greedy tokens are accepted exactly as long as they are the
text's, so both are known from the head's own argmaxes on the batch, without any decoding.

Weights w carry no gradient, and do not enter the number N_k of loss rows: a depth's loss stays
sum(w * loss) / N_k, whose sums add up over any split of a batch.

Shape suffixes: M loss rows of all depths end to end, R rows of depth 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weighting:
    """Attributes:
    reach: share of each row's weight that it has only where the head's own drafts of the depths
        before are all right.
    on_policy: share that it has only where a round of greedy decoding would start.
    """

    reach: float = 0.0
    on_policy: float = 0.0

    @property
    def uniform(self) -> bool:
        """Do all rows weigh 1?"""
        return self.reach == self.on_policy == 0

    def weights(self, hit_M: Tensor, rows: list[Tensor], positions: int) -> Tensor:
        """[M] weights of loss rows.

        Args:
            hit_M: is the draft's argmax the token of the text?
            rows: for each depth its flat positions, ascending.
        """
        if self.uniform:  # then nobody has looked for hits
            return torch.ones(len(hit_M), device=hit_M.device)
        right = products(hit_M, rows, positions)
        starts = torch.zeros_like(right[0])
        if self.on_policy:
            length_R = torch.stack(right[1:]).sum(0)[rows[0]]
            starts[rows[0]] = round_starts(rows[0], length_R)
        return torch.cat(
            [
                (1 - self.reach * (~before[r]).double())
                * (1 - self.on_policy * (~starts[r]).double())
                for before, r in zip(right, rows, strict=False)
            ]
        )


def products(value_M: Tensor, rows: list[Tensor], positions: int) -> list[Tensor]:
    """[positions] for each k = 0..K: the product of the values of depths 1..k at a position (of
    truth values: are all of them true?), 0 where one of these depths has no row there."""
    found = [value_M.new_ones(positions)]
    for r, value in zip(rows, value_M.split([len(r) for r in rows]), strict=True):
        found.append(found[-1] * torch.zeros_like(found[-1]).index_put((r,), value))
    return found


def round_starts(row_R: Tensor, length_R: Tensor) -> Tensor:
    """[R] does a round of decoding start at each row?

    Args:
        row_R: rows t of depth 1, ascending; those of one answer follow each other without a gap,
            and its first round starts at the first of them.
        length_R: draft tokens that a round from there has accepted; the next one is n + 1 further.
    """
    starts, before, due = [], -2, -2
    for row, length in zip(row_R.tolist(), length_R.tolist(), strict=True):
        starts.append(row == due or row != before + 1)
        due = row + 1 + length if starts[-1] else due
        before = row
    return torch.tensor(starts, dtype=torch.bool, device=row_R.device)
