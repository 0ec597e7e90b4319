"""Loading a set from local files: which samples, in which order, and what is said about the others."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import transformers
from calibration_tokenizer import write_tokenizer
from packaging.version import Version
from tokenizers import Tokenizer

from quantizers.calibration.load_set import load_set
from quantizers.calibration.lock import lock_path, lock_set, lock_text, pin
from quantizers.calibration.samples import CalibrationData, digest_of
from quantizers.calibration.set import read_set
from quantizers.system.errors import CalibrationError
from quantizers.system.shipped import shipped

SETS = shipped("calibration")


def jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_set(folder: Path, sources: str, head: str = "", length: int = 64) -> Path:
    path = folder / "set.yaml"
    path.write_text(f"name: test\nsequence_length: {length}\n{head}sources:\n{sources}", encoding="utf-8")
    return path


def source(dataset: str, **changes: object) -> str:
    keys = {"dataset": dataset, "columns": ["text"], "shape": "text", "samples": "all", "category": "x"}
    return f"  - {json.dumps(keys | changes)}\n"


def numbers(data: CalibrationData) -> list[str]:
    return [sample.text for sample in data.samples]


@pytest.fixture
def hundred(tmp_path: Path) -> Path:
    jsonl(tmp_path / "a.jsonl", [{"text": f"text number {i}"} for i in range(100)])
    return tmp_path


def test_all_keeps_the_files_order_and_cuts(hundred: Path, tokenizer: str) -> None:
    data = load_set(write_set(hundred, source("a.jsonl"), length=12), tokenizer)
    assert numbers(data) == [f"text number {i}" for i in range(100)]
    first, last = data.samples[0], data.samples[-1]
    assert (len(first.tokens), first.truncated) == (12, 1)
    assert (len(last.tokens), last.truncated) == (12, 2)
    assert first.tokens.dtype == np.int32
    assert data.summary()["truncated_tokens"] == 10 * 1 + 90 * 2
    assert first.place == "a.jsonl:1"


def test_a_source_is_cut_at_its_own_length(hundred: Path, tokenizer: str) -> None:
    """Shorter than the set's, longer, or none; only what is longer makes long texts."""
    jsonl(hundred / "a.jsonl", [{"text": "a" * 14}])
    jsonl(hundred / "b.jsonl", [{"text": "b" * 40}, {"text": "c" * 10}])
    sources = source("a.jsonl") + source("a.jsonl", sequence_length=5)
    path = write_set(hundred, sources + source("b.jsonl", sequence_length=30), length=12)
    for run in (None, hundred / "run", hundred / "run"):  # the third time from what the run has kept
        data = load_set(path, tokenizer, run=run)
        found = [(len(sample.tokens), sample.truncated, sample.long) for sample in data.samples]
        assert found == [(12, 2, False), (5, 9, False), (30, 10, True), (10, 0, True)]
        assert (data.sequence_length, data.lengths) == (12, (5, 12, 30))
        summary = data.summary()
        assert (summary["long_samples"], summary["long_tokens"], summary["truncated_tokens"]) == (2, 40, 21)


def test_which_texts_are_long_is_part_of_the_digest(hundred: Path, tokenizer: str) -> None:
    """The same tokens, once as short texts and once as long ones, give other figures."""
    short, long = (
        load_set(write_set(hundred, source("a.jsonl", sequence_length=20), length=length), tokenizer)
        for length in (20, 19)
    )
    assert [s.tokens.tolist() for s in short.samples] == [s.tokens.tolist() for s in long.samples]
    assert short.digest != long.digest
    plain = load_set(write_set(hundred, source("a.jsonl"), length=20), tokenizer)
    assert plain.digest == short.digest


def test_digests_of_sets_without_long_texts_are_what_they_were(
    tiny_model: Path, embedded_in_tokens: CalibrationData
) -> None:
    """Those from before a source could have a length of its own; the short part of held-out is the whole of then."""
    held_out = load_set(SETS / "held-out.yaml", str(tiny_model))
    assert embedded_in_tokens.digest == "cc0f97c125c04ead05edb929e10b3896bd9622e831fdf15e6fe226b7959706c1"
    short = [sample for sample in held_out.samples if not sample.long]
    assert digest_of(short) == "0a32d69f8ba67946d5dbab018a26f06a8b2f53c1a9c7e26a1f03af2ae595b189"
    assert len(held_out.samples) - len(short) == 8


def test_a_number_takes_a_choice_by_seed_and_source_alone(hundred: Path, tokenizer: str) -> None:
    def taken(sources: str, seed: int = 1) -> list[str]:
        return numbers(load_set(write_set(hundred, sources, f"seed: {seed}\n"), tokenizer))

    jsonl(hundred / "b.jsonl", [{"text": "another"}])
    one = source("a.jsonl", samples=20)
    first, twice = taken(one), taken(one * 2)
    assert first == taken(one) != taken(one, seed=2)
    assert len(set(first)) == 20
    assert first != sorted(first)
    assert taken(source("b.jsonl") + one)[1:] == first
    assert twice[:20] == first != twice[20:]


