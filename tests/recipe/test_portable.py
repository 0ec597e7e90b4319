"""Nothing of a finished folder names a path of the machine it was made on, and its recipe still works elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from commands import Command
from conftest import REPOSITORY, Finished
from runs import change, cut_at, hashes, private_job
from safetensors.torch import load_file, save_file
from tiny import write_job

from quantizers.calibration.load_set import load_set
from quantizers.calibration.set import read_set
from quantizers.commands import verify as verification
from quantizers.pipeline import pipeline
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.recipe.portable import resolve_recipe, source_name
from quantizers.recipe.read import read_recipe
from quantizers.system.errors import CalibrationError, InputError, OutputError
from quantizers.system.shipped import shipped

CPU = torch.device("cpu")


def leaks(folder: Path, *words: str) -> list[str]:
    """Files, but the shards, in which one of the words stands."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert len(files) > 8
    return [f"{path.name}: {word}" for path in files for word in words if word.encode() in path.read_bytes()]


@pytest.mark.slow
def test_no_path_of_the_machine_and_a_recipe_that_works_elsewhere(tmp_path: Path) -> None:
    """Before, report.json, recipe.yaml, report.html and the card held a user's home folder."""
    home = tmp_path / "somebody"
    recipe = private_job(home)
    output = tmp_path / "output"
    report = run(prepare(str(recipe)), Options(output, CPU))
    assert report["calibration"]["dropped"], "no row was dropped, so no place is shown"
    assert leaks(output, "somebody", str(tmp_path), "diary.jsonl", str(REPOSITORY), str(Path.home())) == []
    assert report["source"]["model"] == "secret-model"
    published = yaml.safe_load((output / "recipe.yaml").read_text())
    assert (published["calibration"], published["source"]["model"]) == ("calibration.yaml", "secret-model")
    assert not list(output.glob("data-*"))
    lock = json.loads((output / "calibration.lock.json").read_text())
    assert [pin["dataset"] for pin in lock["sources"]] == [
        source.dataset for source in read_set(output / "calibration.yaml").sources
    ]

    # Without the data the recipe says what is missing; with it, the same bytes, wherever it lies.
    elsewhere = tmp_path / "elsewhere"
    words = (str(output / "recipe.yaml"), False, False, home / "models" / "secret-model")
    with pytest.raises(CalibrationError, match=r"was not published with it; put the file there whose SHA-256 begins"):
        run(prepare(*words), Options(elsewhere, CPU))
    assert run(prepare(str(recipe)), Options(output, CPU, with_data=True))["already_done"]
    assert len(list(output.glob("data-*.jsonl"))) == 3
    again = run(prepare(*words), Options(elsewhere, CPU, with_data=True))
    assert hashes(elsewhere) == hashes(output)
    assert again["settings"]["hash"] == report["settings"]["hash"]
    assert again["calibration"] == report["calibration"]
    assert leaks(elsewhere, "somebody", str(tmp_path)) == []

    # Finished is finished, though the data is gone meanwhile; and what was edited since is another recipe.
    (home / "data" / "diary.jsonl").rename(home / "data" / "lost.jsonl")
    assert run(prepare(str(recipe)), Options(output, CPU))["already_done"]
    change(home / "recipes" / "calibration.yaml", lambda body: body.update(name="other"))
    with pytest.raises(OutputError, match="holds the finished output of another recipe"):
        run(prepare(str(recipe)), Options(output, CPU))


def test_shipped_sets_travel_without_their_data(tmp_path: Path, tiny_model: Path) -> None:
    """Their data is found again by its content, in whatever installation."""
    recipe, path = read_recipe("tiny-minimax-m2-fp8-int4")
    for name, text in resolve_recipe(recipe, path).texts().items():
        (tmp_path / name).write_text(text)
    assert not list(tmp_path.glob("*.jsonl"))
    here = load_set(tmp_path / "held-out.yaml", str(tiny_model))
    there = load_set(shipped("calibration") / "held-out.yaml", str(tiny_model))
    assert (here.digest, here.name) == (there.digest, there.name)


def test_a_local_file_under_another_name_gives_the_same_samples_in_order(tmp_path: Path, tiny_model: Path) -> None:
    """Of a file from which some rows are drawn the name decides which; the copy of the set says it instead."""
    recipe, _ = read_recipe(str(private_job(tmp_path)))
    change(tmp_path / "recipes" / "calibration.yaml", lambda body: body["sources"][1].update(samples=4))
    (tmp_path / "recipes" / "calibration.lock.json").unlink()
    resolved = resolve_recipe(recipe, tmp_path / "recipes" / "recipe.yaml")
    (tmp_path / "copy").mkdir()
    for name, text in resolved.texts().items():
        (tmp_path / "copy" / name).write_text(text)
    for name, file in resolved.data.items():
        shutil.copy(file, tmp_path / "copy" / name)
    here = load_set(tmp_path / "copy" / "calibration.yaml", str(tiny_model))
    there = load_set(tmp_path / "recipes" / "calibration.yaml", str(tiny_model))
    assert here.digest == there.digest
    text = (tmp_path / "copy" / "calibration.yaml").read_text()
    assert text.count("order:") == 1
    other = re.sub(r"order: '?\w+'?", "order: other", text)
    (tmp_path / "copy" / "calibration.yaml").write_text(other)
    assert load_set(tmp_path / "copy" / "calibration.yaml", str(tiny_model)).digest != there.digest


