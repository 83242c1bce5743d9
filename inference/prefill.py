"""Reading prompts into an empty cache: in chunks, and rows of like length together.

Shape suffixes: B rows, G rows that are read together, T tokens, N tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..heads.protocols import Features
from .cache import SlotCache

CHUNK = 512  # tokens a forward of a long prompt, so that its mask stays small
TOGETHER = 8192  # tokens of rows that are read together, so that their states stay small
Forward = Callable[[Tensor, SlotCache, Tensor, None, list[int], Tensor], Features]
"""`TargetModel.forward`."""


def prefill(
    forward: Forward, ids_BT: Tensor, lengths: list[int], cache: SlotCache, taps: list[int]
) -> Features:
    """See `TargetModel.prefill`."""
    parts = []
    for rows in like_lengths(lengths):
        with cache.only(rows):
            ids_GT = ids_BT[rows, : max(lengths[rows])]
            parts.append(_read(forward, ids_GT, lengths[rows], cache, taps))
    return _joined(parts, ids_BT.shape[1])


def forwards(lengths: list[int]) -> int:
    """Forwards that `prefill` takes for prompts of these lengths."""
    return sum(-(-max(lengths[rows]) // CHUNK) for rows in like_lengths(lengths))


def like_lengths(lengths: list[int]) -> list[slice]:
    """Neighbours that are read together: padding, which takes as long as text but where rows are
    ragged, stays below a quarter of it or 64 tokens a row, and all of them below `TOGETHER` unless
    one alone is longer.
    """
    groups, start = [], 0
    for end in range(1, len(lengths) + 1):
        group = lengths[start : end + 1]
        unlike = max(group) > 1.25 * min(group) + 64 or max(group) * len(group) > TOGETHER
        if unlike or end == len(lengths):
            groups.append(slice(start, end))
            start = end
    return groups


def _read(
    forward: Forward, ids_GT: Tensor, lengths: list[int], cache: SlotCache, taps: list[int]
) -> Features:
    parts = []
    for chunk_GN in ids_GT.split(CHUNK, dim=1):
        nodes = chunk_GN.shape[1]
        causal = torch.ones(nodes, nodes, dtype=torch.bool).tril()
        left_G1 = torch.tensor(lengths)[:, None] - cache.lengths[0]
        valid_GN = torch.arange(nodes) < left_G1
        parts.append(forward(chunk_GN, cache, causal[None], None, taps, valid_GN))
        cache.lengths = [length + nodes for length in cache.lengths]
    cache.lengths = list(lengths)
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def _joined(parts: list[Features], width: int) -> Features:
    """Of all rows, padded on the right to `width` tokens."""

    def padded(part: Tensor) -> Tensor:
        return nn.functional.pad(part, (*[0, 0] * (part.ndim - 2), 0, width - part.shape[1]))

    return {name: torch.cat([padded(part[name]) for part in parts]) for name in parts[0]}
