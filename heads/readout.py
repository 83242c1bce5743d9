"""What makes logits of a head's states beside the target's frozen lm_head: an lm_head of low rank
in its place, and a Markov prior that adds what the previous token alone says.

Both start from the data that the head will learn from: see `init_from`.

Shape suffixes: M positions, W hidden width, P distinct pairs of neighbours, D draft vocabulary, V
vocabulary, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SMOOTHING = 20.0
"""Tokens for which the unigram law counts in each bigram law.  On held-out text of SmolLM2-135M,
with 180k tokens to count, the cross-entropy of the smoothed law is flat from 20 to 100."""
RIDGE = 1e-4
"""Share of their mean that is added to the states' second moments."""


class LowRank(nn.Module):
    """hidden -> r -> ids: an lm_head of r (hidden + ids) parameters (Sainath et al., ICASSP 2013).

    Args:
        width: of the hidden state.
        rank: r, no more than `width`.
        ids: D, how many ids have a logit.
    """

    def __init__(self, width: int, rank: int, ids: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, ids, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [.., D] of hidden [.., W]."""
        return self.up(self.down(hidden))

    @torch.no_grad()
    def init_from(self, lm_head_DW: Tensor, hidden_MW: Tensor) -> None:
        """Starts as the map of rank r whose logits are nearest to the target's over `hidden_MW`, up
        to a shift of all logits, which changes no law.

        The states' second moments are L L^T; with V the r leading right singular vectors of
        lm_head L, that map is lm_head L V V^T L^-1.  (On SmolLM2-135M at r = 128 the KL from the
        target's law is 1.3; it is 4.6 if all directions of a state count alike.)
        """
        moments_WW = hidden_MW.double().T @ hidden_MW.double()
        size = moments_WW.diagonal().mean()
        moments_WW.diagonal().add_(RIDGE * size if size > 0 else 1.0)
        root_WW = torch.linalg.cholesky(moments_WW / max(1, len(hidden_MW))).float()
        centred_DW = lm_head_DW.float() - lm_head_DW.float().mean(0)
        weighed_DW = centred_DW @ root_WW
        basis_WR = _svd(weighed_DW, len(self.down.weight))[2]
        down_WR = torch.linalg.solve_triangular(root_WW.T, basis_WR, upper=True)
        _fill(self.down.weight.T, down_WR)
        _fill(self.up.weight, weighed_DW @ basis_WR)


class Prior(nn.Module):
    """Adds U[x] W^T to the logits after token x, U being [V, r] and W [D, r]: a Markov model of
    rank r, trained with the head that it helps.  W starts at zero."""

    def __init__(self, vocab: int, rank: int, ids: int) -> None:
        super().__init__()
        self.before = nn.Embedding(vocab, rank)
        self.after = nn.Linear(rank, ids, bias=False)
        nn.init.zeros_(self.after.weight)

    def forward(self, token: Tensor) -> Tensor:
        """What to add to the logits [.., D] after `token` [..]."""
        return self.after(self.before(token))

    @torch.no_grad()
    def init_from(self, pairs_P2: Tensor, count_P: Tensor) -> None:
        """Starts from the log ratio of bigram and unigram law: what a law lacks that has not seen
        the token before (their product is right where that token and what the law has seen are
        independent given the next token).

        The bigram law is smoothed by a = `SMOOTHING` tokens of the unigram law p.  Then the ratio
        (c_ij + a p_j) / ((c_i + a) p_j) is 1 + c_ij / (a p_j) up to a factor of i alone, which
        changes no law.  Its logarithm is 0 for pairs that were never seen, so a sparse matrix holds
        it all; of that the best approximation of rank r is taken, errors weighed by c_i p_j.

        Args:
            pairs_P2: distinct (id before, index in the draft vocabulary of the id after).
            count_P: c_ij of each.
        """
        (vocab, rank), ids = self.before.weight.shape, len(self.after.weight)
        if not len(count_P):
            return
        (before_P, after_P), count_P = pairs_P2.T, count_P.double()
        seen_V = count_P.new_zeros(vocab).index_add_(0, before_P, count_P)
        p_D = count_P.new_zeros(ids).index_add_(0, after_P, count_P) / count_P.sum()
        value_P = (count_P / (SMOOTHING * p_D[after_P])).log1p()
        # Ids that were never seen have no entry: any weight does.
        weight_V, weight_D = (w.sqrt().where(w > 0, 1.0) for w in (seen_V, p_D))
        weighed_P = value_P * weight_V[before_P] * weight_D[after_P]
        matrix = torch.sparse_coo_tensor(
            pairs_P2.T, weighed_P, (vocab, ids), is_coalesced=False, check_invariants=True
        ).coalesce()
        u_VR, s_R, v_DR = _svd(matrix, rank)
        before_VR, after_DR = u_VR * s_R / weight_V[:, None], v_DR / weight_D[:, None]
        # Entries of one size on both sides, so that they learn at one rate.
        balance = (after_DR.square().mean() / before_VR.square().mean()).sqrt().sqrt()
        _fill(self.before.weight, before_VR * balance)
        _fill(self.after.weight, after_DR / balance)


def _svd(matrix: Tensor, rank: int) -> list[Tensor]:
    """The leading `rank` singular vectors and values, fewer where the matrix has fewer, by the
    randomized method, which wants some more than are kept."""
    found = torch.svd_lowrank(matrix, min(rank + 8, *matrix.shape))
    return [part[..., :rank] for part in found]


def _fill(weight: Tensor, value: Tensor) -> None:
    """Copies columns into `weight`, zeros into those that `value` lacks."""
    weight.zero_()
    weight[:, : value.shape[1]] = value.to(weight)