def test_json_and_parquet_hold_the_same(hundred: Path, tokenizer: str) -> None:
    rows = [{"text": f"text number {i}"} for i in range(100)]
    (hundred / "a.json").write_text(json.dumps(rows, indent=1))
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    (hundred / "a.parquet").write_bytes(buffer.getvalue())
    digests = {
        load_set(write_set(hundred, source(f"a.{suffix}")), tokenizer).digest for suffix in ("jsonl", "json", "parquet")
    }
    assert len(digests) == 1


def test_a_refused_row_is_replaced_and_counted(tmp_path: Path, tokenizer: str) -> None:
    good = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    no_call = [*good, {"role": "tool", "content": "3"}]
    rows = [{"m": no_call if i % 3 == 0 else good} for i in range(30)] + [{"m": []}]
    jsonl(tmp_path / "a.jsonl", rows)
    chat = {"columns": ["m"], "shape": "chat"}
    data = load_set(write_set(tmp_path, source("a.jsonl", samples=20, **chat)), tokenizer)
    assert len(data.samples) == 20
    counts = {dropped.reason: dropped.count for dropped in data.dropped}
    assert set(counts) <= {"the chat template refuses it: a tool turn without a call", "m is not a list of turns"}
    assert all(":" in dropped.first for dropped in data.dropped)
    few = load_set(write_set(tmp_path, source("a.jsonl", samples=21, **chat)), tokenizer)
    assert len(few.samples) == 20
    (note,) = few.notes
    assert note.startswith("a.jsonl: 20 of the 21 samples; ")
    assert "without a call (10, first at " in note


def test_a_column_of_classes_is_one_of_categories(tmp_path: Path, tokenizer: str) -> None:
    jsonl(tmp_path / "a.jsonl", [{"text": f"text {label}", "label": label} for label in (2, 0, True)])
    given = {"category": {"column": "label"}, "samples": 3}
    data = load_set(write_set(tmp_path, source("a.jsonl", **given)), tokenizer)
    assert {sample.text: sample.category for sample in data.samples} == {"text 2": "2", "text 0": "0"}


def test_prompts_render_in_the_users_turn(tmp_path: Path, tokenizer: str) -> None:
    jsonl(tmp_path / "a.jsonl", [{"text": "fn main() {}", "kind": "code/rust"}])
    path = write_set(tmp_path, source("a.jsonl", prompt="Explain.", category={"column": "kind"}))
    (sample,) = load_set(path, tokenizer).samples
    ids = sample.tokens.tolist()
    assert (ids[0], ids[-1]) == (1, 0)  # [turn] ... [end]
    assert sample.text == "Explain.\n\nfn main() {}"
    assert sample.category == "code/rust"


LANGUAGES = "languages: {programming: [C++, Rust, Zig], spoken: [Hindi, Hebrew], required: true}\n"


def test_languages_are_assigned_in_turn_over_the_whole_set(hundred: Path, tokenizer: str) -> None:
    one = source("a.jsonl", samples=4, prompt="In {programming_language}:", category="code/{programming_language}")
    two = source("a.jsonl", samples=5, prompt="{programming_language}, {spoken_language}", category="code")
    path = write_set(hundred, one + source("a.jsonl", samples=3) + two, LANGUAGES)
    data = load_set(path, tokenizer, require_languages=False)
    assert not any(sample.languages for sample in data.samples)
    assigned = [sample.asked for sample in data.samples if sample.asked]
    assert len(assigned) == 9
    assert Counter(names[0] for names in assigned) == {"C++": 3, "Rust": 3, "Zig": 3}
    assert [names[0] for names in assigned[:6]] == [names[0] for names in assigned[3:]]
    assert sorted(Counter(names[1] for names in assigned if len(names) == 2).values()) == [2, 3]
    first = data.samples[0]
    assert first.category == {"C++": "code/cpp", "Rust": "code/rust", "Zig": "code/zig"}[first.asked[0]]
    assert first.text.startswith(f"In {first.asked[0]}:\n\n")


def test_a_replaced_row_does_not_use_up_a_language(tmp_path: Path, tokenizer: str) -> None:
    jsonl(tmp_path / "a.jsonl", [{"text": "good"}, {"text": ""}] * 9)
    path = write_set(tmp_path, source("a.jsonl", samples=9, category="code/{programming_language}"), LANGUAGES)
    categories = load_set(path, tokenizer, require_languages=False).summary()["categories"]
    assert categories == {"code/cpp": 3, "code/rust": 3, "code/zig": 3}


