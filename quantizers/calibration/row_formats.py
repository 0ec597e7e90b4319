"""Row formats: converts a row of a dataset to plain text or to the turns of a conversation."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from .set import DataSource, seeded

Turn = dict[str, Any]  # role, content; reasoning_content, tool_calls

_ROLES = {
    "system": "system",
    "user": "human user",
    "assistant": "gpt assistant chatgpt model bot bing bard",
    "call": "function_call",  # the whole turn is one call
    "tool": "tool observation function_response",
}
# The role that a chat template knows, by each role name in ShareGPT files on the Hub.
SHAREGPT_ROLES = {name: role for role, names in _ROLES.items() for name in names.split()}
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
# deepmind/code_contests numbers the languages of its solutions.
CONTEST_LANGUAGES = {0: "", 1: "python", 2: "cpp", 3: "python", 4: "java"}


class Rejected(Exception):
    """A row cannot become a sample; the message says why."""


@dataclass(frozen=True)
class Content:
    """The content of one row.

    Attributes:
        turns: the conversation; empty for plain text.
        tools: the tools' JSON schemas, for the chat template.
        text: the plain text, or the words of all turns without the chat template; the search for
            duplicates and the language check use it.
    """

    turns: tuple[Turn, ...]
    tools: tuple[Any, ...]
    text: str


def read_row(row: dict[str, Any], source: DataSource, seed: str) -> Content:
    """Read one row in the shape that the source declares.

    Args:
        row: one row of the dataset, as Python values.
        source: names the shape and the columns.
        seed: decides which of several solutions is taken (code-contests).

    Raises:
        Rejected: the row cannot be used.
    """
    columns = source.columns
    if source.shape == "text":
        return Content((), (), _text(row, columns[0]))
    if source.shape == "prompt-answer":
        turns, answer = row.get(columns[0]), _text(row, columns[1])
        asked = list(map(_chat_turn, turns)) if isinstance(turns, list) else [_turn("user", _text(row, columns[0]))]
        thinks = answer.lstrip().startswith("<think>")
        return _conversation([*asked, _hermes(answer) if thinks else _turn("assistant", answer)], None)
    if source.shape == "code-contests":
        return _conversation(_contest(row, columns[0], seed), None)
    read = _chat_turn if source.shape == "chat" else _sharegpt_turn
    messages = _from_json(row.get(columns[0]))
    if not isinstance(messages, list) or not messages:
        raise Rejected(f"{columns[0]} is not a list of turns")
    tools = row.get(columns[1]) if len(columns) == 2 else None
    return _conversation([read(message) for message in messages], tools)


def instruct(content: Content, instruction: str) -> Content:
    """Put an instruction before the text: in the first user turn, or in a new turn if there are none."""
    if not content.turns:
        text = f"{instruction}\n\n{content.text}"
        return Content((_turn("user", text),), content.tools, text)
    turns = list(content.turns)
    first_user = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
    if first_user is None:
        raise Rejected("no user turn to put the prompt in")
    turns[first_user] = turns[first_user] | {"content": f"{instruction}\n\n{turns[first_user]['content']}"}
    return replace(content, turns=tuple(turns), text=f"{instruction}\n\n{content.text}")


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


def _text(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise Rejected(f"{column} is not text")
    if not value.strip():
        raise Rejected("an empty text")
    return value


def _conversation(turns: list[Turn], tools: Any) -> Content:
    for turn in turns:
        if not turn["content"].strip() and not turn.get("tool_calls"):
            raise Rejected("an empty turn")
    tools = _from_json(tools) or []
    if not isinstance(tools, list):
        raise Rejected("tools is not a list of tools")
    words = [part for turn in turns for part in (turn.get("reasoning_content"), turn["content"]) if part]
    return Content(tuple(turns), tuple(tools), "\n\n".join(words))


def _chat_turn(message: Any) -> Turn:
    """A turn as chat templates expect it: {role, content, reasoning_content?, tool_calls?}."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in CHAT_ROLES:
        raise Rejected(f"unknown role {role}")
    turn: Turn = message | _turn(role, _content(message.get("content")))
    if calls := message.get("tool_calls"):
        turn["tool_calls"] = [_call(call) for call in calls] if isinstance(calls, list) else [_call(calls)]
    return turn


def _content(content: Any) -> str:
    """The text of a turn; a list of typed parts is joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "\n".join(str(part.get("text", "")) for part in content)
    raise Rejected("a turn that is not text")


def _call(call: Any) -> dict[str, Any]:
    """One tool call with its arguments as a mapping, from any of the usual notations."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Rejected("a tool call without a name")
    arguments = _from_json(function.get("arguments", {}))
    if not isinstance(arguments, dict):
        raise Rejected("tool call arguments are not a JSON object")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _sharegpt_turn(message: Any) -> Turn:
    """Convert a turn {from, value}, including the markup of Hermes-style tool calls in its text."""
    if not isinstance(message, dict):
        raise Rejected("unknown role None")
    given = message.get("from", message.get("role"))
    role = SHAREGPT_ROLES.get(given.lower()) if isinstance(given, str) else None
    if role is None:
        raise Rejected(f"unknown role {given}")
    text = _content(message.get("value", message.get("content")))
    if role == "call":
        return _turn("assistant", "") | {"tool_calls": [_call(_from_json(text))]}
    if role == "tool":
        return _turn("tool", re.sub(r"</?tool_response>", "", text).strip())
    return _hermes(text) if role == "assistant" else _turn(role, text)


def _hermes(text: str) -> Turn:
    """Move `<think>` and `<tool_call>` blocks into fields, so that each chat template writes them in its own markup."""
    turn = _turn("assistant", "")
    if match := re.match(r"\s*<think>(.*?)</think>", text, re.DOTALL):
        turn["reasoning_content"] = match[1].strip()
        text = text[match.end() :]
    calls = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    if calls:
        turn["tool_calls"] = [_call(_from_json(call)) for call in calls]
        text = re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL)
    return turn | {"content": text.strip()}


def _contest(row: dict[str, Any], name_column: str, seed: str) -> list[Turn]:
    """A conversation from a competitive programming task and one of its solutions."""
    name, description = _text(row, name_column), _text(row, "description")
    solutions = row.get("solutions")
    if not isinstance(solutions, dict) or not solutions.get("solution"):
        raise Rejected("no solution")
    chosen = seeded(f"{seed}:{name}").randrange(len(solutions["solution"]))
    language = CONTEST_LANGUAGES.get(solutions["language"][chosen], "")
    answer = f"```{language}\n{solutions['solution'][chosen].rstrip()}\n```"
    return [_turn("user", f"{name}\n\n{description}"), _turn("assistant", answer)]


def _from_json(value: Any) -> Any:
    """Parse JSON text: many datasets store structures as text, so that all rows have one Arrow type."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
