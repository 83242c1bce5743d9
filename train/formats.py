"""The forms that a row may have, as one: a conversation in the roles of chat templates.

Known are prepared answers (`answer_ids`), `messages`, ShareGPT's `conversations`, a prompt and its
response under the names in use, and plain `text`.  Only the keys of the form are looked at.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from .reading import RowError

Message = dict[str, Any]
ROLES = {
    "system": "system developer",
    "user": "user human prompter",
    "assistant": "assistant gpt chatgpt bing bard model bot",
    "tool": "tool observation function function_response tool_response tool_output ipython",
    "call": "function_call tool_call",
}
ALIASES = {alias: role for role, names in ROLES.items() for alias in names.split()}
CHATS = {"messages", "conversations", "conversation"}
PROMPTS = ("prompt", "instruction", "question")
RESPONSES = ("response", "output", "completion", "answer")


@dataclass(frozen=True)
class Conversation:
    """Messages with text contents, and the tools that the system offers in them."""

    messages: list[Message]
    tools: list[Any] = field(default_factory=list)


def check_prepared(row: dict[str, Any]) -> None:
    """Are prompt and answer of a prepared row ids?

    Raises:
        RowError: naming what is wrong.
    """
    for name in ("prompt_ids", "answer_ids"):
        ids = row.get(name)
        if not (isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)):
            raise RowError(f"{name} is no list of ids, or empty")


def plain_text(row: dict[str, Any]) -> str | None:
    """The text of a row that has no other form.

    Raises:
        RowError: an empty one.
    """
    if CHATS & row.keys() or set(PROMPTS) & row.keys() or "text" not in row:
        return None
    if not isinstance(row["text"], str) or not row["text"].strip():
        raise RowError("a text that is empty, or none")
    return row["text"]


def conversation(row: dict[str, Any]) -> Conversation:
    """The chat of a row of `messages`, `conversations`, or a prompt and its response.

    Raises:
        RowError: another form, or what is wrong with it.
    """
    for name in sorted(CHATS & row.keys(), reverse=True):
        if row[name] is not None:
            return _chat(row, row[name], name)
    return _chat(row, [*_prompt(row), *_response(row)], "messages")


def check_answered(chat: Conversation) -> None:
    """Raises RowError where no assistant says anything."""
    if all(message["role"] != "assistant" for message in chat.messages):
        raise RowError("messages without an assistant turn")


def prompt_conversation(row: dict[str, Any]) -> Conversation:
    """What the target is to answer: a prompt, the first of `turns`, or a chat up to its last
    user turn.

    Raises:
        RowError: none of them, or an empty one.
    """
    turns = row.get("turns")
    if isinstance(turns, list) and turns and not {*PROMPTS, *CHATS} & row.keys():
        row = {"prompt": turns[0]}
    if CHATS & row.keys():
        chat = conversation(row)
        last = max((i for i, m in enumerate(chat.messages) if m["role"] == "user"), default=-1)
        if last < 0:
            raise RowError("messages without a user turn")
        return Conversation(chat.messages[: last + 1], chat.tools)
    return _chat(row, _prompt(row), "messages")


def prompt_messages(row: dict[str, Any]) -> list[Message]:
    """The messages of `prompt_conversation`."""
    return prompt_conversation(row).messages


def prompt_key(messages: list[Message]) -> str:
    """The prompt's text; rows with equal keys answer the same prompt."""
    return json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=False)


# -- parts of a row ------------------------------------------------------------------------------


def _prompt(row: dict[str, Any]) -> list[Message]:
    text = next((row[name] for name in PROMPTS if row.get(name) is not None), None)
    if isinstance(text, list):
        return text
    if not isinstance(text, str) or not text.strip():
        raise RowError("no prompt, messages or conversations, or an empty one")
    more = row.get("input")  # Alpaca's context of an instruction
    if isinstance(more, str) and more.strip():
        text = f"{text}\n\n{more}"
    return [{"role": "user", "content": text}]


def _response(row: dict[str, Any]) -> list[Message]:
    text = next((row[name] for name in RESPONSES if row.get(name) is not None), None)
    if isinstance(text, list):
        return text
    if not isinstance(text, str) or not text.strip():
        raise RowError("a prompt without a response, or an empty one")
    return [{"role": "assistant", "content": text}]


def _chat(row: dict[str, Any], turns: Any, name: str) -> Conversation:
    if not isinstance(turns, list) or not turns:
        raise RowError(f"{name} is no list or empty")
    messages = [_message(turn) for turn in turns]
    system = next((row[k] for k in ("system", "system_prompt") if row.get(k)), None)
    if system is not None and not isinstance(system, str):
        raise RowError("a system prompt that is no text")
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    elif system is not None and messages[0]["content"] != system:
        raise RowError("two system prompts that differ")
    return Conversation(messages, _tools(row.get("tools") or row.get("functions") or []))


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise RowError("a turn that is no object")
    name = turn.get("role", turn.get("from"))
    role = ALIASES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise RowError(f"a turn of unknown role {str(name)[:30]!r}")
    content = turn.get("content", turn.get("value"))
    if role == "call":
        return {"role": "assistant", "content": "", "tool_calls": _calls(content)}
    message: Message = {"role": role, "content": ""}
    if turn.get("tool_calls"):
        message["tool_calls"] = _calls(turn["tool_calls"])
    message |= {k: turn[k] for k in ("name", "tool_call_id") if isinstance(turn.get(k), str)}
    if content is not None or "tool_calls" not in message:
        message["content"] = _text(content)
    return message


def _text(content: Any) -> str:
    """A message's text; a list of text parts is joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("a message without text content")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else None
            raise RowError(f"a message with a part that is no text: {str(kind)[:30]}")
    return "".join(part["text"] for part in content)


def _calls(given: Any) -> list[dict[str, Any]]:
    """Tool calls in the form of chat templates, arguments as an object; one call or several, as
    objects or as JSON text."""
    given = _parsed(given)
    calls = []
    for call in given if isinstance(given, list) else [given]:
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise RowError("a tool call without a name")
        arguments = _parsed(inner.get("arguments", inner.get("parameters", {})))
        calls.append(
            {"type": "function", "function": {"name": inner["name"], "arguments": arguments}}
        )
    if not calls:
        raise RowError("a tool call without a name")
    return calls


def _tools(given: Any) -> list[Any]:
    tools = _parsed(given)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("tools that are no list of objects")
    return tools


def _parsed(value: Any) -> Any:
    """JSON text as what it says, anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
