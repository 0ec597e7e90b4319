"""A run whose model and calibration set come from the Hub: a stand-in on the loopback interface."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import Command
from hub_stand_in import HubStandIn, reached

MODEL = "org/tiny"
SET = """\
name: from-the-hub
sequence_length: 64
sources:
  - {dataset: org/texts, columns: [COLUMN], shape: text, samples: 6, category: spoken}
  - {dataset: org/more, streaming: true, columns: [text], shape: text, samples: 4, category: spoken}
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    recipe = tiny.write_job(tmp_path, layers=2)
    recipe.write_text(recipe.read_text().replace("model: model", f"model: {MODEL}"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    texts = b"".join(json.dumps({"text": f"row {n} of the texts " * 3}).encode() + b"\n" for n in range(30))
    with HubStandIn(repositories={MODEL: {"main": files}}) as stand_in:
        stand_in.datasets = {name: {"train.jsonl": texts} for name in ("org/texts", "org/more")}
        reached(stand_in, tmp_path / "home", monkeypatch)
        yield stand_in


def loaded(folder: Path) -> dict[str, Any]:
    calibration: dict[str, Any] = json.loads((folder / "report.json").read_text())["calibration"]
    return calibration


@pytest.mark.slow
def test_a_run_looks_at_its_data_first_keeps_it_and_publishes_what_it_was(
    hub: HubStandIn, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, output, kept = tmp_path / "calibration.yaml", tmp_path / "output", tmp_path / "home" / "cache"
    path.write_text(SET)
    assert command("run", "recipe.yaml", "--output", output) == 2
    assert "calibration.yaml:4: org/texts: no column 'COLUMN' (it has text)" in command.err
    assert not [asked for asked in hub.asked if asked.endswith(".safetensors")]
    path.write_text(SET.replace("COLUMN", "text"))
    run = ("run", "recipe.yaml", "--output", output, "--with-data", "--without", "org/more", "--set")
    stopping = (*run, "verify.stop.max_hidden_error=1e-9")
    assert command(*stopping) == 3
    assert "stopped after layer 0" in command.err
    hub.datasets.clear()
    kept.rename(tmp_path / "kept")
    assert command(*stopping, "--ignore-stop") == 0
    calibration = loaded(output)
    assert calibration["notes"] == ["without org/more (--without): 4 samples are replaced by 4 of the same category"]
    assert calibration["samples"] == 10
    assert "without org/more" in (output / "README.md").read_text()
    assert command(*stopping, "--json") == 0
    assert json.loads(command.out)["already_done"]
    lock = json.loads((output / "calibration.lock.json").read_text())
    assert [pin["commit"] for pin in lock["sources"]] == calibration["versions"]
    assert [len(pin["rows"]) for pin in lock["sources"]] == [10, 0]
    shutil.rmtree(kept, ignore_errors=True)
    (tmp_path / "kept").rename(kept)
    assert command("calibration", "check", "--recipe", output / "recipe.yaml", "--tokenizer", "model", "--json") == 0, (
        command.err
    )
    assert json.loads(command.out)["summary"]["digest"] == calibration["digest"]
