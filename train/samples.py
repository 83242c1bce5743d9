"""Held-out prompts answered with the head in training: what trackers show, its drafted tokens
marked, and tokens a round of real decoding."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from ..heads import HEADS, Head, Plan, load_head
from ..heads.protocols import Drafter
from ..inference.decode import Row, decode
from ..inference.settings import Settings
from ..inference.statistics import Stats
from ..inference.target import TargetModel
from .config import TrackingConfig
from .ranks import is_main

if TYPE_CHECKING:
    from .packing import Document

MARKS = "⟦", "⟧"


class Sample(NamedTuple):
    """One answer; ⟦ ⟧ in `text` are around accepted draft tokens, `tau` is tokens a round."""

    prompt: str
    text: str
    tokens: int
    tau: float


COLUMNS = Sample._fields


def make_samples(
    folder: Path, target: TargetModel, documents: list[Document], tracking: TrackingConfig
) -> list[Sample]:
    """Greedy answers to prompts of `documents` with the head in `folder`, one process alone."""
    # A new head draws its weights before it is given those on disk.
    with torch.random.fork_rng(devices=[]):
        head = load_head(folder, target.spec)
    return _answers(head, target, documents, tracking)


def decoded_tau(
    weights: dict[str, Tensor],
    of: Head,
    target: TargetModel,
    documents: list[Document],
    tracking: TrackingConfig,
) -> float:
    """Tokens a round, over all rounds of the same answers, with a head like `of` and `weights`.
    Every process must ask for it; one decodes."""
    found = [1.0]
    if is_main():
        with torch.random.fork_rng(devices=[]):
            head = HEADS[of.kind](of.config, target.spec, of.draft_ids)
        head.load_state_dict(weights)
        head.requires_grad_(False).eval().to(target.spec.device, target.spec.dtype)
        samples = _answers(head, target, documents, tracking)
        # The prefill gives each answer's first token, in no round.
        tokens = [sample.tokens - 1 for sample in samples]
        rounds = sum(n / sample.tau for n, sample in zip(tokens, samples, strict=True))
        found = [sum(tokens) / rounds if rounds else 1.0]
    return float(broadcast_object_list(found)[0])


def _answers(
    head: Head, target: TargetModel, documents: list[Document], tracking: TrackingConfig
) -> list[Sample]:
    """To the first distinct prompts of documents that have one."""
    every = (tuple(document.ids[: document.loss_mask.index(True)]) for document in documents)
    prompts = [list(ids) for ids in dict.fromkeys(every) if ids][: tracking.samples]
    return [answer(target, head, ids, tracking.sample_tokens) for ids in prompts]


def answer(target: TargetModel, head: Drafter, prompt: list[int], tokens: int) -> Sample:
    """A greedy answer of at most `tokens` tokens, a chain of the head's full depth a round."""
    limit = min(tokens, target.spec.max_positions - len(prompt))
    row, stats = Row(0, prompt, 0, limit, target.eos_ids), Stats()
    accepted: list[bool] = []
    for commits in decode(target, head, [row], Settings(), Plan(depth=head.max_depth), stats):
        drafted = sum(stats.accepted_by_depth) - sum(accepted)
        accepted += [place < drafted for place in range(len(commits[0].tokens))]
    text = marked(target.tokenizer, row.new, accepted)
    shown = target.tokenizer.decode(prompt, skip_special_tokens=True)
    return Sample(shown, text, len(row.new), stats.tokens_per_round)


def marked(tokenizer: Any, ids: list[int], accepted: list[bool]) -> str:
    """The text of `ids`, with marks around runs of accepted tokens."""
    pieces, end, before = [], 0, ""
    for drafted, run in groupby(accepted):
        end += len(list(run))
        text = tokenizer.decode(ids[:end], skip_special_tokens=True)
        piece, before = text[len(before) :], text
        pieces.append(piece.join(MARKS) if drafted else piece)
    return "".join(pieces)
