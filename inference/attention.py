"""Grouped-query attention for drafts: transformers' sdpa without its copies of keys and values.

With fewer key heads than query heads, transformers repeats every cached key and value for a masked
forward of several tokens.  The query heads of a group share one key head, so they can stand as
further query rows of it instead; nothing is copied, whatever the context's length.

Shape suffixes: B rows, H query heads, G key heads, N query tokens, S slots, D head width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

NAME = "selfdraft_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, N, D], key and value [B, G, S, D] and an
    additive mask [B, 1, N, S] to [B, N, H, D].  What is not of this form goes to its own sdpa."""
    rows, heads, nodes, width = query.shape
    groups = key.shape[1]
    shared = attention_mask is not None and attention_mask.shape[1] == 1
    if groups == heads or not shared or kwargs.get("softcap") or kwargs.get("position_bias"):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    assert attention_mask is not None
    folded = query.reshape(rows, groups, heads // groups * nodes, width)
    out = nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=_repeated(attention_mask, heads // groups), scale=scaling
    )
    return out.reshape(rows, heads, nodes, -1).transpose(1, 2), None


def _repeated(mask: Tensor, times: int) -> Tensor:
    """The rows of `mask` for each query head of a group; kept on the mask, which all layers get."""
    known: dict[int, Tensor] = mask.__dict__.setdefault("repeated", {})
    if times not in known:
        known[times] = mask.repeat(1, 1, times, 1)
    return known[times]


def use_grouped_attention(model: Any) -> bool:
    """Switches a model that runs on sdpa over; False where it runs on something else."""
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(NAME)
    return bool(config._attn_implementation == NAME)
