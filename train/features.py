"""Batches and the target's features in them, computed for each batch or read from elsewhere."""

from __future__ import annotations

from torch import Tensor

from ..heads.protocols import Features
from ..inference.target import TargetModel
from .packing import Document, collate, collate_features, places
from .rounding import decode, encode


class FeatureSource:
    """Where training gets batches from, and the target's features in them."""

    def __init__(self, target: TargetModel, pack: int | None = None) -> None:
        """Args:
        pack: documents share rows of at most so many tokens.
        """
        self.target, self.pack = target, pack

    def collate(self, documents: list[Document]) -> dict[str, Tensor]:
        """The batch of `documents`: see `packing.collate`."""
        return collate(documents, pack=self.pack)

    def get(self, documents: list[Document]) -> Features:
        """Features of that batch, zero where it has no token, on the target's device and in its
        dtype, rounded to the cache's dtype on the way."""
        laid = self._laid(documents)
        return {name: value.to(self.target.spec.device) for name, value in laid.items()}

    def expect(self, documents: list[Document]) -> None:
        """Says what `get` is asked for next; a source that reads begins now, in the background."""

    def _laid(self, documents: list[Document]) -> Features:
        rows = [decode(row, self.target.spec.dtype) for row in self._stored(documents)]
        return collate_features(rows, places(documents, self.pack))

    def _stored(self, documents: list[Document]) -> list[Features]:
        raise TypeError(f"{type(self).__name__} does not say where its features are")


class OnlineFeatures(FeatureSource):
    """Features computed anew for each batch, through the same rounding as cached ones."""

    def __init__(
        self, target: TargetModel, taps: list[int], dtype: str, pack: int | None = None
    ) -> None:
        super().__init__(target, pack)
        self.taps, self.dtype = taps, dtype

    def _stored(self, documents: list[Document]) -> list[Features]:
        return compute(self.target, documents, self.taps, self.dtype)


def compute(
    target: TargetModel, documents: list[Document], taps: list[int], dtype: str
) -> list[Features]:
    """Features of each document as they are stored, from one forward: hidden [T, D], taps
    [T, K, D]."""
    batch = collate(documents)
    device = target.spec.device
    found = target.features(batch["ids"].to(device), batch["length"].to(device), taps)
    lengths = batch["length"].tolist()
    return [
        encode({name: tensor[row, :length] for name, tensor in found.items()}, dtype)
        for row, length in enumerate(lengths)
    ]
