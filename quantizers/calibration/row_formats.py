"""Row formats: converts a row of a dataset to plain text or to the turns of a conversation."""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from .set import DataSource, seeded

Turn = dict[str, Any]  # role, content; reasoning_content, tool_calls, tool_call_id

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "human user",
    "assistant": "gpt assistant chatgpt model bot bing bard",
    "call": "function_call",  # the whole turn is one call
    "tool": "tool observation function_response function",
}
# The role that a chat template knows, by each role name in data sets on the Hub.
ROLES = {name: role for role, names in _ROLES.items() for name in names.split()}
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # keys under which data sets and templates have them
# deepmind/code_contests numbers the languages of its solutions.
CONTEST_LANGUAGES = {0: "", 1: "python", 2: "cpp", 3: "python", 4: "java"}


class Rejected(Exception):
    """A row cannot become a sample; the message says why."""


@dataclass(frozen=True)
class Content:
    """The content of one row."""

    turns: tuple[Turn, ...]  # the conversation; empty for plain text
    tools: tuple[Any, ...]  # the tools' JSON schemas, for the chat template
    text: str  # the plain text, or the words of all turns without the chat template: what a check compares


def read_row(row: dict[str, Any], source: DataSource, seed: str) -> Content:
    """Read one row in the shape that the source declares. Raises Rejected if it cannot be used.

    The seed decides which of several solutions is taken (code-contests).
    """
    columns = source.columns
    if source.shape == "text":
        return Content((), (), _text(row, columns[0]))
    if source.shape == "prompt-answer":
        turns, answer = _parsed(row.get(columns[0])), _thinking(turn_of("assistant", _text(row, columns[1])))
        if not isinstance(turns, list):
            return _conversation([turn_of("user", _text(row, columns[0])), answer], None)
        return _conversation([*(turn for message in turns for turn in _turns(message)), answer], None)
    if source.shape == "code-contests":
        return _conversation(_contest(row, columns[0], seed), None)
    messages = _parsed(row.get(columns[0]))
    if not isinstance(messages, list) or not messages:
        raise Rejected(f"{columns[0]} is not a list of turns")
    tools = row.get(columns[1]) if len(columns) == 2 else None
    sharegpt = source.shape == "sharegpt"
    return _conversation([turn for message in messages for turn in _turns(_parsed(message), sharegpt)], tools)


def instruct(content: Content, instruction: str) -> Content:
    """Put an instruction before the text: in the first user turn, or in a new turn if there are none."""
    if not content.turns:
        text = f"{instruction}\n\n{content.text}"
        return Content((turn_of("user", text),), content.tools, text)
    turns = list(content.turns)
    first_user = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
    if first_user is None:
        raise Rejected("no user turn to put the prompt in")
    turns[first_user] = turns[first_user] | {"content": f"{instruction}\n\n{turns[first_user]['content']}"}
    return replace(content, turns=tuple(turns), text=f"{instruction}\n\n{content.text}")


def turn_of(role: str, content: str, **more: Any) -> Turn:
    """A turn as chat templates have it."""
    return {"role": role, "content": content} | more


