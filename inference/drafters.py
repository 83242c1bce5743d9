"""Drafters that are not heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..heads.draft import Draft, Plan
from ..heads.protocols import Features, Noise, Sampling


@dataclass(frozen=True)
class NoState:
    """Nothing to remember."""

    def select(self, rows: Tensor) -> NoState:
        """Itself."""
        return self


class Plain:
    """Drafts nothing: the decoding loop then is plain decoding, the baseline of every figure."""

    name = "plain"
    taps: list[int] = []  # noqa: RUF012
    max_depth = 0

    def start(self, ids_BT: Tensor, length_B: Tensor, features: Features) -> NoState:
        """See `heads.base.Drafter`."""
        return NoState()

    def propose(
        self, state: NoState, root_B: Tensor, plan: Plan, sampling: Sampling, noise: Noise
    ) -> Draft:
        """The root alone."""
        return Draft.root(root_B)

    def advance(
        self, state: NoState, committed_BM: Tensor, count_B: Tensor, features: Features
    ) -> NoState:
        """See `heads.base.Drafter`."""
        return state
