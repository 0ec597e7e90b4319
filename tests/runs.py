"""Small runs, whole and cut off, and what their outputs are compared by."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from tiny import write_job
from torch import Tensor

from quantizers.calibration.load_set import load_set
from quantizers.calibration.lock import lock_set
from quantizers.pipeline import quantizer
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import Job, prepare
from quantizers.system.errors import QuantizeError


@dataclass(frozen=True)
class JobFolder:
    """A recipe, its model and its sets in one folder, and where its output goes."""

    folder: Path

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def output(self) -> Path:
        return self.folder / "output"

    @property
    def job(self) -> Job:
        return prepare(str(self.recipe))


@dataclass(frozen=True)
class Small(JobFolder):
    """A random model of three layers.

    Attributes:
        report: of an unbroken run, whose output is in `whole`.
        needed: the bytes for which that run asked.
    """

    report: dict[str, Any]
    needed: int

    @property
    def whole(self) -> Path:
        return self.folder / "whole"

    def copied(self, folder: Path) -> Small:
        """The same job elsewhere, for a test that changes the source or a set."""
        shutil.copytree(self.folder, folder)
        return Small(folder, self.report, self.needed)


@dataclass(frozen=True)
class Made(JobFolder):
    """A run of a tiny model of some type, and what it reported."""

    name: str
    report: dict[str, Any]

    def texts(self, name: str = "held-out") -> list[Tensor]:
        """Token ids of the texts of one of its two sets."""
        data = load_set(self.folder / f"{name}.yaml", str(self.model))
        return [torch.from_numpy(sample.tokens).long() for sample in data.samples]


def report_of(folder: JobFolder) -> dict[str, Any]:
    """What a run of the recipe reports, on the CPU."""
    return run(folder.job, Options(folder.output, torch.device("cpu")))


VARYING = {"report.json", "README.md"}  # these carry times and memory


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that must not vary."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name not in VARYING
    }


def timeless(report: dict[str, Any]) -> dict[str, Any]:
    """A report without what may differ between equal runs: times and memory, and the hashes of what holds them."""
    varying = ("seconds", "peak_memory_bytes", "already_done", "card", "seal")
    kept = {k: v for k, v in report.items() if k not in varying}
    return kept | {"layers": [{k: v for k, v in layer.items() if k != "seconds"} for layer in report["layers"]]}


def cut_at(module: ModuleType, name: str, job: Job, options: Options, calls: int = 0) -> None:
    """A run in which a module's function `name` raises once it has been called so many times, as a kill there would."""
    real, count = getattr(module, name), iter(range(1_000_000))

    def cut(*arguments: Any, **named: Any) -> Any:
        if next(count) == calls:
            raise QuantizeError("", "cut here")
        return real(*arguments, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, name, cut)
        with pytest.raises(QuantizeError, match="cut here"):
            run(job, options)


def cut_in_layer(number: int, job: Job, options: Options) -> None:
    """A run that fails where it would solve this layer."""
    cut_at(quantizer, "solve_layer", job, options, number)


def timeless_card(folder: Path) -> list[str]:
    """The lines of the card, but those with times and memory."""
    lines = (folder / "README.md").read_text().splitlines()
    return [line for line in lines if not re.search(r"\d (s|min|h|GB|MB)\b.*(layers|memory|time)", line)]


def assert_same(output: Path, whole: Path) -> None:
    """All files equal, report.json and the card but for times and memory."""
    assert {path.name for path in output.iterdir()} == {path.name for path in whole.iterdir()} > VARYING
    assert hashes(output) == hashes(whole)
    first, second = (json.loads((folder / "report.json").read_text()) for folder in (output, whole))
    assert timeless(first) == timeless(second)
    assert timeless_card(output) == timeless_card(whole)


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    data = yaml.safe_load(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))  # which is YAML too, without anchors


def private_job(home: Path) -> Path:
    """A recipe with absolute paths everywhere: its source, a set with a lock, a data file of which rows are dropped."""
    recipe = write_job(home / "recipes", layers=2)
    shutil.move(home / "recipes" / "model", home / "models" / "secret-model")
    data = home / "data" / "diary.jsonl"
    data.parent.mkdir()
    rows = [json.dumps({"text": f"page {n} " * 8}) for n in range(12)]
    # The order in which rows are tried follows from the file's path, which is a new one in each run of the tests:
    # there are so many empty rows that no order has all of them last, where they would not be read.
    data.write_text("\n".join([*rows, '{"text": 5}', *['{"text": ""}'] * 48]) + "\n")

    def private(body: dict[str, Any]) -> None:
        body["sources"].append(body["sources"][0] | {"dataset": str(data), "samples": 12})

    change(home / "recipes" / "calibration.yaml", private)
    lock_set(home / "recipes" / "calibration.yaml")

    def absolute(body: dict[str, Any]) -> None:
        body["source"]["model"] = str(home / "models" / "secret-model")
        body["calibration"] = str(home / "recipes" / "calibration.yaml")
        body["verify"]["perplexity"]["data"] = str(home / "recipes" / "held-out.yaml")

    change(recipe, absolute)
    return recipe


def leaves(figures: Any, place: str = "") -> dict[str, float]:
    """Every number of nested figures, by its place."""
    if isinstance(figures, dict):
        return {k: v for key, part in figures.items() for k, v in leaves(part, f"{place}.{key}").items()}
    if isinstance(figures, list):
        return {k: v for n, part in enumerate(figures) for k, v in leaves(part, f"{place}.{n}").items()}
    return {place: figures} if isinstance(figures, (int, float)) else {}
