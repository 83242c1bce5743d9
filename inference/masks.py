"""Attention masks over a SlotCache: who may look at which slot.

Shape suffixes: B rows, N draft nodes, S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
