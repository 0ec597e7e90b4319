"""Whatever a row holds, it becomes the words that it has, or is rejected with a reason that names the field."""

from __future__ import annotations

import copy
import datetime
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantizers.calibration.render import Renderer
from quantizers.calibration.row_formats import CALLS as CALL_KEYS
from quantizers.calibration.row_formats import DEEPEST, THOUGHTS, Rejected, instruct, read_row
from quantizers.calibration.rows import needed_columns
from quantizers.calibration.set import DataSource

COUNT = settings(max_examples=100, deadline=None, derandomize=True)
WORD = re.compile("word-[a-z]+")  # what must not vanish from a row that is read
CALLS = [{"id": "call_1", "type": "function", "function": {"name": "word-call", "arguments": {"river": "word-elbe"}}}]
TOOLS = [{"type": "function", "function": {"name": "word-tool", "parameters": {"type": "object"}}}]
CHAT = [
    {"role": "system", "content": "word-system"},
    {"role": "user", "content": [{"type": "text", "text": "word-asked"}, {"type": "text", "text": "word-more"}]},
    {"role": "assistant", "content": None, "reasoning_content": "word-thought", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call_1", "content": "word-result"},
    {"role": "assistant", "content": "<think>word-hidden</think> word-answer", "thinking": None},
]
OLD = [{"role": "user", "content": "word-asked"}, {"role": "assistant", "function_call": CALLS[0]["function"]}]
BLOCK = '<tool_call>\n{"name": "word-call", "arguments": {"x": "word-elbe"}}\n</tool_call>'
SHAREGPT = [
    {"from": "human", "value": "word-asked"},
    {"from": "gpt", "value": f"<think>word-thought</think>word-answer{BLOCK}"},
    {"from": "tool", "value": "<tool_response>\nword-result\n</tool_response>"},
    {"from": "function_call", "value": '{"name": "word-later", "arguments": "{}"}'},
]
SOLUTIONS = {"language": [2, 3], "solution": ["int a;", "a = 1"]}  # of which one is chosen
# A shape, its columns, and a row that can be used.
ROWS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("text", ("t",), {"t": "word-text"}),
    ("prompt-answer", ("q", "a"), {"q": "word-asked", "a": "<think>word-thought</think>word-answer"}),
    ("prompt-answer", ("q", "a"), {"q": CHAT[:2], "a": "word-answer"}),
    ("chat", ("m", "tools"), {"m": CHAT, "tools": TOOLS}),
    ("chat", ("m",), {"m": json.dumps(CHAT)}),
    ("chat", ("m", "tools"), {"m": [*map(str, OLD)], "tools": json.dumps([TOOLS[0]["function"]])}),
    ("chat", ("m",), {"m": OLD}),
    ("sharegpt", ("c", "tools"), {"c": SHAREGPT, "tools": TOOLS}),
    ("code-contests", ("n",), {"n": "word-name", "description": "word-task", "solutions": SOLUTIONS}),
    ("code-contests", ("n",), {"n": "word-name", "description": "word-task", "solutions": str(SOLUTIONS)}),
]
FIELDS = ["role", "from", "content", "value", *THOUGHTS, *CALL_KEYS, "<tool_call>"]


def deep(levels: int) -> Any:
    value: Any = "deep"
    for number in range(levels):
        value = [value] if number % 2 else {"a": value}
    return value


ODD: list[Any] = [
    *(None, "", " \n", 0, -1, 3.5, True, False, float("nan"), float("inf"), 10**3000, [], {}, [None], {"a": None}),
    *("\ud800 half", "a\0b", "null", "NaN", "[", "[" * 3000, "9" * 5000, "[0x" + "f" * 5000 + "]", '["\\ud800"]'),
    *("{[]: 1}", "{1, 2}", "{'a': b'x'}", "{'name': 'f', 'arguments': ...}", '{"a": ' * 150 + "1" + "}" * 150),
    *(b"x", b"\xff", datetime.date(2026, 1, 1), {1: 2}, {None: 1}, {"a": {"b"}}, (1, 2), object(), 1j),
    *(deep(DEEPEST), deep(DEEPEST + 1), [{"type": "image_url", "image_url": {"url": "x"}}]),
    *("narrator", "function", "\ud800", "tool", "assistant", ["role"], {"name": "f"}, {"function": None}, "</think>"),
    *([{"type": "text", "text": {"a": 1}}], [{"type": "text"}], [{"name": "f", "arguments": "{broken"}], {"name": ""}),
]  # fmt: skip


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    yield ()
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from ((key, *rest) for rest in paths(value[key]))


