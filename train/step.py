"""The rows of each step, and an optimizer step whose gradient does not depend on how they are
split.

Loss = sum_k w_k S_k / N_k, with N_k the loss rows of depth k in the whole global batch: all
processes and all micro-batches of the accumulation window.

Shape suffixes: K depths.
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ..heads import Head, InputError
from .engine import Engine
from .evaluate import Tally, to_device
from .features import FeatureSource
from .packing import Document, row_order

PATIENCE = 10  # steps in a row that may be skipped


class Batches:
    """The global stream of rows, cut into steps.

    Row i of the run is document row_order(documents, seed, i // n)[i % n]: a function of the seed
    and i alone, so a resumed run goes on with the very next row.
    """

    def __init__(
        self,
        documents: list[Document],
        seed: int,
        batch_size: int,
        accumulate: int,
        world: int,
        bucket: int = 1,
    ) -> None:
        """Args:
        bucket: see `packing.row_order`.
        """
        self.documents, self.batch_size, self.accumulate = documents, batch_size, accumulate
        self.world = world
        self.size = batch_size * accumulate * world
        self._order = lru_cache(maxsize=2)(lambda epoch: row_order(documents, seed, epoch, bucket))

    def rows(self, step: int) -> list[Document]:
        """The global batch of `step`, counted from 0."""
        count = len(self.documents)
        stream = range(step * self.size, (step + 1) * self.size)
        return [self.documents[self._order(i // count)[i % count]] for i in stream]

    def micro(self, step: int, rank: int) -> list[list[Document]]:
        """The micro-batches of process `rank` in `step`."""
        rows, width = self.rows(step), self.batch_size
        starts = [(a * self.world + rank) * width for a in range(self.accumulate)]
        return [rows[start : start + width] for start in starts]


def learning_rate(step: int, steps: int, warmup: int, peak: float, spent: float = 0.0) -> float:
    """Of step 0, 1, .., steps - 1: linear up to `peak` over `warmup` steps, then a cosine that
    would reach 0 at `steps`, or when all time is spent, whichever comes first.

    Args:
        spent: share of the run's time that is spent before this step.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = max((step - warmup) / max(1, steps - warmup), min(1.0, spent))
    return peak * 0.5 * (1 + math.cos(math.pi * done))


def depth_scales(weights_K: Tensor, counts_K: Tensor) -> Tensor:
    """w_k / N_k; 0 where N_k = 0, so that such a depth still takes part in the backward."""
    return torch.where(counts_K > 0, weights_K / counts_K.clamp(min=1), 0.0)


class Stepper:
    """Takes optimizer steps, and skips those that are not finite.

    Attributes:
        tally: sums of the last step over the global batch.
        grad_norm: of the last step, before clipping.
    """

    def __init__(self, engine: Engine, features: FeatureSource) -> None:
        self.engine, self.accelerator, self.features = engine, engine.accelerator, features
        self.module: Head = self.accelerator.unwrap_model(engine.head)
        self.tally, self.grad_norm = Tally(self.module.config.depth, self.accelerator.device), 0.0
        self.skipped = 0

    def __call__(
        self,
        micro: list[list[Document]],
        step: int,
        lr: float,
        following: list[Document] | None = None,
    ) -> bool:
        """Takes step `step` on this process's micro-batches.

        Args:
            following: the next step's first micro-batch, whose features are read meanwhile.
        Returns:
            False where it was skipped because the loss or the gradient was not finite; every
            process gets the same answer.
        Raises:
            InputError: the last of PATIENCE such steps in a row.
        """
        self._backward(micro, following)
        self.grad_norm = self.engine.step(lr)
        fine = math.isfinite(self.grad_norm)
        self.skipped = 0 if fine else self.skipped + 1
        if not fine:
            self._report([d for rows in micro for d in rows], step)
        return fine

    def _backward(
        self, micro: list[list[Document]], following: list[Document] | None = None
    ) -> None:
        device, world = self.accelerator.device, self.accelerator.num_processes
        batches = [to_device(self.features.collate(rows), device) for rows in micro]
        counts = [self.module.counts(batch) for batch in batches]
        total_K = self.accelerator.reduce(torch.stack(counts).sum(0), "sum")
        # Times the number of processes: the engine averages gradients over them.
        scale_K = depth_scales(self.module.loss_weights().to(device), total_K) * world
        self.tally = Tally(len(total_K), device)
        for number, (rows, batch) in enumerate(zip(micro, batches, strict=True), start=1):
            last = number == len(micro)
            features = self.features.get(rows)
            if upcoming := following if last else micro[number]:
                self.features.expect(upcoming)
            with self.engine.micro_step(last):
                out = self.engine.head(batch, features)
                self.tally.add(out, counts[number - 1])
                loss = (out["loss"] * scale_K).sum()
                if last:
                    self.tally.reduce(self.accelerator)
                    # All processes see these sums: bad ones spoil every gradient, and no engine
                    # takes such a step.
                    loss = loss if self.tally.finite() else loss * torch.nan
                self.engine.backward(loss)

    def _report(self, documents: list[Document], step: int) -> None:
        """Names the rows at fault, from all processes."""
        faults = [fault for row in documents for fault in self._faults(row)]
        faults = gather_object(faults)
        named = "; ".join(faults) or "no single row is at fault, their sum overflows"
        message = (
            f"step {step} of the {self.module.kind} head was skipped, its loss or gradient is not "
            f"finite: {named}"
        )
        if self.skipped >= PATIENCE:
            raise InputError(
                f"{PATIENCE} steps in a row were not finite; {message}",
                "Lower optim.lr, or look at the rows that are named; resume=FOLDER goes on from a "
                "checkpoint, and those before the first such step are kept.",
            )
        if self.accelerator.is_main_process:
            warnings.warn(message, stacklevel=2)

    def _faults(self, document: Document) -> list[str]:
        """Depths at which this row alone gives a loss or a gradient that is not finite."""
        batch = to_device(self.features.collate([document]), self.accelerator.device)
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        states = self.features.get([document])
        with self.engine.autocast():
            loss_K = self.module(batch, states)["loss"]
        bad = []
        for depth, loss in enumerate(loss_K, start=1):
            grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            found = [loss.detach(), *(g for g in grads if g is not None)]
            if not all(t.isfinite().all() for t in found):
                bad.append(f"depth {depth} of row {document.row}")
        return bad
