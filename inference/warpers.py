"""transformers' logits processors that are slow over a large vocabulary, done faster: same results.

transformers sorts, scans or copies the whole vocabulary (top-p over 5 x 49,152 takes 17 ms on two
cores, a full decoding step 25 ms).  Here the few tokens that can be kept are found first, and only
they are ranked.  On an accelerator, where sorting is cheap and leaving the device is not,
transformers' own run.

Shape suffixes: N laws, V vocabulary, T prefix.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation import logits_process as stock

BLOCK = 256  # tokens whose maximum stands for them in top-k


def faster(processor: Any) -> Any:
    """The processor that gives what `processor` gives, in less time; itself where there is none."""
    make = OWN.get(type(processor))
    if make is None or getattr(processor, "filter_value", -math.inf) != -math.inf:
        return processor
    return make(processor)


class Warper(ABC):
    """A warper of transformers, given by the ids it keeps of each law.

    Args:
        theirs: transformers' own, with its settings; it takes what is not on the CPU.
    """

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs
        self.least: int = theirs.min_tokens_to_keep

    def __call__(self, input_ids: Tensor | None, scores_NV: Tensor) -> Tensor:
        """Scores [N, V], -inf where a token is dropped."""
        if scores_NV.device.type != "cpu":
            return self.theirs(input_ids, scores_NV)
        result_NV = torch.full_like(scores_NV, -math.inf)
        result, scores = result_NV.numpy(), scores_NV.detach().numpy()
        with np.errstate(invalid="ignore"):  # rows without a law: NaN comes and NaN goes
            kept = self.kept(scores_NV)
        for row, given, ids in zip(result, scores, kept, strict=True):
            row[ids] = given[ids]
        return result_NV

    @abstractmethod
    def kept(self, scores_NV: Tensor) -> list[Any]:
        """Ids that stay, for each law."""


class TopK(Warper):
    """The k best and what equals the last of them."""

    def kept(self, scores_NV: Tensor) -> list[Any]:
        """The k-th best block maximum is no more than the k-th best score, and few exceed it."""
        rows, size = scores_NV.shape
        k, blocks = min(self.theirs.top_k, size), size // BLOCK
        bound_N = [-math.inf] * rows
        if k <= blocks:
            maxima = scores_NV[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK)).amax(2)
            bound_N = maxima.topk(k).values[:, -1].tolist()
        kept = []
        for x_V, bound in zip(scores_NV.detach().numpy(), bound_N, strict=True):
            ids = np.flatnonzero(~(x_V < bound))  # NaN stays, as it does there
            kth = np.partition(x_V[ids], -k)[-k]
            kept.append(ids[~(x_V[ids] < kth)])
        return kept


class TopP(Warper):
    """The most probable tokens up to the one that brings their mass to top_p.

    Of equal scores at the border the higher ids stay, as a stable ascending sort has it;
    transformers sorts unstably, so that there any of them may.
    """

    def kept(self, scores_NV: Tensor) -> list[Any]:
        """See `Warper.kept`."""
        rows = zip(scores_NV.detach().numpy(), scores_NV.detach().softmax(-1).numpy(), strict=True)
        return [self._row(x_V, p_V) for x_V, p_V in rows]

    def _row(self, x_V: Any, p_V: Any) -> Any:
        # Tokens below this probability have less mass, all together, than is cut away.
        ids = np.flatnonzero(p_V > (1 - self.theirs.top_p) / len(p_V))
        if len(ids) < self.least:
            ids = np.arange(len(p_V))
        x = x_V[ids]
        ranked = np.sort(x)[::-1]  # values alone: several times faster than their order
        p = np.exp(ranked - ranked[0]) * p_V.max()
        before = np.cumsum(p, dtype=np.float64) - p
        count = max(int(np.count_nonzero(before < self.theirs.top_p)), int(self.least))
        border = ranked[count - 1]
        surely, level = ids[x > border], ids[x == border]
        return np.concatenate([surely, level[len(surely) - count :]])


class MinP(Warper):
    """Tokens of at least min_p times the highest probability."""

    def kept(self, scores_NV: Tensor) -> list[Any]:
        """See `Warper.kept`."""
        probabilities = scores_NV.detach().softmax(-1).numpy()
        return [np.flatnonzero(p_V >= self.theirs.min_p * p_V.max()) for p_V in probabilities]


class Typical(Warper):
    """Tokens whose information is nearest to the law's entropy (arXiv 2202.00666), up to the one
    that brings their mass to typical_p, and what is as near as that one."""

    def kept(self, scores_NV: Tensor) -> list[Any]:
        """See `Warper.kept`."""
        log_NV = scores_NV.detach().log_softmax(-1)
        p_NV = log_NV.exp()
        entropy_N1 = -(log_NV * p_NV).nansum(-1, keepdim=True)
        distance_NV = (-log_NV - entropy_N1).abs()
        rows = zip(p_NV.numpy(), distance_NV.numpy(), entropy_N1[:, 0].tolist(), strict=True)
        return [self._row(*row) for row in rows]

    def _row(self, p_V: Any, distance_V: Any, entropy: float) -> Any:
        # The rest, each below `least`, is farther from the entropy than `far`; where the mass is
        # reached nearer than that, the rest plays no part.
        least = (1 - self.theirs.mass) / len(p_V)
        far = -math.log(least) - entropy
        ids = np.flatnonzero(p_V > least)
        border = self._border(p_V[ids], distance_V[ids]) if len(ids) else math.inf
        if not border < far:
            border = self._border(p_V, distance_V)
        return np.flatnonzero(distance_V <= border)

    def _border(self, p: Any, distance: Any) -> float:
        order = np.argsort(distance)
        inside = np.count_nonzero(np.cumsum(p[order], dtype=np.float64) < self.theirs.mass)
        return float(distance[order][min(inside, len(p) - 1)])


class WhereLaws:
    """transformers' own where there is a law to warp: its Categorical refuses any other."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def __call__(self, input_ids: Tensor | None, scores_NV: Tensor) -> Tensor:
        """Scores [N, V]; a row whose tokens are all forbidden, or with NaN or inf, as it is."""
        lawful_N = scores_NV.amax(-1).isfinite()
        if bool(lawful_N.all()):
            return self.theirs(input_ids, scores_NV)
        result_NV = scores_NV.clone()
        if bool(lawful_N.any()):
            result_NV[lawful_N] = self.theirs(input_ids, scores_NV[lawful_N])
        return result_NV


