"""Building blocks that several head kinds share.

Shape suffixes: M rows of any kind, K taps, W width; in attention B rows, T tokens, H query heads,
G key heads, S slots, E width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class RMSNorm(nn.Module):
    """x / rms(x) * weight (arXiv 1910.07467), computed in float32 or wider."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Args: x [.., W].  Returns [.., W] in the dtype of x."""
        wide = x.to(torch.promote_types(torch.float32, x.dtype))
        weight = self.weight.to(wide.dtype)
        return nn.functional.rms_norm(wide, weight.shape, weight, self.eps).to(x.dtype)


class TapNorm(nn.Module):
    """RMS-norms each tapped state on its own and concatenates them: taps of unlike depth differ
    in scale by orders of magnitude."""

    def __init__(self, taps: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(taps))

    def forward(self, taps_MKW: Tensor) -> Tensor:
        """Args: taps [.., K, W].  Returns [.., K*W]."""
        normed = [norm(taps_MKW[..., i, :]) for i, norm in enumerate(self.norms)]
        return torch.cat(normed, -1)


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), W and b zero at the start: Medusa's block (arXiv 2401.10774, eq. 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Args: x [.., W].  Returns [.., W]."""
        return x + nn.functional.silu(self.linear(x))


class Rope:
    """Rotary position embedding (arXiv 2104.09864) with the frequencies, the partial rotation and
    the scaling of a target's config; frequencies that depend on the length stay those of the start.

    Not a module: its frequencies must not be cast with the weights.

    Args:
        config: the target's text config; without rope parameters the paper's base of 10,000 holds.
    """

    def __init__(self, config: Any) -> None:
        fields, layer_type = getattr(config, "rope_parameters", None) or {}, None
        nested = [name for name, value in fields.items() if isinstance(value, dict)]
        if nested:  # one set of parameters for each kind of layer
            layer_type = "full_attention" if "full_attention" in nested else nested[0]
            fields = fields[layer_type]
        kind = fields.get("rope_type", "default")
        if kind in ROPE_INIT_FUNCTIONS:
            self.frequencies, self.scale = ROPE_INIT_FUNCTIONS[kind](config, layer_type=layer_type)
            return
        width = int(attention_shape(config)[2] * fields.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        self.frequencies, self.scale = fields.get("rope_theta", 10000.0) ** -exponents, 1.0

    def angles(self, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, 1, T, rotated half], for all heads of a position."""
        self.frequencies = self.frequencies.to(position_BT.device)
        angles = position_BT[:, None, :, None] * self.frequencies
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x_BHTE: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the leading features of each head, first half against second half."""
    cos, sin = (part.to(x_BHTE.dtype) for part in angles)
    half = cos.shape[-1]
    first, second, rest = x_BHTE.split([half, half, x_BHTE.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attention_shape(config: Any) -> tuple[int, int, int]:
    """Query heads, key heads and width of a head of a target's text config."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    return heads, groups, getattr(config, "head_dim", None) or config.hidden_size // heads


def folded_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """Grouped-query attention that copies no key or value: the query heads that share a key head
    stand as further query rows of it.

    Args:
        query: [B, H, T, E]; key and value [B, G, S, E].
        mask: [B, 1, T, S], True or 0 where a query may look.
    Returns:
        [B, H, T, E].
    """
    rows, heads, tokens, width = query.shape
    groups = key.shape[1]
    folded = query.reshape(rows, groups, heads // groups * tokens, width)
    out = nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=_repeated(mask, heads // groups), scale=scale
    )
    return out.reshape(rows, heads, tokens, -1)


def _repeated(mask: Tensor, times: int) -> Tensor:
    """The rows of `mask` for each query head of a group; kept on the mask, which all layers get."""
    known: dict[int, Tensor] = mask.__dict__.setdefault("repeated", {})
    if times not in known:
        known[times] = mask.repeat(1, 1, times, 1)
    return known[times]


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer of the target's shape whose attention may read another input than
    its residual; both output projections are zero at the start, so that it begins as the identity.

    Args:
        config: the target's text config.
        inputs: width of what attention reads; None for the hidden size.
        width: inner width of the MLP; None for the target's.
    """

    def __init__(self, config: Any, inputs: int | None = None, width: int | None = None) -> None:
        super().__init__()
        self.heads, self.groups, self.head_width = attention_shape(config)
        hidden = config.hidden_size
        inner = width or getattr(config, "intermediate_size", None) or 4 * hidden
        self.rope = Rope(config)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(inputs or hidden, count * self.head_width, bias=False)
            for count in (self.heads, self.groups, self.groups)
        )
        self.o_proj = nn.Linear(self.heads * self.head_width, hidden, bias=False)
        self.mlp_norm = RMSNorm(hidden)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        nn.init.zeros_(self.o_proj.weight)
        nn.init.zeros_(self.down_proj.weight)

    def project(self, inputs_BTI: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, E], keys and values [B, G, T, E] of tokens at their positions: together
        and in this order, since packed linears serve all three with one product."""
        query, keys, values = (
            linear(inputs_BTI).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        angles = self.rope.angles(position_BT)
        return rotate(query, angles), rotate(keys, angles), values

    def forward(
        self,
        residual_BTW: Tensor,
        query_BHTE: Tensor,
        keys_BGSE: Tensor,
        values_BGSE: Tensor,
        mask_BTS: Tensor,
    ) -> Tensor:
        """Output [B, T, W] of tokens that look where the mask is True."""
        seen = folded_attention(query_BHTE, keys_BGSE, values_BGSE, mask_BTS[:, None])
        x = residual_BTW + self.o_proj(seen.transpose(1, 2).flatten(2))
        inner = self.mlp_norm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(inner)) * self.up_proj(inner))


def tokens_of(query_BHTE: Tensor, place_BM: Tensor) -> Tensor:
    """Queries [B, H, M, E] of the tokens at `place_BM` of each row."""
    index = place_BM[:, None, :, None].expand(-1, query_BHTE.shape[1], -1, query_BHTE.shape[-1])
    return query_BHTE.gather(2, index)