def test_a_missing_language_is_an_error_where_required(hundred: Path, tokenizer: str) -> None:
    path = write_set(hundred, source("a.jsonl", category="spoken/hindi"), LANGUAGES)
    with pytest.raises(CalibrationError, match=r"no text is in C\+\+, Rust, Zig, Hebrew; add some"):
        load_set(path, tokenizer)
    path.write_text(path.read_text().replace("required: true", "required: false"))
    assert load_set(path, tokenizer).samples[0].languages == ("Hindi",)


GOOD = '{"text": "good"}\n'
CHAT = {"columns": ["m"], "shape": "chat"}


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (GOOD, {"columns": ["txt"]}, "no column 'txt' (it has text)"),
        (GOOD, {"category": {"column": "kind"}}, "no column 'kind' (it has text)"),
        (GOOD + '{"text": broken}\n', {}, "a.jsonl:2: not valid JSON (Expecting value, column 10)"),
        (GOOD.encode() + b'{"text": "\xff"}\n', {}, "a.jsonl:2: not UTF-8"),
        (GOOD + '["text"]\n', {}, "a.jsonl:2: not a JSON object"),
        ("\ufeff\r\n" + GOOD + "\r\nnull\r\n", {}, "a.jsonl:4: not a JSON object"),
        (GOOD + '{"text": ' + "9" * 5000 + "}\n", {}, "a.jsonl:2: a number with too many digits"),
        (GOOD + '{"text": ' + "[" * 101 + "]" * 101 + "}\n", {}, "a.jsonl:2: nested too deeply"),
        (GOOD + '{"text": ' + "[" * 99999, {}, "a.jsonl:2: nested too deeply"),
        (b"\x1f\x8b" + GOOD.encode(), {}, "a.jsonl:1: not UTF-8"),
        (GOOD + '{"text": ""}\n', {}, "1 of all 2 samples; an empty text in text (1, first at a.jsonl:2)"),
        (GOOD + '{"text": "x"}\n', {}, "fewer than 2 tokens (1, first at a.jsonl:2)"),
        ('{"text": "\\ud800 half"}\n', {}, "half of a surrogate pair"),
        ("", {}, "a.jsonl: no rows"),
        (
            '{"m": [{"role": "narrator", "content": "x"}]}\n',
            CHAT,
            "unknown role narrator in role (1, first at a.jsonl:1)",
        ),
        ('{"m": [{"role": "tool", "content": "x"}]}\n', CHAT, "0 of all 1 samples; the chat template refuses it"),
    ],
)
def test_wrong_data_is_refused_in_one_line(
    tmp_path: Path, tokenizer: str, content: str | bytes, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    path = write_set(tmp_path, source("a.jsonl", **changes))
    with pytest.raises(CalibrationError) as failure:
        load_set(path, tokenizer)
    assert failure.value.exit_code == 2
    assert str(failure.value).startswith(f"{path}:4: ")
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


def test_rows_of_which_none_can_be_used_are_one_short_line(tmp_path: Path, tokenizer: str) -> None:
    """The most frequent reasons come first, however many there are, and what they quote of a row is printable."""
    roles = [*(f"role\n{number}\x1b" for number in range(30)), "narrator", "narrator"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"m": [{"role": role}]}) + "\n" for role in roles))
    path = write_set(tmp_path, source("a.jsonl", **CHAT))
    with pytest.raises(CalibrationError) as failure:
        load_set(path, tokenizer)
    assert failure.value.exit_code == 2
    said = str(failure.value)
    assert said.startswith(
        f"{path}:4: a.jsonl: 0 of all 32 samples; unknown role narrator in role (2, first at a.jsonl:31), "
    )
    assert "\\n" in said
    assert "\n" not in said
    assert said.endswith(" and 26 more reasons; correct the rows, columns or shape")


def test_a_template_that_refuses_everything_and_a_tokenizer_without_one(tmp_path: Path) -> None:
    refusing = str(write_tokenizer(tmp_path / "refusing", "{{ raise_exception('never') }}"))
    without = str(write_tokenizer(tmp_path / "without", None))
    jsonl(tmp_path / "a.jsonl", [{"text": "some text"}])
    path = write_set(tmp_path, source("a.jsonl", prompt="Read."))
    with pytest.raises(CalibrationError, match=r"0 of all 1 samples; the chat template refuses it: never \(1, first"):
        load_set(path, refusing)
    told = load_set(path, without)
    assert load_set(path, without).notes == told.notes  # from the cache
    assert told.notes == ("the tokenizer has no chat template: each turn begins with its role's name",)
    assert load_set(write_set(tmp_path, source("a.jsonl")), without).notes == ()


