"""A raw row as a conversation, or the reason why it is none.

In: one row as `reading` found it: a line of JSON as bytes, a dict from arrow, or a refusal. Out: a
`Conversation`, whose messages all have a known `role` and a `content` of text, or a `Rejected` with
a reason that rows are counted by. Two forms of a turn are known, `role`/`content` and
`from`/`value`, under either of the columns `messages` and `conversations`.

Invariants: nothing that a row may hold raises; turns keep their order and none is left out; a key
whose value is null is the same as no key, since arrow pads every struct with nulls (a JSON-lines
file and its parquet copy give the same conversations).
"""

import json
import re
from dataclasses import dataclass
from typing import Any

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
# Only for turns of the form role/content: under from/value their content has no agreed shape.
EXTRA_ROLES = ("tool", "developer")

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A row that can be rendered.

    Attributes:
        messages: dicts with `role`, `content` (text) and what else the row had (`tool_calls`, ...).
        tools: tool schemas for the template, or None.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why a row, or one answer of it, cannot be used.

    Attributes:
        reason: few words, the same for all rows with this trouble; rows are counted by it.
        detail: what was found in this row.
    """

    reason: str
    detail: str = ""


def parse_row(raw: bytes | dict[str, Any] | Rejected) -> Conversation | Rejected:
    """A raw row as a conversation, or the reason why it is none. Raises for nothing in a row."""
    if isinstance(raw, Rejected):
        return raw
    try:
        row = _json_object(raw) if isinstance(raw, bytes) else raw
        return row if isinstance(row, Rejected) else _conversation(row)
    except RecursionError:
        return Rejected("nested too deeply")


def _json_object(line: bytes) -> dict[str, Any] | Rejected:
    try:
        row = json.loads(line.decode("utf-8"))
        if _SURROGATE_ESCAPE.search(line):
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        return Rejected("text is not UTF-8", str(error))
    except UnicodeEncodeError as error:
        return Rejected("text holds half of a surrogate pair", str(error))
    except ValueError as error:
        return Rejected("line is not JSON", f"{error}; the line ends in {line[-40:]!r}")
    if not isinstance(row, dict):
        return Rejected("line is not a JSON object", f"it is {type(row).__name__}")
    return row


def _conversation(row: dict[str, Any]) -> Conversation | Rejected:
    turns = row.get("messages")
    if turns is None:
        turns = row.get("conversations")
    if turns is None:
        found = [key for key, value in row.items() if value is not None]
        return Rejected("no 'messages' or 'conversations'", f"columns found: {found}")
    if not isinstance(turns, list):
        return Rejected("the messages are not a list", f"they are {type(turns).__name__}")
    if not turns:
        return Rejected("the list of messages is empty")
    messages = []
    for number, turn in enumerate(turns):
        message = _message(turn)
        if isinstance(message, Rejected):
            return Rejected(message.reason, f"turn {number}: {message.detail}")
        messages.append(message)
    tools = _tools(row.get("tools"))
    return tools if isinstance(tools, Rejected) else Conversation(messages, tools)


def _message(turn: Any) -> dict[str, Any] | Rejected:
    if not isinstance(turn, dict):
        return Rejected("a turn is not an object", "null" if turn is None else f"{turn!r:.60}")
    turn = _without_nulls(turn)
    if "role" in turn:
        roles = ROLES | {role: role for role in EXTRA_ROLES}
        written, content, others = turn["role"], turn.get("content"), turn
    elif "from" in turn:
        roles = ROLES
        written, content, others = turn["from"], turn.get("value"), {}
    else:
        return Rejected("a turn has neither 'role' nor 'from'", f"keys found: {sorted(turn)}")
    role = roles.get(written.strip().lower()) if isinstance(written, str) else None
    if role is None:
        return Rejected(f"unknown role {written!r:.40}")
    if content is None and role == "assistant" and others.get("tool_calls"):
        content = ""  # null beside a tool call is legal; no template prints "" as "None"
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        content = content[0].get("text", content)
    if not isinstance(content, str):
        return Rejected("a content is not text", f"{content!r:.60}")
    return {**others, "role": role, "content": content}


def _tools(value: object) -> list[dict[str, Any]] | Rejected | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            return Rejected("the tools are not JSON", str(error))
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        return Rejected("the tools are not a list of objects", f"{value!r:.60}")
    return [_without_nulls(tool) for tool in value]


def _without_nulls(value: Any) -> Any:
    """The value without the keys whose value is None, at every depth; nulls inside lists stay."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
