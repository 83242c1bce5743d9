"""What callers hand in as prompts, and when a text ends: strings, chats and ids to lists of ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from ..heads.errors import InputError, check_switch
from .target import TargetModel

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
STOP_TAIL = 16  # tokens looked at beyond a stop string's own length in characters


def prompt_ids(target: TargetModel, prompts: Any, chat: bool) -> tuple[list[list[int]], bool]:
    """Ids of one prompt or of a list of prompts, checked against the target.

    Returns:
        the ids, and whether a list was given.
    Raises:
        InputError: an empty prompt, ids outside the vocabulary, a prompt that leaves no position,
            padding.
    """
    check_switch("chat", chat)
    many = not _is_single(prompts)
    rows = [_ids(target, prompt, chat) for prompt in (prompts if many else [prompts])]
    if not rows:
        raise InputError("the list of prompts is empty", "Give at least one prompt.")
    for number, ids in enumerate(rows):
        check_ids(target, ids, f"prompt {number}" if many else "the prompt")
    if isinstance(prompts, Tensor) and len(rows) > 1:
        _refuse_padding(target, rows)
    return rows, many


def _refuse_padding(target: TargetModel, rows: list[list[int]]) -> None:
    """Raises InputError for rows of a tensor that are padded: their padding would be read as text.
    A pad id that has another meaning says nothing."""
    roles = ("pad", "bos", "eos", "unk")
    pad, *others = (getattr(target.tokenizer, f"{role}_token_id", None) for role in roles)
    if pad is None or pad in target.eos_ids or pad in others:
        return
    if any(pad in (ids[0], ids[-1]) for ids in rows):
        raise InputError(
            f"rows of the prompt tensor begin or end with the pad id {pad}",
            "Give prompts of unlike length as a list of lists of ids, without padding.",
        )


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, Tensor):
        if prompts.ndim not in (1, 2):
            raise InputError(
                f"a prompt tensor of shape {tuple(prompts.shape)}", "Give ids [T], or rows [B, T]."
            )
        return prompts.ndim == 1
    if not isinstance(prompts, Sequence):
        raise InputError(
            f"a prompt of type {type(prompts).__name__}",
            "Give a string, a list of messages, a list of ids, or a list of these.",
        )
    return bool(prompts) and isinstance(prompts[0], int | dict)


def _ids(target: TargetModel, prompt: Any, chat: bool) -> list[int]:
    if isinstance(prompt, Tensor):
        if prompt.dtype not in INTEGERS:
            raise InputError(f"a prompt tensor of {prompt.dtype}", "Give integer token ids.")
        if prompt.ndim != 1 and tuple(prompt.shape[:-1]) != (1,):
            raise InputError(
                f"a prompt tensor of shape {tuple(prompt.shape)} in a list", "Give ids [T]."
            )
        return prompt.flatten().tolist()
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise InputError("a text prompt needs a tokenizer", "Give ids, or pass tokenizer=.")
        if chat and target.tokenizer.chat_template is not None:
            # A template would make tokens even of nothing.
            messages = [{"role": "user", "content": prompt}]
            return _chat_ids(target, messages) if prompt.strip() else []
        return list(target.tokenizer(prompt)["input_ids"])
    if isinstance(prompt, list) and all(isinstance(item, dict) for item in prompt) and prompt:
        return _chat_ids(target, [_message(message) for message in prompt])
    if isinstance(prompt, list) and all(type(item) is int for item in prompt):
        return list(prompt)
    raise InputError(
        f"a prompt of type {type(prompt).__name__} that is neither text, messages nor ids",
        "Give a string, a list of messages or a list of ids.",
    )


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text in one piece, which is what chat templates read."""
    if not isinstance(message.get("role"), str):
        raise InputError("a message without role", "Give role and content in every message.")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return message
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(
            f"a message of {message['role']!r} whose content is no text: {str(content)[:60]}",
            "Give content as a string, or as a list of parts of type text.",
        )
    return message | {"content": "".join(map(str, texts))}


def _chat_ids(target: TargetModel, messages: list[dict[str, Any]]) -> list[int]:
    try:
        return target.chat_ids(messages)
    except (TemplateError, TypeError) as error:
        raise InputError(
            f"the chat template refuses the messages: {' '.join(str(error).split())[:200]}",
            "Give them in the roles and the order that the target's template takes.",
        ) from None


def check_ids(target: TargetModel, ids: list[int], name: str) -> None:
    """Raises InputError for an empty prompt, a foreign id, or no position left for the answer."""
    size, positions = target.vocab_size, target.max_positions
    if not ids:
        raise InputError(f"{name} is empty: it has no tokens", "Give at least one token.")
    if min(ids) < 0 or max(ids) >= size:
        wrong = next(i for i in ids if not 0 <= i < size)
        raise InputError(
            f"{name} has id {wrong}, the target's vocabulary has {size}",
            "Tokenize it with the target's own tokenizer.",
        )
    if len(ids) >= positions:
        raise InputError(
            f"{name} has {len(ids)} tokens, the target has {positions} positions",
            "Shorten it; at least one position must be left for the answer.",
        )


def stop_rule(target: TargetModel, strings: Sequence[str]) -> Callable[[list[int]], bool] | None:
    """True for new tokens whose text holds one of `strings`, which ended with the last token.

    Raises:
        InputError: an empty string, or no tokenizer to see text with.
    """
    if strings is None or (isinstance(strings, list | tuple | str) and not strings):
        return None
    if isinstance(strings, str):
        strings = [strings]
    if not isinstance(strings, list | tuple) or not all(
        isinstance(text, str) and text for text in strings
    ):
        raise InputError(f"stop_strings {strings!r}", "Give non-empty strings.")
    if target.tokenizer is None:
        raise InputError("stop_strings need a tokenizer", "Pass tokenizer= with the model.")
    # A token covers at least one byte, so older ones cannot be part of a match.
    tail = max(len(text.encode()) for text in strings) + STOP_TAIL

    def stopped(new: list[int]) -> bool:
        text = target.tokenizer.decode(new[-tail:], skip_special_tokens=False)
        return any(string in text for string in strings)

    return stopped
