"""The difference of two sets as they load: texts and tokens won and lost, and what is said where they cannot load."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from commands import Command, printed
from sets import rows_set

from quantizers.calibration.diff import diff_sets, diff_texts
from quantizers.calibration.load_set import load_set
from quantizers.calibration.rows import Unreachable
from quantizers.calibration.set import DataSource
from quantizers.calibration.view import render_diff
from quantizers.system.package_data import shipped

OLD = [("x", "first"), ("x", "second"), ("y", "third, which is long"), ("y", "twice"), ("y", "twice")]
NEW = [("x", "first"), ("z", "second"), ("y", "third, which is long"), ("y", "twice"), ("y", "fourth"), ("y", "5th")]


def test_texts_and_tokens_are_counted_as_a_slow_comparison_does(tmp_path: Path, tokenizer: str) -> None:
    paths = [rows_set(tmp_path, rows, name, sequence_length=10) for name, rows in (("a", OLD), ("b", NEW))]
    sets = [load_set(path, tokenizer) for path in paths]
    diff = diff_texts(*sets, tokenizer)
    lost = list((Counter(text for _, text in OLD) - Counter(text for _, text in NEW)).elements())
    gained = list((Counter(text for _, text in NEW) - Counter(text for _, text in OLD)).elements())
    assert ([text["place"] for text in diff.lost], lost) == (["a.jsonl:5"], ["twice"])
    assert ([text["place"] for text in diff.gained], gained) == (["b.jsonl:5", "b.jsonl:6"], ["fourth", "5th"])
    assert (diff.texts, diff.tokens) == ((5, 6), (5 + 6 + 10 + 5 + 5, 5 + 6 + 10 + 5 + 6 + 3))
    assert diff.categories == {
        "x": {"texts": (2, 1), "tokens": (11, 5)},
        "y": {"texts": (3, 4), "tokens": (20, 24)},
        "z": {"texts": (0, 1), "tokens": (0, 6)},
    }
    back = diff_texts(sets[1], sets[0], tokenizer)
    assert (back.texts, back.tokens) == (diff.texts[::-1], diff.tokens[::-1])
    assert (len(back.gained), len(back.lost)) == (1, 2)
    assert [text["category"] for text in back.gained] == ["y"]
    assert not diff_texts(sets[0], sets[0], tokenizer)


def said(command: Command, *words: object) -> str:
    assert command("calibration", "diff", *words) == 0
    return command.out


def test_a_language_that_is_taken_from_a_set_loses_its_texts(tmp_path: Path, tokenizer: str, command: Command) -> None:
    rows = [("code/rust", "let"), ("code/cobol", "move"), ("code/cobol", "stop run")]
    before = rows_set(tmp_path, rows, "a", sequence_length=10, languages={"programming": ["Rust", "Cobol"]})
    after = tmp_path / "b.yaml"
    after.write_text(before.read_text().replace(', "Cobol"', ""))
    text = said(command, before, after, "--tokenizer", tokenizer)
    assert "- programming Cobol" in text
    assert "texts: 3 -> 1 (0 gained, 2 lost); tokens: 15 -> 3, counted with the tokenizer of" in text
    assert "- a.jsonl:3 (code/cobol, 8 tokens)" in text
    row = next(line for line in text.splitlines() if line.startswith("│ code/cobol"))
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["code/cobol", "2 -> 0", "12 -> 0"]
    data = json.loads(said(command, before, after, "--tokenizer", tokenizer, "--json"))
    assert data["texts"]["categories"] == {"code/cobol": {"texts": [2, 0], "tokens": [12, 0]}}
    assert data["note"] == ""
    text = said(command, before, after, "--yaml")
    assert text == "- programming Cobol\n"


def test_other_data_under_the_same_file_is_a_difference(tmp_path: Path, tokenizer: str, command: Command) -> None:
    """The files say the same, and the texts do not; then the same texts are called that."""
    sets = []
    for name, text in (("one", "this"), ("two", "that")):
        (tmp_path / name).mkdir()
        sets.append(rows_set(tmp_path / name, [("x", text)], "a", sequence_length=10))
    text = said(command, *sets, "--tokenizer", tokenizer)
    assert text.startswith("no difference between the files\ntexts: 1 (1 gained, 1 lost); tokens: 4, counted")
    assert "the same texts; texts: 1 (0 gained" in said(command, sets[0], sets[0], "--tokenizer", tokenizer)


def test_many_texts_are_counted_and_not_all_listed(tmp_path: Path, tokenizer: str, command: Command) -> None:
    few = rows_set(tmp_path, [("x", "the only one")], "a", sequence_length=10)
    many = rows_set(tmp_path, [("x", f"text {number}") for number in range(30)], "b", sequence_length=10)
    text = said(command, few, many, "--tokenizer", tokenizer)
    assert text.count("+ b.jsonl:") == 20
    assert "+ and 10 more; --json lists all of them" in text


def test_without_the_hub_the_files_are_compared_and_one_line_says_so(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def resolve(source: DataSource) -> str:
        raise Unreachable(source.dataset, "the Hub cannot be reached", "go online once")

    monkeypatch.setattr("quantizers.calibration.lock.resolve", resolve)
    local = rows_set(tmp_path, [("x", "the only one")], "a", sequence_length=10)
    hub = tmp_path / "hub.yaml"
    hub.write_text(local.read_text().replace('"a.jsonl"', '"owner/data"'))
    text = said(command, local, hub, "--tokenizer", tokenizer)
    assert "+ owner/data train: all samples" in text
    assert "texts and tokens are not compared: " in " ".join(text.split())
    assert "reads the Hub and cannot be loaded now" in " ".join(text.split())
    data = json.loads(said(command, local, hub, "--tokenizer", tokenizer, "--json"))
    assert data["texts"] is None
    assert f"`quantize calibration {hub}` says why" in data["note"]
    assert "\n" not in data["note"]


def test_local_data_that_cannot_be_read_is_an_error(tmp_path: Path, tokenizer: str, command: Command) -> None:
    path = rows_set(tmp_path, [("x", "the only one")], "a", sequence_length=10)
    (tmp_path / "a.jsonl").write_text("{")
    assert command("calibration", "diff", path, path, "--tokenizer", tokenizer) == 2
    assert "a.jsonl:1: not valid JSON" in command.err


def test_a_text_that_only_moved_is_not_won(tmp_path: Path, tokenizer: str) -> None:
    """Its tokens may change all the same: another sequence_length cuts elsewhere."""
    sets = [
        load_set(rows_set(tmp_path, OLD, name, sequence_length=length), tokenizer)
        for name, length in (("a", 10), ("b", 12))
    ]
    diff = diff_texts(*sets, tokenizer)
    assert (diff.gained, diff.lost) == ((), ())
    assert diff.categories == {"y": {"texts": (3, 3), "tokens": (20, 22)}}


SETS = shipped("calibration")


def test_a_difference_names_every_change(tmp_path: Path) -> None:
    before = SETS / "software-engineer.yaml"
    assert not diff_sets(before, before)
    assert printed(render_diff(diff_sets(before, before))) == "no difference\n"
    after = tmp_path / "after.yaml"
    text = before.read_text(encoding="utf-8").replace("seed: 42", "seed: 7").replace("CUDA, Vulkan", "CUDA, Odin")
    text = text.replace("fka/awesome-chatgpt-prompts", "fka/prompts").replace("samples: 50", "samples: 51")
    after.write_text(text, encoding="utf-8")
    diff = diff_sets(before, after)
    assert diff.settings == {"seed": (42, 7)}
    assert diff.languages == {"programming": (["Odin"], ["Vulkan"])}
    assert diff.added == {"fka/prompts train": 8}
    assert diff.removed == {"fka/awesome-chatgpt-prompts train": 8}
    assert diff.changed == {"deepmind/code_contests train": {"samples": (50, 51)}}
    assert diff.samples == {"code": (190, 191)}
    shown_text = printed(render_diff(diff))
    assert "deepmind/code_contests train: samples: 50 -> 51" in shown_text
    assert "+ programming Odin" in shown_text
    json.dumps(asdict(diff))
