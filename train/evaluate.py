"""Held-out tau at temperatures 0 and 1, and the sums by depth that training reports too.

Shape suffixes: K depths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..heads import Head
from ..heads.calibration import FACTORS, sharpness
from .data import Documents
from .features import FeatureSource
from .packing import Document

METRICS = ("loss", "top1", "prefix")
EVALUATED = (*METRICS, "accepted", "chance")
"""What `Head.forward` gives: always, and in evaluation."""
Autocast = Callable[[], AbstractContextManager[Any]]
"""What stands around the head's forwards, and not around the target's: see `Engine.autocast`."""
TAUS = ("tau", "tau_by_depth", "tau_t1", "tau_t1_by_depth")


class Tally:
    """Sums over loss rows by depth; they add up over batches and processes before any division.

    Args:
        names: of the sums, see `Head.forward`.
    """

    def __init__(self, depth: int, device: torch.device, names: tuple[str, ...] = METRICS) -> None:
        self.names, self.rows = names, [FACTORS if name == "chance" else 1 for name in names]
        self.sums = torch.zeros(sum(self.rows) + 1, depth, dtype=torch.float64, device=device)

    def add(self, out: dict[str, Tensor], counts_K: Tensor) -> None:
        """Adds what `Head.forward` and `Head.counts` gave for a batch."""
        parts = [*(out[name].detach() for name in self.names), counts_K]
        self.sums += torch.cat([part.to(self.sums.dtype).view(-1, len(counts_K)) for part in parts])

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
            probabilities), top1 and loss_k by depth, and the weighted loss; where `accepted` was
            added up, also tau_t1 and tau_t1_by_depth, the same for drafts that are drawn and
            accepted at temperature 1 (see `losses._accepted`), and the head's `sharpness`.
        """
        *sums, counts = self.sums.cpu().tolist()
        means = [[s / n if n else None for s, n in zip(row, counts, strict=True)] for row in sums]
        ends = list(accumulate(self.rows))
        by_name = {name: means[end - 1] for name, end in zip(self.names, ends, strict=True)}
        weighted = zip(weights_K.tolist(), by_name["loss"], strict=True)
        found = {
            **_tau("tau", by_name["prefix"]),
            "top1": by_name["top1"],
            "loss": sum(w * x for w, x in weighted if x is not None),
            "loss_k": by_name["loss"],
        }
        if "accepted" in by_name:
            found |= _tau("tau_t1", by_name["accepted"])
        if "chance" in by_name:
            chances = means[ends[-1] - FACTORS : ends[-1]]
            found["sharpness"] = sharpness(chances, by_name["top1"])
        return found


def _tau(name: str, by_depth: list[float | None]) -> dict[str, Any]:
    return {name: 1 + sum(p for p in by_depth if p is not None), f"{name}_by_depth": by_depth}


@torch.no_grad()
def evaluate(
    head: Head,
    documents: list[Document],
    features: FeatureSource,
    batch_size: int,
    accelerator: Accelerator,
    autocast: Autocast = nullcontext,
) -> dict[str, Any]:
    """`Tally.means` over `documents`, each counted once whatever the number of processes.

    tau is exact for documents that the target wrote greedily, tau_t1 for those that it drew at
    temperature 1; on other text they are estimates.
    """
    tally = Tally(head.config.depth, accelerator.device, EVALUATED)
    world = accelerator.num_processes
    mine = documents[accelerator.process_index :: world]
    head.eval()
    # Forwards of a sharded head are collective: all processes take as many as the first.
    for start in range(0, math.ceil(len(documents) / world), batch_size):
        rows = mine[start : start + batch_size]
        shown = rows or documents[:1]
        batch = to_device(features.collate(shown), accelerator.device)
        states = features.get(shown)
        with autocast():
            out = head(batch, states)
        if rows:
            tally.add(out, head.counts(batch))
    head.train()
    tally.reduce(accelerator)
    return tally.means(head.loss_weights())


def measure(
    head: Head,
    documents: Documents,
    features: FeatureSource,
    batch_size: int,
    accelerator: Accelerator,
    autocast: Autocast = nullcontext,
) -> dict[str, Any]:
    """Held-out figures: those at temperature 1 on answers that were drawn at it, where there are
    some, all others on `documents.eval`."""
    found = evaluate(head, documents.eval, features, batch_size, accelerator, autocast)
    if documents.drawn not in ([], documents.eval):
        drawn = evaluate(head, documents.drawn, features, batch_size, accelerator, autocast)
        found |= {name: drawn[name] for name in TAUS if "t1" in name}
    return {name: found[name] for name in (*TAUS, "top1", "loss", "sharpness")}


def described(found: dict[str, Any]) -> str:
    """The figures of `measure`, and tau of real decoding where it is there, in words."""
    decoded = f", decoded {found['tau_decoded']:.3f}" if "tau_decoded" in found else ""
    return (
        f"tau {found['tau']:.3f}, at temperature 1 {found['tau_t1']:.3f}{decoded}, "
        f"loss {found['loss']:.3f}"
    )


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch on `device`."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
