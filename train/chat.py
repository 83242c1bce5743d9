"""Conversations as token ids, with a loss mask from token boundaries alone.

No offset is tied to a tokenizer, and no text is searched for: what the template gives for the
messages before an assistant turn, generation prompt included, is where that turn's tokens begin.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import datetime
from typing import Any

from jinja2 import TemplateSyntaxError

from ..heads.errors import InputError
from ..inference.target import TargetModel
from .formats import Conversation, Message
from .reading import RowError

DAY = datetime(2026, 1, 1, 12)
"""What training data has for today."""
_CODES = [f"%{flag}{code}" for flag in ("", "-") for code in "aAbBcdDeFHIjmMpSTuUVwWxXyYZ"]
_DATED = (
    "{%- macro strftime_now(format) %}{{- format"
    + "".join(f"|replace({code!r}, {DAY.strftime(code)!r})" for code in _CODES)
    + " }}{%- endmacro %}{{- '' }}"
)
"""Begins a template that shadows transformers' function; the empty text behind it keeps the newline
that a template may begin with."""


def chat_ids(chat: Conversation, target: TargetModel, *, prompt: bool) -> list[int]:
    """Ids of a conversation.

    Args:
        prompt: end with the generation prompt.
    Raises:
        RowError: the template refuses the messages.
    """
    try:
        template = _undated(target, chat.tools)
        return target.chat_ids(chat.messages, prompt, chat.tools, template)
    except InputError:
        raise
    except TemplateSyntaxError as error:  # of every row alike
        raise InputError(
            f"the chat template is no template: line {error.lineno}: {error.message}",
            "Repair chat_template.jinja beside the target's tokenizer.",
        ) from None
    except Exception as error:  # a template may meet anything in foreign rows
        reason = " ".join(str(error).split())[:80] or type(error).__name__
        raise RowError(f"the chat template refuses the messages: {reason}") from None


def _undated(target: TargetModel, tools: list[dict[str, Any]]) -> str | None:
    """The template with `strftime_now` of DAY, where it asks for the date: rows stay the same
    whenever a run goes on.  None: it does not ask."""
    tokenizer = target.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        return None
    template: str = tokenizer.get_chat_template(tools=tools or None)
    return _DATED + template if "strftime_now" in template else None


def masked_chat(
    chat: Conversation,
    target: TargetModel,
    left_out: Counter[str],
    max_length: int | None = None,
) -> tuple[list[int], list[bool]]:
    """Ids of the whole conversation, and where they are an assistant's own tokens.

    The mask of a turn ends with its end-of-turn token (one of `target.eos_ids`); what the template
    adds after it, such as a newline, is not learned from.

    Args:
        left_out: counts assistant turns that cannot be told from the template's text, by reason;
            they stay in the ids, out of the mask.
        max_length: the mask is not wanted past this many tokens.
    Raises:
        RowError: the template refuses the messages or leaves some out, or no turn can be told.
    """
    ids = chat_ids(chat, target, prompt=False)
    _check_all_seen(chat, ids, target)
    mask, told, reasons = [False] * len(ids), 0, Counter[str]()
    for turn, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        try:
            begin, end = _span(chat, turn, ids, target)
        except RowError as error:
            reasons[str(error)] += 1
            continue
        told += 1
        mask[begin:end] = [True] * (end - begin)
        if max_length is not None and end >= max_length:
            break
    if reasons and not told:
        raise RowError(next(iter(reasons)))
    left_out.update(reasons)
    return ids, mask


def _span(chat: Conversation, turn: int, ids: list[int], target: TargetModel) -> tuple[int, int]:
    """Where the tokens of assistant turn `turn` begin and end in `ids`."""
    messages = chat.messages
    before = chat_ids(replace(chat, messages=messages[:turn]), target, prompt=True)
    upto = replace(chat, messages=messages[: turn + 1])
    until = chat_ids(upto, target, prompt=False)
    if until[: len(before)] != before:
        raise RowError("the chat template's generation prompt is not a prefix of the turn")
    ends = [i for i in range(len(before), len(until)) if until[i] in target.eos_ids]
    end = ends[-1] + 1 if ends else max(len(before), len(until) - _tail(upto, until, target))
    if ids[:end] != until[:end]:
        raise RowError("the chat template rewrites earlier turns")
    return len(before), end


def _tail(chat: Conversation, ids: list[int], target: TargetModel) -> int:
    """Number of tokens that the template adds behind the last message, where none of them is an
    end-of-turn token: those that stay when the message's last character changes."""
    *before, last = chat.messages
    text = last["content"]
    if not text:
        return 0
    other = {**last, "content": text[:-1] + ("y" if text[-1] == "x" else "x")}
    changed = chat_ids(replace(chat, messages=[*before, other]), target, prompt=False)
    tail = 0
    while tail < min(len(ids), len(changed)) and ids[-1 - tail] == changed[-1 - tail]:
        tail += 1
    return tail


def _check_all_seen(chat: Conversation, ids: list[int], target: TargetModel) -> None:
    """Templates may leave out roles, tool calls or tools that they do not know, without a word.

    Raises:
        RowError: this one does.
    """
    if chat.tools and _same(replace(chat, tools=[]), ids, target):
        raise RowError("the chat template leaves out tools")
    for turn, message in enumerate(chat.messages):
        changed, what = _changed(message)
        if changed is None:
            continue
        messages = [*chat.messages[:turn], changed, *chat.messages[turn + 1 :]]
        if _same(replace(chat, messages=messages), ids, target):
            raise RowError(f"the chat template leaves out {what}")


def _changed(message: Message) -> tuple[dict[str, Any] | None, str]:
    """The message with another content, where templates are known to leave such messages out."""
    if calls := message.get("tool_calls"):
        function = calls[0]["function"]
        call = {**calls[0], "function": {**function, "name": function["name"] + "x"}}
        return {**message, "tool_calls": [call, *calls[1:]]}, "tool calls"
    if message["role"] in ("system", "tool"):
        return {**message, "content": message["content"] + "x"}, f"{message['role']} turns"
    return None, ""


def _same(chat: Conversation, ids: list[int], target: TargetModel) -> bool:
    try:
        return chat_ids(chat, target, prompt=False) == ids
    except RowError:
        return False
