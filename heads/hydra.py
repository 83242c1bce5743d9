"""Hydra (arXiv 2402.05109): one MLP for each depth, on h_t and the tokens drafted so far.

Slot k's MLP reads [h_t; e(x_{t+1}); ..; e(x_{t+k})], the root token's embedding first.  With
`prefix_attention` (Hydra++) a decoder layer's output stands in place of h_t.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from .base import LastFeatures, register
from .layers import ResidualBlock, RMSNorm, TapNorm
from .prefix import PrefixConfig, PrefixHead
from .protocols import Features
from .spec import TargetSpec


class HydraConfig(PrefixConfig):
    """Attributes:
    width: hidden width of each MLP; None for twice the target's hidden size.
    layers: residual blocks inside each MLP, after its first layer.
    """

    kind: Literal["hydra"] = "hydra"
    width: int | None = Field(None, ge=1)
    layers: int = Field(0, ge=0, le=8)


class _DepthMLP(nn.Module):
    """SiLU(W [state; embeddings]) -> residual blocks -> a correction of h_t, zero at the start."""

    def __init__(self, state_width: int, tokens: int, width: int, layers: int, out: int) -> None:
        super().__init__()
        self.state_in = nn.Linear(state_width, width)
        self.tokens_in = nn.Linear(tokens * out, width, bias=False)
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(layers)))
        self.out = nn.Linear(width, out, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Args: state [M, state_width], tokens [M, tokens*W] normed embeddings.  Returns [M, W]."""
        inner = nn.functional.silu(self.state_in(state) + self.tokens_in(tokens))
        return self.out(self.blocks(inner))


@register
class Hydra(PrefixHead):
    """K sequentially dependent MLPs.  The state half is h_t and the tapped states, the token half
    the RMS-normed embeddings of the root and the drafted tokens; each MLP corrects h_t, so that
    its output stays where the target's lm_head reads."""

    kind = "hydra"
    Config = HydraConfig
    config: HydraConfig

    def __init__(
        self, config: HydraConfig, spec: TargetSpec, draft_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, spec, draft_ids)
        out, width = spec.hidden_size, config.width or 2 * spec.hidden_size
        self.hidden_norm, self.embed_norm = RMSNorm(out), RMSNorm(out)
        self.tap_norm = TapNorm(len(self.taps), out) if self.taps else None
        state_width = out * (1 + len(self.taps))
        self.mlps = nn.ModuleList(
            _DepthMLP(state_width, k, width, config.layers, out) for k in range(1, config.depth + 1)
        )

    def _state(self, hidden: Tensor, taps: Tensor | None) -> Tensor:
        parts = [self.hidden_norm(hidden)]
        if self.tap_norm is not None and taps is not None:
            parts.append(self.tap_norm(taps))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def unroll(
        self, batch: dict[str, Tensor], features: Features, rows: list[Tensor]
    ) -> list[Tensor]:
        """State of depth k at row t: h_t + mlp_k(h_t, e(x_{t+1}), .., e(x_{t+k}))."""
        ids, inputs = batch["ids"].flatten(), self.at_rows(batch, features, rows)
        taps = features["taps"].flatten(0, 1) if self.taps else None
        states = []
        for k, (mlp, hidden, r) in enumerate(zip(self.mlps, inputs, rows, strict=True), start=1):
            state = self._state(hidden, None if taps is None else taps[r])
            tokens = self._embed([ids[r + shift] for shift in range(1, k + 1)])
            states.append(hidden + mlp(state, tokens))
        return states

    def step(
        self,
        state: LastFeatures,
        paths_BLk: Tensor,
        place_BL: Tensor,
        memo: dict[str, Tensor],
    ) -> Tensor:
        """See `Head.step`."""
        newest = self._embed([paths_BLk[..., -1]])
        if not memo:
            memo["state"] = self._state(state.hidden_BW, state.taps_BKW)[:, None]
            memo["tokens"] = newest
        else:
            place = place_BL[..., None].expand(-1, -1, memo["tokens"].shape[-1])
            memo["tokens"] = torch.cat([memo["tokens"].gather(1, place), newest], -1)
        mlp = self.mlps[paths_BLk.shape[-1] - 1]
        return state.hidden_BW[:, None] + mlp(memo["state"], memo["tokens"])

    def _embed(self, tokens: list[Tensor]) -> Tensor:
        return torch.cat([self.embed_norm(self.spec.embed(token)) for token in tokens], -1)
