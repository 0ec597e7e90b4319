"""Rows in every shape, and every reason for which a row is passed over."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from quantizers.calibration import rows
from quantizers.calibration.row_formats import Content, Rejected, instruct, read_row
from quantizers.calibration.set import DataSource
from quantizers.calibration.source_faults import SourceError


def source(shape: str, *columns: str) -> DataSource:
    values = {"dataset": "a.jsonl", "columns": columns, "shape": shape, "samples": 1, "category": "x"}
    return DataSource.model_validate(values)


def read(shape: str, columns: tuple[str, ...], row: dict[str, Any]) -> Content:
    return read_row(row, source(shape, *columns), "seed")


def chat(*messages: Any, tools: Any = None) -> Content:
    return read("chat", ("m", "tools"), {"m": list(messages), "tools": tools})


def sharegpt(*messages: Any) -> Content:
    return read("sharegpt", ("c",), {"c": list(messages)})


def test_text_is_taken_as_it_is() -> None:
    assert read("text", ("t",), {"t": " a\nb "}) == Content((), (), " a\nb ")


def test_prompt_and_answer_are_two_turns() -> None:
    content = read("prompt-answer", ("q", "a"), {"q": "Why?", "a": "Because."})
    assert [(turn["role"], turn["content"]) for turn in content.turns] == [("user", "Why?"), ("assistant", "Because.")]
    assert content.text == "Why?\n\nBecause."
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    content = read("prompt-answer", ("q", "a"), {"q": asked, "a": "<think>\nHm.\n</think>\n\nBecause."})
    assert content.turns[:2] == tuple(asked)
    assert content.turns[2] == {"role": "assistant", "content": "Because.", "reasoning_content": "Hm."}


def test_chat_keeps_reasoning_calls_and_results() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    content = chat(
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I need f.",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": [1, null]}'}}],
        },
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
        tools=[tool],
    )
    assert [turn["role"] for turn in content.turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert content.turns[1]["content"] == "one\ntwo"
    call = content.turns[2]["tool_calls"][0]["function"]
    assert call == {"name": "f", "arguments": {"x": [1, None]}}
    assert content.turns[2]["reasoning_content"] == "I need f."
    assert content.tools == (tool,)
    assert content.text == "Be brief.\n\none\ntwo\n\nI need f.\n\n3\n\nIt is 3."


def test_structures_may_be_json_text() -> None:
    content = read("chat", ("m", "tools"), {"m": '[{"role": "user", "content": "hi"}]', "tools": '[{"a": 1}]'})
    assert content.turns[0]["content"] == "hi"
    assert content.tools == ({"a": 1},)


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("system", "system"),
        ("user", "human user Human"),
        ("assistant", "gpt assistant chatgpt model bot bing bard GPT"),
        ("tool", "tool observation function_response"),
    ],
)
def test_sharegpt_knows_its_role_names(role: str, names: str) -> None:
    turns = sharegpt(*({"from": name, "value": "hello"} for name in names.split())).turns
    assert {(turn["role"], turn["content"]) for turn in turns} == {(role, "hello")}


def test_sharegpt_markup_becomes_fields() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    content = sharegpt(
        {"from": "human", "value": "go"},
        {"from": "gpt", "value": f"<think>\nhm\n</think>\nCalling.\n{call}\n{call}"},
        {"from": "tool", "value": "<tool_response>\n1\n</tool_response>"},
        {"from": "function_call", "value": '{"name": "g", "arguments": "{}"}'},
    )
    assistant, tool, called = content.turns[1:]
    assert (assistant["reasoning_content"], assistant["content"]) == ("hm", "Calling.")
    assert [c["function"]["arguments"] for c in assistant["tool_calls"]] == [{"x": 1}, {"x": 1}]
    assert tool == {"role": "tool", "content": "1"}
    assert called["tool_calls"][0]["function"] == {"name": "g", "arguments": {}}


def test_structures_may_be_python_literals_and_lists_of_json_text() -> None:
    turns = [{"role": "human", "content": "hi"}, {"role": "GPT", "content": "It's me.", "weight": None}]
    whole = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It's me."}]
    assert read("chat", ("m",), {"m": str(turns)}).turns == tuple(whole)
    assert chat(*map(json.dumps, turns)).turns == tuple(whole)
    quoted = sharegpt({"from": "gpt", "value": "<tool_call>{'name': 'f', 'arguments': {'x': None}}</tool_call>"})
    assert quoted.turns[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": None}}
    assert sharegpt({"from": "function_call", "value": '[{"name": "f"}, {"name": "g"}]'}).turns[0]["tool_calls"] == [
        {"type": "function", "function": {"name": name, "arguments": {}}} for name in "fg"
    ]


def test_ids_are_kept_and_bare_tools_wrapped() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}
    bare = {"name": "f", "parameters": {"type": "object"}}
    content = chat({"role": "assistant", "tool_calls": [call]}, tools=[json.dumps(bare)])
    assert content.turns[0]["tool_calls"] == [call]
    assert content.tools == ({"type": "function", "function": bare},)
    old = chat({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}})
    assert old.turns[0]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    assert "function_call" not in old.turns[0]


@pytest.mark.parametrize("nothing", ["", None, " "])
def test_an_empty_system_turn_is_left_out(nothing: str | None) -> None:
    assert [
        turn["role"] for turn in sharegpt({"from": "system", "value": nothing}, {"from": "human", "value": "hi"}).turns
    ] == ["user"]
    parts = [{"type": "text", "text": nothing}, {"type": "text", "text": "hi"}]
    assert (
        chat({"role": "system", "content": nothing}, {"role": "user", "content": parts}).turns[0]["content"].strip()
        == "hi"
    )


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning", "content"])
def test_thoughts_have_one_name(key: str) -> None:
    thinking = {"role": "assistant", "content": "4"} | {key: "<think>2 + 2</think> 4" if key == "content" else "2 + 2"}
    assert chat(thinking).turns == ({"role": "assistant", "content": "4", "reasoning_content": "2 + 2"},)
    asked = read("prompt-answer", ("q", "a"), {"q": "2 + 2?", "a": "<think>\n2 + 2\n</think>\n4"})
    assert asked.turns[1] == {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}


def test_several_results_are_several_turns() -> None:
    response = "<tool_response>\n{}\n</tool_response>"
    both = sharegpt({"from": "tool", "value": f"{response.format(1)}\n{response.format(2)}"}).turns
    assert both == ({"role": "tool", "content": "1"}, {"role": "tool", "content": "2"})
    mixed = sharegpt({"from": "tool", "value": f"Two: {response.format(1)} and {response.format(2)}"}).turns
    assert [turn["content"] for turn in mixed] == ["Two: \n1\n and \n2"]


def test_contests_take_one_solution_by_the_seed() -> None:
    row = {
        "name": "1_A",
        "description": "Add.",
        "solutions": {"language": [2, 3, 4], "solution": ["int a;", "a = 1\n", "class A {}"]},
    }
    answers = {
        seed: read_row(row, source("code-contests", "name"), seed).turns[1]["content"] for seed in map(str, range(20))
    }
    assert set(answers.values()) == {"```cpp\nint a;\n```", "```python\na = 1\n```", "```java\nclass A {}\n```"}
    assert answers["0"] == read_row(row, source("code-contests", "name"), "0").turns[1]["content"]


@pytest.mark.parametrize(
    ("solutions", "answer"),
    [
        ({"solution": ["a = 1"]}, "```\na = 1\n```"),
        ({"solution": ["a = 1"], "language": []}, "```\na = 1\n```"),
        ({"solution": ["a = 1"], "language": None}, "```\na = 1\n```"),
        ({"solution": ["a = 1"], "language": ["PYTHON3"]}, "```\na = 1\n```"),
        ({"solution": ["a = 1"], "language": [[3]]}, "```\na = 1\n```"),
        ({"solution": [None, "a = 1", "", 5], "language": [2, 3, 4, 2]}, "```python\na = 1\n```"),
        (json.dumps({"solution": ["a = 1"], "language": [3]}), "```python\na = 1\n```"),
    ],
)
def test_contests_with_less_than_all_fields(solutions: Any, answer: str) -> None:
    """A solution of no known language has a block without one, and one that is null is never taken."""
    row = {"name": "1_A", "description": "Add.", "solutions": solutions}
    for seed in map(str, range(9)):
        assert read_row(row, source("code-contests", "name"), seed).turns[1]["content"] == answer


def test_an_instruction_goes_into_the_users_turn() -> None:
    assert instruct(Content((), (), "fn main() {}"), "Explain.").turns == (
        {"role": "user", "content": "Explain.\n\nfn main() {}"},
    )
    talk = chat({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    assert [turn["content"] for turn in instruct(talk, "I").turns] == ["s", "I\n\nu"]
    with pytest.raises(Rejected, match="no user turn"):
        instruct(chat({"role": "assistant", "content": "a"}), "I")


@pytest.mark.parametrize(
    ("shape", "columns", "row", "reason"),
    [
        ("text", ("t",), {"t": ""}, "an empty text"),
        ("text", ("t",), {"t": " \n"}, "an empty text"),
        ("text", ("t",), {"t": 3}, "t is not text"),
        ("text", ("t",), {}, "t is not text"),
        ("prompt-answer", ("q", "a"), {"q": "x", "a": None}, "a is not text"),
        ("chat", ("m",), {"m": []}, "m is not a list of turns"),
        ("chat", ("m",), {"m": "hello"}, "m is not a list of turns"),
        ("chat", ("m",), {"m": ["hello"]}, "m has a turn that is not a mapping"),
        ("chat", ("m",), {"m": [{"role": "narrator", "content": "x"}]}, "unknown role narrator"),
        ("chat", ("m",), {"m": [{"role": "user", "content": " "}]}, "an empty turn"),
        ("chat", ("m",), {"m": [{"role": "user", "content": [{"type": "image"}]}]}, "content of a turn has a part"),
        ("chat", ("m",), {"m": [{"role": "user", "content": 5}]}, "content of a turn is not text"),
        ("chat", ("m", "t"), {"m": [{"role": "user", "content": "x"}], "t": "none"}, "not a list of tools"),
        (
            "chat",
            ("m",),
            {"m": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {"x": 1}}}]}]},
            "a tool call without a name",
        ),
        (
            "chat",
            ("m",),
            {"m": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{x"}]}]},
            "tool call arguments are not a JSON object",
        ),
        ("sharegpt", ("c",), {"c": [{"from": "narrator", "value": "x"}]}, "unknown role narrator"),
        ("sharegpt", ("c",), {"c": [{"value": "x"}]}, "unknown role None"),
        ("sharegpt", ("c",), {"c": [{"from": "gpt", "value": "<tool_call>x</tool_call>"}]}, "without a name"),
        ("code-contests", ("n",), {"n": "1_A", "description": "d", "solutions": {"solution": []}}, "no solution"),
        ("code-contests", ("n",), {"n": "1_A", "description": "d"}, "no solution"),
        ("code-contests", ("n",), {"n": "1_A", "description": "d", "solutions": {"solution": [None]}}, "no solution"),
        ("code-contests", ("n",), {"n": "1_A", "description": "d", "solutions": {"solution": "x"}}, "is not a list"),
        (
            "code-contests",
            ("n",),
            {"n": "1_A", "description": "d", "solutions": {"solution": ["a", "b"], "language": [3]}},
            "solutions has 2 of solution and 1 of language",
        ),
        ("chat", ("m",), {"m": [{"role": "user", "content": "x", "thinking": ["y"]}]}, "thinking is not text"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(
    shape: str, columns: tuple[str, ...], row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Rejected, match=reason):
        read(shape, columns, row)


def test_a_text_that_is_not_quoted_is_not_cut_at_its_comma() -> None:
    with pytest.raises(SourceError) as failure:
        list(rows.file_rows(io.BytesIO(b"text,n\r\na,1\r\nHello, world,2\r\n"), "a.csv", "a.csv"))
    assert (failure.value.subject, failure.value.reason) == (
        "a.csv row 2",
        "more fields than the first line has columns",
    )


@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_is_read_bit_by_bit_as_json_reads_it_whole(indent: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is cut between two reads; and a fault in it has its own line."""
    monkeypatch.setattr(rows, "WINDOW", 7)
    items = [{"a": "ä漢" * number, "b": [1, {"c": "],"}]} for number in range(20)]
    raw = json.dumps(items, indent=indent, ensure_ascii=False).encode()

    def read(raw: bytes) -> list[Any]:
        return [row.values for row in rows.file_rows(io.BufferedReader(io.BytesIO(raw)), "a.json", "a.json")]

    assert read(raw) == read(b"\xef\xbb\xbf \n" + raw) == items
    at = raw.index("漢".encode(), 300)
    with pytest.raises(SourceError) as failure:
        read(raw[:at] + b"\xff" + raw[at:])
    line = raw[:at].count(b"\n") + 1
    assert (failure.value.subject, failure.value.reason) == (f"a.json:{line}", "not UTF-8")
    without_a_comma = raw[:at] + raw[at:].replace(b"},", b"}", 1)
    for spoilt in raw[:at], raw[:at] + b'"' + raw[at:], without_a_comma, raw[:-1] + b",]", raw + b" " + raw:
        with pytest.raises(json.JSONDecodeError) as said:
            json.loads(spoilt.decode())
        with pytest.raises(SourceError) as failure:
            read(spoilt)
        reason = f"not valid JSON ({said.value.msg}, column {said.value.colno})"
        assert (failure.value.subject, failure.value.reason) == (f"a.json:{said.value.lineno}", reason)
