"""The target answers the prompts: training data that is drawn from the law a head is to learn.

Rows are appended batch by batch, so that a kill loses one batch at most and a second run goes on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from ..heads.errors import InputError
from ..inference.speculator import Speculator
from ..inference.target import TargetModel
from .chat import chat_ids
from .config import TrainConfig, resolve_path
from .data import TOO_LONG, check_limits
from .formats import Conversation, prompt_conversation, prompt_key
from .meta import check_settings, read_meta, take_up, write_meta
from .reading import RowError, counted, read_rows
from .recording import RecordedStates, Recorder
from .sections import Answer

Generate = Callable[[list[list[int]], Answer, list[int], Recorder | None], list[list[int]]]
"""(prompts, entry of data.answers, a seed a prompt, what collects states) -> new tokens of each
prompt, a final EOS included."""


@dataclass(frozen=True)
class Request:
    """One answer that is wanted; its seed tells it from all others of the file."""

    prompt_index: int
    chat: Conversation
    ids: list[int]
    answer: Answer
    seed: int


def read_prompts(config: TrainConfig) -> tuple[list[Conversation], Counter[str]]:
    """The prompts of `data.prompts`, and the rows that are none, by reason.

    Raises:
        InputError: no file named, no such file, or no prompt in it.
    """
    if config.data.prompts is None:
        raise InputError("data.prompts is not set", "Name a file with one prompt a row.")
    path, skipped, prompts = config.local_file(config.data.prompts), Counter[str](), []
    rows = read_rows(path, skipped, keep_whole=config.data.on_truncated == "keep_whole")
    for _, row in itertools.islice(rows, config.data.limit):
        try:
            prompts.append(prompt_conversation(row))
        except RowError as error:
            skipped[str(error)] += 1
    if not prompts:
        reason = f"{path}: no usable prompt: {counted(skipped)}"
        raise InputError(reason, 'Rows want {"prompt": "..."}.')
    return prompts, skipped


def plan_requests(
    config: TrainConfig, target: TargetModel, prompts: list[Conversation]
) -> tuple[list[Request], Counter[str]]:
    """One request a prompt and entry of `data.answers`, longest prompts first within an entry;
    and the prompts that cannot be answered and learned from, by reason.

    Raises:
        InputError: no prompt is left, or sizes that do not fit the target.
    """
    check_limits(config, target)
    # Two answer tokens at least are learned from.
    spare = target.spec.max_positions - config.data.max_new_tokens
    limit = min(config.data.max_length - 2, spare)
    skipped, fitting = Counter[str](), []
    for i, chat in enumerate(prompts):
        try:
            ids = chat_ids(chat, target, prompt=True)
            if len(ids) > limit:
                raise RowError(TOO_LONG)
            fitting.append((i, ids))
        except RowError as error:
            skipped[str(error)] += 1
    if not fitting:
        raise InputError(
            f"no prompt can be answered: {skipped.most_common(1)[0][0]}; data.max_length "
            f"{config.data.max_length}, data.max_new_tokens {config.data.max_new_tokens} and the "
            f"target's {target.spec.max_positions} positions leave {limit} tokens to a prompt",
            "Shorten the prompts or change these lengths.",
        )
    fitting.sort(key=lambda found: -len(found[1]))
    requests = [
        Request(i, prompts[i], ids, answer, config.seed + entry * len(prompts) + i)
        for entry, answer in enumerate(config.data.answers)
        for i, ids in fitting
    ]
    return requests, skipped


def open_answers(config: TrainConfig, target: TargetModel, prompts: list[Conversation]) -> set[int]:
    """Makes `config.answers_file` ready to be appended to.

    A line torn by a kill is removed.  Entries may be added at the end of `data.answers`.

    Returns:
        seeds of the requests that it already answers.
    Raises:
        InputError: the file was made by other means, with another target or other settings.
    """
    settings = _settings(config, prompts)
    rows = take_up(config.answers_file, target, settings, "set data.file to another name")
    seeds = (row.get("seed") for _, row in rows)
    return {seed for seed in seeds if type(seed) is int}


def close_answers(
    config: TrainConfig, target: TargetModel, prompts: list[Conversation], unfit: Counter[str]
) -> None:
    """Notes that `config.answers_file` has all answers, so that it can be trained on.

    Args:
        unfit: prompts that have none, by reason, see `plan_requests`.
    """
    settings, found = _settings(config, prompts), read_meta(config.answers_file, target)
    # A file that was whole already holds the answers that there was room for then.
    whole = found is not None and found.complete
    room = found.settings.get("max_length", math.inf) if found is not None and whole else 0
    if unfit[TOO_LONG] and room < math.inf:
        settings["max_length"] = max(room, config.data.max_length)
    write_meta(config.answers_file, target, settings, complete=True)


def check_answers(config: TrainConfig, target: TargetModel) -> None:
    """Refuses to train on answers that are not, or not yet, those that the config asks for.  Where
    it names no prompts, its file is trained on as it is; so is a file of one's own.

    Raises:
        InputError: answers are missing, or were made of other prompts or in another way.
    """
    path, found = config.answers_file, read_meta(config.answers_file, target)
    if config.data.prompts is None or found is None:
        return
    as_it_is = f"set data.prompts=null data.limit=null data.file={path} to train on what is there"
    fewer = len(found.settings["answers"]) < len(config.data.answers)
    # Prompts that were too long then may fit now.
    fewer |= found.settings.get("max_length", config.data.max_length) < config.data.max_length
    if fewer or not found.complete:
        raise InputError(
            f"{path} has not got all answers yet",
            f"Run scripts/prepare_data.py with this config until it ends, or {as_it_is}.",
        )
    if config.local_file(config.data.prompts).is_file():
        wanted = _settings(config, read_prompts(config)[0])
        del wanted["seed"]  # a run may have another one than its data
        check_settings(path, found, wanted, as_it_is)


def _settings(config: TrainConfig, prompts: list[Conversation]) -> dict[str, Any]:
    """What the answers depend on."""
    digest = hashlib.sha256("\n".join(map(_asked, prompts)).encode())
    return {
        "prompts": digest.hexdigest()[:16],
        "max_new_tokens": config.data.max_new_tokens,
        "seed": config.seed,
        "answers": [answer.model_dump() for answer in config.data.answers],
    }


def _asked(prompt: Conversation) -> str:
    """What the ids of a prompt come from: its text and, if any, tools, calls of them and names."""
    text = ("role", "content")
    more = [{k: v for k, v in m.items() if k not in text} for m in prompt.messages]
    rest = json.dumps([prompt.tools, more]) if prompt.tools or any(more) else ""
    return prompt_key(prompt.messages) + rest


class Answerer:
    """A `Generate` on the target, with the drafter of `data.answers_drafter`."""

    def __init__(self, config: TrainConfig, target: TargetModel) -> None:
        self.max_new_tokens, name = config.data.max_new_tokens, config.data.answers_drafter
        if name in ("none", "ngram"):
            self.speculator = Speculator.from_pretrained(target=target, drafter=name)
        else:
            self.speculator = Speculator.from_pretrained(resolve_path(name), target=target)

    def __call__(
        self, prompts: list[list[int]], answer: Answer, seeds: list[int], record: Recorder | None
    ) -> list[list[int]]:
        """See `Generate`; heads that read other layers than are to be kept leave `record` empty."""
        taps = self.speculator.drafter.taps
        return self.speculator.generate(
            prompts,
            max_new_tokens=self.max_new_tokens,
            do_sample=answer.temperature > 0,
            temperature=answer.temperature or 1.0,
            top_p=answer.top_p,
            seed=seeds,
            batch_size=len(prompts),
            record=record if record is None or taps in ([], record.taps) else None,
        ).token_ids


def answer_all(
    config: TrainConfig,
    target: TargetModel,
    requests: list[Request],
    done: set[int],
    generate: Generate,
    taps: list[int] | None = None,
) -> int:
    """Answers the `requests` whose seeds are not `done` and appends them to `config.answers_file`.
    The states that the target has on the way are kept for the feature cache, up to its size cap.

    Batches are cut from all requests, and one that a kill has torn is answered again as a whole:
    so the file does not depend on where earlier runs were ended.

    Args:
        taps: layers kept; None for those that the config's head reads.
    Returns:
        number of new tokens.
    """
    tokens, begin = 0, time.perf_counter()
    states = RecordedStates(config, target, taps)
    room = config.data.features.max_gb * 1e9 - states.bytes if config.data.features.cache else 0
    bar = tqdm(total=len(requests), initial=len(done), desc="answers", unit="row")
    with bar, config.answers_file.open("a", encoding="utf-8") as file:
        for batch in _batches(requests, config.data.answer_batch_size):
            missing = [b for b, request in enumerate(batch) if request.seed not in done]
            if not missing:
                continue
            recorder = Recorder(states.taps, states.dtype) if room > 0 else None
            seeds = [request.seed for request in batch]
            answers = generate([r.ids for r in batch], batch[0].answer, seeds, recorder)
            if recorder is not None and recorder.filled:
                ids = [r.ids + answer for r, answer in zip(batch, answers, strict=True)]
                room -= states.write([(i, recorder.states(b, len(i))) for b, i in enumerate(ids)])
            rows = [_row(batch[b], answers[b], target) for b in missing]
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            file.flush()
            tokens += sum(map(len, answers))
            bar.update(len(missing))
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
    first, *more = request.chat.messages
    plain = not more and first["role"] == "user"
    return {
        "prompt": first["content"] if plain else request.chat.messages,
        "prompt_ids": request.ids,
        "answer_ids": ids,
        "answer": target.tokenizer.decode(ids, skip_special_tokens=True),
        "temperature": request.answer.temperature,
        "top_p": request.answer.top_p,
        "seed": request.seed,
        "prompt_index": request.prompt_index,
    }
