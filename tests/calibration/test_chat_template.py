"""Conversations reach the model whole whatever a chat template's habits are, and what it leaves out is counted."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
import yaml
from calibration_tokenizer import TEMPLATE, write_tokenizer
from chat_templates import TEMPLATES
from packaging.version import Version
from transformers import AutoTokenizer

from quantizers.calibration.load_set import load_set
from quantizers.calibration.render import DATE, Rendered, Renderer
from quantizers.calibration.row_formats import Content, read_row
from quantizers.calibration.set import DataSource
from quantizers.system.shipped import shipped

Row = dict[str, Any]


@pytest.fixture
def renderer(tmp_path: Path) -> Callable[..., Renderer]:
    """`renderer(template)`: of a tokenizer with that template, by its name in TEMPLATES or as its text."""

    def make(template: str | None, **settings: Any) -> Renderer:
        folder = write_tokenizer(tmp_path / "tokenizer", TEMPLATES.get(template or "none", template))
        config = folder / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | settings))
        return Renderer(str(folder))

    return make


def skip_if_null_is_left_out(template: str) -> None:
    if template == "deepseek-first" and Version(transformers.__version__) >= Version("5.24"):
        pytest.skip("transformers 5.24 drops keys that are null: this template shows no calls, they are told in words")


def talk(*turns: Row, shape: str = "chat", tools: Any = None) -> Content:
    values = {"dataset": "a.jsonl", "columns": ("m", "t"), "shape": shape, "samples": 1, "category": "x"}
    return read_row({"m": list(turns), "t": tools}, DataSource.model_validate(values), "0")


def said(renderer: Renderer, content: Content, length: int = 10_000) -> tuple[str, Rendered]:
    rendered = renderer.render(content, length)
    return renderer.tokenizer.decode(rendered.tokens.tolist()), rendered


USER, ANSWER = {"role": "user", "content": "Elbe?"}, {"role": "assistant", "content": "201 cm"}
CALL = {"id": "call_7", "type": "function", "function": {"name": "level", "arguments": '{"river": "Elbe"}'}}
CALLED = (USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_7", "content": "2"})


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("deepseek", '<call>level<sep>{"river": "Elbe"}'),
        ("deepseek-first", '<|Assistant|><call>function<sep>level\n{"river": "Elbe"}<call end><output>2<output end>'),
        ("hermes", '<tool_call>{"name": "level", "arguments": {"river": "Elbe"}}</tool_call>'),
        ("mistral", '[TOOL_CALLS]{"name": "level", "arguments": {"river": "Elbe"}}'),
        ("{% for m in messages %}{% if m.content is defined %}{{ m.content }}{% else %}{% for c in m.tool_calls %}"
         "<{{ c.function.name }} {{ c.function.arguments.values() | first }}>{% endfor %}{% endif %}{% endfor %}",
         "Elbe?<level Elbe>2"),
        ("{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}>"
         "{% endfor %}{% endfor %}", '<tool_call>\n{"name": "level", "arguments": {"river": "Elbe"}}\n</tool_call>'),
        ("kimi", '<begin>functions.level:0<argument>{"river": "Elbe"}<|im_tool|>## Return of functions.level:0\n2'),
        ("mixtral", '<tool_call>\n{"name": "level", "arguments": {"river": "Elbe"}}\n</tool_call></s>[INST] <tool'),
        ("{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function }}"
         "{{ raise_exception('ids') if c.id | length != 9 }}{% endfor %}{% endfor %}", "level"),
        ("{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}{{ c.function.name }} "
         "{{ c.function.arguments }}{% endfor %}{{ m.content }}{% endfor %}", 'level {"river": "Elbe"}'),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% for c in m.tool_calls or [] %}"
         "<{{ c.function.name }}>{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
         'Elbe?<level>{"river": "Elbe"}2'),
        ("none", 'user: Elbe?\n\nassistant: <tool_call>\n{"name": "level", "arguments": {"river": "Elbe"}}\n'),
    ],
)  # fmt: skip
def test_a_call_is_shown_in_the_templates_way(renderer: Callable[..., Renderer], template: str, shown: str) -> None:
    skip_if_null_is_left_out(template)
    text, rendered = said(renderer(template), talk(*CALLED))
    assert shown in text
    assert rendered.left_out == ()


NOW = {"content": "A moment."}
LATER = CALL | {"id": "call_8", "function": {"name": "level", "arguments": '{"river": "Oder"}'}}
TOOL = {"type": "function", "function": {"name": "level", "description": "A moment: the level of a river"}}


@pytest.mark.parametrize(
    ("template", "beside", "lost"),
    [
        ("deepseek-first", "<|Assistant|>A moment.<|end|><|Assistant|><call>function<sep>level", ["tool"]),
        ("hermes", "<|im_start|>assistant A moment.<|im_end|><|im_start|>assistant<tool_call>", []),
        ("mistral", "[TOOL_CALLS]", ["assistant turn", "tool"]),  # which takes no turn more
        ("qwen3", "<|im_start|>assistantA moment.<tool_call>", ["tool"]),
        ("minimax", "]aiA moment.<invoke level>", []),
        ("first-call", "<|assistant|>A moment.<|call|>", []),
    ],
)
def test_words_beside_a_call_are_shown_where_they_can_be_and_counted_else(
    renderer: Callable[..., Renderer], template: str, beside: str, lost: list[str]
) -> None:
    """Also where the same words stand in a tool's description."""
    skip_if_null_is_left_out(template)
    written = renderer(template)
    text, rendered = said(written, talk(USER, CALLED[1] | NOW, CALLED[2], ANSWER, tools=[TOOL]))
    assert beside in text
    assert sorted(rendered.left_out) == lost
    note = "the chat template leaves out words beside calls: they are a turn of their own before them"
    assert (note in written.notes) == (template in ("deepseek-first", "hermes"))


