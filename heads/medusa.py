"""Medusa (arXiv 2401.10774): one independent residual stack for each depth, all on h_t.

Slot k's law is lm_head(blocks_k(h_t)); it does not see the root token or earlier drafts.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from .base import LastFeatures, register
from .layers import ResidualBlock, TapNorm
from .prefix import PrefixConfig, PrefixHead
from .protocols import Features
from .spec import TargetSpec, TargetWeights


class MedusaConfig(PrefixConfig):
    """Attributes:
    layers: residual blocks of each depth.
    lm_head: "shared" draws on the target's frozen lm_head; "own" trains a copy of its draft
        vocabulary rows for each depth (Medusa's first version).
    """

    kind: Literal["medusa"] = "medusa"
    layers: int = Field(1, ge=1, le=8)
    lm_head: Literal["shared", "own"] = "shared"


@register
class Medusa(PrefixHead):
    """K stacks of `x + SiLU(Wx + b)`, zero at the start, on the target's last state; tapped states
    enter through one zero-initialised projection."""

    kind = "medusa"
    Config = MedusaConfig
    config: MedusaConfig

    def __init__(
        self, config: MedusaConfig, spec: TargetSpec, draft_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, spec, draft_ids)
        width = spec.hidden_size
        # One stack a depth, each built anew: `[Block()] * K` would share its weights.
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width) for _ in range(config.layers)))
            for _ in range(config.depth)
        )
        if self.taps:
            self.tap_norm = TapNorm(len(self.taps), width)
            self.tap_in = nn.Linear(len(self.taps) * width, width, bias=False)
            nn.init.zeros_(self.tap_in.weight)
        if config.lm_head == "own":
            self.lm_heads = nn.ParameterList(
                torch.zeros(self.draft_size, width) for _ in range(config.depth)
            )

    def init_from_target(self, weights: TargetWeights) -> None:
        """Copies the target's lm_head rows of the draft vocabulary into own lm_heads."""
        super().init_from_target(weights)
        if self.config.lm_head == "own":
            rows = weights.lm_head(self.draft_ids)
            for weight in self.lm_heads:
                weight.data.copy_(rows)

    def output_weights(self) -> list[Tensor] | None:
        """See `Head.output_weights`."""
        return list(self.lm_heads) if self.config.lm_head == "own" else None

    def _inputs(self, hidden: Tensor, taps: Tensor | None) -> Tensor:
        return hidden if taps is None else hidden + self.tap_in(self.tap_norm(taps))

    def unroll(
        self, batch: dict[str, Tensor], features: Features, rows: list[Tensor]
    ) -> list[Tensor]:
        """State of depth k at row t: blocks_k(h_t)."""
        inputs = self.at_rows(batch, features, rows)
        taps = features["taps"].flatten(0, 1) if self.taps else None
        return [
            block(self._inputs(hidden, None if taps is None else taps[r]))
            for block, hidden, r in zip(self.blocks, inputs, rows, strict=True)
        ]

    def step(
        self,
        state: LastFeatures,
        paths_BLk: Tensor,
        place_BL: Tensor,
        memo: dict[str, Tensor],
    ) -> Tensor:
        """See `Head.step`; of the tokens only their number is looked at."""
        if "inputs" not in memo:
            memo["inputs"] = self._inputs(state.hidden_BW, state.taps_BKW)
        hidden_BW = self.blocks[paths_BLk.shape[-1] - 1](memo["inputs"])
        return hidden_BW[:, None].expand(-1, paths_BLk.shape[1], -1)
