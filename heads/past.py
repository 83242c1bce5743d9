"""A head's decoder layer over a row's past: in training read at the loss rows, in decoding at the
last token.

Shape suffixes: B rows, T tokens, M committed tokens or loss rows, R loss rows of a batch row, W
width, I width of what attention reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kv import KVBuffer
from .layers import DecoderLayer, tokens_of
from .spec import TargetWeights

COPIED = ("q_proj", "k_proj", "v_proj", "mlp_norm", "gate_proj", "up_proj")


def start_layer(layer: DecoderLayer, weights: TargetWeights) -> None:
    """Copies the target's last layer where shapes fit; output projections stay zero."""
    for name in COPIED:
        ours, theirs = getattr(layer, name).weight, weights.last_layer.get(name)
        if theirs is not None and theirs.shape == ours.shape:
            ours.data.copy_(theirs)


class LossRows:
    """Those of depth 1, which hold those of all other depths, batch row by batch row.

    Args:
        rows_M: flat positions b*T+t.
        shape: [B, T].
    Attributes:
        place_BR: the t of each, padded with 0.
    """

    def __init__(self, rows_M: Tensor, shape: torch.Size) -> None:
        batch, time = shape
        row, place = rows_M // time, rows_M % time
        counts = row.bincount(minlength=batch)
        width = max(1, int(counts.max()))
        before = counts.cumsum(0) - counts
        column = torch.arange(len(rows_M), device=rows_M.device) - before[row]
        self.place_BR = rows_M.new_zeros(batch, width)
        self.place_BR[row, column] = place
        self._rows_M, self._slot_M = rows_M, row * width + column

    def of(self, value_BT: Tensor) -> Tensor:
        """[B, R, ..] of values [B, T, ..]."""
        rows_B1 = torch.arange(len(value_BT), device=value_BT.device)[:, None]
        return value_BT[rows_B1, self.place_BR]

    def flat(self, value_BRW: Tensor, rows_M: Tensor) -> Tensor:
        """[M, W] at some of the flat positions."""
        return value_BRW.flatten(0, 1)[self._slot_M[torch.searchsorted(self._rows_M, rows_M)]]


def read_rows(
    layer: DecoderLayer,
    residual_BTW: Tensor,
    inputs_BTI: Tensor,
    document_BT: Tensor | None,
    rows: LossRows,
    first_position: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output [B, R, W] at loss rows, and the keys, values and mask [B, R, T] that it came through.

    Args:
        first_position: of a row's first token.
    """
    batch, time = inputs_BTI.shape[:2]
    place_BT = torch.arange(time, device=inputs_BTI.device).expand(batch, time)
    query, keys, values = layer.project(inputs_BTI, place_BT + first_position)
    mask = rows.of(row_mask(place_BT, document_BT))
    out = layer(rows.of(residual_BTW), tokens_of(query, rows.place_BR), keys, values, mask)
    return out, keys, values, mask


def read_last(
    layer: DecoderLayer,
    cache: KVBuffer | None,
    residual_BMW: Tensor,
    inputs_BMI: Tensor,
    count_B: Tensor,
    first_position: int = 0,
) -> tuple[Tensor, KVBuffer]:
    """Output [B, W] at each row's last token, after `count_B` further ones that enter the cache.

    Args:
        cache: of the tokens before; None where there are none.
        first_position: of a row's first token.
    """
    length_B = torch.zeros_like(count_B) if cache is None else cache.length_B
    row_BM = length_B[:, None] + torch.arange(inputs_BMI.shape[1], device=count_B.device)
    query, keys, values = layer.project(inputs_BMI, row_BM + first_position)
    if cache is None:
        cache = KVBuffer.of(keys, values, count_B)
    else:
        cache = cache.append(keys, values, count_B)
    at, new_B1 = torch.arange(len(count_B), device=count_B.device)[:, None], count_B[:, None] - 1
    view = cache.view(cache.length_B[:, None] - 1)
    return layer(residual_BMW[at, new_B1], tokens_of(query, new_B1), *view)[:, 0], cache


def row_mask(place_BT: Tensor, document_BT: Tensor | None, first: int = 0) -> Tensor:
    """[B, T, T] who sees whom among true tokens at places 0, 1, ..: the past, from `first` on, of
    one document; everyone sees itself."""
    other, own = place_BT[:, None], place_BT[:, :, None]
    mask = (other <= own) & (other >= own.clamp(max=first))
    if document_BT is None:
        return mask
    return mask & (document_BT[:, None] == document_BT[:, :, None])