def test_a_place_is_published_by_the_file_that_it_is_in(tmp_path: Path) -> None:
    recipe, _ = read_recipe(str(private_job(tmp_path)))
    renamed = {"a.json": "data-1.json", "a.jsonl": "data-2.jsonl"}
    resolved = replace(resolve_recipe(recipe, tmp_path / "recipes" / "recipe.yaml"), renamed={"held-out.yaml": renamed})
    places = ("a.json:1", "a.jsonl:2", "owner/dataset:3")
    assert [resolved.published(place, "held-out.yaml") for place in places] == [
        "data-1.json:1",
        "data-2.jsonl:2",
        "owner/dataset:3",
    ]


def test_another_source_of_the_same_name_is_not_finished(finished: Finished, tmp_path: Path) -> None:
    """Only the name of its folder is published, so what the source holds is compared."""
    output, moved = tmp_path / "output", tmp_path / finished.source.name
    shutil.copytree(finished.folder, output)
    shutil.copytree(finished.source, moved)
    assert run(prepare(str(finished.recipe), source_folder=moved), Options(output, CPU))["already_done"]
    shard = sorted(moved.glob("*.safetensors"))[-1]
    save_file({name: value.roll(1) for name, value in load_file(shard).items()}, shard, {"format": "pt"})
    with pytest.raises(OutputError, match="holds the finished output of another source than"):
        run(prepare(str(finished.recipe), source_folder=moved), Options(output, CPU))


def test_data_that_is_no_longer_asked_for_does_not_stay(tmp_path: Path) -> None:
    """Begun with --with-data, cut in the proof, and gone on without."""
    recipe = write_job(tmp_path / "job", layers=2)
    output = tmp_path / "output"
    cut_at(pipeline, "run_report", prepare(str(recipe)), Options(output, CPU, with_data=True))
    assert len(list((output / ".quantize" / "output").glob("data-*"))) == 2
    report = run(prepare(str(recipe)), Options(output, CPU))
    assert not [name for name in report["files"] if name.startswith("data-")]
    assert not list(output.glob("data-*"))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("MiniMaxAI/MiniMax-M2.1", "MiniMaxAI/MiniMax-M2.1"),
        ("models/mine", "mine"),  # there is such a folder beside the recipe
        ("/somewhere/else/mine", "mine"),
        ("../mine/", "mine"),
        ("{here}/link", "link"),  # and not what it leads to
        ("{here}/hub/models--MiniMaxAI--MiniMax-M2.1/snapshots/0123abc", "MiniMaxAI/MiniMax-M2.1"),
    ],
)
def test_sources_are_called_by_id_or_folder(model: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "hub" / "models--MiniMaxAI--MiniMax-M2.1" / "snapshots" / "0123abc").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "models" / "mine")
    assert source_name(model.format(here=tmp_path), tmp_path) == name


@pytest.mark.slow
def test_the_recipe_says_what_and_source_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """`--source` of run, plan, coverage and verify; without it, verify finds what report.json names or says so."""
    recipe = write_job(tmp_path / "job", layers=2)
    model = tmp_path / "job" / "model"
    change(recipe, lambda body: body["source"].update(model="somebody/somewhere"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert command("plan", recipe, "--source", model, "--json") == 0
    assert json.loads(command.out)["basis"] == f"the headers of {model}"
    assert command("coverage", recipe, "--source", model, "--no-picture", "--json") == 0
    assert command("run", recipe, "--source", "job/model", "--device", "cpu") == 0
    said = command
    assert said.err.splitlines()[0] == "output: out/recipe (another with --output)"
    assert "output    out/recipe\n" in said.out
    assert "quantize verify out/recipe --source job/model" in said.out
    output = tmp_path / "out" / "recipe"
    assert yaml.safe_load((output / "README.md").read_text().split("---\n")[1])["base_model"] == "somebody/somewhere"
    assert command("verify", output, "--source", "job/model") == 0
    assert command("verify", output) == 2  # a Hub id, and there is no network
    assert "somebody/somewhere" in command.err
    assert command("run", recipe, "--source", "nowhere") == 2
    assert command.err.splitlines()[-1] == (
        "quantize: --source nowhere: no such folder; give the folder of the source model"
    )
    assert command("coverage", "--model", model, "--data", "embedded", "--source", model) == 2
    assert "give a recipe and no --model with it" in command.err


def test_verify_knows_a_shipped_source_and_asks_for_any_other_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    source_of = verification.source_of
    (tmp_path / "report.json").write_text('{"source": {"model": "tiny-minimax-m2", "revision": "main"}}')
    assert source_of(tmp_path, None, None).folder == shipped("models") / "tiny-minimax-m2"
    (tmp_path / "report.json").write_text('{"source": {"model": "another", "revision": "main"}}')
    with pytest.raises(InputError, match="was made from a folder called another; say where that is with --source"):
        source_of(tmp_path, None, None)
    (tmp_path / "report.json").write_text('{"source": {"model": "..", "revision": "main"}}')
    with pytest.raises(InputError, match="say where that is with --source"):
        source_of(tmp_path, None, None)
    asked: list[tuple[str, str]] = []
    with monkeypatch.context() as patched:
        patched.setattr(verification, "open_checkpoint", lambda *words, **_: asked.append(words))
        (tmp_path / "report.json").write_text('{"source": {"model": "a/b", "revision": "v2"}}')
        for given, revision in ((None, None), ("c/d", None), ("c/d", "v3")):
            source_of(tmp_path, given, revision)
    assert asked == [("a/b", "v2"), ("c/d", "v2"), ("c/d", "v3")]
    (tmp_path / "report.json").unlink()
    assert command("verify", tmp_path) == 2
    assert "has no report.json that names its source; say where that is with --source" in command.err
