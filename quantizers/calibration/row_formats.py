"""Row formats: converts a row of a dataset to plain text or to the turns of a conversation."""

from __future__ import annotations

import ast
import json
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantizers.system.formatting import printable

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
CALLS = ("tool_calls", "function_call")  # keys under which data sets have a turn's calls
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # keys under which data sets and templates have them
# deepmind/code_contests numbers the languages of its solutions.
CONTEST_LANGUAGES = {0: "", 1: "python", 2: "cpp", 3: "python", 4: "java"}
DEEPEST = 100  # lists and mappings within each other; chat templates, and Python's JSON, fail at some depth
_SURROGATE = re.compile("[\ud800-\udfff]")
LONGEST = 4000  # binary digits of a whole number; Python refuses to write some more
REASON = 200  # characters of a reason, which may quote what a template says


class Rejected(Exception):
    """A row cannot become a sample; the message, one printable line, says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason if len(reason) <= REASON else f"{reason[:REASON]}…"))


@dataclass(frozen=True)
class Content:
    """The content of one row."""

    turns: tuple[Turn, ...]  # the conversation; empty for plain text
    tools: tuple[Any, ...]  # the tools' JSON schemas, for the chat template
    text: str  # the plain text, or the words of all turns without the chat template: what a check compares


def read_row(row: dict[str, Any], source: DataSource, seed: str) -> Content:
    """Read one row in the shape that the source declares. Raises Rejected if it cannot be used, and nothing else.

    The seed decides which of several solutions is taken (code-contests).
    """
    first, *more = source.columns
    if source.shape == "text":
        return Content((), (), _text(row, first))
    if source.shape == "prompt-answer":
        answer = _thinking(turn_of("assistant", _text(row, more[0])))
        turns = _parsed(_cell(row, first))
        if not isinstance(turns, list):
            return _conversation([turn_of("user", _text(row, first)), answer])
        return _conversation([*(turn for message in turns for turn in _turns(message, first)), answer])
    if source.shape == "code-contests":
        return _conversation(_contest(row, first, seed))
    messages = _parsed(_cell(row, first))
    if not isinstance(messages, list) or not messages:
        raise Rejected(f"{first} is not a list of turns")
    tools = _tools(row, more[0]) if more else []
    sharegpt = source.shape == "sharegpt"
    return _conversation([turn for message in messages for turn in _turns(_parsed(message), first, sharegpt)], tools)


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


def _cell(row: dict[str, Any], column: str) -> Any:
    """The value of a column, None where there is none: the only way to it, so that all else sees sound values alone."""
    value = row.get(column)
    if fault := _fault(value):
        raise Rejected(f"{column} has {fault}")
    return value


def too_deep(value: Any, levels: int = DEEPEST) -> bool:
    """Whether lists and mappings lie deeper within each other than so many levels."""
    if not isinstance(value, (dict, list)):
        return False
    return not levels or any(too_deep(inner, levels - 1) for inner in _inner(value))


def _inner(value: dict[Any, Any] | list[Any]) -> list[Any]:
    return value if isinstance(value, list) else list(value.values())


def _fault(value: Any) -> str:
    """The reason why a value cannot be written as JSON in UTF-8; empty if it can."""
    return f"values nested deeper than {DEEPEST} levels" if too_deep(value) else _unsound(value)


def _unsound(value: Any) -> str:
    if isinstance(value, str):
        return "half of a surrogate pair" if _SURROGATE.search(value) else ""
    if isinstance(value, int):
        return "a number with too many digits" if value.bit_length() > LONGEST else ""
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else []
        return next(filter(None, map(_unsound, [*keys, *_inner(value)])), "")
    return "" if value is None or isinstance(value, float) else f"a value of type {type(value).__name__}"


def _is_nothing(value: Any) -> bool:
    """Whether a value holds nothing, as where a table has its columns for other rows: null, empty, or nulls alone."""
    if isinstance(value, (dict, list)):
        return all(map(_is_nothing, _inner(value)))
    return value is None or (isinstance(value, str) and not value.strip())


def _text(row: dict[str, Any], column: str) -> str:
    value = _cell(row, column)
    if not isinstance(value, str):
        raise Rejected(f"{column} is not text")
    if not value.strip():
        raise Rejected(f"an empty text in {column}")
    return value


def _conversation(turns: list[Turn], tools: Sequence[Any] = ()) -> Content:
    """A conversation without its empty system turns, which many data sets have; other empty turns are an error."""
    turns = [turn for turn in turns if turn["content"].strip() or turn["role"] not in ("system", "developer")]
    if not turns:
        raise Rejected("an empty turn, and no other with content")
    for turn in turns:
        if not (turn["content"].strip() or turn.get("tool_calls") or turn.get("reasoning_content")):
            raise Rejected(f"an empty turn of role {turn['role']}: without content, thoughts or calls")
    words = [text for turn in turns for text in (turn.get("reasoning_content"), turn["content"]) if text]
    return Content(tuple(turns), tuple(tools), "\n\n".join(words))


def _tools(row: dict[str, Any], column: str) -> list[Any]:
    """The tools as chat templates expect them; many data sets have the function alone."""
    tools = _parsed(_cell(row, column))
    if _is_nothing(tools):
        return []
    if not isinstance(tools, list):
        raise Rejected(f"{column} is not a list of tools")
    return [_tool(_parsed(tool), column) for tool in tools]


def _tool(tool: Any, column: str) -> Any:
    if not isinstance(tool, (dict, str)):
        raise Rejected(f"{column} has a tool that is neither a mapping nor text")
    bare = isinstance(tool, dict) and "name" in tool and "function" not in tool
    return {"type": "function", "function": tool} if bare else tool


def _turns(message: Any, column: str, sharegpt: bool = False) -> list[Turn]:
    """The turns of a message {role, content, reasoning_content?, tool_calls?}; with `sharegpt` of {from, value}."""
    if not isinstance(message, dict):
        raise Rejected(f"{column} has a turn that is not a mapping")
    message = {key: value for key, value in message.items() if value is not None}
    names = (("from", "role"), ("value", "content")) if sharegpt else (("role",), ("content",))
    role_key, content_key = (next((name for name in usual if name in message), usual[0]) for usual in names)
    role = message.get(role_key)
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise Rejected(f"unknown role {role if isinstance(role, str) else reprlib.repr(role)} in {role_key}")
    role, content = ROLES[role.lower()], _content(message.get(content_key), content_key)
    if role == "call":
        return [turn_of("assistant", "", tool_calls=_calls(content, content_key))]
    return _sharegpt_turns(role, content) if sharegpt else [_chat_turn(message, role, content)]


def _chat_turn(message: Turn, role: str, content: str) -> Turn:
    turn: Turn = {key: value for key, value in message.items() if key not in (*THOUGHTS, *CALLS)}
    turn |= turn_of(role, content)
    if calls := next(filter(None, (_calls(message.get(key), key) for key in CALLS)), None):
        turn["tool_calls"] = calls
    if thought := next(filter(None, (_thought(message, key) for key in THOUGHTS)), None):
        return turn | {"reasoning_content": thought}
    return _thinking(turn) if role == "assistant" else turn


def _thought(message: Turn, key: str) -> str:
    """The thoughts under a key; empty where it is missing, empty, or a switch."""
    thought = message.get(key)
    if isinstance(thought, bool) or _is_nothing(thought):
        return ""
    if not isinstance(thought, str):
        raise Rejected(f"{key} is not text")
    return thought


def _content(content: Any, key: str) -> str:
    """The text of a turn; a list of typed parts is joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Rejected(f"{key} of a turn is not text")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text", ""), str | None)):
            raise Rejected(f"{key} of a turn has a part that is not text")
    return "\n".join(part["text"] for part in content if part.get("text") is not None)


