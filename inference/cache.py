"""SlotCache: a KV cache whose rows have lengths of their own and which keeps any path of a draft.

Shape suffixes: B rows, H key heads, S slots, D head width, N draft nodes.

Slot length_b + n holds draft node n of row b.  A rejected node's slot is masked, then overwritten:
zeroing it would still give it weight e^0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from .ragged import Ragged

GROWTH = 64  # slots are allocated in steps of this many


class SlotCache(Cache):
    """Preallocated keys and values with one length a row.

    Args:
        layers: decoder layers of the target.
        rows: B.
        capacity: slots to allocate at once; grows when more are asked for.

    Attributes:
        lengths: tokens in the cache, a row each, on the host.
        end: slots in use by the current forward.
    """

    _rows = slice(None)  # that the current forward reads and writes

    def __init__(self, layers: int, rows: int, capacity: int) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.lengths, self._count = [0] * rows, rows
        self.capacity = _round_up(capacity)
        # Where the current forward writes: slots of all rows, or [2, B, N] rows and slots, which
        # are [2, 1, T] where rows are ragged.
        self._places: slice | Callable[[torch.device], Tensor] = slice(0, 0)
        self.end = 0

    @contextmanager
    def only(self, rows: slice) -> Iterator[None]:
        """Inside, this is the cache of `rows` alone."""
        everything, self.lengths, self._rows = self.lengths, self.lengths[rows], rows
        try:
            yield
        finally:
            everything[rows], self.lengths, self._rows = self.lengths, everything, slice(None)

    def open(self, nodes: int, device: torch.device, ragged: Ragged | None = None) -> Tensor:
        """Announces the next forward over `nodes` nodes a row.

        Args:
            ragged: where the forward reads the nodes of all rows as one row.
        Returns:
            [B] the rows' lengths on `device`.
        """
        lengths_B = torch.tensor(self.lengths, device=device)
        self.end = max(self.lengths) + nodes
        if self.end > self.capacity:
            # By a quarter, so that a long answer copies each token a few times only.
            self._grow(_round_up(max(self.end, self.capacity * 5 // 4)))
        if ragged is None and min(self.lengths) == max(self.lengths):
            self._places = slice(self.lengths[0], self.end)
            return lengths_B
        slots_BN = lengths_B[:, None] + torch.arange(nodes, device=device)
        rows_BN = torch.arange(len(slots_BN), device=device)[:, None].expand_as(slots_BN)
        places = [x if ragged is None else ragged.close(x) for x in (rows_BN, slots_BN)]
        self._places = _everywhere(torch.stack(places))
        return lengths_B

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes a layer's new keys and values [B, H, N, D], or [1, H, T, D] of ragged rows, and
        returns all slots in use."""
        return (
            self._write(self.keys, key_states, layer_idx),
            self._write(self.values, value_states, layer_idx),
        )

    def _write(self, buffers: list[Tensor | None], new: Tensor, layer: int) -> Tensor:
        buffer = buffers[layer]
        if buffer is None:
            _, heads, _, width = new.shape
            buffer = new.new_zeros(self._count, heads, self.capacity, width)
            buffers[layer] = buffer
        buffer = buffer[self._rows]
        if isinstance(self._places, slice):
            buffer[:, :, self._places] = new
        else:
            rows_BN, slots_BN = self._places(new.device)
            buffer[rows_BN, :, slots_BN] = new.transpose(1, 2)
        return buffer[:, :, : self.end]

    def keep(self, paths: list[list[int]]) -> None:
        """Keeps, for each row, the draft nodes of an accepted path, root first."""
        moves = [
            (row, start + node, start + place)
            for row, (start, path) in enumerate(zip(self.lengths, paths, strict=True))
            for place, node in enumerate(path)
            if node != place
        ]
        self.lengths = [start + len(p) for start, p in zip(self.lengths, paths, strict=True)]
        if not moves:
            return
        moved = _everywhere(torch.tensor(moves).T)
        for buffer in (*self.keys, *self.values):
            if buffer is not None:
                rows_M, from_M, to_M = moved(buffer.device)
                buffer[rows_M, :, to_M] = buffer[rows_M, :, from_M]  # all are read first

    def select(self, rows: list[int]) -> None:
        """Keeps `rows` alone, in that order."""
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        # Rows that only move up into freed places are moved where they lie.
        in_place = all(old >= len(rows) for _, old in moved)
        for buffers in (self.keys, self.values):
            for layer, buffer in enumerate(buffers):
                if buffer is None:
                    continue
                for new, old in moved if in_place else []:
                    buffer[new] = buffer[old]
                buffers[layer] = buffer[: len(rows)] if in_place else buffer[rows]
        self.lengths, self._count = [self.lengths[row] for row in rows], len(rows)

    def _grow(self, capacity: int) -> None:
        for buffers in (self.keys, self.values):
            for layer, buffer in enumerate(buffers):
                if buffer is not None:
                    rows, heads, slots, width = buffer.shape
                    larger = buffer.new_zeros(rows, heads, capacity, width)
                    larger[:, :, :slots] = buffer
                    buffers[layer] = larger
        self.capacity = capacity

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Length of the longest row."""
        return max(self.lengths)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """(slots in use, offset 0): asked for by transformers' mask code."""
        return self.end, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: no fixed length."""
        return -1


def _everywhere(index: Tensor) -> Callable[[torch.device], Tensor]:
    """`index` on any device, copied to each once."""
    return cache(index.to)


def _round_up(slots: int) -> int:
    return -(-max(slots, 1) // GROWTH) * GROWTH
