"""From a JSONL file to documents with a loss mask, batches, and the order of a run.

A row is a prepared answer (`prompt_ids`, `answer_ids`: exactly what the target read and wrote) or a
chat (`messages`), which goes through the target's chat template.  Rows that cannot be used are
skipped and counted by reason.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..heads.errors import InputError
from ..inference.target import TargetModel
from .chat import RowError, check_messages, masked_chat, prompt_key, prompt_messages
from .config import TrainConfig
from .meta import read_meta

CUT_AWAY = "fewer than two loss tokens left within max_length"
TOO_LONG = "longer than max_length"


@dataclass(frozen=True)
class Document:
    """One row.

    Attributes:
        loss_mask: True where the target (or a chat's assistant) generated the token.
        temperature: of a prepared answer; None where it is not known.
        row: line number in the file, from 1.
        prompt_key: rows with equal keys answer the same prompt.
    """

    ids: list[int]
    loss_mask: list[bool]
    temperature: float | None
    row: int
    prompt_key: str


@dataclass(frozen=True)
class Documents:
    """What a run learns from and is judged by.

    Attributes:
        eval: answers to prompts that `train` has none of.
        skipped: rows that are not used, by reason.
        cut: rows of `train` and `eval` that were cut to max_length.
    """

    train: list[Document]
    eval: list[Document]
    skipped: dict[str, int]
    cut: int


# -- reading -------------------------------------------------------------------------------------


def read_rows(path: Path, skipped: Counter[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers (from 1) and objects of a JSONL file; other lines are counted in `skipped`.

    Raises:
        InputError: no such file, or an empty one.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist", "Name an existing JSONL file.")
    if not path.stat().st_size:
        raise InputError(f"{path} is empty", "It wants one JSON object a line.")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
                if not isinstance(row, dict):
                    raise RowError("not a JSON object")
                if b"\\u" in line:  # half of a surrogate pair is JSON, but no text
                    json.dumps(row, ensure_ascii=False).encode()
                yield number, row
            except RowError as error:
                skipped[str(error)] += 1
            except UnicodeError:
                skipped["not Unicode text"] += 1
            except (ValueError, RecursionError):
                skipped["not JSON" if line.strip() else "an empty line"] += 1


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
    for _, row in read_rows(path, skipped):
        try:
            _check_row(row)
            return
        except RowError as error:
            skipped[str(error)] += 1
    raise _no_rows(path, skipped)


def _check_row(row: dict[str, Any]) -> None:
    if "answer_ids" in row:
        for name in ("prompt_ids", "answer_ids"):
            ids = row.get(name)
            if not (isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)):
                raise RowError(f"{name} is no list of ids, or empty")
    elif "messages" not in row:
        raise RowError("neither answer_ids nor messages")
    elif all(message["role"] != "assistant" for message in check_messages(row["messages"])):
        raise RowError("messages without an assistant turn")


def _no_rows(path: Path, skipped: Counter[str]) -> InputError:
    reasons = "; ".join(f"{count} × {reason}" for reason, count in skipped.most_common())
    if set(skipped) & {CUT_AWAY, TOO_LONG}:
        return InputError(f"{path}: no usable row: {reasons}", "Raise data.max_length.")
    return InputError(
        f"{path}: no usable row: {reasons}",
        "Rows want prompt_ids and answer_ids (scripts/prepare_data.py) or messages.",
    )


# -- documents -----------------------------------------------------------------------------------


def load_documents(config: TrainConfig, target: TargetModel) -> Documents:
    """The rows of `config.answers_file`, split by prompt into training and evaluation.

    Raises:
        InputError: sizes that do not fit the target, data of another target, no usable row.
    """
    path, skipped = config.answers_file, Counter[str]()
    check_limits(config, target)
    read_meta(path, target)
    documents, cut = [], 0
    for number, row in read_rows(path, skipped):
        try:
            whole = _document(number, row, target)
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
    train = [d for d in documents if d.prompt_key not in held]
    evaluate = [d for d in documents if d.prompt_key in held]
    evaluate = [d for d in evaluate if d.temperature == 0] or evaluate
    return Documents(train, evaluate, dict(skipped), cut)


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


def _document(number: int, row: dict[str, Any], target: TargetModel) -> Document:
    _check_row(row)
    if "answer_ids" not in row:
        ids, mask = masked_chat(row["messages"], target)
        first = [m["role"] for m in row["messages"]].index("assistant")
        return Document(ids, mask, None, number, prompt_key(row["messages"][:first]))
    prompt, answer = row["prompt_ids"], row["answer_ids"]
    mask = [False] * len(prompt) + [True] * len(answer)
    key = prompt_key(prompt_messages(row)) if "prompt" in row else str(prompt)
    temperature = row.get("temperature")
    known = float(temperature) if isinstance(temperature, int | float) else None
    return Document(prompt + answer, mask, known, number, key)


def _check_ids(document: Document, path: Path, vocab_size: int) -> None:
    if max(document.ids) >= vocab_size:
        raise InputError(
            f"{path}: line {document.row} has token id {max(document.ids)}, the target's "
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
        warnings.warn(
            f"only {count} of {len(keys)} prompts are held out, not data.eval_prompts {wanted}",
            stacklevel=3,
        )
    hashes = {key: hashlib.sha256(f"{seed} {key}".encode()).digest() for key in keys}
    return set(sorted(keys, key=hashes.__getitem__)[:count])


# -- batches -------------------------------------------------------------------------------------


def collate(documents: list[Document], pad_id: int = 0) -> dict[str, Tensor]:
    """A right-padded batch.

    Returns:
        `ids` [B, T] int64, `loss_mask` [B, T] bool (False on padding), `length` [B] int64.
    """
    length_B = torch.tensor([len(d.ids) for d in documents])
    ids_BT = torch.full((len(documents), int(length_B.max())), pad_id)
    mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for b, document in enumerate(documents):
        ids_BT[b, : len(document.ids)] = torch.tensor(document.ids)
        mask_BT[b, : len(document.ids)] = torch.tensor(document.loss_mask)
    return {"ids": ids_BT, "loss_mask": mask_BT, "length": length_B}


def token_counts(documents: list[Document], vocab_size: int) -> Tensor:
    """[V] int64: how often each id is a loss token."""
    counts = Counter(
        i for d in documents for i, learned in zip(d.ids, d.loss_mask, strict=True) if learned
    )
    result = torch.zeros(vocab_size, dtype=torch.int64)
    result[torch.tensor(list(counts), dtype=torch.int64)] = torch.tensor(list(counts.values()))
    return result


def order(seed: int, epoch: int, n: int) -> np.ndarray:
    """[n] a permutation that depends on (seed, epoch) alone.

    Raw bits of PCG64 are the same in every numpy release, `Generator.permutation` need not be.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(bits, kind="stable")
