"""A small job and its unbroken run, which the tests of interrupted runs share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import Finished
from runs import Small
from tiny import write_job

from quantizers.pipeline import pipeline
from quantizers.pipeline.options import Options
from quantizers.planning.job import prepare

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder, needed = tmp_path_factory.mktemp("small"), list[int]()
    recipe = write_job(folder, layers=3, words=20, samples=3, awq={"grid": 5})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pipeline, "check_room", lambda _, asked: needed.append(asked))
        report = pipeline.run(prepare(str(recipe)), Options(folder / "whole", CPU))
    return Small(folder, report, needed[0])


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Path:
    """A copy of the finished folder, to be damaged."""
    return shutil.copytree(finished.folder, tmp_path / "copy")
