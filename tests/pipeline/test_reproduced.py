"""A finished folder gives the same bytes again, by its own recipe.yaml and what lies beside it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from commands import Command, quantize
from conftest import REPOSITORY
from runs import change, hashes
from tiny import make, write_job

from quantizers.pipeline import pipeline
from quantizers.system.errors import QuantizeError

SHIPPED = REPOSITORY / "calibration" / "embedded" / "held-out-long.jsonl"


@pytest.fixture(scope="module")
def finished_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run left on another machine: the finished folder `tiny-INT4`, and beside it the source, `model`.

    The calibration set draws rows from a copy of shipped data, which has a name of its own; the held-out set has data
    of its own. All of that came with the folder, and nothing is left where it was made.
    """
    home, here = (tmp_path_factory.mktemp(name) for name in ("home", "here"))
    recipe = write_job(home, layers=1)
    shutil.copy(SHIPPED, home / "diary.jsonl")
    change(
        home / "calibration.yaml",
        lambda body: body["sources"][0].update(dataset="diary.jsonl", samples=3, category={"column": "category"}),
    )
    with pytest.MonkeyPatch.context() as patched:
        assert quantize(patched, "run", recipe, "--output", home / "tiny-INT4", "--with-data") == 0
    shutil.move(home / "model", here)
    shutil.move(home / "tiny-INT4", here)
    shutil.rmtree(home)
    return here / "tiny-INT4"


@pytest.fixture
def folder(finished_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy in the current folder, and a link to the source beside it."""
    shutil.copytree(finished_folder, tmp_path / "tiny-INT4")
    (tmp_path / "model").symlink_to(finished_folder.parent / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tiny-INT4"


def data_of(folder: Path, file: Path) -> Path:
    """The copy of a data file in a finished folder."""
    return folder / f"data-{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}.jsonl"


@pytest.mark.parametrize("with_data", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_finished_folder_gives_the_same_bytes_again(with_data: bool, folder: Path, command: Command) -> None:
    """With the data beside it, or with shipped data, which is found by its content; every file but times and memory."""
    assert data_of(folder, SHIPPED).is_file()
    assert command("run", "tiny-INT4/recipe.yaml") == 2
    assert command.err.splitlines()[-1] == (
        "quantize: tiny-INT4/recipe.yaml:2: source.model: model is neither a folder beside the recipe nor a Hub id "
        "(owner/name); give --source DIR if it is elsewhere, or correct it"
    )
    if not with_data:
        data_of(folder, SHIPPED).unlink()
    flags = ["--with-data"] if with_data else []
    assert command("run", "tiny-INT4/recipe.yaml", "--source", "model", *flags) == 0
    said = command
    assert said.err.splitlines()[0] == "output: out/tiny-INT4-again (another with --output)"
    assert "another source" not in said.err
    again = Path("out/tiny-INT4-again")
    wanted = {name: value for name, value in hashes(folder).items() if with_data or not name.startswith("data-")}
    assert hashes(again) == wanted
    assert {"recipe.yaml", "calibration.yaml", "config.json", "model-00001-of-00002.safetensors"} < wanted.keys()
    reports = [json.loads((one / "report.json").read_text()) for one in (folder, again)]
    assert reports[0]["settings"]["hash"] == reports[1]["settings"]["hash"]


def test_what_a_finished_folder_lacks_is_named(folder: Path, command: Command) -> None:
    (missing,) = (path for path in folder.glob("data-*") if path != data_of(folder, SHIPPED))
    missing.unlink()
    assert command("run", "tiny-INT4/recipe.yaml", "--source", "model", "--output", "again") == 2
    assert command.err.splitlines()[-1] == (
        f"quantize: tiny-INT4/held-out.yaml:9: tiny-INT4/{missing.name}: the data of this set was not published with "
        f"it; put the file there whose SHA-256 begins with {missing.stem.removeprefix('data-')}"
    )
    assert not Path("again").exists()


def test_the_finished_folder_itself_is_never_the_place_of_its_second_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    before, source = hashes(folder), Path("model").resolve()
    again = ("run", folder / "recipe.yaml", "--source", source)
    assert command(*again, "--output", folder, "--fresh", "--yes") == 2
    assert "--fresh would discard it with the rest of" in command.err
    monkeypatch.chdir(folder)
    assert command("run", "recipe.yaml", "--source", source) == 2
    assert command.err == (
        "quantize: recipe.yaml: the current folder is inside this finished checkpoint; give --output a folder outside "
        "of it\n"
    )
    assert hashes(folder) == before


def test_another_source_than_that_of_the_finished_folder_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    other = make(Path("other"), seed=1, num_hidden_layers=1)

    def stopped(*_: object) -> None:
        raise QuantizeError("", "stopped here")

    monkeypatch.setattr(pipeline, "plan_findings", stopped)
    for source, said in (("model", False), (other, True)):
        words = ("run", "tiny-INT4/recipe.yaml", "--source", source, "--output", "again")
        assert command(*words) == 1
        err = command.err
        assert ("was made from another source than" in err) is said
        assert "stopped here" in err
