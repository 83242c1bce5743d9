"""EAGLE-3 (arXiv 2503.01840): one decoder layer over tapped states, trained as it drafts.

Step i = 0, 1, .. at row t reads [RMS(e(x_{t+1+i})); RMS(o^{i-1}_t)] and gives o^i_t, the state of
slot k = i + 1; o^{-1}_t joins the tapped states of row t.  The 3.1 changes are fields: `tap_norm`,
and `recycle: normed`.  EAGLE-1 (arXiv 2401.15077) is `taps: []` with `feature_loss` (unrolled over
the depths, as HASS, arXiv 2408.15766, does).
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from .base import register
from .config import Tap
from .protocols import Features
from .sequence import Cell, SequenceConfig, SequenceHead
from .spec import TargetSpec, TargetWeights


class EagleConfig(SequenceConfig):
    """Attributes:
    taps: layers joined for the first state; the default fits 32 layers.
    fusion: "residual" adds the joined taps, zero at the start, to the target's last state, so that
        the first output is the target's own; "fc" has the joined taps alone, as published.
    norm_before_residual: the residual is the normed state.
    lm_head: "shared" draws on the target's frozen lm_head; "own" trains a copy of its draft
        vocabulary rows.
    feature_loss: weight of smooth L1 between draft and target states (EAGLE-1's 1 : 0.1 is 10).
    """

    kind: Literal["eagle"] = "eagle"
    taps: list[Tap] = Field(default_factory=lambda: [2, 16, 29])
    fusion: Literal["residual", "fc"] = "residual"
    norm_before_residual: bool = False
    lm_head: Literal["shared", "own"] = "shared"
    feature_loss: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _taps_to_join(self) -> Self:
        if self.fusion == "fc" and not self.taps:
            raise ValueError("fusion: fc reads joined taps alone, and taps is empty: give some")
        return self


class EagleCell(Cell):
    """Attention reads both normed halves side by side; the residual is the state alone."""

    def __init__(self, spec: TargetSpec, config: EagleConfig) -> None:
        super().__init__(spec, config, inputs=2 * spec.hidden_size)
        self.norm_before_residual = config.norm_before_residual

    def read(self, embeds: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `Cell.read`."""
        normed = self.hidden_norm(state)
        inputs = torch.cat([self.embed_norm(embeds), normed], -1)
        return normed if self.norm_before_residual else state, inputs


@register
class Eagle(SequenceHead):
    """One layer applied at every step."""

    kind = "eagle"
    Config = EagleConfig
    config: EagleConfig
    first_position = 0

    def __init__(
        self, config: EagleConfig, spec: TargetSpec, draft_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, spec, draft_ids)
        if config.lm_head == "own":
            self.lm_head = nn.Parameter(torch.zeros(self.draft_size, spec.hidden_size))

    def make_cell(self) -> Cell:
        """See `SequenceHead.make_cell`."""
        return EagleCell(self.spec, self.config)

    @classmethod
    def reads_hidden(cls, config: Any) -> bool:
        """See `SequenceHead.reads_hidden`."""
        return config.fusion == "residual"

    def init_from_target(self, weights: TargetWeights) -> None:
        """See `Head.init_from_target`."""
        super().init_from_target(weights)
        if self.config.lm_head == "own":
            self.lm_head.data.copy_(weights.lm_head(self.draft_ids))

    def output_weights(self) -> list[Tensor] | None:
        """See `Head.output_weights`: one for all steps."""
        return [self.lm_head] * self.config.depth if self.config.lm_head == "own" else None

    def extra_loss(
        self, states: list[Tensor], rows: list[Tensor], features: Features
    ) -> Tensor | None:
        """EAGLE-1's feature loss: smooth L1 between the state of slot k at row t and h_{t+k}, the
        mean over the width."""
        if not self.config.feature_loss:
            return None
        hidden = features["hidden"].flatten(0, 1)
        sums = [
            nn.functional.smooth_l1_loss(state, hidden[r + k].to(state.dtype), reduction="sum")
            for k, (state, r) in enumerate(zip(states, rows, strict=True), start=1)
        ]
        return self.config.feature_loss / hidden.shape[-1] * torch.stack(sums)
