"""How documents stand in batches: their order in a run, and their places in the rows of a batch.

Both are layout only: the loss and the gradient of a step are those of its documents, however they
are padded or packed.

Shape suffixes: B rows, T tokens, N documents.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..heads.protocols import Features


@dataclass(frozen=True)
class Document:
    """One row of the data.

    Attributes:
        loss_mask: True where the target (or a chat's assistant) generated the token.
        temperature: of a prepared answer; None where it is not known.
        row: number of the line or the element in the file, from 1.
        prompt_key: rows with equal keys answer the same prompt.
    """

    ids: list[int]
    loss_mask: list[bool]
    temperature: float | None
    row: int
    prompt_key: str


def digest(documents: list[Document]) -> str:
    """A hash of the rows' numbers, tokens and loss masks, whatever their order."""
    found = hashlib.sha256()
    for document in sorted(documents, key=lambda d: d.row):
        found.update(np.array([document.row, len(document.ids), *document.ids]).tobytes())
        found.update(bytes(document.loss_mask))
    return found.hexdigest()


# -- order ---------------------------------------------------------------------------------------

WINDOW = 64
"""Blocks of a window: lengths are compared within it, so that training stays well mixed."""


def order(seed: int, epoch: int, n: int) -> np.ndarray:
    """[n] a permutation that depends on (seed, epoch) alone.

    Raw bits of PCG64 are the same in every numpy release, `Generator.permutation` need not be.
    """
    return np.argsort(_bits([seed, epoch], n), kind="stable")


def row_order(documents: list[Document], seed: int, epoch: int, block: int = 1) -> np.ndarray:
    """[N] the order of an epoch, a function of (seed, epoch) and the documents alone.

    Args:
        block: that many neighbours have like lengths, so that a batch needs little padding; each
            window of `order` is sorted by length, cut into blocks, and these are shuffled.
    """
    shuffled = order(seed, epoch, len(documents))
    if block == 1:
        return shuffled
    lengths = np.array([len(documents[i].ids) for i in shuffled])
    blocks: list[np.ndarray] = []
    for start in range(0, len(shuffled), block * WINDOW):
        window = shuffled[start : start + block * WINDOW]
        by_length = window[np.argsort(lengths[start : start + block * WINDOW], kind="stable")]
        parts = [by_length[i : i + block] for i in range(0, len(window), block)]
        mixed = np.argsort(_bits([seed, epoch, start], len(parts)), kind="stable")
        blocks += [parts[i] for i in mixed]
    return np.concatenate(blocks)


def _bits(key: list[int], n: int) -> np.ndarray:
    return np.random.PCG64(np.random.SeedSequence(key)).random_raw(n)


# -- places --------------------------------------------------------------------------------------


def places(documents: list[Document], pack: int | None) -> list[tuple[int, int]]:
    """(row, first column) of each document: a row of its own or, with `pack`, a place behind others
    in the first row that has room, of at most `pack` tokens, the longest documents first."""
    if pack is None:
        return [(row, 0) for row in range(len(documents))]
    used: list[int] = []
    found = {}
    for index in sorted(range(len(documents)), key=lambda i: -len(documents[i].ids)):
        size = len(documents[index].ids)
        row = next((r for r, filled in enumerate(used) if filled + size <= pack), len(used))
        used += [0] * (row == len(used))
        found[index] = row, used[row]
        used[row] += size
    return [found[index] for index in range(len(documents))]


def collate(
    documents: list[Document], pad_id: int = 0, pack: int | None = None
) -> dict[str, Tensor]:
    """A right-padded batch.

    Args:
        pack: several documents share a row of at most so many tokens.
    Returns:
        `ids` [B, T] int64, `loss_mask` [B, T] bool (False on padding), `length` [B] int64; with
        `pack` also `document` [B, T] int64, the number of a token's document (-1 on padding), and
        `position` [B, T] int64, the token's place in it.
    """
    where = places(documents, pack)
    rows = 1 + max(row for row, _ in where)
    length_B = torch.zeros(rows, dtype=torch.int64)
    for (row, start), document in zip(where, documents, strict=True):
        length_B[row] = max(int(length_B[row]), start + len(document.ids))
    shape = rows, int(length_B.max())
    batch = {"ids": torch.full(shape, pad_id), "loss_mask": torch.zeros(shape, dtype=torch.bool)}
    if pack is not None:
        batch |= {"document": torch.full(shape, -1), "position": torch.zeros(shape).long()}
    for number, ((row, start), document) in enumerate(zip(where, documents, strict=True)):
        span = slice(start, start + len(document.ids))
        batch["ids"][row, span] = torch.tensor(document.ids)
        batch["loss_mask"][row, span] = torch.tensor(document.loss_mask)
        if pack is not None:
            batch["document"][row, span] = number
            batch["position"][row, span] = torch.arange(len(document.ids))
    return batch | {"length": length_B}


def collate_features(rows: list[Features], where: list[tuple[int, int]]) -> Features:
    """Features [T_i, ..] of documents at their `places`, zero elsewhere: [B, T, ..]."""
    height = 1 + max(row for row, _ in where)
    lengths = [len(row["hidden"]) for row in rows]
    width = max(start + n for (_, start), n in zip(where, lengths, strict=True))
    out = {
        name: value.new_zeros(height, width, *value.shape[1:]) for name, value in rows[0].items()
    }
    for (row, start), n, found in zip(where, lengths, rows, strict=True):
        for name, value in found.items():
            out[name][row, start : start + n] = value
    return out
