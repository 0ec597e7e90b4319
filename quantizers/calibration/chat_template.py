"""Habits of a chat template, found by rendering small conversations, and what a template leaves out of a conversation.

Templates share an interface, and no file says how each reads it: one joins a call's arguments as text, one writes them
one by one; one writes a call's id and not its name; many know no system turn, or no tools. What a template refuses or
leaves out in one way is handed to it in another.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .row_formats import THOUGHTS, Turn

# For tokenizers without a template: a line for each turn, in the markup of Hermes-style data sets.
PLAIN = """\
{% if tools %}tools: {{ tools | tojson }}

{% endif %}{% for message in messages %}{{ message.role }}: \
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}{{ message.content }}

{% endfor %}"""


@dataclass(frozen=True)
class Habits:
    """How a template takes the turns of a conversation.

    Attributes:
        parts: a turn's content is a list of typed parts.
        thoughts: the key under which it reads an answer's thoughts; None to leave them out.
        arguments: of a call, as a mapping or as JSON text.
        ids: of calls: their own, `functions.NAME:NUMBER` instead, or nine letters and digits.
        folds: it knows user and assistant alone, in turn: words of the system are the user's, and neighbouring turns
            of one role are joined.
        tells: it knows no calls: they and their results are told in words, in the markup of Hermes-style data sets.
    """

    parts: bool = False
    thoughts: str | None = THOUGHTS[0]
    arguments: Literal["mapping", "text"] = "mapping"
    ids: Literal["own", "named", "short"] = "own"
    folds: bool = False
    tells: bool = False


Render = Callable[[Sequence[Turn], Sequence[Any], Habits], str]


def _words(role: str, content: str, **more: Any) -> Turn:
    return {"role": role, "content": content} | more


_ARGUMENTS = {"fruit": "quince"}
_ASKED, _ANSWERED = _words("user", "apricot"), _words("assistant", "cherry")
_CALL = {"id": "call_1", "type": "function", "function": {"name": "pick_one", "arguments": _ARGUMENTS}}
# Conversations, and the ways to hand them over, the usual one first.
_PROBES: tuple[tuple[Sequence[Turn], Sequence[dict[str, Any]]], ...] = (
    ((_ASKED, _ANSWERED), ({}, {"parts": True})),
    ((_words("system", "bilberry"), _ASKED, _ANSWERED), ({}, {"folds": True})),
    ((_ASKED, _ANSWERED | {"reasoning_content": "sloe"}), [{"thoughts": key} for key in THOUGHTS]),
    (
        (_ASKED, _words("assistant", "", tool_calls=[_CALL]), _words("tool", "damson"), _ANSWERED),
        [
            *({"arguments": kind, "ids": ids} for kind in ("mapping", "text") for ids in ("own", "named", "short")),
            {"tells": True},
        ],
    ),
)


def habits_of(render: Render) -> Habits:
    """The habits with which a template shows most of some small conversations."""
    habits = Habits()
    for turns, ways in _PROBES:
        lost = [_lost(render, turns, replace(habits, **way)) for way in ways]
        habits = replace(habits, **ways[lost.index(min(lost))])
    return habits


def _lost(render: Render, turns: Sequence[Turn], habits: Habits) -> float:
    """How many parts of a conversation are not shown; arguments written as Python writes a mapping are not."""
    try:
        text = render(turns, (), habits)
    except Exception:  # a template is a program and can fail in any way
        return float("inf")
    return len(left_out(turns, (), text)) + (str(_ARGUMENTS) in text)


def handed(turns: Sequence[Turn], habits: Habits) -> list[Turn]:
    """The turns of a conversation in the form that a template takes."""
    ready = list(_with_ids(turns, habits.ids))
    if habits.tells:
        ready = [_told(turn) for turn in ready]
    if habits.folds:
        ready = _folded(ready)
    return [_formed(turn, habits) for turn in ready]


def _with_ids(turns: Iterable[Turn], kind: str) -> Iterator[Turn]:
    """Give each call and its result an id: results without one belong to the calls before them, in their order."""
    number, waiting, renamed = 0, list[str](), dict[str, str]()
    for turn in turns:
        added: Turn = {}
        if "tool_calls" in turn:
            added["tool_calls"], waiting = [], []
            for call in turn["tool_calls"]:
                named = f"functions.{call['function']['name']}:{number}"
                own, short = call.get("id", named), hashlib.sha256(named.encode()).hexdigest()[:9]
                renamed[own] = {"own": own, "named": named, "short": short}[kind]
                waiting.append(renamed[own])
                added["tool_calls"].append(call | {"id": renamed[own]})
                number += 1
        elif turn["role"] == "tool" and (waiting or str(turn.get("tool_call_id")) in renamed):
            added["tool_call_id"] = renamed.get(str(turn.get("tool_call_id"))) or waiting[0]
            waiting = [other for other in waiting if other != added["tool_call_id"]]
        yield turn | added


def _told(turn: Turn) -> Turn:
    """A turn with its calls, or its result, told in its words."""
    if turn["role"] == "tool":
        return _words("user", f"<tool_response>\n{turn['content']}\n</tool_response>")
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ())]
    words = [*filter(None, [turn["content"]]), *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
    return {key: value for key, value in turn.items() if key != "tool_calls"} | {"content": "\n".join(words)}


def _folded(turns: Iterable[Turn]) -> list[Turn]:
    """User and assistant turns in turn, where the calls between them allow it."""
    folded: list[Turn] = []
    for turn in turns:
        role = "user" if turn["role"] in ("system", "developer") else turn["role"]
        before = folded[-1] if folded else {}
        if role == before.get("role") != "tool" and "tool_calls" not in before:
            both = {key: [one[key] for one in (before, turn) if one.get(key)] for key in ("content", THOUGHTS[0])}
            words = {key: "\n\n".join(said) for key, said in both.items() if said}
            folded[-1] = before | turn | words | {"role": role}
        else:
            folded.append(turn | {"role": role})
    return folded


def _formed(turn: Turn, habits: Habits) -> Turn:
    formed = {key: value for key, value in turn.items() if key != THOUGHTS[0]}
    if THOUGHTS[0] in turn and habits.thoughts:
        formed[habits.thoughts] = turn[THOUGHTS[0]]
    if habits.parts:
        formed["content"] = [{"type": "text", "text": turn["content"]}]
    if habits.arguments == "text" and "tool_calls" in turn:
        formed["tool_calls"] = [call | {"function": _with_text(call["function"])} for call in turn["tool_calls"]]
    return formed


def _with_text(function: dict[str, Any]) -> dict[str, Any]:
    return function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def left_out(turns: Iterable[Turn], tools: Iterable[Any], text: str) -> list[str]:
    """What a template has left out of a rendered conversation: an entry such as `system turn`, `thoughts` or `call`
    for each part whose words are not in the text, as they are or as JSON.
    """
    parts: Counter[tuple[str, str]] = Counter()
    for turn in turns:
        words = {f"{turn['role']} turn": turn["content"], "thoughts": turn.get(THOUGHTS[0], "")}
        parts.update((what, said.strip()) for what, said in words.items() if said.strip())
        parts.update(("call", call["function"]["name"]) for call in turn.get("tool_calls", ()))
    parts.update(("tool", tool["function"]["name"]) for tool in tools if _named(tool))
    return [what for (what, words), count in parts.items() for _ in range(count - _shown(words, text))]


def _named(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _shown(words: str, text: str) -> int:
    """How often some words are in a text."""
    return max(text.count(words), text.count(json.dumps(words, ensure_ascii=False)[1:-1]))
