"""Grouped-query attention for drafts: transformers' sdpa without its copies of keys and values.

With fewer key heads than query heads, transformers repeats every cached key and value for a masked
forward of several tokens; `folded_attention` copies nothing, whatever the context's length.

Shape suffixes: B rows, H query heads, G key heads, N query tokens, S slots, D head width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from ..heads.layers import folded_attention
from .ragged import Ragged

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
    additive mask [B, 1, N, S] to [B, N, H, D].  What is not of this form goes to its own sdpa.

    Where the mask says that rows are ragged, query and result are [1, H, T, D] and [1, T, H, D].
    """
    ragged: Ragged | None = getattr(attention_mask, "ragged", None)
    if ragged is not None:
        query = ragged.open_heads(query)
    out = _attend(module, query, key, value, attention_mask, scaling, dropout, kwargs)
    return (out if ragged is None else ragged.close(out)), None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> Tensor:
    heads, groups = query.shape[1], key.shape[1]
    shared = attention_mask is not None and attention_mask.shape[1] == 1
    if groups == heads or not shared or kwargs.get("softcap") or kwargs.get("position_bias"):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )[0]
    assert attention_mask is not None
    return folded_attention(query, key, value, attention_mask, scaling).transpose(1, 2)


def use_grouped_attention(model: Any) -> bool:
    """Switches a model that runs on sdpa over; False where it runs on something else."""
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(NAME)
    return bool(config._attn_implementation == NAME)
