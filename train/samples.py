"""Answers of the head in training, its drafted tokens marked: what trackers show."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..heads import Plan, load_head
from ..heads.protocols import Drafter
from ..inference.decode import Row, decode
from ..inference.settings import Settings
from ..inference.statistics import Stats
from ..inference.target import TargetModel
from .config import TrainConfig

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
    folder: Path, target: TargetModel, documents: list[Document], config: TrainConfig
) -> list[Sample]:
    """Greedy answers to the prompts of `documents` with the head in `folder`, one process alone."""
    with torch.random.fork_rng():  # a new head draws its weights before it is given those on disk
        head = load_head(folder, target.spec)
    prompts = [document.ids[: document.loss_mask.index(True)] for document in documents]
    tokens = config.tracking.sample_tokens
    return [answer(target, head, ids, tokens) for ids in prompts[: config.tracking.samples] if ids]


def answer(target: TargetModel, head: Drafter, prompt: list[int], tokens: int) -> Sample:
    """A greedy answer of at most `tokens` tokens."""
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
