"""A run that was cut off, and an input to be spoiled."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from calibration_tokenizer import write_tokenizer
from commands import Command
from runs import JobFolder, Small, cut_in_layer

from quantizers.pipeline.options import Options


@pytest.fixture(scope="session")
def cut(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unfinished folder of the small job, cut off where its third layer would be solved."""
    folder = tmp_path_factory.mktemp("cut") / "output"
    cut_in_layer(2, small.job, Options(folder, torch.device("cpu")))
    return folder


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> JobFolder:
    """A good input to be spoiled: a recipe, its set, and a random checkpoint of one layer."""
    case = JobFolder(tmp_path_factory.mktemp("good"))
    write_tokenizer(tiny.make(case.model, num_hidden_layers=1))
    rows = [{"text": f'fn main() {{ println!("{word}"); }}'} for word in ("one", "two", "three", "four")]
    (case.folder / "t.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = {"dataset": "./t.jsonl", "columns": ["text"], "shape": "text", "samples": "all", "category": "code/rust"}
    body = {"name": "small", "sequence_length": 32, "seed": 1, "sources": [source]}
    (case.folder / "set.yaml").write_text(yaml.safe_dump(body))
    case.recipe.write_text("source:\n  model: model\ncalibration: set.yaml\nexperts:\n  group_size: 32\n")
    return case


@pytest.fixture
def case(good: JobFolder, tmp_path: Path) -> JobFolder:
    """A copy of its own."""
    return JobFolder(shutil.copytree(good.folder, tmp_path / "case"))


@pytest.fixture
def quantize(monkeypatch: pytest.MonkeyPatch, command: Command) -> Callable[..., Any]:
    """`quantize(*arguments)`: exit code, standard output and standard error of the command in this process."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    return lambda *arguments: (command(*arguments), command.out, command.err)


class Counting:
    """A file that counts the bytes that are read from it."""

    def __init__(self, stream: Any, count: Callable[[int], None]) -> None:
        self._stream, self._count = stream, count

    def read(self, *size: int) -> bytes:
        found: bytes = self._stream.read(*size)
        self._count(len(found))
        return found

    def readinto(self, buffer: Any) -> int:
        found: int = self._stream.readinto(buffer)
        self._count(found)
        return found

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes read from safetensors files so far, by the folder that they lie in."""
    counts, real = Counter[str](), Path.open

    def opened(path: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        stream = real(path, mode, *arguments, **named)
        if ".safetensors" not in path.name or "r" not in mode:
            return stream

        def count(size: int) -> None:
            counts[path.parent.name] += size

        return Counting(stream, count)

    monkeypatch.setattr(Path, "open", opened)
    return counts