def _calls(calls: Any, key: str) -> list[dict[str, Any]]:
    """The tool calls under a key of a turn, which has one or a list of them; none of those that hold nothing."""
    calls = _parsed(calls)
    listed = [_parsed(call) for call in (calls if isinstance(calls, list) else [calls])]
    return [_call(call, key) for call in listed if not _is_nothing(call)]


def _call(call: Any, key: str) -> dict[str, Any]:
    """One tool call with its arguments as a mapping, and its id if it has one, from any of the usual notations."""
    function = _parsed(call.get("function", call)) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise Rejected(f"a tool call without a name in {key}")
    arguments = _parsed(function.get("arguments", function.get("parameters")))
    if not isinstance(arguments, dict) and _is_nothing(arguments):
        arguments = {}
    if not isinstance(arguments, dict):
        raise Rejected(f"tool call arguments are not a JSON object in {key}")
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
        turn["tool_calls"] = [call for block in calls for call in _calls(block, "<tool_call>")]
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
    """A task and one of its solutions, in a block of its language where the row has languages."""
    name, description = _text(row, name_column), _text(row, "description")
    solutions = _parsed(_cell(row, "solutions"))
    texts = _listed(solutions, "solution")
    languages = _listed(solutions, "language") or [None] * len(texts)
    if len(languages) != len(texts):
        raise Rejected(f"solutions has {len(texts)} of solution and {len(languages)} of language")
    usable = [
        pair for pair in zip(texts, languages, strict=True) if isinstance(pair[0], str) and not _is_nothing(pair[0])
    ]
    if not usable:
        raise Rejected("no solution that is text in solutions")
    text, language = usable[seeded(f"{seed}:{name}").randrange(len(usable))]
    fence = CONTEST_LANGUAGES.get(language, "") if isinstance(language, int) else ""
    answer = f"```{fence}\n{text.rstrip()}\n```"
    return [turn_of("user", f"{name}\n\n{description}"), turn_of("assistant", answer)]


def _listed(solutions: Any, key: str) -> list[Any]:
    """The list under a key of a task's solutions; an empty one for null, and where there is none."""
    values = solutions.get(key) if isinstance(solutions, dict) else None
    if values is not None and not isinstance(values, list):
        raise Rejected(f"{key} in solutions is not a list")
    return values or []


def _parsed(value: Any) -> Any:
    """The value of JSON text or of a Python literal: many data sets store structures as text, for one Arrow type.

    Text of neither, and of a value that JSON does not have, stays text.
    """
    if not isinstance(value, str):
        return value
    for parse in (json.loads, ast.literal_eval) if value.lstrip()[:1] in ("[", "{") else (json.loads,):
        try:
            read = parse(value.strip())
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        if not _fault(read):
            return read
    return value