@pytest.mark.parametrize(
    ("template", "lost"),
    [("first-call", ["arguments", "call"]), ("hermes", []), ("kimi", ["tool"]), ("mistral", ["tool"])],
)
def test_a_call_that_is_lost_is_counted_though_its_name_stands_elsewhere(
    renderer: Callable[..., Renderer], template: str, lost: list[str]
) -> None:
    """In the tool's declaration, in its description, and in another call."""
    results = (CALLED[2], {"role": "tool", "tool_call_id": "call_8", "content": "3"})
    both = talk(USER, {"role": "assistant", "tool_calls": [CALL, LATER]}, *results, ANSWER, tools=[TOOL])
    text, rendered = said(renderer(template), both)
    assert ("Oder" in text) == ("call" not in lost)
    assert sorted(rendered.left_out) == lost


def test_a_template_that_refuses_other_words_is_told_and_its_losses_are_still_counted(
    renderer: Callable[..., Renderer],
) -> None:
    strict = renderer(
        "{% for m in messages %}{{ raise_exception('odd') if 'mark' in m.content else m.content }}{% endfor %}"
    )
    text, rendered = said(strict, talk(USER, ANSWER | {"thinking": "Look it up."}))
    assert (text, rendered.left_out) == ("Elbe?201 cm", ("thoughts",))
    assert [note[:55] for note in strict.notes] == ["the chat template refuses some conversations in other w"]


def test_a_template_for_tools_is_taken_where_there_are_calls(renderer: Callable[..., Renderer]) -> None:
    named = {"default": "{% for m in messages %}{{ m.content }}{% endfor %}", "tool_use": TEMPLATES["deepseek"]}
    both = renderer(None, chat_template=[{"name": name, "template": text} for name, text in named.items()])
    assert said(both, talk(USER, ANSWER))[0] == "Elbe?201 cm"
    assert "<call>level" in said(both, talk(*CALLED))[0]


