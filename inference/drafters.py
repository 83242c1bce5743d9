"""Drafters that are not heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..heads.draft import Draft, Plan
from ..heads.protocols import Features, Noise, Sampling, State


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

    def start(self, ids_BT: Tensor, length_B: Tensor, features: Features) -> State:
        """See `heads.protocols.Drafter`."""
        return NoState()

    def propose(
        self, state: State, root_B: Tensor, plan: Plan, sampling: Sampling, noise: Noise
    ) -> Draft:
        """The root alone."""
        return Draft.root(root_B)

    def advance(
        self, state: State, committed_BM: Tensor, count_B: Tensor, features: Features
    ) -> State:
        """See `heads.protocols.Drafter`."""
        return state
