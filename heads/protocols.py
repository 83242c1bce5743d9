"""What heads, drafters and the decoding loop ask of each other.

Shape suffixes: B rows, T tokens, N draft nodes, M committed tokens, K taps, W width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

from torch import Tensor

from .draft import Draft, Plan

Features = dict[str, Tensor]
"""`hidden` [B, T, W] after the target's final norm and, where a head asks for them, `taps`
[B, T, K, W].  Training may add `log_z` [B, T], at least float32: log sum exp of the target's
logits over all ids, at the positions whose next token was generated."""


class Purpose(IntEnum):
    """What a random decision is for; a part of its key, so that no coin is used twice."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2


class Noise(Protocol):
    """Randomness of one round, a decision at a time."""

    def bernoulli(self, probability: float, row: int, node: int) -> bool:
        """True with `probability`: is node `node` of row `row` accepted?"""

    def categorical(self, law_V: Tensor, row: int, node: int, purpose: Purpose) -> int:
        """An index drawn from `law_V`, which sums to 1."""


Paths = Callable[[int], tuple[int, list[int]] | None]
"""paths(m) gives node m's row and the tokens that it has after the row's committed tokens, the root
excluded since it is committed; None where there is no such node."""


class Sampling(Protocol):
    """Turns logits into the laws that are sampled from, the target's and the drafter's alike."""

    @property
    def greedy(self) -> bool:
        """Laws are point masses; `laws` returns token ids."""

    @property
    def raw_greedy(self) -> bool:
        """Greedy without any processor: the argmax may be taken before scattering to V."""

    def scores(self, logits_MV: Tensor, paths: Paths) -> Tensor:
        """Logits [M, V] as the processors leave them, for drafts; arguments as in `laws`."""

    def laws(self, logits_MV: Tensor, paths: Paths) -> Tensor:
        """The target's laws of the next token after each of M nodes, of any rows.

        Args:
            logits_MV: raw logits over target ids, -inf where a token cannot be proposed.
            paths: see `Paths`; asked for only where a processor looks.  Parents before children.
        Returns:
            [M, V] probabilities, or [M] token ids when `greedy`; anything at a node that the laws
            above it rule out.
        """


class State(Protocol):
    """What a drafter remembers of its rows between rounds."""

    def select(self, rows: Tensor) -> State:
        """The state of `rows` alone, when other rows have finished."""


class Drafter(Protocol):
    """Anything that proposes tokens: a head, n-gram lookup, a separate draft model, a merge.

    A state is given back to the drafter that made it, so its type is the drafter's own affair.
    """

    taps: list[int]
    max_depth: int
    name: str

    def start(self, ids_BT: Tensor, length_B: Tensor, features: Features) -> State:
        """State after the prefill.

        Args:
            ids_BT: prompt and root, right padded: length + 1 ids a row.
            length_B: tokens the target has read, the root excluded.
            features: of the prompt's tokens.
        """

    def propose(
        self, state: Any, root_B: Tensor, plan: Plan, sampling: Sampling, noise: Noise
    ) -> Draft:
        """The draft of one round, at most `plan.depth` deep."""

    def advance(
        self, state: Any, committed_BM: Tensor, count_B: Tensor, features: Features
    ) -> State:
        """State after a round.

        Args:
            committed_BM: (n1, .., nm, y), accepted nodes and the next token, right padded.
            count_B: m + 1, how many of them each row has.
            features: of (n0, n1, .., nm), so that pair j is a node's state and the token after it.
        """
