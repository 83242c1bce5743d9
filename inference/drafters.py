"""Drafters that are not heads: none at all, and several in one tree."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ..heads.draft import Draft, Plan
from ..heads.errors import InputError
from ..heads.merging import merge
from ..heads.protocols import Drafter, Features, Noise, Sampling, State


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


@dataclass(frozen=True)
class MergedState:
    """The states of the drafters that are merged."""

    parts: list[State]

    def select(self, rows: Tensor) -> MergedState:
        """Each part's rows."""
        return MergedState([part.select(rows) for part in self.parts])


class Merged:
    """Several drafters in one tree: they are right at different places.

    Args:
        drafters: asked in this order.  One at most may read taps, and one at most may draw.
    """

    def __init__(self, drafters: list[Drafter]) -> None:
        tapped = [drafter for drafter in drafters if drafter.taps]
        if len(tapped) > 1:
            names = " and ".join(drafter.name for drafter in tapped)
            raise InputError(f"{names} both read taps of the target", "Merge one head alone.")
        self.drafters = drafters
        self.taps = tapped[0].taps if tapped else []
        self.max_depth = max(drafter.max_depth for drafter in drafters)
        # A head stands before what helps it, whatever the order they are asked in.
        self.name = "+".join(drafter.name for drafter in reversed(drafters))

    def start(self, ids_BT: Tensor, length_B: Tensor, features: Features) -> State:
        """See `heads.protocols.Drafter`."""
        return MergedState([d.start(ids_BT, length_B, features) for d in self.drafters])

    def propose(
        self, state: MergedState, root_B: Tensor, plan: Plan, sampling: Sampling, noise: Noise
    ) -> Draft:
        """All drafts in one tree, of which the likeliest nodes that pay are kept: how nodes are
        shared is left to the drafters' own estimates.  What a row keeps depends on that row alone.
        """
        # What two agree on may be worth twice what each thinks of it; drawn nodes stay as they are.
        asked = replace(plan, worth=plan.worth / 2) if sampling.greedy else plan
        parts = zip(self.drafters, state.parts, strict=True)
        drafts = [d.propose(s, root_B, asked, sampling, noise) for d, s in parts]
        return merge(drafts, [drafter.name for drafter in self.drafters], plan)

    def advance(
        self, state: MergedState, committed_BM: Tensor, count_B: Tensor, features: Features
    ) -> State:
        """See `heads.protocols.Drafter`."""
        parts = zip(self.drafters, state.parts, strict=True)
        return MergedState([d.advance(s, committed_BM, count_B, features) for d, s in parts])