def _text(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise Rejected(f"{column} is not text")
    if not value.strip():
        raise Rejected("an empty text")
    return value


def _conversation(turns: list[Turn], tools: Any) -> Content:
    """A conversation without its empty system turns, which many data sets have; other empty turns are an error."""
    turns = [turn for turn in turns if turn["content"].strip() or turn["role"] not in ("system", "developer")]
    if not turns or not all(t["content"].strip() or t.get("tool_calls") or t.get("reasoning_content") for t in turns):
        raise Rejected("an empty turn")
    tools = _parsed(tools) or []
    if not isinstance(tools, list):
        raise Rejected("tools is not a list of tools")
    words = [text for turn in turns for text in (turn.get("reasoning_content"), turn["content"]) if text]
    return Content(tuple(turns), tuple(map(_tool, tools)), "\n\n".join(words))


def _tool(tool: Any) -> Any:
    """A tool as chat templates expect it; many data sets have the function alone."""
    tool = _parsed(tool)
    bare = isinstance(tool, dict) and "name" in tool and "function" not in tool
    return {"type": "function", "function": tool} if bare else tool


def _turns(message: Any, sharegpt: bool = False) -> list[Turn]:
    """The turns of a message {role, content, reasoning_content?, tool_calls?}; with `sharegpt` of {from, value}."""
    message = message if isinstance(message, dict) else {}
    role, content = message.get("role"), message.get("content")
    if sharegpt:
        role, content = message.get("from", role), message.get("value", content)
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise Rejected(f"unknown role {role}")
    role, content = ROLES[role.lower()], _content(content)
    if role == "call":
        return [turn_of("assistant", "", tool_calls=_calls(content))]
    return _sharegpt_turns(role, content) if sharegpt else [_chat_turn(message, role, content)]


def _chat_turn(message: Turn, role: str, content: str) -> Turn:
    turn: Turn = {key: value for key, value in message.items() if value is not None and key not in THOUGHTS}
    turn |= turn_of(role, content)
    if calls := turn.pop("tool_calls", None) or turn.pop("function_call", None):
        turn["tool_calls"] = _calls(calls)
    thoughts = (message[key] for key in THOUGHTS if isinstance(message.get(key), str) and message[key].strip())
    if thought := next(thoughts, None):
        return turn | {"reasoning_content": thought}
    return _thinking(turn) if role == "assistant" else turn


def _content(content: Any) -> str:
    """The text of a turn; a list of typed parts is joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "\n".join(str(part["text"]) for part in content if part.get("text") is not None)
    raise Rejected("a turn that is not text")


def _calls(calls: Any) -> list[dict[str, Any]]:
    calls = _parsed(calls)
    return [_call(_parsed(call)) for call in (calls if isinstance(calls, list) else [calls])]


def _call(call: Any) -> dict[str, Any]:
    """One tool call with its arguments as a mapping, and its id if it has one, from any of the usual notations."""
    function = _parsed(call.get("function", call)) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Rejected("a tool call without a name")
    arguments = _parsed(function.get("arguments", function.get("parameters"))) or {}
    if not isinstance(arguments, dict):
        raise Rejected("tool call arguments are not a JSON object")
    own_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return own_id | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _sharegpt_turns(role: str, text: str) -> list[Turn]:
    """The turns of a text with the markup of Hermes-style data sets: its `<think>`, `<tool_call>` and `<tool_response>`
    blocks become fields and turns, so that each chat template writes them in its own markup.
    """
    if role == "tool":
        results, rest = _blocks("tool_response", text)
        whole = re.sub(r"</?tool_response>", "", text).strip()
        return [turn_of("tool", result) for result in (results if results and not rest.strip() else [whole])]
    if role != "assistant":
        return [turn_of(role, text)]
    turn = _thinking(turn_of("assistant", text))
    calls, text = _blocks("tool_call", turn["content"])
    if calls:
        turn["tool_calls"] = [call for block in calls for call in _calls(block)]
    return [turn | {"content": text.strip()}]


def _blocks(tag: str, text: str) -> tuple[list[str], str]:
    """The contents of all blocks between tags, and the text around them."""
    pattern = re.compile(f"<{tag}>(.*?)</{tag}>", re.DOTALL)
    return [block.strip() for block in pattern.findall(text)], pattern.sub("", text)


def _thinking(turn: Turn) -> Turn:
    """Move a `<think>` block at the beginning of an answer into its field."""
    match = re.match(r"\s*<think>(.*?)</think>", turn["content"], re.DOTALL)
    if match is None:
        return turn
    thought = {"reasoning_content": match[1].strip()} if match[1].strip() else {}
    return turn | thought | {"content": turn["content"][match.end() :].strip()}


def _contest(row: dict[str, Any], name_column: str, seed: str) -> list[Turn]:
    name, description = _text(row, name_column), _text(row, "description")
    solutions = row.get("solutions")
    if not isinstance(solutions, dict) or not solutions.get("solution"):
        raise Rejected("no solution")
    chosen = seeded(f"{seed}:{name}").randrange(len(solutions["solution"]))
    language = CONTEST_LANGUAGES.get(solutions["language"][chosen], "")
    answer = f"```{language}\n{solutions['solution'][chosen].rstrip()}\n```"
    return [turn_of("user", f"{name}\n\n{description}"), turn_of("assistant", answer)]


def _parsed(value: Any) -> Any:
    """The value of JSON text or of a Python literal: many data sets store structures as text, for one Arrow type."""
    if not isinstance(value, str):
        return value
    for parse in (json.loads, ast.literal_eval) if value.lstrip()[:1] in ("[", "{") else (json.loads,):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return parse(value.strip())
    return value
