"""Logits to laws, for target and drafters alike.

Shape suffixes: M nodes of all rows, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..heads.protocols import Paths
from .processors import prefix_free, probe
from .settings import Settings


@dataclass
class RowSampling:
    """`heads.protocols.Sampling` for the rows of a running batch.

    Attributes:
        history: committed ids of each row, prompt and root included; at first the prompt alone.
        chains: the processors of each row.
    """

    settings: Settings
    history: list[list[int]]
    chains: list[list[Any]] = field(default_factory=list)
    _probed: bool = False

    def __post_init__(self) -> None:
        if not self.chains:
            self.chains = [self.settings.processors(len(ids)) for ids in self.history]

    @property
    def greedy(self) -> bool:
        """See `heads.protocols.Sampling`."""
        return self.settings.greedy

    @property
    def raw_greedy(self) -> bool:
        """See `heads.protocols.Sampling`."""
        return self.settings.greedy and not self.chains[0]

    def scores(self, logits_MV: Tensor, paths: Paths) -> Tensor:
        """See `heads.protocols.Sampling`.

        Processors that do not look at the prefix take all nodes at once; the others take each node
        with its own prefix, unpadded.  Where a custom one fails there is no law, and nothing is
        drafted: a draft may hold what the target's law rules out, where that processor is never
        asked in plain decoding.  On any other prefix `laws` asks it again, and the error is told.
        """
        scores = _wide(logits_MV)
        first = self.chains[0]
        for free, places in groupby(range(len(first)), lambda place: prefix_free(first[place])):
            if free:
                for place in places:
                    scores = first[place](None, scores)
            else:
                scores = self._by_prefix(list(places), scores, paths)
        return scores

    def laws(self, logits_MV: Tensor, paths: Paths) -> Tensor:
        """See `heads.protocols.Sampling`."""
        if self._custom:
            return self._reachable_laws(_wide(logits_MV), paths)
        return self._law(self.scores(logits_MV, paths))

    @property
    def _custom(self) -> bool:
        return not all(map(prefix_free, self.settings.logits_processor))

    def _law(self, scores: Tensor) -> Tensor:
        return scores.argmax(-1) if self.greedy else scores.softmax(-1)

    def _by_prefix(self, places: list[int], scores: Tensor, paths: Paths) -> Tensor:
        result = scores.clone()
        for node, row, _, prefix in self._nodes(paths, scores):
            try:
                result[node] = self._after(row, prefix, scores[node], places)
            except Exception:  # whatever a custom processor raises
                if not self._custom:
                    raise
                result[node] = -torch.inf
        return result

    def _nodes(
        self, paths: Paths, scores_MV: Tensor
    ) -> Iterator[tuple[int, int, list[int], Tensor]]:
        """The nodes that are there: each with its row, its path and its whole prefix [1, T]."""
        committed: dict[int, Tensor] = {}
        for node in range(len(scores_MV)):
            if (found := paths(node)) is None:
                continue
            row, path = found
            if row not in committed:
                committed[row] = torch.tensor([self.history[row]], device=scores_MV.device)
            prefix = torch.cat([committed[row], committed[row].new_tensor([path])], 1)
            yield node, row, path, prefix

    def _after(
        self, row: int, prefix_1T: Tensor, scores_V: Tensor, places: Iterable[int]
    ) -> Tensor:
        """Scores [V] of one node as the processors at `places` of its row's chain leave them."""
        # A clone: processors may write into what they are given.
        scores = scores_V[None].clone()
        for place in places:
            processor = self.chains[row][place]
            if not self._probed and processor in self.settings.logits_processor:
                probe(processor, prefix_1T, scores.clone())
            scores = processor(prefix_1T, scores)
        self._probed = True
        return scores[0]

    def _reachable_laws(self, scores_MV: Tensor, paths: Paths) -> Tensor:
        """The laws of the nodes that can be reached, zeros for the others: custom processors are
        asked about no prefix that plain decoding could not come to."""
        laws = torch.zeros_like(scores_MV)
        if self.greedy:
            laws = torch.zeros(len(scores_MV), dtype=torch.long, device=scores_MV.device)
        after: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for node, row, path, prefix in self._nodes(paths, scores_MV):
            if _reached(after, row, tuple(path)):
                chain = range(len(self.chains[row]))
                laws[node] = law = self._law(self._after(row, prefix, scores_MV[node], chain))
                after[row, *path].append(law)
        return laws

    def select(self, rows: list[int]) -> RowSampling:
        """The sampling of `rows` alone."""
        history, chains = ([kept[row] for row in rows] for kept in (self.history, self.chains))
        return replace(self, history=history, chains=chains)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(torch.float32, logits.dtype))


def _reached(after: dict[tuple[int, ...], list[Tensor]], row: int, path: tuple[int, ...]) -> bool:
    """May the last token of `path` follow the others?

    Args:
        after: the laws of the nodes on each path, the row before it; parents before children.
    """
    if not path:
        return True
    laws, token = after[row, *path[:-1]], path[-1]
    return any(bool(law[token] > 0 if law.ndim else law == token) for law in laws)
