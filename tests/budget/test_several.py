"""A budget measured by several processes: every figure is that of one, however often it is cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import yaml
from launched import quantize
from rank_threads import together
from runs import assert_same
from tiny import write_recipe

from quantizers.budget import measure
from quantizers.calibration.load_set import load_set
from quantizers.distributed.process_group import ProcessGroup
from quantizers.output import journal
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.device_memory import Placement, Residents
from quantizers.planning.job import prepare
from quantizers.walk.context import Context

CPU = torch.device("cpu")
FAMILY = "glm4_moe"  # its first layer has no experts


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A budget between two schemes."""
    folder = tmp_path_factory.mktemp("several")
    families.write_job(folder, FAMILY)
    path = write_recipe(folder, words=20, samples=6)
    body = yaml.safe_load(path.read_text())
    body["experts"] = {"bits_per_weight": 6.5, "awq": {"grid": 3}}  # of a width of 32, so between INT4 and INT8
    path.write_text(yaml.safe_dump(body, sort_keys=False))
    return path


@pytest.mark.slow
def test_figures_of_one_process(recipe: Path, tmp_path: Path) -> None:
    """Two processes, on two machines."""
    job = prepare(str(recipe))
    data = load_set(recipe.parent / "calibration.yaml", str(job.opened.folder))
    tokens = [torch.from_numpy(sample.tokens).long() for sample in data.samples]

    alone = tmp_path / "alone"
    alone.mkdir()
    wanted = measure.measure_schemes(job, tokens, Context(alone, CPU, Placement(Residents(5, 1, 0))))
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()

    def work(dist: ProcessGroup) -> Any:
        context = Context(folders[dist.node], CPU, Placement(Residents(5, 1, 0)), dist.watch(lambda: None), dist)
        return measure.measure_schemes(job, tokens if dist.is_main else None, context)

    got, *others = together(2, work, nodes=2)
    assert got == wanted
    assert others == [None]
    again = together(2, work, nodes=2)  # what is measured is not measured again
    assert again[0] == got


@pytest.mark.every
def test_torchrun_from_the_beginning(recipe: Path, tmp_path: Path) -> None:
    """By two processes, terminated while they measure, and resumed: the bytes of one process, which is this one."""
    run(prepare(str(recipe)), Options(tmp_path / "one", CPU))
    output = tmp_path / "output"
    code, said = quantize(recipe, output, 2, STOP_AFTER_MEASURING="1")
    assert code == 1, said  # torchrun's, of 143
    schemes = journal.work_folder(output) / "schemes"
    assert sorted(path.name for path in schemes.glob("*.json")) == ["00000.json", "00001.json"]
    code, said = quantize(recipe, output, 2)
    assert code == 0, said
    assert_same(output, tmp_path / "one")
    reports = [json.loads((folder / "report.json").read_text())["schemes"] for folder in (output, tmp_path / "one")]
    assert reports[0] == reports[1]
    assert len({row["scheme"] for row in reports[0]["layers"]}) == 2
