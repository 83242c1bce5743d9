"""KVBuffer: keys and values of one layer of a head, over tokens that stay and over a round's draft.

Shape suffixes: B rows, H key heads, S slots, E width of a head, M tokens or nodes of one call,
N draft nodes of the round so far.

The first `room` slots belong to the draft nodes of the round at hand and are written over by the
next round; slot room + i holds committed token i of a row.  So a draft never touches what stays,
and attention reads one tensor without copying it.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROWTH = 64  # committed slots are allocated in steps of this many
ROOM = 16


class KVBuffer:
    """Preallocated keys and values [B, H, S, E] with one length a row.

    `append` gives a new buffer, which may share storage: the old one still shows what it showed.

    Attributes:
        length_B: committed tokens.
        first: committed tokens before this one are never looked at.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, length_B: Tensor, room: int, first: int
    ) -> None:
        self.keys, self.values, self.room = keys, values, room
        self.length_B, self.first = length_B, first
        self.longest = int(length_B.max()) if len(length_B) else 0

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, length_B: Tensor, first: int = 0) -> KVBuffer:
        """A buffer of right-padded keys and values [B, H, M, E]."""
        rows, heads, _, width = keys.shape
        empty = keys.new_zeros(rows, heads, ROOM, width)
        buffer = cls(empty, empty, torch.zeros_like(length_B), ROOM, first)
        return buffer.append(keys, values, length_B)

    def append(self, keys: Tensor, values: Tensor, count_B: Tensor) -> KVBuffer:
        """The buffer with further tokens behind each row's own.

        Args:
            keys, values: [B, H, M, E], right padded; the padding is written and never looked at.
            count_B: how many of the M tokens each row has.
        """
        new = keys.shape[2]
        self._reserve(self.room, self.longest + new)
        slots_BM = self.room + self.length_B[:, None] + torch.arange(new, device=keys.device)
        rows_B1 = torch.arange(len(keys), device=keys.device)[:, None]
        for buffer, values_BHME in ((self.keys, keys), (self.values, values)):
            buffer[rows_B1, :, slots_BM] = values_BHME.transpose(1, 2).to(buffer.dtype)
        return KVBuffer(self.keys, self.values, self.length_B + count_B, self.room, self.first)

    def draft(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Writes draft nodes start, start + 1, .. of this round."""
        end = start + keys.shape[2]
        self._reserve(end, self.longest)
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values

    def view(
        self, last_BM: Tensor, seen_BMN: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and the mask [B, M, S] of M queries.

        Args:
            last_BM: the last committed token that each query sees; a token that is committed
                itself always sees itself.
            seen_BMN: for draft nodes, which of the round's N nodes each sees.
        """
        end = self.room + self.longest
        place = torch.arange(-self.room, self.longest, device=last_BM.device)
        last = last_BM[..., None]
        floor = last.clamp(max=self.first) if seen_BMN is None else self.first
        mask = (place <= last) & (place >= floor) & (place >= 0)
        if seen_BMN is not None:
            mask[..., : seen_BMN.shape[-1]] = seen_BMN
        return self.keys[:, :, :end], self.values[:, :, :end], mask

    def select(self, rows: Tensor) -> KVBuffer:
        """The buffer of `rows` alone, in storage of its own."""
        return KVBuffer(
            self.keys[rows], self.values[rows], self.length_B[rows], self.room, self.first
        )

    def _reserve(self, room: int, committed: int) -> None:
        """Makes place for so many draft nodes and committed tokens."""
        rows, heads, slots, width = self.keys.shape
        if room <= self.room and self.room + committed <= slots:
            return
        room = max(room, self.room)
        grown = max(committed + committed // 4, self.longest)
        shape = (rows, heads, room + -(-grown // GROWTH) * GROWTH, width)
        old = slice(self.room, self.room + self.longest)
        larger = [b.new_zeros(shape) for b in (self.keys, self.values)]
        for new, buffer in zip(larger, (self.keys, self.values), strict=True):
            new[:, :, : self.room] = buffer[:, :, : self.room]
            new[:, :, room : room + self.longest] = buffer[:, :, old]
        (self.keys, self.values), self.room = larger, room