def test_a_system_turn_that_is_refused_stands_in_the_users_turn(renderer: Callable[..., Renderer]) -> None:
    content = talk({"role": "system", "content": "Be brief."}, USER, USER, ANSWER)
    alternating, coder = renderer("mixtral"), renderer("qwen-coder")
    assert said(alternating, content)[0] == "[INST] Be brief.\n\nElbe?\n\nElbe? [/INST]201 cm</s>"
    assert [note[:38] for note in alternating.notes] == ["the chat template refuses system turns"]
    assert said(coder, content)[0].startswith("<|im_start|>system Be brief.<|im_end|>")
    later = talk(USER, ANSWER, {"role": "developer", "content": "In metres."}, USER, ANSWER)
    assert "<|im_start|>user In metres.\n\nElbe?<|im_end|>" in said(coder, later)[0]


def test_thoughts_that_are_refused_beside_a_call_are_left_out_and_counted(renderer: Callable[..., Renderer]) -> None:
    thinking = {"content": "A moment.", "thinking": "Look it up."}
    text, rendered = said(renderer("gpt-oss"), talk(USER, CALLED[1] | thinking, CALLED[2]))
    assert "A moment." in text
    assert rendered.left_out == ("thoughts",)
    text, rendered = said(renderer("gpt-oss"), talk(USER, ANSWER | {"thinking": "Look it up."}))
    assert "<|analysis|>Look it up.<|final|>201 cm" in text


def test_a_date_is_always_the_same_and_said(renderer: Callable[..., Renderer]) -> None:
    dated = renderer("llama")
    assert f"Today Date: {DATE:%d %b %Y}" in said(dated, talk(USER, ANSWER))[0]
    assert dated.notes == ("the chat template writes the date: always 01 January 2026, not today's",)


