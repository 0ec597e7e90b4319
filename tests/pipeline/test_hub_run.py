"""A run whose model and calibration set come from the Hub: a stand-in on the loopback interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from hub_stand_in import HubStandIn

MODEL = "org/tiny"
SET = """\
name: from-the-hub
sequence_length: 64
sources:
  - {dataset: org/texts, columns: [COLUMN], shape: text, samples: 6, category: spoken}
  - {dataset: org/more, streaming: true, columns: [text], shape: text, samples: 4, category: spoken}
"""
Quantize = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubStandIn]:
    recipe = tiny.write_job(tmp_path, layers=2)
    recipe.write_text(recipe.read_text().replace("model: model", f"model: {MODEL}"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    texts = b"".join(json.dumps({"text": f"row {n} of the texts " * 3}).encode() + b"\n" for n in range(30))
    with HubStandIn(repositories={MODEL: {"main": files}}) as stand_in:
        stand_in.datasets = {name: {"train.jsonl": texts} for name in ("org/texts", "org/more")}
        yield stand_in


@pytest.fixture
def quantize_(hub: HubStandIn, tmp_path: Path) -> Quantize:
    """`quantize` in a process of its own, with caches of its own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    home = {"HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment = kept | home | {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1"}

    def call(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "quantizers", *map(str, words)]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    return call


def loaded(folder: Path) -> dict[str, Any]:
    calibration: dict[str, Any] = json.loads((folder / "report.json").read_text())["calibration"]
    return calibration


@pytest.mark.slow
def test_a_run_looks_at_its_data_first_keeps_it_and_publishes_what_it_was(
    hub: HubStandIn, quantize_: Quantize, tmp_path: Path
) -> None:
    path, output = tmp_path / "calibration.yaml", tmp_path / "output"
    path.write_text(SET)
    wrong = quantize_("run", "recipe.yaml", "--output", output)
    assert wrong.returncode == 2
    assert "calibration.yaml:4: org/texts: no column 'COLUMN' (it has text)" in wrong.stderr
    assert not [asked for asked in hub.asked if ".safetensors" in asked]
    path.write_text(SET.replace("COLUMN", "text"))
    command = ("run", "recipe.yaml", "--output", output, "--without", "org/more")
    stopped = quantize_(*command, "--set", "verify.stop.max_hidden_error=1e-9")
    assert (stopped.returncode, "stopped after layer 0" in stopped.stderr) == (3, True), stopped.stderr
    hub.datasets.clear()
    (tmp_path / "cache" / "moe-quantizers").rename(tmp_path / "kept")
    finished = quantize_(*command, "--set", "verify.stop.max_hidden_error=1e-9", "--ignore-stop")
    assert finished.returncode == 0, finished.stderr
    calibration = loaded(output)
    assert calibration["notes"] == ["without org/more (--without): 4 samples are replaced by 4 of the same category"]
    assert calibration["samples"] == 10
    assert calibration["notes"][0] in (output / "README.md").read_text()
    again = quantize_(*command, "--set", "verify.stop.max_hidden_error=1e-9", "--json")
    assert json.loads(again.stdout)["already_done"]
    lock = json.loads((output / "calibration.lock.json").read_text())
    assert [pin["commit"] for pin in lock["sources"]] == calibration["versions"]
    assert [len(pin["rows"]) for pin in lock["sources"]] == [6, 0]
    (tmp_path / "kept").rename(tmp_path / "cache" / "moe-quantizers")
    published = quantize_("calibration", "check", "--recipe", output / "recipe.yaml", "--tokenizer", "model", "--json")
    assert json.loads(published.stdout)["summary"]["digest"] == calibration["digest"], published.stderr
