"""Acceptance of drawn chains, as it was met and as the laws say it must be.

Shape suffixes: B rows, M committed tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfdraft.heads.base import Head
from selfdraft.heads.draft import Draft, Plan
from selfdraft.heads.protocols import Features, Noise, Sampling, State
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel


class Watched:
    """A head that drafts one row's chains by sampling.  Of every draft token that was judged it
    notes whether it was accepted, and the chance of that: 1 - TV(p, q) = sum_v min(p(v), q(v)) at
    its own prefix (arXiv 2211.17192, corollary 3.6).

    A row's last round is not seen.

    Attributes:
        judged, accepted, chance: sums by depth.
    """

    def __init__(self, head: Head, target: TargetModel, temperature: float, limit: int) -> None:
        """Args:
        limit: new tokens of a row.
        """
        self.head, self.target, self.temperature, self.limit = head, target, temperature, limit
        self.name, self.taps, self.max_depth = head.name, head.taps, head.max_depth
        self.judged, self.accepted = [0] * self.max_depth, [0] * self.max_depth
        self.chance = [0.0] * self.max_depth

    def start(self, ids_BT: Tensor, length_B: Tensor, features: Features) -> State:
        """See `heads.protocols.Drafter`."""
        self.emitted = 1
        return self.head.start(ids_BT, length_B, features)

    def propose(
        self, state: Any, root_B: Tensor, plan: Plan, sampling: Sampling, noise: Noise
    ) -> Draft:
        """See `heads.protocols.Drafter`."""
        self.draft = self.head.propose(state, root_B, plan, sampling, noise)
        return self.draft

    def advance(
        self, state: Any, committed_BM: Tensor, count_B: Tensor, features: Features
    ) -> State:
        """See `heads.protocols.Drafter`."""
        count, law_BNV = int(count_B[0]), self.draft.q_BNV
        # A draft is cut to what the row may still emit beside the next token.
        drafted = min(len(self.draft.tokens[0]) - 1, self.limit - self.emitted - 1)
        for depth in range(min(count, drafted)):
            assert law_BNV is not None, "chains of a greedy call have no laws"
            logits_V = self.target.logits(features["hidden"][0, depth]).double()
            target_V = (logits_V / self.temperature).softmax(-1)
            self.judged[depth] += 1
            self.accepted[depth] += depth + 1 < count
            self.chance[depth] += float(torch.minimum(target_V, law_BNV[0, depth].double()).sum())
        self.emitted += count
        return self.head.advance(state, committed_BM, count_B, features)


def watch(
    head: Head, target: TargetModel, prompt: list[int], new_tokens: int, temperature: float
) -> list[list[float]]:
    """Tokens judged, tokens accepted and the sum of their chances, each by depth, of one answer."""
    watched = Watched(head, target, temperature, new_tokens)
    spec = Speculator(target, watched, Plan(head.max_depth))
    spec.generate(prompt, max_new_tokens=new_tokens, do_sample=True, temperature=temperature)
    return [list(map(float, watched.judged)), list(map(float, watched.accepted)), watched.chance]
