"""A finished folder gives the same bytes again, by its own recipe.yaml and what lies beside it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from commands import quantize
from conftest import REPOSITORY
from runs import change, hashes
from tiny import make, write_job

SHIPPED = REPOSITORY / "calibration" / "embedded" / "held-out-long.jsonl"


def job_with_shipped_data(folder: Path) -> Path:
    """Its calibration set draws rows from a copy of shipped data, which has a name of its own."""
    recipe = write_job(folder, layers=1)
    shutil.copy(SHIPPED, folder / "diary.jsonl")
    change(
        folder / "calibration.yaml",
        lambda body: body["sources"][0].update(dataset="diary.jsonl", samples=3, category={"column": "category"}),
    )
    change(recipe, lambda body: body.pop("verify"))
    return recipe


def downloaded(folder: Path, target: Path) -> Path:
    """A finished folder on another machine: where the recipe, sets and data were made, nothing is left."""
    shutil.copytree(folder, target)
    for path in folder.parent.iterdir():
        if path.name != "model":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return target


@pytest.mark.parametrize("with_data", [True, False])
def test_the_finished_folder_gives_the_same_bytes_again(
    with_data: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data that came with it, or shipped data that is found by its content; every file but times and memory."""
    home, here = tmp_path / "home", tmp_path / "here"
    recipe = write_job(home, layers=1) if with_data else job_with_shipped_data(home)
    flags = ["--with-data"] if with_data else []
    assert quantize(monkeypatch, "run", recipe, "--output", home / "tiny-INT4", *flags) == 0
    folder = downloaded(home / "tiny-INT4", here / "tiny-INT4")
    assert len(list(folder.glob("data-*"))) == (2 if with_data else 0)
    capsys.readouterr()
    monkeypatch.chdir(here)

    assert quantize(monkeypatch, "run", "tiny-INT4/recipe.yaml") == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "quantize: tiny-INT4/recipe.yaml:2: source.model: model is neither a folder here nor a Hub id (owner/name); "
        "give --source DIR if it lies elsewhere, or correct it"
    )
    before = hashes(folder)
    assert quantize(monkeypatch, "run", "tiny-INT4/recipe.yaml", "--source", home / "model", *flags) == 0
    said = capsys.readouterr()
    assert said.err.splitlines()[0] == "output: out/tiny-INT4-again (another with --output)"
    assert "another source" not in said.err
    assert hashes(here / "out" / "tiny-INT4-again") == hashes(folder) == before
    assert {"recipe.yaml", "calibration.yaml", "config.json", "model-00001-of-00002.safetensors"} < before.keys()
    reports = [json.loads((one / "report.json").read_text()) for one in (folder, here / "out" / "tiny-INT4-again")]
    assert reports[0]["settings"]["hash"] == reports[1]["settings"]["hash"]


def test_what_a_finished_folder_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    assert quantize(monkeypatch, "run", write_job(home, layers=1), "--output", home / "tiny") == 0
    digest = hashlib.sha256((home / "calibration.jsonl").read_bytes()).hexdigest()
    folder = downloaded(home / "tiny", tmp_path / "tiny")
    capsys.readouterr()
    words = ("run", folder / "recipe.yaml", "--source", home / "model", "--output", tmp_path / "again")
    assert quantize(monkeypatch, *words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"quantize: {folder}/calibration.yaml:9: {folder}/data-{digest[:16]}.jsonl: the data of this set was not "
        f"published with it; put the file there whose SHA-256 begins with {digest[:16]}"
    )
    assert not (tmp_path / "again").exists()


def test_the_finished_folder_itself_is_never_the_place_of_its_second_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = job_with_shipped_data(tmp_path)
    folder = tmp_path / "tiny"
    assert quantize(monkeypatch, "run", recipe, "--output", folder) == 0
    before = hashes(folder)
    capsys.readouterr()
    again = ("run", folder / "recipe.yaml", "--source", tmp_path / "model")
    assert quantize(monkeypatch, *again, "--output", folder, "--fresh", "--yes") == 2
    assert "--fresh would discard it with the rest of" in capsys.readouterr().err
    monkeypatch.chdir(folder)
    assert quantize(monkeypatch, "run", "recipe.yaml", "--source", tmp_path / "model") == 2
    assert capsys.readouterr().err == (
        "quantize: recipe.yaml: lies in this finished checkpoint; give --output a folder outside of it\n"
    )
    assert hashes(folder) == before


def test_another_source_than_that_of_the_finished_folder_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = job_with_shipped_data(tmp_path)
    assert quantize(monkeypatch, "run", recipe, "--output", tmp_path / "tiny") == 0
    model = tmp_path / "model"
    other = make(tmp_path / "other", seed=1, num_hidden_layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, other / name)
    capsys.readouterr()
    words = ("run", tmp_path / "tiny" / "recipe.yaml", "--source", other, "--output", tmp_path / "again")
    assert quantize(monkeypatch, *words) == 0
    assert f"was made from another source than {other}, so this will not give the same bytes" in capsys.readouterr().err
