"""Rows in a language that the set does not list: left out where a column says so, refused where the set itself does."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import printed
from sets import rows_set

from quantizers.calibration.load_set import load_set
from quantizers.calibration.samples import CalibrationData
from quantizers.calibration.set import Languages, read_set
from quantizers.sets.check import check_set, render
from quantizers.system.errors import CalibrationError
from quantizers.system.shipped import shipped

LISTS = Languages(programming=("C++", "Rust", "Bash/Shell"), spoken=("Hindi",))


def write_set(folder: Path, rows: list[tuple[str, str]], samples: int | str = "all", *lists: str) -> Path:
    languages = {"programming": lists or ["Rust", "C"]}
    return rows_set(folder, rows, "a", samples, sequence_length=99, languages=languages)


def texts(data: CalibrationData) -> list[str]:
    return [sample.text for sample in data.samples]


@pytest.mark.parametrize(
    ("category", "named", "unlisted_kind"),
    [
        ("code/rust", "Rust", None),
        ("code/Rust", "Rust", None),
        ("Code/c++", "C++", None),
        ("code/cpp", "C++", None),
        ("code/Bash/Shell", "Bash/Shell", None),
        ("code/bash-shell/scripts", "Bash/Shell", None),
        ("code/rust/async", "Rust", None),
        ("code/cobol", None, "programming"),
        ("code/terminal", None, "programming"),
        ("spoken/german", None, "spoken"),
        ("code", None, None),
        ("code/", None, None),
        ("math", None, None),
        ("long/german", None, None),
        ("coder/cobol", None, None),
    ],
)
def test_which_categories_claim_a_language(category: str, named: str | None, unlisted_kind: str | None) -> None:
    assert (LISTS.claimed_by(category)[1], LISTS.unlisted_kind(category)) == (named, unlisted_kind)
    assert Languages().unlisted_kind(category) is None, "an empty list leaves nothing out"


def test_rows_of_an_unlisted_language_are_left_out_and_counted(tmp_path: Path, tokenizer: str) -> None:
    rows = [("code/rust", "one"), ("code/cobol", "two"), ("code/cobol", ""), ("math", "four"), ("code/terminal", "5")]
    for run in (tmp_path / "run", tmp_path / "run"):  # the second time from what the run has kept
        data = load_set(write_set(tmp_path, rows), tokenizer, run=run)
        assert texts(data) == ["one", "four"]
        assert [(row["reason"], row["count"], row["first"], row["left_out"]) for row in data.summary()["dropped"]] == [
            ("code/cobol is not in languages.programming", 2, "a.jsonl:2", True),
            ("code/terminal is not in languages.programming", 1, "a.jsonl:5", True),
        ]


def test_a_column_of_languages_names_them_under_a_family(tmp_path: Path, tokenizer: str) -> None:
    """`Rust` in the column is `code/rust`; rows of all other languages are left out for one reason."""
    path = write_set(tmp_path, [("Rust", "one"), ("Cobol", "two"), ("Basic", "three")])
    path.write_text(path.read_text().replace('"column": "category"', '"column": "category", "under": "code"'))
    data = load_set(path, tokenizer)
    assert [(sample.category, sample.languages, sample.text) for sample in data.samples] == [
        ("code/rust", ("Rust",), "one")
    ]
    assert [(row.reason, row.count) for row in data.dropped] == [("its category is not in languages.programming", 2)]


TWENTY = [("code/rust" if number % 2 else "code/cobol", f"text {number}") for number in range(20)]


def test_the_next_row_is_taken_in_place_of_one_left_out(tmp_path: Path, tokenizer: str) -> None:
    data = load_set(write_set(tmp_path, TWENTY, samples=10), tokenizer)
    assert sorted(texts(data)) == sorted(text for category, text in TWENTY if category == "code/rust")
    (note,) = load_set(write_set(tmp_path, TWENTY, samples=11), tokenizer).notes
    assert note.startswith("a.jsonl: 10 of the 11 samples; code/cobol is not in languages.programming (10, first at ")


@pytest.mark.parametrize(
    ("rows", "samples", "message"),
    [
        ([("code/cobol", "")] * 4 + [("code/rust", "")], 2, "list these languages, correct the rows, columns or shape"),
        (
            [("code/cobol", "two"), ("code/rust", "")],
            "all",
            r"0 of all 1 samples; an empty text in text \(1, first at a",
        ),
        ([("code/cobol", "two")], "all", r"no row is left \(a.jsonl:1: code/cobol is not in languages"),
    ],
)
def test_rows_left_out_that_the_set_needs_are_an_error(
    rows: list[tuple[str, str]], samples: int | str, message: str, tmp_path: Path, tokenizer: str
) -> None:
    with pytest.raises(CalibrationError, match=message):
        load_set(write_set(tmp_path, rows, samples), tokenizer)


def test_a_category_written_in_the_set_must_be_listed(tmp_path: Path) -> None:
    path = write_set(tmp_path, [("code/rust", "one")])
    path.write_text(path.read_text().replace('{"column": "category"}', '"code/cobol"'))
    with pytest.raises(CalibrationError) as failure:
        read_set(path)
    assert str(failure.value) == (
        f"{path}:1: sources[0].category: code/cobol names a language that languages.programming does not list; "
        "list it, remove the source, or give a category outside of code/"
    )
    path.write_text(path.read_text().replace('["Rust", "C"]', '["Cobol"]'))
    assert read_set(path).sources[0].category == "code/cobol"


def without(folder: Path, *languages: str) -> Path:
    """The embedded set with its data elsewhere, without these languages."""
    text = (shipped("calibration") / "embedded.yaml").read_text(encoding="utf-8")
    for language in languages:
        assert f" {language}," in text
        text = text.replace(f" {language},", "", 1)
    text = text.replace("./embedded/", f"{shipped('calibration')}/embedded/")
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    return folder / "mine.yaml"


@pytest.mark.every
def test_two_languages_taken_from_the_embedded_set_are_gone(tmp_path: Path, tokenizer: str) -> None:
    """The check agrees with what a run and a coverage would load; every other text stays, in its order."""
    path, whole = without(tmp_path, "Cobol", "Hindi"), load_set(shipped("calibration") / "embedded.yaml", tokenizer)
    gone = {"code/cobol", "spoken/hindi"}
    data = load_set(path, tokenizer)
    assert texts(data) == [sample.text for sample in whole.samples if sample.category not in gone]
    assert len(whole.samples) - len(data.samples) == 3 + 4
    report = check_set(path, tokenizer)
    assert report["summary"] == data.summary()
    assert not report["findings"]
    assert (len(report["languages"]["programming"]), len(report["languages"]["spoken"])) == (59, 11)
    assert not gone & {row["category"] for row in report["categories"]}
    said = printed(render(report))
    assert "left out: code/cobol is not in languages.programming (3 texts, first at" in said
    assert "left out: spoken/hindi is not in languages.spoken (4 texts, first at" in said


def test_a_held_out_set_has_lists_of_its_own(tmp_path: Path, tokenizer: str) -> None:
    """Taking a language from the set leaves the measurement as it is."""
    path = write_set(tmp_path, [("code/rust", "one two three"), ("code/cobol", "shared words")])
    other = write_set(tmp_path / "other", [("code/cobol", "shared words")], "all", "Cobol")
    report = check_set(path, tokenizer, other)
    assert report["shared"] == [], "a text that is left out is not calibrated on, so it is not shared"
    path.write_text(path.read_text().replace('["Rust", "C"]', '["Rust", "Cobol"]'))
    assert len(check_set(path, tokenizer, other)["shared"]) == 1


def test_rows_that_are_left_out_do_not_end_the_search_in_a_file_that_was_read(tmp_path: Path, tokenizer: str) -> None:
    rows = [("code/cobol", f"other {number}") for number in range(1_500)] + [("code/rust", f"fn {n}") for n in range(9)]
    assert len(load_set(write_set(tmp_path, rows, 9), tokenizer).samples) == 9
    unusable = [("code/rust", "")] * 3_000 + [("code/rust", f"fn {number}") for number in range(50)]
    (note,) = load_set(write_set(tmp_path, unusable, 19), tokenizer).notes
    assert note.endswith("given up after 1,000 rows")
