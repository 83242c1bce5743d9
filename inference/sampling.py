"""Logits to laws, for target and drafters alike.

Shape suffixes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

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

    def scores(self, logits_BNV: Tensor, paths: Callable[[int, int], list[int]]) -> Tensor:
        """See `heads.protocols.Sampling`.

        Processors that do not look at the prefix take all nodes at once; the others take each node
        with its own prefix, unpadded.
        """
        scores = logits_BNV.to(torch.promote_types(torch.float32, logits_BNV.dtype))
        first = self.chains[0]
        for free, places in groupby(range(len(first)), lambda place: prefix_free(first[place])):
            if free:
                for place in places:
                    scores = first[place](None, scores.flatten(0, 1)).view_as(scores)
            else:
                scores = self._by_prefix(list(places), scores, paths)
        return scores

    def laws(self, logits_BNV: Tensor, paths: Callable[[int, int], list[int]]) -> Tensor:
        """See `heads.protocols.Sampling`."""
        scores = self.scores(logits_BNV, paths)
        return scores.argmax(-1) if self.greedy else scores.softmax(-1)

    def _by_prefix(
        self, places: list[int], scores: Tensor, paths: Callable[[int, int], list[int]]
    ) -> Tensor:
        result = torch.empty_like(scores)
        for row, history in enumerate(self.history):
            committed = torch.tensor([history], device=scores.device)
            for node in range(scores.shape[1]):
                path = torch.tensor([paths(row, node)], device=scores.device, dtype=torch.long)
                prefix = torch.cat([committed, path], 1)
                # A clone: processors may write into what they are given.
                node_scores = scores[row, node][None].clone()
                for place in places:
                    processor = self.chains[row][place]
                    if not self._probed and processor in self.settings.logits_processor:
                        probe(processor, prefix, node_scores.clone())
                    node_scores = processor(prefix, node_scores)
                result[row, node] = node_scores[0]
                self._probed = True
        return result

    def select(self, rows: list[int]) -> RowSampling:
        """The sampling of `rows` alone."""
        history, chains = ([kept[row] for row in rows] for kept in (self.history, self.chains))
        return replace(self, history=history, chains=chains)