class RepetitionPenalty:
    """Divides the positive scores of tokens seen by the penalty, multiplies the others."""

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def __call__(self, input_ids: Tensor, scores_NV: Tensor) -> Tensor:
        """Args: input_ids [N, T], scores [N, V]."""
        seen_NT = scores_NV.gather(1, input_ids)
        changed_NT = torch.where(seen_NT < 0, seen_NT * self.penalty, seen_NT / self.penalty)
        return scores_NV.scatter(1, input_ids, changed_NT)


class Ban:
    """Forbids `ids` after prefixes of the lengths for which `applies`."""

    def __init__(self, ids: Tensor, applies: Callable[[int], bool]) -> None:
        # Ids of an empty list come as floats.
        self.ids, self.applies = ids.flatten().long(), applies

    def __call__(self, input_ids: Tensor, scores_NV: Tensor) -> Tensor:
        """Args: input_ids [N, T], scores [N, V]."""
        if not self.applies(input_ids.shape[1]):
            return scores_NV
        ids = self.ids[self.ids < scores_NV.shape[1]].to(scores_NV.device)
        return scores_NV.index_fill(1, ids, -math.inf)


def _single(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """For warpers whose ways of keeping several tokens at least are left to transformers."""
    return lambda theirs: make(theirs) if theirs.min_tokens_to_keep == 1 else theirs


OWN: dict[type, Callable[[Any], Any]] = {
    stock.TopKLogitsWarper: TopK,
    stock.TopPLogitsWarper: TopP,
    stock.MinPLogitsWarper: _single(MinP),
    stock.TypicalLogitsWarper: _single(Typical),
    stock.TopHLogitsWarper: WhereLaws,
    stock.EtaLogitsWarper: WhereLaws,
    stock.RepetitionPenaltyLogitsProcessor: lambda p: (
        RepetitionPenalty(p.penalty) if p.prompt_ignore_length is None else p
    ),
    stock.MinLengthLogitsProcessor: lambda p: Ban(p.eos_token_id, lambda n: n < p.min_length),
    stock.MinNewTokensLengthLogitsProcessor: lambda p: Ban(
        p.eos_token_id, lambda n: n - p.prompt_length_to_skip < p.min_new_tokens
    ),
    stock.SuppressTokensLogitsProcessor: lambda p: Ban(p.suppress_tokens, lambda n: True),
    stock.SuppressTokensAtBeginLogitsProcessor: lambda p: Ban(
        p.begin_suppress_tokens, lambda n: n == p.begin_index
    ),
}
