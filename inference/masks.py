"""Attention masks over a SlotCache: who may look at which slot.

Shape suffixes: B rows, N draft nodes, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..heads.errors import InputError

KINDS = ("full_attention", "sliding_attention")


def slot_masks(
    kinds: list[str],
    length_B: Tensor,
    position_BN: Tensor,
    ancestors_BNN: Tensor,
    slots: int,
    window: int | None,
    dtype: torch.dtype,
) -> Tensor | dict[str, Tensor]:
    """Additive masks [B, 1, N, S]: 0 where a node may look, the dtype's lowest number elsewhere.

    Float masks, since eager attention adds a bool one as 0 and 1.

    Args:
        kinds: of the model's layers; one alone gives a tensor, several a dict by kind.
        length_B: committed tokens of each row, in slots 0..length-1; node n is in slot length + n.
        position_BN: of the nodes.
        ancestors_BNN: entry (n, m): node n may look at node m; the first axis may be 1.
        slots: S.
        window: of sliding layers, in positions; a committed token's position is its slot.
    """
    rows, nodes = position_BN.shape
    device = length_B.device
    slot_S = torch.arange(slots, device=device)
    seen_BNS = (slot_S < length_B[:, None])[:, None].repeat(1, nodes, 1)
    node_BN = length_B[:, None] + torch.arange(nodes, device=device)
    node_BNN = node_BN[:, None].expand(rows, nodes, nodes)
    seen_BNS.scatter_(2, node_BNN, ancestors_BNN.expand(rows, nodes, nodes))
    masks = {}
    for kind in kinds:
        allowed = seen_BNS
        if kind == "sliding_attention" and window and slots > window:
            place_BS = slot_S.expand(rows, slots).scatter(1, node_BN, position_BN)
            allowed = allowed & (position_BN[:, :, None] - place_BS[:, None] < window)
        mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
        masks[kind] = mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
    return masks if len(kinds) > 1 else masks[kinds[0]]


def sliding_window(config: Any) -> int | None:
    """Positions that the sliding layers of a model look back; None where there are none."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return getattr(config, "sliding_window", None)


def layer_kinds(model: Any, config: Any) -> list[str]:
    """Kinds of attention of a model's layers; one alone is passed as a tensor, several as a dict.

    Raises:
        InputError: layers of another kind, or no model that generates.
    """
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not hasattr(model, "generate"):
        raise InputError(
            f"target {config.model_type!r} has layers of kind {unknown}",
            f"Supported are decoder-only models with {' and '.join(KINDS)} layers.",
        )
    return kinds or ["sliding_attention" if sliding_window(config) else "full_attention"]