def changed(row: Any, path: tuple[Any, ...], change: str, odd: Any) -> None:
    """Change what lies at a path that is not empty."""
    *way, key = path
    inside = row
    for step in way:
        inside = inside[step]
    old = inside[key]
    if change == "remove":
        del inside[key]
    elif change == "more" and isinstance(old, list):
        old.append(odd)
    else:
        inside[key] = {"text": json.dumps(old, default=str), "list": [old], "twice": [old, old]}.get(change, odd)


@st.composite
def spoilt_rows(draw: st.DrawFn) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    shape, columns, row = copy.deepcopy(draw(st.sampled_from(ROWS)))
    for _ in range(draw(st.integers(1, 3))):
        if places := list(paths(row))[1:200]:
            change = draw(st.sampled_from(["remove", "replace", "replace", "replace", "text", "list", "twice", "more"]))
            changed(row, draw(st.sampled_from(places)), change, copy.deepcopy(draw(st.sampled_from(ODD))))
    return shape, columns, row


@pytest.fixture(scope="module")
def renderer(tokenizer: str) -> Renderer:
    return Renderer(tokenizer)


def outcome(renderer: Renderer, shape: str, columns: tuple[str, ...], row: dict[str, Any]) -> str:
    """What is read of a row, as text; or else the reason for which it is rejected, after `rejected: `."""
    values = {"dataset": "a.jsonl", "columns": columns, "shape": shape, "samples": 1, "category": "x"}
    source = DataSource.model_validate(values)
    try:
        content = read_row(row, source, "0")
    except Rejected as failure:
        reason = f"{failure}"
        assert any(field in reason for field in [*needed_columns(source), *FIELDS]), reason
        assert reason.isprintable()
        assert len(reason) <= 201
        return f"rejected: {reason}"
    with suppress(Rejected):  # by the chat template, or for want of a user's turn
        renderer.render(content, 64)
        renderer.render(instruct(content, "Explain."), 64)
    return json.dumps([content.text, content.turns, content.tools], ensure_ascii=False)


@settings(COUNT, max_examples=400)
@given(spoilt_rows())
def test_a_spoilt_row_keeps_its_words_or_is_rejected_by_field(
    renderer: Renderer, case: tuple[str, tuple[str, ...], dict[str, Any]]
) -> None:
    shape, columns, row = case
    said = outcome(renderer, shape, columns, row)
    if not said.startswith("rejected: "):
        kept = {column: row[column] for column in (*columns, "description", "solutions") if column in row}
        assert set(WORD.findall(json.dumps(kept, default=str))) <= set(WORD.findall(said))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(ODD),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*FIELDS, "name", "type", "text", "id", "solution", "language"]), inner, max_size=4
        )
    ),
    max_leaves=9,
)


@COUNT
@given(st.sampled_from(ROWS), st.lists(JSON, min_size=3, max_size=3))
def test_any_values_are_read_or_rejected_by_field(
    renderer: Renderer, case: tuple[str, tuple[str, ...], dict[str, Any]], values: list[Any]
) -> None:
    shape, columns, valid = case
    outcome(renderer, shape, columns, dict(zip(valid, values, strict=False)))


def test_a_usable_row_is_read(renderer: Renderer) -> None:
    for shape, columns, row in ROWS:
        said = outcome(renderer, shape, columns, row)
        assert outcome(renderer, shape, columns, row | {columns[0]: deep(5000)}).startswith("rejected: ")
        assert set(WORD.findall(said)) == set(WORD.findall(json.dumps(row)))
