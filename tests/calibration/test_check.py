"""The check as a command: the verdict first, what is cut, whose tokenizer counts, which samples are shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import quantize

from quantizers.calibration.check import cut_share, truncation_warnings
from quantizers.calibration.samples import Sample
from quantizers.system.package_data import shipped

RECIPE = "tiny-minimax-m2-fp8-int4"

pytestmark = pytest.mark.usefixtures("own_cache")


def write_set(folder: Path, rows: list[tuple[str, str]], **head: Any) -> Path:
    """A set of (category, text); its length is in bytes, which are the test tokenizer's tokens."""
    lines = [json.dumps({"category": category, "text": text}) for category, text in rows]
    (folder / "a.jsonl").write_text("\n".join(lines))
    shape = {"dataset": "a.jsonl", "columns": ["text"], "shape": "text", "samples": "all"}
    source = shape | {"category": {"column": "category"}}
    path = folder / "set.yaml"
    path.write_text(json.dumps({"name": "mine", "sequence_length": 100, "sources": [source]} | head))
    return path


def sample(category: str, kept: int, cut: int = 0) -> Sample:
    return Sample(np.zeros(kept, dtype=np.int32), category, "a.jsonl", truncated=cut)


def words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *given: object) -> tuple[int, str]:
    code = quantize(monkeypatch, "calibration", *given)
    return code, " ".join(capsys.readouterr().out.split())


def test_a_quarter_of_the_tokens_may_be_cut() -> None:
    assert cut_share([sample("x", 75, 25)]) == 0.25
    assert truncation_warnings([sample("x", 75, 25)]) == ()
    assert truncation_warnings([sample("x", 74, 26)]) == (
        "26% of the set's tokens are cut at 74 tokens; raise sequence_length (148 would cut 0%)",
    )


def test_the_length_that_is_advised_cuts_no_more_than_a_quarter() -> None:
    (warning,) = truncation_warnings([sample("x", 10, 190), sample("x", 10, 30), sample("y", 5)])
    assert warning == "90% of the set's tokens are cut at 10 tokens; raise sequence_length (160 would cut 16%)"
    assert f"{40 / 245:.0%}" == "16%"


def test_a_category_that_loses_much_is_named() -> None:
    samples = [sample("long/code", 90, 10), *[sample("x", 90) for _ in range(9)]]
    samples += [sample(f"code/{letter}", 5, 4) for letter in "gfedcba"] + [sample("spoken/hindi", 5, 1)]
    assert truncation_warnings(samples) == (
        "of 7 categories more than 25% of the tokens are cut at 5 tokens: code/a 44%, code/b 44%, code/c 44%, "
        "code/d 44%, code/e 44% and 2 more; raise sequence_length (10 would cut 0%)",
    )


