"""n-gram drafting: what followed the last tokens where they stood before, in prompt or output.

The baseline that needs no training (prompt lookup; LLMA, arXiv 2304.04487), and half of the
default: on text that repeats itself it proposes long runs that no head can know.

Shape suffixes: B rows, T tokens, M committed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from ..heads.draft import Draft, Plan
from ..heads.protocols import Features, Noise, Sampling, State
from ..heads.shapes import paying

ACCEPTED = (0.3, 0.55, 0.65, 0.7, 0.75, 0.85)
"""How often the latest place of the longest match, of 1, 2, .. tokens, is followed again: measured
on answers of SmolLM2-135M, where it does not depend on how the match came about, so that each token
copied rightly makes the match one longer."""
ACCEPTED_LATER = 0.15  # the first token in which another continuation differs

RECENT = 4
"""Places remembered for an n-gram, the latest ones: so that a lookup's cost does not grow with the
context."""


class NGramIndex:
    """Where each n-gram of one row's text was followed by what.

    Adding a token and looking up take max_n dictionary accesses, whatever the text's length.
    """

    def __init__(self, ids: list[int], min_n: int, max_n: int) -> None:
        self.ids: list[int] = []
        self.min_n, self.max_n = min_n, max_n
        self._after: dict[tuple[int, ...], list[int]] = {}
        self.extend(ids)

    def extend(self, ids: list[int]) -> None:
        """Adds tokens to the text."""
        text = self.ids
        for token in ids:
            place = len(text)
            for n in range(self.min_n, min(self.max_n, place) + 1):
                places = self._after.setdefault(tuple(text[place - n :]), [])
                places.append(place)
                if len(places) > RECENT:
                    del places[0]
            text.append(token)

    def matches(self) -> Iterator[tuple[int, int]]:
        """(n, place of the token that followed), longest n first, latest place first; a place comes
        once, with the longest n it matches."""
        seen = set()
        for n in range(min(self.max_n, len(self.ids)), self.min_n - 1, -1):
            for place in reversed(self._after.get(tuple(self.ids[-n:]), ())):
                if place not in seen:
                    seen.add(place)
                    yield n, place

    def copied(self, place: int, length: int) -> list[int]:
        """`length` tokens from `place` on; past the text's end the copy itself goes on, so that a
        text with a period is continued with it."""
        text, period = self.ids, len(self.ids) - place
        return [text[place + i % period] for i in range(length)]


@dataclass(frozen=True)
class NGramState:
    """The texts of the rows."""

    rows: list[NGramIndex]

    def select(self, rows: Tensor) -> NGramState:
        """The texts of `rows` alone."""
        return NGramState([self.rows[row] for row in rows.tolist()])


class NGram:
    """Copies the continuations of the longest matching suffix, the latest ones first.

    Args:
        min_n, max_n: tokens of a suffix that is looked up.
        max_depth: tokens copied at most.
        branches: different continuations at most, as branches of one tree.
    """

    name = "ngram"
    taps: list[int] = []  # noqa: RUF012

    def __init__(
        self, min_n: int = 1, max_n: int = 6, max_depth: int = 10, branches: int = 2
    ) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n {min_n} and max_n {max_n}: give 1 <= min_n <= max_n")
        self.min_n, self.max_n = min_n, max_n
        self.max_depth, self.branches = max_depth, branches

    def start(self, ids_BT: Tensor, length_B: Tensor, features: Features) -> State:
        """See `heads.protocols.Drafter`."""
        rows = zip(ids_BT.tolist(), length_B.tolist(), strict=True)
        return NGramState([NGramIndex(ids[: n + 1], self.min_n, self.max_n) for ids, n in rows])

    def advance(
        self, state: NGramState, committed_BM: Tensor, count_B: Tensor, features: Features
    ) -> State:
        """See `heads.protocols.Drafter`."""
        for index, ids, n in zip(state.rows, committed_BM.tolist(), count_B.tolist(), strict=True):
            index.extend(ids[:n])
        return state

    def propose(
        self, state: NGramState, root_B: Tensor, plan: Plan, sampling: Sampling, noise: Noise
    ) -> Draft:
        """Point proposals: what is copied is chosen without chance."""
        depth = min(plan.depth, self.max_depth)
        nodes = depth if plan.nodes is None else plan.nodes
        trees = [self._tree(index, depth) for index in state.rows]
        plan = replace(plan, nodes=nodes)
        rows = [_cut(i.ids[-1], tree, plan) for i, tree in zip(state.rows, trees, strict=True)]
        return Draft.points(
            [ids for ids, _, _ in rows],
            [parents for _, parents, _ in rows],
            root_B.device,
            [chances for _, _, chances in rows],
        )

    def _tree(self, index: NGramIndex, depth: int) -> dict[tuple[int, ...], float]:
        """The continuations of one row: each path with its chance, parents before children."""
        paths: dict[tuple[int, ...], float] = {}
        branches = 0
        for n, place in index.matches():
            copied, chance, new = tuple(index.copied(place, depth)), 1.0, False
            for i in range(depth):
                path = copied[: i + 1]
                if path in paths:
                    chance = paths[path]
                    continue
                # Where a later continuation leaves the ones before it, it is the less likely one.
                later = branches > 0 and not new
                chance *= ACCEPTED_LATER if later else ACCEPTED[min(n + i, len(ACCEPTED)) - 1]
                paths[path], new = chance, True
            branches += new
            if branches == self.branches:
                break
        return paths


def _cut(
    root: int, paths: dict[tuple[int, ...], float], plan: Plan
) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and chances of the paths that pay, in the order of depth."""
    best = sorted(paths, key=lambda path: -paths[path])
    kept = best[: paying([paths[path] for path in best], plan)]
    ordered = [(), *sorted(kept, key=len)]
    place = {path: i for i, path in enumerate(ordered)}
    ids = [root, *(path[-1] for path in ordered[1:])]
    parents = [-1, *(place[path[:-1]] for path in ordered[1:])]
    return ids, parents, [1.0, *(paths[path] for path in ordered[1:])]
