"""What callers hand in as prompts, and when a text ends: strings, chats and ids to lists of ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..heads.errors import InputError
from .target import TargetModel

Prompt = str | list[dict[str, Any]] | list[int] | Tensor
STOP_TAIL = 16  # tokens looked at beyond a stop string's own length in characters


def prompt_ids(target: TargetModel, prompts: Any, chat: bool) -> tuple[list[list[int]], bool]:
    """Ids of one prompt or of a list of prompts, checked against the target.

    Returns:
        the ids, and whether a list was given.
    Raises:
        InputError: an empty prompt, ids outside the vocabulary, a prompt that leaves no position.
    """
    many = not _is_single(prompts)
    rows = [_ids(target, prompt, chat) for prompt in (prompts if many else [prompts])]
    if not rows:
        raise InputError("the list of prompts is empty", "Give at least one prompt.")
    for number, ids in enumerate(rows):
        check_ids(target, ids, f"prompt {number}" if many else "the prompt")
    return rows, many


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, Tensor):
        return prompts.ndim == 1
    if not isinstance(prompts, Sequence):
        raise InputError(
            f"a prompt of type {type(prompts).__name__}",
            "Give a string, a list of messages, a list of ids, or a list of these.",
        )
    return bool(prompts) and isinstance(prompts[0], int | dict)


def _ids(target: TargetModel, prompt: Any, chat: bool) -> list[int]:
    if isinstance(prompt, Tensor):
        if prompt.is_floating_point() or prompt.is_complex():
            raise InputError(f"a prompt tensor of {prompt.dtype}", "Give integer token ids.")
        return prompt.flatten().tolist()
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise InputError("a text prompt needs a tokenizer", "Give ids, or pass tokenizer=.")
        if chat and target.tokenizer.chat_template is not None:
            return target.chat_ids([{"role": "user", "content": prompt}])
        return list(target.tokenizer(prompt)["input_ids"])
    if isinstance(prompt, list) and all(isinstance(item, dict) for item in prompt) and prompt:
        if not all({"role", "content"} <= message.keys() for message in prompt):
            raise InputError("a message without role or content", "Give both in every message.")
        return target.chat_ids(prompt)
    if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
        return list(prompt)
    raise InputError(
        f"a prompt of type {type(prompt).__name__} that is neither text, messages nor ids",
        "Give a string, a list of messages or a list of ids.",
    )


def check_ids(target: TargetModel, ids: list[int], name: str) -> None:
    """Raises InputError for an empty prompt, a foreign id, or no position left for the answer."""
    spec = target.spec
    if not ids:
        raise InputError(f"{name} has no tokens", "Give at least one token.")
    if min(ids) < 0 or max(ids) >= spec.vocab_size:
        wrong = next(i for i in ids if not 0 <= i < spec.vocab_size)
        raise InputError(
            f"{name} has id {wrong}, the target's vocabulary has {spec.vocab_size}",
            "Tokenize it with the target's own tokenizer.",
        )
    if len(ids) >= spec.max_positions:
        raise InputError(
            f"{name} has {len(ids)} tokens, the target has {spec.max_positions} positions",
            "Shorten it; at least one position must be left for the answer.",
        )


def stop_rule(target: TargetModel, strings: Sequence[str]) -> Callable[[list[int]], bool] | None:
    """True for new tokens whose text holds one of `strings`, which ended with the last token.

    Raises:
        InputError: an empty string, or no tokenizer to see text with.
    """
    if not strings:
        return None
    if isinstance(strings, str):
        strings = [strings]
    if not all(isinstance(text, str) and text for text in strings):
        raise InputError(f"stop_strings {strings!r}", "Give non-empty strings.")
    if target.tokenizer is None:
        raise InputError("stop_strings need a tokenizer", "Pass tokenizer= with the model.")
    # A token covers at least one byte, so older ones cannot be part of a match.
    tail = max(len(text.encode()) for text in strings) + STOP_TAIL

    def stopped(new: list[int]) -> bool:
        text = target.tokenizer.decode(new[-tail:], skip_special_tokens=False)
        return any(string in text for string in strings)

    return stopped