def test_a_warning_is_no_finding(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_set(tmp_path, [("x", "a" * 300), ("y", "short")])
    code, said = words(monkeypatch, capsys, path, "--tokenizer", tokenizer)
    assert code == 0
    assert said.startswith("mine: nothing contradicts the set, but 1 warning warning: 66% of the set's tokens are cut")
    assert words(monkeypatch, capsys, "check", path, "--tokenizer", tokenizer) == (0, said)
    path = write_set(tmp_path, [("x", "a text of its own")])
    assert words(monkeypatch, capsys, path)[1].startswith("mine: fine: nothing contradicts the set mine (")


def test_the_verdict_counts_what_is_wrong(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("x", "one two three four five six seven")] * 8 + [("y", "b" * 900)]
    path = write_set(tmp_path, rows, languages={"programming": ["C", "D"]})
    code, said = words(monkeypatch, capsys, path, "--tokenizer", tokenizer)
    assert code == 3
    assert said.startswith(
        "mine: contradicts what the set claims: 2 languages without a text, 28 pairs of equal texts; and 1 warning "
        "no sample shows C, D (programming) a.jsonl:2 repeats a.jsonl:1"
    )
    assert "and 9 more; --json lists all of them" in said
    assert quantize(monkeypatch, "calibration", path, "--json", "--tokenizer", tokenizer) == 3
    report = json.loads(capsys.readouterr().out)
    assert (len(report["findings"]), len(report["warnings"]), report["ok"]) == (29, 1, False)
    assert said.startswith(f"mine: {report['verdict']}")


def test_it_says_whose_tokenizer_counted(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that is named; else the recipe's; else the tiny model's, which is said to make more tokens."""
    tiny = shipped("models") / "tiny-minimax-m2"
    path = write_set(tmp_path, [("x", "a text of its own")])
    assert f"the tokenizer of {tiny}; a large model's makes fewer" in words(monkeypatch, capsys, path)[1]
    text = words(monkeypatch, capsys, path, "--recipe", RECIPE)[1]
    assert f"the tokenizer of {tiny}, the recipe's source" in text
    named = words(monkeypatch, capsys, path, "--tokenizer", tokenizer, "--recipe", RECIPE)[1]
    assert "1 sample, 17 tokens; none cut digest " in named
    assert f"the tokenizer of {tokenizer} compared with" in named


def test_a_recipe_brings_its_set_and_its_held_out_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = words(monkeypatch, capsys, "check", "--recipe", RECIPE)
    assert code == 0
    assert said.startswith("embedded: nothing contradicts the set, but 1 warning warning: 72% of the set's tokens")
    assert said.endswith("held-out.yaml")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    shared = write_set(folder, [("x", "a text of its own")])
    text = (shipped("recipes") / f"{RECIPE}.yaml").read_text().replace("../calibration/held-out.yaml", str(shared))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text.replace("../models", str(shipped("models"))).replace("../calibration", "x"))
    mine = write_set(tmp_path, [("x", "a text of its own")])
    assert words(monkeypatch, capsys, mine, "--recipe", recipe)[0] == 3


def test_shown_samples_can_be_chosen(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(category, f"{category} {n}") for n in range(6) for category in ("code/rust", "code/c", "math")]
    path = write_set(tmp_path, rows)
    (tmp_path / "b.jsonl").write_text(json.dumps({"category": "code", "text": "another"}))
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"sources": [*body["sources"], body["sources"][0] | {"dataset": "b.jsonl"}]}))

    def shown(*given: object) -> list[dict[str, Any]]:
        assert quantize(monkeypatch, "calibration", path, "--json", "--tokenizer", tokenizer, *given) == 0
        return list(json.loads(capsys.readouterr().out)["samples"])

    assert [row["text"] for row in shown("--show", 9, "--category", "math")] == [f"math {n}" for n in range(6)]
    assert [row["position"] for row in shown("--show", 3, "--category", "code/c")] == [1, 7, 13]
    assert len(shown("--show", 99, "--category", "code")) == 6 + 6 + 1
    assert [row["text"] for row in shown("--show", 9, "--source", "b.json")] == ["another"]
    assert len(shown("--show", 99, "--source", "a.jsonl", "--category", "code")) == 12
    assert quantize(monkeypatch, "calibration", path, "--category", "code") == 2
    assert "add --show N" in capsys.readouterr().err
    words = ("calibration", path, "--show", 1, "--category", "cod", "--source", "a.jsonl", "--tokenizer", tokenizer)
    assert quantize(monkeypatch, *words) == 2
    assert "mine: no sample of source a.jsonl and cod; it has code, math, from a.jsonl, b.jsonl" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("check",), "give a set, such as embedded, or --recipe RECIPE to check the set of a recipe"),
        (("nothing",), "nothing: no such set; give a file"),
        (("embedded", "held-out"), "unexpected extra argument"),
        (("copy", "nothing", "x"), "nothing: no such set; `quantize calibration list` lists them"),
    ],
)
def test_wrong_words(
    given: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(monkeypatch, "calibration", *given) == 2
    assert message in capsys.readouterr().err