def test_a_template_with_a_fault_is_one_line_of_its_own(tmp_path: Path) -> None:
    broken = str(write_tokenizer(tmp_path / "broken", "{% for m in messages %}\n{{ m.content }"))
    jsonl(tmp_path / "a.jsonl", [{"text": "some text"}])
    with pytest.raises(
        CalibrationError, match=r"^the chat template cannot be read \(line 2: unexpected '}'\); correct it$"
    ):
        load_set(write_set(tmp_path, source("a.jsonl", prompt="Read.")), broken)
    assert len(load_set(write_set(tmp_path, source("a.jsonl")), broken).samples) == 1  # it is not needed for plain text


@pytest.mark.parametrize("named", ["LlamaTokenizerFast", None])
def test_tokens_are_those_of_tokenizer_json_where_transformers_class_makes_others(
    named: str | None, tmp_path: Path
) -> None:
    """LlamaTokenizer loses every space of a byte-level vocabulary, and Qwen2Tokenizer composes accents."""
    folder = write_tokenizer(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": named}))
    text = "a  gru\u0308n b"
    jsonl(tmp_path / "a.jsonl", [{"text": text}])
    path = write_set(tmp_path, source("a.jsonl"))
    data = load_set(path, str(folder))
    written = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert data.samples[0].tokens.tolist() == written
    if named and Version(transformers.__version__) >= Version("5.24"):  # which sees that this class is not meant
        assert data.notes == ()
        return
    assert data.notes[0].startswith("tokenizer.json splits texts in another way than transformers' ")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))  # as the note says
    plain = load_set(path, str(folder))
    assert (plain.digest, plain.notes) == (data.digest, ())


def test_bad_sources_are_told_together(hundred: Path, tokenizer: str) -> None:
    (hundred / "broken.jsonl").write_text("{")
    (hundred / "not.parquet").write_text("PAR")
    names = ("missing.jsonl", "broken.jsonl", "a.jsonl", "not.parquet", "also-missing.json")
    path = write_set(hundred, "".join(map(source, names)))
    for workers in (1, 4):
        with pytest.raises(CalibrationError) as failure:
            load_set(path, tokenizer, workers=workers)
        lines = str(failure.value).splitlines()
        assert lines[0] == (
            f"{path}:4: {hundred}/missing.jsonl, {hundred}/also-missing.json (line 8): "
            "cannot be read (No such file or directory); give an existing file"
        )
        assert lines[1].startswith(f"{path}:5: {hundred}/broken.jsonl:1: not valid JSON")
        assert lines[2].startswith(f"{path}:7: {hundred}/not.parquet: not a Parquet file")
        assert len(lines) == 3


def test_a_wrong_tokenizer_is_one_line(hundred: Path) -> None:
    with pytest.raises(CalibrationError, match="no tokenizer can be read") as failure:
        load_set(write_set(hundred, source("a.jsonl")), str(hundred))
    assert "\n" not in str(failure.value)


def test_a_lock_holds_local_files(hundred: Path, tokenizer: str) -> None:
    path = write_set(hundred, source("a.jsonl"))
    assert lock_set(path) == (lock_path(path), {}) == (hundred / "set.lock.json", {})
    data = load_set(path, tokenizer)
    assert data.lock
    assert data.notes == ("versions are those of the set's lock",)
    jsonl(hundred / "a.jsonl", [{"text": "changed"}])
    with pytest.raises(CalibrationError, match=r"set.yaml:4: a.jsonl: changed since it was locked"):
        load_set(path, tokenizer)
    lock_set(path)
    assert load_set(path, tokenizer).lock


def test_a_lock_of_another_set_is_refused(hundred: Path, tokenizer: str) -> None:
    path = write_set(hundred, source("a.jsonl"))
    lock_set(path)
    write_set(hundred, source("a.jsonl") * 2)
    with pytest.raises(CalibrationError, match=r"set.lock.json: was made for no source, .*a.jsonl.*; run `quantize"):
        load_set(path, tokenizer)
    write_set(hundred, source("b.jsonl"))
    with pytest.raises(CalibrationError, match=r"was made for .*'a.jsonl'.*, the set now has .*'b.jsonl'"):
        load_set(path, tokenizer)
    lock_path(path).write_text("{}")
    with pytest.raises(CalibrationError, match="not a readable lock"):
        load_set(path, tokenizer)


def test_a_source_without_a_usable_row_is_left_out_of_the_lock_of_a_run_too(hundred: Path, tokenizer: str) -> None:
    jsonl(hundred / "b.jsonl", [{"text": ""}])
    path = write_set(hundred, source("a.jsonl") + source("b.jsonl", samples=1, required=False, category="y"))
    data = load_set(path, tokenizer)
    assert "without b.jsonl (0 of the 1 samples; an empty text" in data.notes[-1]
    assert data.versions[1] == ""
    pins = map(pin, read_set(path).sources, data.versions, data.licences, data.rows)
    lock_path(path).write_text(lock_text(list(pins)))
    assert load_set(path, tokenizer).digest == data.digest
