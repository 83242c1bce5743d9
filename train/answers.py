"""The target answers the prompts: training data that is drawn from the law a head is to learn.

Rows are appended batch by batch, so that a kill loses one batch at most and a second run goes on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..heads.errors import InputError
from ..inference.target import TargetModel
from .chat import Message, RowError, prompt_key, prompt_messages
from .config import Answer, TrainConfig, resolve_path
from .data import check_limits, read_rows
from .meta import check_settings, read_meta, write_meta
from .recording import RecordedStates, Recorder

Generate = Callable[[list[list[int]], Answer, list[int], Recorder | None], list[list[int]]]
"""(prompts, entry of data.answers, a seed a prompt, what collects states) -> new tokens of each
prompt, a final EOS included."""


@dataclass(frozen=True)
class Request:
    """One answer that is wanted; its seed tells it from all others of the file."""

    prompt_index: int
    messages: list[Message]
    ids: list[int]
    answer: Answer
    seed: int


def read_prompts(config: TrainConfig) -> tuple[list[list[Message]], Counter[str]]:
    """The prompts of `data.prompts`, and the rows that are none, by reason.

    Raises:
        InputError: no file named, no such file, or no prompt in it.
    """
    if config.data.prompts is None:
        raise InputError("data.prompts is not set", "Name a JSONL file with one prompt a line.")
    path, skipped, prompts = resolve_path(config.data.prompts), Counter[str](), []
    for _, row in read_rows(path, skipped):
        try:
            prompts.append(prompt_messages(row))
        except RowError as error:
            skipped[str(error)] += 1
    if not prompts:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in skipped.items())
        raise InputError(f"{path}: no usable prompt: {reasons}", 'Rows want {"prompt": "..."}.')
    return prompts, skipped


def plan_requests(
    config: TrainConfig, target: TargetModel, prompts: list[list[Message]]
) -> tuple[list[Request], int]:
    """One request a prompt and entry of `data.answers`, longest prompts first within an entry;
    and the number of prompts that are too long to be answered and learned from.

    Raises:
        InputError: all prompts are too long, or sizes that do not fit the target.
    """
    check_limits(config, target)
    # Two answer tokens at least are learned from.
    spare = target.spec.max_positions - config.data.max_new_tokens
    limit = min(config.data.max_length - 2, spare)
    ids = [target.chat_ids(messages) for messages in prompts]
    fitting = [i for i in range(len(prompts)) if len(ids[i]) <= limit]
    if not fitting:
        raise InputError(
            f"every prompt is longer than {limit} tokens, which data.max_length "
            f"{config.data.max_length}, data.max_new_tokens {config.data.max_new_tokens} and the "
            f"target's {target.spec.max_positions} positions leave",
            "Shorten the prompts or change these lengths.",
        )
    fitting.sort(key=lambda i: -len(ids[i]))
    requests = [
        Request(i, prompts[i], ids[i], answer, config.seed + entry * len(prompts) + i)
        for entry, answer in enumerate(config.data.answers)
        for i in fitting
    ]
    return requests, len(prompts) - len(fitting)


def open_answers(
    config: TrainConfig, target: TargetModel, prompts: list[list[Message]]
) -> set[int]:
    """Makes `config.answers_file` ready to be appended to.

    A line torn by a kill is removed.  Entries may be added at the end of `data.answers`.

    Returns:
        seeds of the requests that it already answers.
    Raises:
        InputError: the file was made by other means, with another target or other settings.
    """
    path = config.answers_file
    digest = hashlib.sha256("\n".join(map(prompt_key, prompts)).encode())
    settings = {
        "prompts": digest.hexdigest()[:16],
        "max_new_tokens": config.data.max_new_tokens,
        "seed": config.seed,
        "answers": [answer.model_dump() for answer in config.data.answers],
    }
    done: set[int] = set()
    if path.exists() and path.stat().st_size:
        check_settings(path, read_meta(path, target), settings)
        _remove_torn_line(path)
        done = _seeds(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_meta(path, target, settings)
    return done


def _remove_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _seeds(path: Path) -> set[int]:
    if not path.stat().st_size:
        return set()
    return {row["seed"] for _, row in read_rows(path, Counter()) if type(row.get("seed")) is int}


def answer_all(
    config: TrainConfig, target: TargetModel, requests: list[Request], generate: Generate
) -> int:
    """Answers `requests` in batches and appends them to `config.answers_file`.  The states that the
    target has on the way are kept for the feature cache, up to its size cap.

    Returns:
        number of new tokens.
    """
    tokens, begin = 0, time.perf_counter()
    states = RecordedStates(config, target)
    room = config.data.features.max_gb * 1e9 if config.data.features.cache else 0
    bar = tqdm(total=len(requests), desc="answers", unit="row", disable=not requests)
    with bar, config.answers_file.open("a", encoding="utf-8") as file:
        for batch in _batches(requests, config.data.answer_batch_size):
            recorder = Recorder(states.taps, states.dtype) if room > 0 else None
            seeds = [request.seed for request in batch]
            answers = generate([r.ids for r in batch], batch[0].answer, seeds, recorder)
            if recorder is not None:
                ids = [r.ids + answer for r, answer in zip(batch, answers, strict=True)]
                room -= states.write([(i, recorder.states(b, len(i))) for b, i in enumerate(ids)])
            rows = [_row(r, ids, target) for r, ids in zip(batch, answers, strict=True)]
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            file.flush()
            tokens += sum(map(len, answers))
            bar.update(len(batch))
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - begin):.0f} tokens/s")
    return tokens


def _batches(requests: list[Request], size: int) -> list[list[Request]]:
    """Consecutive requests that share the entry of `data.answers`."""
    batches: list[list[Request]] = []
    for request in requests:
        if batches and len(batches[-1]) < size and batches[-1][0].answer == request.answer:
            batches[-1].append(request)
        else:
            batches.append([request])
    return batches


def _row(request: Request, ids: list[int], target: TargetModel) -> dict[str, Any]:
    first, *more = request.messages
    plain = not more and first["role"] == "user"
    return {
        "prompt": first["content"] if plain else request.messages,
        "prompt_ids": request.ids,
        "answer_ids": ids,
        "answer": target.tokenizer.decode(ids, skip_special_tokens=True),
        "temperature": request.answer.temperature,
        "seed": request.seed,
        "prompt_index": request.prompt_index,
    }
