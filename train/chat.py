"""Conversations as token ids, with a loss mask from token boundaries alone.

No offset is tied to a tokenizer: what the template gives for the messages before an assistant turn,
generation prompt included, is where that turn's tokens begin.
"""

from __future__ import annotations

import json
from typing import Any

from jinja2 import TemplateError

from ..inference.target import TargetModel

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")


class RowError(ValueError):
    """A row that cannot be used; the text is the reason that it is counted under."""


def check_messages(messages: Any) -> list[Message]:
    """`messages` with text contents and known roles.

    Raises:
        RowError: naming what is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise RowError("messages is no list or empty")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise RowError("a message without text content")
        if message.get("role") not in ROLES:
            raise RowError("a message of unknown role")
    return messages


def prompt_messages(row: dict[str, Any]) -> list[Message]:
    """What the target is to answer: `prompt`, the first of `turns`, or `messages` up to the last
    user turn.

    Raises:
        RowError: none of them, or an empty one.
    """
    if "messages" in row:
        messages = check_messages(row["messages"])
        last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        if last < 0:
            raise RowError("messages without a user turn")
        return messages[: last + 1]
    turns = row.get("turns")
    text = row.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    if isinstance(text, list):
        return check_messages(text)
    if not isinstance(text, str) or not text.strip():
        raise RowError("no prompt, turns or messages, or an empty one")
    return [{"role": "user", "content": text}]


def prompt_key(messages: list[Message]) -> str:
    """The prompt's text; rows with equal keys answer the same prompt."""
    return json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=False)


def masked_chat(messages: list[Message], target: TargetModel) -> tuple[list[int], list[bool]]:
    """Ids of the whole conversation, and where they are an assistant's own tokens.

    The mask of a turn ends with its end-of-turn token (one of `target.eos_ids`); what the template
    adds after it, such as a newline, is not learned from.

    Raises:
        RowError: nothing was asked, the template refuses the messages, or its text for an earlier
            part is not a prefix of its text for the whole.
    """
    try:
        ids = target.chat_ids(messages, add_generation_prompt=False)
        if messages[0]["role"] == "assistant":
            raise RowError("messages begin with an assistant turn")
        mask = [False] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                begin, end = _span(messages, turn, ids, target)
                mask[begin:end] = [True] * (end - begin)
    except TemplateError:
        raise RowError("the chat template refuses the messages") from None
    return ids, mask


def _span(
    messages: list[Message], turn: int, ids: list[int], target: TargetModel
) -> tuple[int, int]:
    """Where the tokens of assistant turn `turn` begin and end in `ids`."""
    before = target.chat_ids(messages[:turn], add_generation_prompt=True)
    until = target.chat_ids(messages[: turn + 1], add_generation_prompt=False)
    if until[: len(before)] != before:
        raise RowError("the chat template's generation prompt is not a prefix of the turn")
    ends = [i for i in range(len(before), len(until)) if until[i] in target.eos_ids]
    end = ends[-1] + 1 if ends else len(until)
    if ids[:end] != until[:end]:
        raise RowError("the chat template rewrites earlier turns")
    return len(before), end
