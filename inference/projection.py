"""From hidden states to logits: the lm_head, dense, packed or rounded, whole or some of its rows.

Shape suffixes: D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.errors import InputError
from . import packed, rounded

Project = Callable[[Tensor], Tensor]


class Projection:
    """`TargetSpec.projector` of one lm_head; what it makes is kept for reuse.

    Args:
        lm_head: of the target; a module without a dense weight (quantized) is called as it is.
        config: of the target; names what the family does to its logits.
    """

    def __init__(self, lm_head: Any, config: Any) -> None:
        self.lm_head, self.config = lm_head, config
        self.weight: Tensor | None = getattr(lm_head, "weight", None)
        self.vocab_size = config.vocab_size if self.weight is None else self.weight.shape[0]
        self._made: dict[Any, tuple[Tensor | None, Project]] = {}

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
        key = (make, None if rows is None else (rows.data_ptr(), len(rows)))
        if key not in self._made:
            # The rows are kept as well: their address is the key.
            self._made[key] = rows, self._make(rows, make)
        return self._made[key][1]

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
        if not isinstance(self.lm_head, nn.Linear):
            whole: Project = self.lm_head
            pick = whole if rows is None else lambda hidden: whole(hidden)[..., rows]
            return lambda hidden: scale_logits(self.config, pick(hidden))
        bias = self.lm_head.bias
        product = make(self.weight_rows(rows), bias if bias is None or rows is None else bias[rows])
        return lambda hidden: scale_logits(self.config, product(hidden))

    def _make_gathered(self, rows_BE: Tensor) -> Project:
        if not isinstance(self.lm_head, nn.Linear):
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
