"""From a file to documents with a loss mask, within max_length, for training and for evaluation.

Rows that cannot be used are skipped, and counted by reason.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..heads.errors import InputError
from ..inference.target import TargetModel
from .chat import masked_chat
from .config import TrainConfig
from .formats import (
    Conversation,
    check_answered,
    check_prepared,
    conversation,
    plain_text,
    prompt_key,
    prompt_messages,
)
from .meta import meta_path, read_meta
from .packing import Document, digest
from .ranks import warn
from .reading import RowError, check_end, counted, read_rows

CUT_AWAY = "fewer than two loss tokens left within max_length"
TOO_LONG = "longer than max_length"


@dataclass(frozen=True)
class Documents:
    """What a run learns from and is judged by.

    Attributes:
        held_out: answers to prompts that `train` has none of.
        skipped: rows that are not used, by reason.
        cut: rows that were cut to max_length.
        turns: assistant turns of used rows that are out of the loss, by reason.
        unused: answers that are not of `data.temperatures`; the feature cache holds them, so that
            runs which differ in that share it.
    """

    train: list[Document]
    held_out: list[Document]
    skipped: dict[str, int]
    cut: int
    turns: dict[str, int] = field(default_factory=dict)
    unused: list[Document] = field(default_factory=list)

    @cached_property
    def eval(self) -> list[Document]:
        """What tau is measured on: held-out greedy answers, all where there are none."""
        return [d for d in self.held_out if d.temperature == 0] or self.held_out

    @cached_property
    def judged_by(self) -> str:
        """A hash of the rows that held-out figures come from."""
        return digest(self.held_out)[:16]

    @cached_property
    def drawn(self) -> list[Document]:
        """Held-out answers that were drawn at temperature 1."""
        return [d for d in self.held_out if d.temperature == 1]


# -- rows ----------------------------------------------------------------------------------------


def check_data(config: TrainConfig) -> None:
    """Before the target loads: the file is there and has at least one row of a known form.

    Raises:
        InputError: otherwise, with the reasons.
    """
    path, skipped = config.answers_file, Counter[str]()
    if not path.is_file():
        raise InputError(
            f"{path}, the data to train on, does not exist",
            "Run scripts/prepare_data.py with this config, or name a file in data.file.",
        )
    check_end(path, config.data.on_truncated == "keep_whole")
    for _, row in _rows(config, path, skipped):
        try:
            _check_row(row)
            return
        except RowError as error:
            skipped[str(error)] += 1
    raise _no_rows(path, skipped)


def _rows(
    config: TrainConfig, path: Path, skipped: Counter[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """`data.limit` counts the prompts that were answered, whose answers are all read, or else the
    rows of a file."""
    rows = read_rows(path, skipped, keep_whole=config.data.on_truncated == "keep_whole")
    answered = config.data.prompts is not None and meta_path(path).exists()
    return itertools.islice(rows, None if answered else config.data.limit)


def _check_row(row: dict[str, Any]) -> Conversation | str | None:
    """The conversation or the text of a row; None for a prepared answer."""
    if "answer_ids" in row:
        check_prepared(row)
        return None
    text = plain_text(row)
    if text is not None:
        return text
    chat = conversation(row)
    check_answered(chat)
    return chat


def _no_rows(path: Path, skipped: Counter[str]) -> InputError:
    reasons = counted(skipped)
    if set(skipped) & {CUT_AWAY, TOO_LONG}:
        return InputError(f"{path}: no usable row: {reasons}", "Raise data.max_length.")
    return InputError(
        f"{path}: no usable row: {reasons}",
        "Rows want prompt_ids and answer_ids (scripts/prepare_data.py), messages, conversations, "
        "prompt and response, or text.",
    )


# -- documents -----------------------------------------------------------------------------------


def load_documents(config: TrainConfig, target: TargetModel) -> Documents:
    """The rows of `config.answers_file`, split by prompt into training and evaluation.

    Raises:
        InputError: sizes that do not fit the target, data of another target, no usable row.
    """
    path, skipped, turns = config.answers_file, Counter[str](), Counter[str]()
    check_limits(config, target)
    read_meta(path, target)
    documents, cut = [], 0
    for number, row in _rows(config, path, skipped):
        try:
            whole = _document(number, row, target, config.data.max_length, turns)
            _check_ids(whole, path, target.spec.vocab_size)
            document = _fit(whole, config)
        except RowError as error:
            skipped[str(error)] += 1
            continue
        cut += len(document.ids) < len(whole.ids)
        documents.append(document)
    if not documents:
        raise _no_rows(path, skipped)
    held = _held_out(documents, config.data.eval_prompts, config.seed)
    rest = [d for d in documents if d.prompt_key in held]
    train, wanted = [d for d in documents if d.prompt_key not in held], config.data.temperatures
    if wanted is None:
        return Documents(train, rest, dict(skipped), cut, dict(turns))
    _check_temperatures(train, wanted, path)
    unused = [d for d in train if d.temperature not in wanted]
    train = [d for d in train if d.temperature in wanted]
    return Documents(train, rest, dict(skipped), cut, dict(turns), unused)


def _check_temperatures(documents: list[Document], wanted: list[float], path: Path) -> None:
    known = {d.temperature for d in documents}
    if missing := [t for t in wanted if t not in known]:
        shown = ", ".join(str(t) for t in sorted(t for t in known if t is not None)) or "none"
        raise InputError(
            f"{path}: no usable row is an answer at temperature {missing[0]}",
            f"Its temperatures are: {shown}. Set data.temperatures to some of them, or to null.",
        )


def check_limits(config: TrainConfig, target: TargetModel) -> None:
    """Refuses lengths and ids that the target has no positions or embeddings for.

    Raises:
        InputError: naming both numbers.
    """
    spec, longest = target.spec, config.data.max_length
    if longest > spec.max_positions:
        raise InputError(
            f"data.max_length {longest} is more than the target's {spec.max_positions} positions",
            f"Set data.max_length to {spec.max_positions} or less.",
        )
    size = 0 if target.tokenizer is None else len(target.tokenizer)
    if size > spec.vocab_size:
        raise InputError(
            f"the tokenizer has {size} ids, the target only {spec.vocab_size} embeddings",
            "Use the tokenizer that belongs to this target, or resize the target's embeddings.",
        )


def _document(
    number: int, row: dict[str, Any], target: TargetModel, max_length: int, turns: Counter[str]
) -> Document:
    found = _check_row(row)
    if isinstance(found, str):
        ids = target.text_ids(found)
        return Document(ids, [i > 0 for i in range(len(ids))], None, number, found)
    if found is not None:
        ids, mask = masked_chat(found, target, turns, max_length)
        first = [m["role"] for m in found.messages].index("assistant")
        return Document(ids, mask, None, number, prompt_key(found.messages[:first]))
    prompt, answer = row["prompt_ids"], row["answer_ids"]
    mask = [False] * len(prompt) + [True] * len(answer)
    key = prompt_key(prompt_messages(row)) if "prompt" in row else str(prompt)
    temperature = row.get("temperature")
    # A law that top-p has cut is that of no temperature.
    whole = temperature == 0 or row.get("top_p", 1.0) == 1.0
    known = float(temperature) if isinstance(temperature, int | float) and whole else None
    return Document(prompt + answer, mask, known, number, key)


def _check_ids(document: Document, path: Path, vocab_size: int) -> None:
    if max(document.ids, default=0) >= vocab_size:
        raise InputError(
            f"{path}: row {document.row} has token id {max(document.ids)}, the target's "
            f"vocabulary has {vocab_size}",
            "Prepare the data with this target and its own tokenizer.",
        )


def _fit(document: Document, config: TrainConfig) -> Document:
    """`document` within max_length."""
    length = config.data.max_length
    if len(document.ids) > length and config.data.overlong == "drop":
        raise RowError(TOO_LONG)
    cut = replace(document, ids=document.ids[:length], loss_mask=document.loss_mask[:length])
    if not _learnable(cut.loss_mask):
        raise RowError(CUT_AWAY if _learnable(document.loss_mask) else "fewer than two loss tokens")
    return cut


def _learnable(loss_mask: list[bool]) -> bool:
    """Two neighbours: the root and one draft token, without which no depth has a loss row."""
    return any(root and draft for root, draft in itertools.pairwise(loss_mask))


def _held_out(documents: list[Document], wanted: int, seed: int) -> set[str]:
    """Prompts kept from training, by a hash of their text: the same whatever the order of rows."""
    keys = {d.prompt_key for d in documents}
    count = min(wanted, len(keys) // 4)
    if count < wanted:
        warn(f"only {count} of {len(keys)} prompts are held out, not data.eval_prompts {wanted}")
    hashes = {key: hashlib.sha256(f"{seed} {key}".encode()).digest() for key in keys}
    return set(sorted(keys, key=hashes.__getitem__)[:count])


def token_counts(documents: list[Document], vocab_size: int) -> Tensor:
    """[V] int64: how often each id is a loss token."""
    counts = Counter(
        i for d in documents for i, learned in zip(d.ids, d.loss_mask, strict=True) if learned
    )
    result = torch.zeros(vocab_size, dtype=torch.int64)
    result[torch.tensor(list(counts), dtype=torch.int64)] = torch.tensor(list(counts.values()))
    return result
