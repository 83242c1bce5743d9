"""From hidden states to logits: the lm_head, dense, packed or rounded, whole or some of its rows;
and from ids to embeddings.

Shape suffixes: D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..heads.errors import InputError
from . import packed, rounded

Project = Callable[[Tensor], Tensor]


class Projection:
    """`TargetSpec.projector` of one lm_head.  What it makes is kept for reuse; of a head's ids, for
    as long as these are there.

    Args:
        lm_head: of the target; what is no nn.Linear, or a subclass of it (quantized, adapted), may
            do more than multiply by its weight, and is called as it is.
        config: of the target; names what the family does to its logits.
    """

    def __init__(self, lm_head: Any, config: Any) -> None:
        self.lm_head, self.config = lm_head, config
        self._linear = type(lm_head) is nn.Linear
        self.weight: Tensor | None = lm_head.weight if self._linear else None
        self.vocab_size: int = getattr(lm_head, "out_features", config.vocab_size)
        # By the ids, and by the weight itself for all ids.
        self._made: MutableMapping[Tensor, dict[packed.Make, Project]] = WeakTensorKeyDictionary()

    def __call__(self, rows: Tensor | None, drafting: bool) -> Project:
        """See `TargetSpec.projector`."""
        if rows is not None and rows.ndim == 2:  # of the texts at hand, so not worth keeping
            return self._make_gathered(rows)
        if drafting:
            return self._kept(rows, rounded.product)
        # No gradient passes through a packed product, which is three times as fast.
        return lambda hidden: self._kept(
            rows,
            _dense if torch.is_grad_enabled() and hidden.requires_grad else packed.product,
        )(hidden)

    def serving(self, hidden: Tensor) -> Tensor:
        """Logits [.., V] for inference; no gradient passes through them."""
        return self._kept(None, packed.product)(hidden)

    def _kept(self, rows: Tensor | None, make: packed.Make) -> Project:
        if not self._linear:
            return self._make(rows, make)  # the module itself, there is nothing to keep
        made = self._made.setdefault(self.lm_head.weight if rows is None else rows, {})
        if make not in made:
            made[make] = self._make(rows, make)
        return made[make]

    def weight_rows(self, rows: Tensor | None = None) -> Tensor:
        """The dense lm_head weight [V, D], or its `rows` [D', D] (a copy).

        Raises:
            InputError: the lm_head has no dense weight.
        """
        if self.weight is None:
            raise InputError(
                f"the lm_head of {self.config.model_type!r} has no dense weight",
                "Use heads that share it (medusa: lm_head: shared).",
            )
        return self.weight.detach() if rows is None else self.weight.detach()[rows]

    def start_rows(self, rows: Tensor | None = None) -> Tensor:
        """`weight_rows` from which a head's own lm_head may start: with the family's scaling in it,
        so that its products are the target's logits, but for a bias or a soft cap."""
        return _scaled(self.config, self.weight_rows(rows))

    def _make(self, rows: Tensor | None, make: packed.Make) -> Project:
        if not self._linear:
            whole: Project = self.lm_head
            pick = whole if rows is None else lambda hidden: whole(hidden)[..., rows]
            return lambda hidden: scale_logits(self.config, pick(hidden))
        bias = self.lm_head.bias
        product = make(self.weight_rows(rows), bias if bias is None or rows is None else bias[rows])
        return lambda hidden: scale_logits(self.config, product(hidden))

    def _make_gathered(self, rows_BE: Tensor) -> Project:
        if not self._linear:
            whole: Project = self._make(None, _dense)
            return lambda hidden: whole(hidden).gather(-1, _beside(rows_BE, hidden))
        weight_BDE, bias = self.weight_rows(rows_BE).mT, self.lm_head.bias
        if bias is None:
            return lambda hidden: scale_logits(self.config, hidden @ weight_BDE)
        return lambda hidden: scale_logits(
            self.config, hidden @ weight_BDE + bias[rows_BE][:, None]
        )


def _dense(weight: Tensor, bias: Tensor | None) -> Project:
    return lambda hidden: nn.functional.linear(hidden, weight, bias)


def _beside(rows_BE: Tensor, hidden_BWD: Tensor) -> Tensor:
    """[B, W, E] `rows_BE` for each of the W states."""
    return rows_BE[:, None].expand(-1, hidden_BWD.shape[1], -1)


def scale_logits(config: Any, logits: Tensor) -> Tensor:
    """What some families do to logits after the lm_head: Granite divides, Cohere multiplies,
    Gemma caps softly."""
    logits = _scaled(config, logits)
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits


def _scaled(config: Any, logits: Tensor) -> Tensor:
    """The linear part of `scale_logits`."""
    if divisor := getattr(config, "logits_scaling", None):
        logits = logits / divisor
    if factor := getattr(config, "logit_scale", None):
        logits = logits * factor
    return logits


def embedder(embedding: Any, config: Any) -> Callable[[Tensor], Tensor]:
    """ids [..] -> embeddings [.., D] as they enter the first layer.  Granite, and Gemma before its
    embedding module did, scale them outside of it."""
    scale = getattr(config, "embedding_multiplier", None) or 1.0
    if config.model_type in ("gemma", "gemma2") and not hasattr(embedding, "embed_scale"):
        scale = config.hidden_size**0.5

    @torch.no_grad()
    def embed(ids: Tensor) -> Tensor:
        return embedding(ids) if scale == 1.0 else embedding(ids) * scale

    return embed
