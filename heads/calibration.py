"""How sure a head is, set right: it decides which nodes of a tree are worth a place.

A head learns the law that the target draws from.  How often its likeliest token is the one that
greedy decoding takes is another number: a flat law may always agree, a sharp one may not.  Held-out
rows tell it, and one factor a depth on the logits makes what the head promises agree with it on
average (temperature scaling, arXiv 1706.04599).

Shape suffixes: M rows, D draft vocabulary, S factors tried, K depths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

LOWEST, FACTORS = 0.25, 9
"""Factors tried: each twice the one before."""


def top_chances(logits_MD: Tensor) -> Tensor:
    """[S, M] the likeliest token's probability, max softmax(s z), for each factor s."""
    share_MD = ((logits_MD - logits_MD.amax(-1, keepdim=True)) * LOWEST).exp()
    chances = [1 / share_MD.sum(-1)]
    for _ in range(FACTORS - 1):
        share_MD = share_MD.square()  # exp(2 s z) from exp(s z)
        chances.append(1 / share_MD.sum(-1))
    return torch.stack(chances)


def sharpness(
    chance_SK: Sequence[Sequence[float | None]], top1_K: Sequence[float | None]
) -> list[float]:
    """The factor of each depth at which the mean chance is the rate of agreement.

    Args:
        chance_SK: mean of `top_chances` by factor and depth, rising with the factor.
        top1_K: how often the likeliest token was right, by depth.
    Returns:
        [K]; 1 at depths without rows.
    """
    factors = []
    for rate, *rising in zip(top1_K, *chance_SK, strict=True):
        known = [chance for chance in rising if chance is not None]
        factors.append(1.0 if rate is None else LOWEST * 2 ** _crossing(known, rate))
    return factors


def _crossing(rising: Sequence[float], value: float) -> float:
    """Where a rising sequence takes on `value`, between its places; its ends beyond them."""
    for place, (low, high) in enumerate(pairwise(rising)):
        if value <= high:
            return place + max(0.0, value - low) / max(high - low, math.ulp(1.0))
    return len(rising) - 1.0