def test_bos_is_set_once_and_markup_in_plain_text_is_text(tmp_path: Path) -> None:
    """As the tokenizer itself sets it before a text, and as the template writes it before a conversation."""
    folder = write_tokenizer(tmp_path / "bos", TEMPLATES["llama"])
    rules = json.loads((folder / "tokenizer.json").read_text())
    first = [{"SpecialToken": {"id": "[turn]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    ids = {"[turn]": {"id": "[turn]", "ids": [1], "tokens": ["[turn]"]}}
    rules["post_processor"] = {"type": "TemplateProcessing", "single": first, "pair": first, "special_tokens": ids}
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "[turn]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATES["llama"]}))
    renderer, own = Renderer(str(folder)), AutoTokenizer.from_pretrained(folder)
    plain = renderer.render(Content((), (), "The [end] is near."), 100).tokens.tolist()
    assert plain == own("The [end] is near.", split_special_tokens=True)["input_ids"]
    assert plain[0] == 1
    assert not {0, 1} & set(plain[1:])
    chat = renderer.render(talk(USER, ANSWER), 1000).tokens.tolist()
    assert chat[0] == 1
    assert 1 not in chat[1:]


def test_a_long_text_is_read_only_as_far_as_needed(
    renderer: Callable[..., Renderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantizers.calibration.render.READ_WHOLE", 1000)
    ordinary = renderer(TEMPLATE)
    short, long = (Content((), (), "0123456789" * (count // 10)) for count in (1000, 100_000))
    assert ordinary.render(short, 64).truncated == 1000 - 64
    assert ordinary.notes == ()
    rendered = ordinary.render(long, 64)
    assert rendered.truncated == 100_000 - 64  # a byte is a token, so the estimate is right
    assert ordinary.notes == ("tokens cut off texts of more than 1,000 characters are estimated",)
    assert np.array_equal(rendered.tokens, ordinary.render(short, 64).tokens)
    assert len(ordinary.render(long, 1500).tokens) == 1500  # which takes a second reading


def test_a_long_conversation_is_cut_at_the_end_of_a_turn(renderer: Callable[..., Renderer]) -> None:
    ordinary = renderer(TEMPLATE)
    turns = [{"role": ("user", "assistant")[n % 2], "content": f"turn {n} " + "x" * 290} for n in range(12)]
    whole = ordinary.render(talk(*turns), 100_000)
    cut = ordinary.render(talk(*turns), 2000)
    assert np.array_equal(cut.tokens, ordinary.render(talk(*turns[:6]), 100_000).tokens)
    assert cut.truncated == len(whole.tokens) - len(cut.tokens)
    assert len(ordinary.render(talk(*turns), 1000).tokens) == 1000  # too short for whole turns
    answer = {"role": "assistant", "content": "x" * 5000}
    assert len(ordinary.render(talk(turns[0], answer), 2000).tokens) == 2000  # a turn that is most of it


@pytest.mark.parametrize("settings", [{"bos_token": "[end]"}, {"eos_token": "[turn]"}, {"chat_template": "x"}])
def test_the_fingerprint_covers_what_a_template_writes(
    renderer: Callable[..., Renderer], settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = renderer("llama").fingerprint()
    assert renderer("llama").fingerprint() == before
    assert renderer("llama", **settings).fingerprint() != before
    monkeypatch.setattr("quantizers.calibration.render.version", lambda library: f"a newer {library}")
    assert renderer("llama").fingerprint() != before


MARK = re.compile(r"(system|developer|user|assistant|tool|thought|call)-mark-\w+")
KINDS = {"thought": "thoughts", "call": "call"}  # else a turn of the role


KINDS_OF = {"code": "programming", "spoken": "spoken"}


@pytest.fixture(scope="module")
def real_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The software-engineer set with files in place of its Hub data sets; their rows have the structures of real ones,
    and a mark of its own in each turn, thought and call.
    """
    folder = tmp_path_factory.mktemp("real")
    declared = yaml.safe_load((shipped("calibration") / "software-engineer.yaml").read_text())
    shutil.copytree(shipped("calibration") / "embedded", folder / "embedded")
    for number, source in enumerate(declared["sources"]):
        if source["samples"] == "all":  # a file already
            continue
        made = _tool_rows if source["category"] == "tool-use" or source["columns"][1:] == ["tools"] else _rows
        rows = list(made(source, f"{number}x", source["samples"] + 60))
        if isinstance(source["category"], dict):
            languages = cycle(declared["languages"][KINDS_OF[source["category"]["under"]]])
            rows = [row | {source["category"]["column"]: next(languages)} for row in rows]
        (folder / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        for key in ("subset", "split", "revision", "streaming"):
            source.pop(key, None)
        source["dataset"] = f"./{number}.jsonl"
    (folder / "set.yaml").write_text(yaml.safe_dump(declared))
    return folder / "set.yaml"


def _rows(source: Row, name: str, count: int) -> Iterator[Row]:
    first, *more = source["columns"]
    for n in range(count):
        mark = f"mark-{name}{n}e"
        asked, answered, thought = f"user-{mark}?", f"assistant-{mark}.", f"thought-{mark}"
        inline = f"<think>\n{thought}\n</think>\n\n{answered}"
        if source["shape"] == "text":
            yield {first: asked}
        elif source["shape"] == "prompt-answer":
            yield {first: asked, more[0]: inline if n % 3 == 0 else answered}
        elif source["shape"] == "code-contests":
            yield {first: f"{n}_A", "description": asked, "solutions": {"language": [2], "solution": [answered]}}
        elif source["shape"] == "sharegpt":
            system = {"from": "system", "value": ("", None, f"system-{mark}")[n % 3]}
            names = ("human", "gpt") if n % 2 else ("user", "assistant")
            turns = zip(names, (asked, inline if n % 3 == 0 else answered), strict=True)
            yield {first: [system, *({"from": role, "value": words} for role, words in turns)]}
        else:
            yield {first: _messages(n, mark, asked, answered, thought)}


def _messages(n: int, mark: str, asked: str, answered: str, thought: str) -> Any:
    user, assistant = {"role": "user", "content": asked}, {"role": "assistant", "content": answered}
    turns = [user, assistant]
    forms: list[Any] = [
        turns,
        [{"role": "system", "content": None}, *turns],
        [user | {"content": [{"type": "text", "text": None}, {"type": "text", "text": asked}]}, assistant],
        [user | {"thinking": None}, assistant | {"thinking": thought}],
        str(turns),
        [json.dumps(turn) for turn in turns],
        [user | {"role": "human"}, assistant | {"role": "gpt"}],
        [{"role": "developer", "content": f"developer-{mark}"}, *turns],
        [user, {"role": "system", "content": f"system-{mark}"}, assistant],
    ]
    return forms[n % len(forms)]


def _tool_rows(source: Row, name: str, count: int) -> Iterator[Row]:
    """In the manner of Hermes: a call, another after its result, two at once, a Python literal, no tool that fits."""
    for n in range(count):
        marks = (f"mark-{name}{n}e{step}" for step in range(9))

        def answer(calls: int, mark: str, quoted: bool = n % 5 == 3) -> Row:
            bodies = [{"name": f"call-{mark}{number}", "arguments": {"river": "Elbe"}} for number in range(calls)]
            blocks = [f"<tool_call>\n{body if quoted else json.dumps(body)}\n</tool_call>" for body in bodies]
            words = "" if calls else f"assistant-{mark}"
            return {"from": "gpt", "value": "\n".join([f"<think>\nthought-{mark}\n</think>", words, *blocks])}

        def result(mark: str, results: int = 1) -> Row:
            values = [
                f'<tool_response>\n{{"level": "tool-{mark}{number}"}}\n</tool_response>' for number in range(results)
            ]
            return {"from": "tool", "value": "\n".join(values)}

        turns = [
            {"from": "system", "value": f"system-{next(marks)}"},
            {"from": "human", "value": f"user-{next(marks)}"},
        ]
        at_once = 2 if n % 10 == 2 else 1
        for _ in range((1, 2, 1, 1, 0)[n % 5]):
            turns += [answer(at_once, next(marks)), result(next(marks), at_once)]
        yield dict(zip(source["columns"], ([*turns, answer(0, next(marks))], "[]"), strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("minimax", {"developer turn", "system turn"}),
        ("glm", {"developer turn"}),
        ("qwen3", {"developer turn"}),
        ("qwen-coder", {"thoughts"}),
        ("deepseek", {"developer turn", "thoughts"}),
        ("deepseek-first", {"thoughts"}),
        ("kimi", set()),
        ("mixtral", {"thoughts"}),
        ("llama", {"thoughts"}),
        ("gpt-oss", set()),
        ("none", set()),
    ],
)
def test_the_whole_software_engineer_set_under_each_templates_habits(
    name: str, lost: set[str], real_rows: Path, tmp_path: Path
) -> None:
    """No row is lost that the model's format can hold, and all that is missing in the tokens is counted."""
    folder = write_tokenizer(tmp_path, TEMPLATES[name])
    data = load_set(real_rows, folder)
    assert len(data.samples) == 590
    refused = {"the chat template refuses it: single tool-calls at once!"} if name == "llama" else set()
    assert {row.reason for row in data.dropped} == refused
    tokenizer, missing = AutoTokenizer.from_pretrained(folder), Counter[tuple[str, str]]()
    files = real_rows.parent.rglob("*.jsonl")
    lines = {str(path.relative_to(real_rows.parent)): path.read_text().splitlines() for path in files}
    for sample in data.samples:
        file, _, line = sample.place.removeprefix("./").partition(":")
        shown = {match[0] for match in MARK.finditer(tokenizer.decode(sample.tokens))}
        for match in MARK.finditer(lines[file][int(line) - 1]):
            if match[0] not in shown:
                missing[sample.source, KINDS.get(match[1], f"{match[1]} turn")] += 1
    counted = {(row["source"], row["part"]): row["count"] for row in data.summary()["not_rendered"]}
    assert counted == missing
    assert {part for _, part in counted} == lost
