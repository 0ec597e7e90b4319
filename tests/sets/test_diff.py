"""The difference of two sets: of their files, and of the texts and tokens that they load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from commands import Command, printed
from sets import rows_set

from quantizers.calibration.load_set import load_set
from quantizers.sets.diff import diff_sets, diff_texts, render_diff
from quantizers.system.shipped import shipped

OLD = [("x", "first"), ("x", "second"), ("y", "third, which is long"), ("y", "twice"), ("y", "twice")]
NEW = [("x", "first"), ("z", "second"), ("y", "third, which is long"), ("y", "twice"), ("y", "fourth"), ("y", "5th")]


def counts(diff: dict[str, Any]) -> dict[str, list[tuple[int, int]]]:
    """Samples and tokens of each category that changed, before and after."""
    return {name: [(row["samples"], row["tokens"]) for row in rows] for name, rows in diff["categories"].items()}


def test_texts_and_tokens_are_counted(tmp_path: Path, tokenizer: str) -> None:
    paths = [rows_set(tmp_path, rows, name, sequence_length=10) for name, rows in (("a", OLD), ("b", NEW))]
    sets = [load_set(path, tokenizer) for path in paths]
    diff = diff_texts(*sets, tokenizer)
    assert [text["place"] for text in diff["lost"]] == ["a.jsonl:5"]  # the second "twice"
    assert [text["place"] for text in diff["gained"]] == ["b.jsonl:5", "b.jsonl:6"]
    assert [row["tokens"] for row in diff["total"]] == [5 + 6 + 10 + 5 + 5, 5 + 6 + 10 + 5 + 6 + 3]
    assert counts(diff) == {"x": [(2, 11), (1, 5)], "y": [(3, 20), (4, 24)], "z": [(0, 0), (1, 6)]}
    same = diff_texts(sets[0], sets[0], tokenizer)
    assert (same["categories"], same["gained"], same["lost"]) == ({}, [], [])


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
    assert data["removed"] == {"programming Cobol": {}}
    assert [row["tokens"] for row in data["texts"]["categories"]["code/cobol"]] == [12, 0]
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


def test_a_text_that_only_moved_is_not_won(tmp_path: Path, tokenizer: str) -> None:
    """Its tokens may change all the same: another sequence_length cuts elsewhere."""
    sets = [
        load_set(rows_set(tmp_path, OLD, name, sequence_length=length), tokenizer)
        for name, length in (("a", 10), ("b", 12))
    ]
    diff = diff_texts(*sets, tokenizer)
    assert (diff["gained"], diff["lost"]) == ([], [])
    assert counts(diff) == {"y": [(3, 20), (3, 22)]}


def test_a_difference_names_every_change(tmp_path: Path) -> None:
    before = shipped("calibration") / "software-engineer.yaml"
    assert printed(render_diff(diff_sets(before, before))) == "no difference\n"
    after = tmp_path / "after.yaml"
    text = before.read_text(encoding="utf-8").replace("seed: 42", "seed: 7").replace("CUDA, Vulkan", "CUDA, Odin")
    text = text.replace("fka/awesome-chatgpt-prompts", "fka/prompts").replace("samples: 32", "samples: 33")
    after.write_text(text, encoding="utf-8")
    assert printed(render_diff(diff_sets(before, after))).splitlines() == [
        "+ programming Odin",
        "+ fka/prompts train",
        "- programming Vulkan",
        "- fka/awesome-chatgpt-prompts train",
        "  set: seed: 42 -> 7",
        "  rombodawg/code_bagel_hermes-2.5 train: samples: 32 -> 33",
    ]
