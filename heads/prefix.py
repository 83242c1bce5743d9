"""Prefix attention (Hydra++, arXiv 2402.05109, section 4.3): one decoder layer over the target's
states, whose output a head reads instead of the last of them.

It runs once a round, at true tokens alone: drafts never enter its cache.

Shape suffixes: B rows, T tokens, M committed tokens, R loss rows of a batch row, K taps, W width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from .base import Head, LastFeatures
from .config import HeadConfig
from .kv import KVBuffer
from .layers import DecoderLayer, RMSNorm
from .past import LossRows, read_last, read_rows, start_layer
from .protocols import Features, State
from .spec import TargetSpec, TargetWeights


class PrefixConfig(HeadConfig):
    """Attributes:
    prefix_attention: a decoder layer of the target's shape reads all states of the row first.
    """

    prefix_attention: bool = False


@dataclass(frozen=True)
class PrefixFeatures(LastFeatures):
    """What a head behind prefix attention reads, and the layer's cache."""

    cache: KVBuffer

    def select(self, rows: Tensor) -> Self:
        """The features of `rows` alone."""
        return replace(super().select(rows), cache=self.cache.select(rows))


class PrefixAttention(nn.Module):
    """s_t = layer(h_t, attending to h_0..h_t), which is h_t at the start."""

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        self.norm = RMSNorm(spec.hidden_size)
        self.layer = DecoderLayer(spec.config)

    def init_from_target(self, weights: TargetWeights) -> None:
        """Starts as the target's last layer where shapes fit; the norm undoes the scale of the
        target's final one, which h_t has behind it."""
        start_layer(self.layer, weights)
        scale, theirs = weights.norm_scale, weights.last_layer.get("input_norm")
        if scale is not None and theirs is not None:
            least = 1e-3 * scale.abs().max()
            size = scale.pow(2).mean().sqrt()  # of h_t, which this norm divides by
            undone = torch.where(scale.abs() > least, theirs / scale, 0.0)
            self.norm.weight.data.copy_(size * undone)

    def at_rows(
        self, batch: dict[str, Tensor], hidden_BTW: Tensor, rows: list[Tensor]
    ) -> list[Tensor]:
        """States [M_k, W] of the loss rows of each depth; those of depth 1 hold all others."""
        at, inputs = LossRows(rows[0], batch["ids"].shape), self.norm(hidden_BTW)
        out, *_ = read_rows(self.layer, hidden_BTW, inputs, batch.get("document"), at)
        return [at.flat(out, rows_M) for rows_M in rows]

    def at_last(
        self, cache: KVBuffer | None, hidden_BMW: Tensor, count_B: Tensor
    ) -> tuple[Tensor, KVBuffer]:
        """State [B, W] of each row's last token, after `count_B` further ones."""
        return read_last(self.layer, cache, hidden_BMW, self.norm(hidden_BMW), count_B)


class PrefixHead(Head):
    """A head that looks at one position, which may have read the row's past by prefix attention."""

    def __init__(
        self, config: PrefixConfig, spec: TargetSpec, draft_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, spec, draft_ids)
        self.prefix = PrefixAttention(spec) if config.prefix_attention else None

    def init_from_target(self, weights: TargetWeights) -> None:
        """See `Head.init_from_target`."""
        if self.prefix is not None:
            self.prefix.init_from_target(weights)

    def at_rows(
        self, batch: dict[str, Tensor], features: Features, rows: list[Tensor]
    ) -> list[Tensor]:
        """For training, what the head reads in place of h_t: [M_k, W] for each depth."""
        if self.prefix is not None:
            return self.prefix.at_rows(batch, features["hidden"], rows)
        hidden = features["hidden"].flatten(0, 1)
        return [hidden[r] for r in rows]

    def read_committed(
        self, state: Any, tokens_BM: Tensor, count_B: Tensor, features: Features
    ) -> State:
        """See `Head.read_committed`."""
        last = super().read_committed(state, tokens_BM, count_B, features)
        if self.prefix is None:
            return last
        assert isinstance(last, LastFeatures)
        cache = None if state is None else state.cache
        hidden_BMW = features["hidden"][:, : tokens_BM.shape[1]]
        hidden_BW, cache = self.prefix.at_last(cache, hidden_BMW, count_B)
        return PrefixFeatures(hidden_BW, last.taps_BKW, cache)
