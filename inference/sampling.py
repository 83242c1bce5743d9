"""Logits to laws: the settings of a generation call as one object, for target and drafters alike.

Shape suffixes: B rows, N nodes, V vocabulary.  The processors are transformers' own, in
transformers' order; those that look at the prefix are called node by node, each on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as processors

from ..heads.errors import InputError

PREFIX_FREE = (
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
)


@dataclass(frozen=True)
class Settings:
    """What a caller may ask for.  Defaults are plain: no truncation, temperature 1.

    Attributes:
        do_sample: False takes the argmax.
        temperature: of the softmax; 0 is greedy.
        top_k: 0 for all; top_p, min_p: 1.0 and None for all.
        repetition_penalty: 1.0 for none (arXiv 1909.05858), over prompt and output.
        logits_processor: custom `LogitsProcessor`s, run after the penalty, before the warpers.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    logits_processor: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        """Raises InputError for a value out of range."""
        checks: list[tuple[str, Callable[[float], bool], str]] = [
            ("temperature", lambda x: x >= 0, "a number >= 0"),
            ("top_k", lambda x: x >= 0 and x == int(x), "an integer >= 0, 0 for all"),
            ("top_p", lambda x: 0 < x <= 1, "a number in (0, 1]"),
            ("min_p", lambda x: 0 <= x <= 1, "None or a number in [0, 1]"),
            ("repetition_penalty", lambda x: x > 0, "a number > 0"),
        ]
        for name, fine, wanted in checks:
            value = getattr(self, name)
            if value is None and name == "min_p":
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not fine(value):
                raise InputError(f"{name} is {value!r}", f"Give {wanted}.")

    @property
    def greedy(self) -> bool:
        """True when each law is its argmax."""
        return not self.do_sample or self.temperature == 0

    def processors(self) -> list[Any]:
        """The logits processors that these settings ask for, in transformers' order."""
        chain: list[Any] = []
        if self.repetition_penalty != 1.0:
            chain.append(processors.RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        chain += self.logits_processor
        if self.greedy:
            return chain
        if self.temperature != 1.0:
            # Dividing by less than this would overflow float32 logits of a few hundred.
            chain.append(processors.TemperatureLogitsWarper(max(float(self.temperature), 1e-5)))
        if self.top_k:
            chain.append(processors.TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            chain.append(processors.TopPLogitsWarper(float(self.top_p)))
        if self.min_p:
            chain.append(processors.MinPLogitsWarper(float(self.min_p)))
        return chain


@dataclass
class RowSampling:
    """`heads.protocols.Sampling` for the rows of a running batch.

    Attributes:
        history: committed ids of each row, prompt and root included.
    """

    settings: Settings
    history: list[list[int]]
    _chain: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self._chain = self.settings.processors()

    @property
    def greedy(self) -> bool:
        """See `heads.protocols.Sampling`."""
        return self.settings.greedy

    @property
    def raw_greedy(self) -> bool:
        """See `heads.protocols.Sampling`."""
        return self.settings.greedy and not self._chain

    def scores(self, logits_BNV: Tensor, paths: Callable[[int, int], list[int]]) -> Tensor:
        """See `heads.protocols.Sampling`."""
        scores = logits_BNV.to(torch.promote_types(torch.float32, logits_BNV.dtype))
        for processor in self._chain:
            if isinstance(processor, PREFIX_FREE):
                flat = processor(None, scores.flatten(0, 1))
                scores = flat.view_as(scores)
            else:
                scores = self._by_prefix(processor, scores, paths)
        return scores

    def laws(self, logits_BNV: Tensor, paths: Callable[[int, int], list[int]]) -> Tensor:
        """See `heads.protocols.Sampling`."""
        scores = self.scores(logits_BNV, paths)
        return scores.argmax(-1) if self.greedy else scores.softmax(-1)

    def _by_prefix(
        self, processor: Any, scores: Tensor, paths: Callable[[int, int], list[int]]
    ) -> Tensor:
        result = torch.empty_like(scores)
        for row, history in enumerate(self.history):
            for node in range(scores.shape[1]):
                prefix = torch.tensor([history + paths(row, node)], device=scores.device)
                # A clone: processors may write into what they are given.
                result[row, node] = processor(prefix, scores[row, node][None].clone())[0]
        return result

    def select(self, rows: list[int]) -> RowSampling:
        """The sampling of `rows` alone."""
        return replace(self, history=[self.history[row] for row in rows])
