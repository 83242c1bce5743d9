"""Held-out tau at temperature 0, and the sums by depth that training reports too.

Shape suffixes: K depths.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..heads import Head
from .features import FeatureSource
from .packing import Document

METRICS = ("loss", "top1", "prefix")


class Tally:
    """Sums over loss rows by depth; they add up over batches and processes before any division."""

    def __init__(self, depth: int, device: torch.device) -> None:
        self.sums = torch.zeros(len(METRICS) + 1, depth, dtype=torch.float64, device=device)

    def add(self, out: dict[str, Tensor], counts_K: Tensor) -> None:
        """Adds what `Head.forward` and `Head.counts` gave for a batch."""
        parts = [*(out[name].detach() for name in METRICS), counts_K]
        self.sums += torch.stack([part.to(self.sums.dtype) for part in parts])

    def reduce(self, accelerator: Accelerator) -> None:
        """Adds up over processes; all of them must call it."""
        self.sums = accelerator.reduce(self.sums, "sum")

    def finite(self) -> bool:
        """No sum is infinite or NaN."""
        return bool(self.sums.isfinite().all())

    def means(self, weights_K: Tensor) -> dict[str, Any]:
        """Metrics; None at depths without loss rows.

        Args:
            weights_K: of the loss, `Head.loss_weights`.
        Returns:
            tau = 1 + sum_k P(the first k drafted tokens are all right), tau_by_depth (these
            probabilities), top1 and loss_k by depth, and the weighted loss.
        """
        *sums, counts = self.sums.cpu()
        loss, top1, prefix = (
            [s / n if n else None for s, n in zip(row.tolist(), counts.tolist(), strict=True)]
            for row in sums
        )
        weighted = zip(weights_K.tolist(), loss, strict=True)
        return {
            "tau": 1 + sum(p for p in prefix if p is not None),
            "tau_by_depth": prefix,
            "top1": top1,
            "loss": sum(w * x for w, x in weighted if x is not None),
            "loss_k": loss,
        }


@torch.no_grad()
def evaluate(
    head: Head,
    documents: list[Document],
    features: FeatureSource,
    batch_size: int,
    accelerator: Accelerator,
) -> dict[str, Any]:
    """`Tally.means` over `documents`, each counted once whatever the number of processes."""
    tally, world = Tally(head.config.depth, accelerator.device), accelerator.num_processes
    mine = documents[accelerator.process_index :: world]
    head.eval()
    # Forwards of a sharded head are collective: all processes take as many as the first.
    for start in range(0, math.ceil(len(documents) / world), batch_size):
        rows = mine[start : start + batch_size]
        shown = rows or documents[:1]
        batch = to_device(features.collate(shown), accelerator.device)
        out = head(batch, features.get(shown))
        if rows:
            tally.add(out, head.counts(batch))
    head.train()
    tally.reduce(accelerator)
    return tally.means(head.loss_weights())


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch on `device`."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
