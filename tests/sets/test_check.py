"""The check as a command: the verdict first, what is cut, whose tokenizer counts, which samples are shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Command, printed
from sets import rows_set

from quantizers.calibration.load_set import load_set
from quantizers.calibration.samples import Sample
from quantizers.calibration.set import CODES, read_set
from quantizers.sets.check import (
    check_set,
    find_duplicates,
    identify,
    render,
    truncation_warnings,
)
from quantizers.system.errors import CalibrationError
from quantizers.system.shipped import shipped

SETS = shipped("calibration")
RECIPE = "tiny-minimax-m2-fp8-int4"


def sample(category: str, kept: int, cut: int = 0) -> Sample:
    return Sample(np.zeros(kept, dtype=np.int32), category, "a.jsonl", truncated=cut)


def words(command: Command, *given: object) -> tuple[int, str]:
    code = command("calibration", *given)
    return code, " ".join(command.out.split())


CATEGORIES = [sample("long/code", 90, 10), sample("x", 900), *(sample(f"code/{c}", 5, 4) for c in "gfedcba")]


@pytest.mark.parametrize(
    ("samples", "warnings"),
    [
        ([sample("x", 75, 25)], ()),
        ([sample("x", 74, 26)], ("26% of the set's tokens are cut; raise sequence_length",)),
        (
            CATEGORIES,
            (
                "more than 25% of the tokens are cut in code/a 44%, code/b 44%, code/c 44%, code/d 44%, code/e 44% "
                "and 2 more; raise their sequence_length",
            ),
        ),
    ],
)
def test_more_than_a_quarter_of_the_tokens_cut_is_a_warning(samples: list[Sample], warnings: tuple[str, ...]) -> None:
    assert truncation_warnings(samples) == warnings


def test_a_warning_is_no_finding(tmp_path: Path, tokenizer: str, command: Command) -> None:
    path = rows_set(tmp_path, [("x", "a" * 300), ("y", "short")], name="a")
    code, said = words(command, path, "--tokenizer", tokenizer)
    assert code == 0
    assert said.startswith("mine: nothing contradicts the set, but 1 warning warning: 66% of the set's tokens are cut")
    assert words(command, "check", path, "--tokenizer", tokenizer) == (0, said)
    path = rows_set(tmp_path, [("x", "a text of its own")], name="a")
    assert words(command, path)[1].startswith("mine: fine: nothing contradicts the set mine (")


def test_the_verdict_counts_what_is_wrong(tmp_path: Path, tokenizer: str, command: Command) -> None:
    rows = [("x", "one two three four five six seven")] * 8 + [("y", "b" * 900)]
    path = rows_set(tmp_path, rows, languages={"programming": ["C", "D"]}, name="a")
    code, said = words(command, path, "--tokenizer", tokenizer)
    assert code == 3
    assert said.startswith(
        "mine: contradicts what the set claims: 29 findings and 1 warning "
        "no text is in C, D (programming) a.jsonl:2 repeats a.jsonl:1"
    )
    assert "and 9 more; --json lists all of them" in said
    assert command("calibration", path, "--json", "--tokenizer", tokenizer) == 3
    report = json.loads(command.out)
    assert (len(report["findings"]), len(report["warnings"]), report["ok"]) == (29, 1, False)
    assert said.startswith(f"mine: {report['verdict']}")


@pytest.mark.slow
def test_it_says_whose_tokenizer_counted(tmp_path: Path, tokenizer: str, command: Command) -> None:
    """The one that is named; else the recipe's; else the tiny model's, which is said to make more tokens."""
    tiny = shipped("models") / "tiny-minimax-m2"
    path = rows_set(tmp_path, [("x", "a text of its own")], name="a")
    assert f"the tokenizer of {tiny}; a large model's makes fewer" in words(command, path)[1]
    text = words(command, path, "--recipe", RECIPE)[1]
    assert f"the tokenizer of {tiny}, the recipe's source" in text
    named = words(command, path, "--tokenizer", tokenizer, "--recipe", RECIPE)[1]
    assert "1 sample, 17 tokens; none cut digest " in named
    assert f"the tokenizer of {tokenizer} compared with" in named


@pytest.mark.slow
def test_a_recipe_brings_its_set_and_its_held_out_set(tmp_path: Path, command: Command) -> None:
    code, said = words(command, "check", "--recipe", RECIPE)
    assert code == 0
    assert said.startswith("embedded: nothing contradicts the set, but 1 warning warning: 72% of the set's tokens")
    assert said.endswith("held-out.yaml")
    shared = rows_set(tmp_path / "elsewhere", [("x", "a text of its own")], name="a")
    text = (shipped("recipes") / f"{RECIPE}.yaml").read_text().replace("../calibration/held-out.yaml", str(shared))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text.replace("../models", str(shipped("models"))).replace("../calibration", "x"))
    mine = rows_set(tmp_path, [("x", "a text of its own")], name="a")
    assert words(command, mine, "--recipe", recipe)[0] == 3


def test_shown_samples_can_be_chosen(tmp_path: Path, tokenizer: str, command: Command) -> None:
    rows = [(category, f"{category} {n}") for n in range(6) for category in ("code/rust", "code/c", "math")]
    path = rows_set(tmp_path, rows, name="a")
    (tmp_path / "b.jsonl").write_text(json.dumps({"category": "code", "text": "another"}))
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"sources": [*body["sources"], body["sources"][0] | {"dataset": "b.jsonl"}]}))

    def shown(*given: object) -> list[dict[str, Any]]:
        assert command("calibration", path, "--json", "--tokenizer", tokenizer, *given) == 0
        return list(json.loads(command.out)["samples"])

    assert [row["text"] for row in shown("--show", 9, "--category", "math")] == [f"math {n}" for n in range(6)]
    assert [row["position"] for row in shown("--show", 3, "--category", "code/c")] == [1, 7, 13]
    assert len(shown("--show", 99, "--category", "code")) == 6 + 6 + 1
    assert [row["text"] for row in shown("--show", 9, "--source", "b.json")] == ["another"]
    assert len(shown("--show", 99, "--source", "a.jsonl", "--category", "code")) == 12
    assert command("calibration", path, "--category", "code") == 2
    assert "add --show N" in command.err
    words = ("calibration", path, "--show", 1, "--category", "cod", "--source", "a.jsonl", "--tokenizer", tokenizer)
    assert command(*words) == 2
    assert "mine: no sample of source a.jsonl and cod; the check's table lists" in command.err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("check",), "give a set, such as embedded, or --recipe RECIPE to check the set of a recipe"),
        (("nothing",), "nothing: no such set; give a file"),
        (("embedded", "held-out"), "unexpected extra argument"),
        (("copy", "nothing", "x"), "nothing: no such set; `quantize calibration list` lists them"),
    ],
)
def test_wrong_words(given: tuple[str, ...], message: str, command: Command) -> None:
    assert command("calibration", *given) == 2
    assert message in command.err


LISTS = {"programming": ["C", "D"], "spoken": ["Hindi", "German"]}


@pytest.fixture(scope="module")
def embedded(tokenizer: str) -> dict[str, Any]:
    return check_set(SETS / "embedded.yaml", tokenizer)


def checked_set(folder: Path, rows: list[tuple[str, str]], name: str = "set") -> Path:
    return rows_set(folder, rows, name, sequence_length=40, languages=LISTS)


def test_the_embedded_set_holds_what_it_claims(embedded: dict[str, Any]) -> None:
    assert embedded["findings"] == []
    assert (len(embedded["languages"]["programming"]), len(embedded["languages"]["spoken"])) == (60, 12)
    assert min(embedded["languages"]["programming"].values()) >= 3
    assert min(embedded["languages"]["spoken"].values()) >= 4
    assert embedded["held_out"] == str(SETS / "held-out.yaml")
    assert embedded["identified"] == 48
    fields = {row["category"] for row in embedded["categories"] if "/" not in row["category"]}
    assert len(fields) == 16
    text = printed(render(embedded))
    assert "programming languages, 60 of 60 in it: Zephyr 3" in text
    assert "licences: apache-2.0 (3)\n" in text
    assert "language identification confirms 48 of 48 spoken texts" in text
    assert "nothing contradicts the set" in text
    data = json.loads(json.dumps(embedded))
    assert data["summary"]["samples"] == sum(row["samples"] for row in data["categories"]) == 299
    assert data["summary"]["tokens"] == sum(row["tokens"] for row in data["categories"])
    assert {"tool-use", "logs", "math", "science", "medicine", "finance", "fiction", "advice"} <= fields


def test_the_held_out_set_has_every_category(embedded: dict[str, Any], tokenizer: str) -> None:
    held_out = check_set(SETS / "held-out.yaml", tokenizer)
    assert not held_out["findings"]
    assert held_out["held_out"] is None
    assert held_out["identified"] == 12
    short = {row["category"] for row in held_out["categories"] if not row["category"].startswith("long/")}
    assert short == {row["category"] for row in embedded["categories"]}
    text = printed(render(held_out))
    assert " cut at 256 or 8,192, which lost " in text
    assert "of these 8 long ones, " in text


def test_faults_are_found_and_named(tmp_path: Path, tokenizer: str) -> None:
    long = "one two three four five six seven eight nine ten eleven twelve"
    german = "Der Zug fährt heute leider nicht, weil auf der Strecke seit dem Morgen gebaut wird."
    rows = [("code/c", long), ("x", long.upper() + "!"), ("x", long + " thirteen"), ("spoken/hindi", german)]
    path = checked_set(tmp_path, rows)
    checked_set(tmp_path, [("x", german + " Bitte nehmen Sie den Bus.")], "other")
    report = check_set(path, tokenizer, tmp_path / "other.yaml")
    assert report["missing"] == {"programming": ["D"], "spoken": ["German"]}
    places = [f"set.jsonl:{number}" for number in (1, 2, 3, 4)]
    assert [tuple(twins.values()) for twins in report["duplicates"]] == [
        (places[0], places[1], 1.0),
        (places[0], places[2], 0.889),
        (places[1], places[2], 0.889),
    ]
    assert [tuple(text.values()) for text in report["mismatches"]] == [(places[3], "Hindi", "German")]
    assert [(twins["first"], twins["second"]) for twins in report["shared"]] == [(places[3], "other.jsonl:1")]
    text = printed(render(report))
    assert "no text is in D (programming)" in text
    assert "reads like German" in text
    assert f"{places[1]} repeats {places[0]} (similarity 1.0)" in text


def test_a_language_that_a_prompt_asks_for_is_not_in_the_set(tmp_path: Path, tokenizer: str) -> None:
    """English texts to which all languages of a shipped set are dealt: none of the languages is in the set."""
    numbers = {"programming": 60, "spoken": 12}
    sources = [
        {
            "dataset": f"{kind}.jsonl",
            "columns": ["text"],
            "shape": "text",
            "samples": number,
            "category": f"{'code' if kind == 'programming' else kind}/{{{kind}_language}}",
            "prompt": f"Answer in {{{kind}_language}}.",
            "licence": f"cc-by{'-nc' if kind == 'spoken' else ''}-4.0",
        }
        for kind, number in numbers.items()
    ]
    for kind, number in numbers.items():
        lines = [json.dumps({"text": f"Tell me about {kind} {n}: {str(n) * 9}"}) for n in range(number)]
        (tmp_path / f"{kind}.jsonl").write_text("\n".join(lines))
    path, claimed = tmp_path / "english.yaml", read_set(SETS / "software-engineer.yaml").languages.model_dump()
    path.write_text(json.dumps({"name": "x", "sequence_length": 99, "languages": claimed, "sources": sources}))
    report = check_set(path, tokenizer)
    assert {kind: len(counts) for kind, counts in report["asked_for"].items()} == numbers
    assert {kind: sum(counts.values()) for kind, counts in report["languages"].items()} == dict.fromkeys(numbers, 0)
    assert {kind: len(names) for kind, names in report["missing"].items()} == numbers
    assert (len(report["findings"]), report["identified"]) == (2, 0)
    text = " ".join(printed(render(report)).split())
    assert "programming languages, 0 of 60 in it, 60 asked for by prompts: Zephyr 0 (asked for 1)" in text
    assert "licences: cc-by-4.0 (1), cc-by-nc-4.0 (1) not for commercial use: spoken.jsonl (cc-by-nc-4.0)" in text
    with pytest.raises(CalibrationError, match=r"no text is in Zephyr, .*Turkish \(a prompt that asks for one is no"):
        load_set(path, tokenizer)


def test_held_out_is_looked_for_beside_the_set(tmp_path: Path, tokenizer: str) -> None:
    """A required language without a text is a finding here, and not an error."""
    path = checked_set(tmp_path, [("code/c", "a text of its own")])
    path.write_text(path.read_text().replace('["Hindi", "German"]', '["Hindi"], "required": true'))
    report = check_set(path, tokenizer)
    assert report["held_out"] is None
    assert report["findings"] == ["no text is in D (programming)", "no text is in Hindi (spoken)"]
    checked_set(tmp_path, [("code/c", "a text of its own")], "held-out")
    assert len(check_set(path, tokenizer)["shared"]) == 1


@pytest.mark.parametrize(
    ("first", "second", "similarity"),
    [
        ("the same words", "The  same, WORDS.", 1.0),
        ("short", "other", None),
        ("一二三四五六七八九十", "一二三四五六七八九十。", 1.0),
        ("一二三四五六七八九十", "一二三四五六七八九百", 5 / 7),
        ("a b c d e f g h i j", "a b c d e f g h i j a b c d e f g h i j", 6 / 10),
        ("", "", None),
        ("a a a a a a", "a a a a a a a", 0.999),
    ],
)
def test_similarity(first: str, second: str, similarity: float | None) -> None:
    found = find_duplicates([first, "something in between", second])
    assert [pair for *pair, _ in found] == ([] if similarity is None else [[0, 2]])
    if similarity is not None:
        assert found[0][2] == pytest.approx(similarity)


def test_every_spoken_language_of_the_sets_can_be_identified() -> None:
    assert set(read_set(SETS / "software-engineer.yaml").languages.spoken) <= set(CODES)
    assert identify("This is plainly an English sentence about the weather.") == "English"


def test_dropped_rows_are_shown(tmp_path: Path, tokenizer: str) -> None:
    path = checked_set(tmp_path, [("code/c", "some text"), *[("x", "")] * 9])
    path.write_text(path.read_text().replace('"samples": "all"', '"samples": 1'))
    text = printed(render(check_set(path, tokenizer)))
    assert re.search(r"dropped \d of set\.jsonl: an empty text in text \(first set\.jsonl:\d+\)", text)


def test_what_is_left_out_is_not_shown(tmp_path: Path, tokenizer: str, command: Command) -> None:
    path = rows_set(tmp_path, [("code/rust", "kept")])
    (tmp_path / "b.jsonl").write_text('{"category": "code/rust", "text": "left out"}')
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"sources": [*body["sources"], body["sources"][0] | {"dataset": "b.jsonl"}]}))
    given = (path, "--tokenizer", tokenizer, "--show", 9, "--json")
    for without, shown in ((), {"kept", "left out"}), (("--without", "b.jsonl"), {"kept"}):
        assert command("calibration", *given, *without) == 0
        assert {one["text"] for one in json.loads(command.out)["samples"]} == shown


def test_samples_are_shown_as_the_model_reads_them(tokenizer: str) -> None:
    report = check_set(SETS / "embedded.yaml", tokenizer, show=3)
    assert [sample["position"] for sample in report["samples"]] == [0, 99, 199]
    assert "[turn]user" in printed(render(report))
