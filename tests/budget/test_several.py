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
from runs import assert_same
from team_threads import together
from tiny import write_recipe

from quantizers.budget import branches, measure
from quantizers.budget.branches import Branches, dealt
from quantizers.calibration.load_set import load_set
from quantizers.output import journal
from quantizers.output.context import Context
from quantizers.plan.job import prepare
from quantizers.system.errors import QuantizeError
from quantizers.team.team import Team

CPU = torch.device("cpu")
FAMILY = "glm4_moe"  # its first layer has no experts


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A budget between two schemes."""
    folder = tmp_path_factory.mktemp("several")
    families.write_job(folder, FAMILY)
    path = write_recipe(folder, words=60, samples=24)
    body = yaml.safe_load(path.read_text())
    body["experts"] = {"bits_per_weight": 6.5}  # of a width of 32, so between INT4 and INT8
    path.write_text(yaml.safe_dump(body, sort_keys=False))
    return path


def one_of(rank: int, count: int) -> Team:
    """A rank that is not connected to the others."""
    team = Team()
    team.rank, team.count = rank, count
    return team


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_everything_is_dealt_once_and_with_its_probe(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "BRANCH_LENGTH", 20)
    monkeypatch.setattr(branches, "BRANCH_TOKENS", 100)
    layout = Branches([30, 10, 25, 7, 40, 12, 33, 21, 5, 60, 13])
    whole, halves = len(layout.probes), len(layout.halved)
    assert (whole, halves) == (6, 2)
    lengths, owners = layout.all_lengths(3), dict[int, int]()
    for rank in range(count):
        team = one_of(rank, count)
        sequences, probes = (dealt(len(items), team, (rank,)) for items in (layout.lengths, layout.probes))
        for run in layout.runs(sequences, probes, 3):
            for place in run:
                assert owners.setdefault(place, rank) == rank
        for branch in range(4):
            for k in probes:
                numbers = [k] if branch == 0 or k not in layout.halved else [k, layout.number_of_half(k)]
                for place in (layout.place(branch, number) for number in numbers):
                    assert owners[place] == rank
                    assert lengths[place] == min(20, layout.lengths[layout.probes[k]])
    assert sorted(owners) == list(range(len(lengths)))
    assert len(lengths) == 11 + whole + 3 * (whole + halves)


def test_figures_and_states_of_one_process(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes on two machines, cut off in the last layer; then three on one machine go on."""
    monkeypatch.setattr(branches, "BRANCH_TOKENS", 600)
    job = prepare(str(recipe))
    data = load_set(recipe.parent / "calibration.yaml", str(job.opened.folder))
    tokens = [torch.from_numpy(sample.tokens).long() for sample in data.samples]
    kept, remove = dict[Path, bytes](), measure._remove

    def keep(work: Path) -> None:
        kept.update((path, path.read_bytes()) for path in (work / "schemes").glob("states-*"))
        remove(work)

    monkeypatch.setattr(measure, "_remove", keep)

    def timeless(entries: Any) -> Any:
        return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]

    alone, first, second = (tmp_path / name for name in ("alone", "first", "second"))
    for folder in (alone, first, second):
        folder.mkdir()
    wanted = measure.measure_schemes(job, tokens, Context(alone, CPU, 5))

    def work(team: Team) -> Any:
        context = Context((first, second)[team.node], CPU, 5, team.heed(lambda: None), team)
        return measure.measure_schemes(job, tokens if team.leads else None, context)

    real, layers = measure.scheme_errors, [0] * 4

    def cut(*arguments: Any, **named: Any) -> Any:
        layers[named["team"].rank] += 1
        if named["team"].rank == 2 and layers[2] == 2:
            raise QuantizeError("cut here")
        return real(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(measure, "scheme_errors", cut)
        found = together(4, work, nodes=2)
    assert str(found[2]) == "cut here"
    assert all(isinstance(failure, Exception) for failure in found)
    assert (first / "schemes" / "00001.json").exists()
    assert not (first / "schemes" / "00002.json").exists()
    assert not list((second / "schemes").glob("*.json"))
    got, *others = together(3, work)
    assert others == [None, None]
    assert timeless(got) == timeless(wanted)
    (states,) = (path for path in kept if path.is_relative_to(alone))
    assert kept[states] == kept[first / states.relative_to(alone)]
    again = together(4, work, nodes=2)  # what is measured is not measured again
    assert timeless(again[0]) == timeless(wanted)
    assert again[1:] == [None] * 3


@pytest.mark.slow
def test_torchrun_from_the_beginning(recipe: Path, tmp_path: Path) -> None:
    """By three processes, terminated while they measure, and gone on with by two."""
    code, said = quantize(recipe, tmp_path / "one", 1)
    assert code == 0, said
    output = tmp_path / "output"
    code, said = quantize(recipe, output, 3, STOP_AFTER_MEASURING="1")
    assert code == 1, said  # torchrun's, of 143
    schemes = journal.work_folder(output) / "schemes"
    assert sorted(path.name for path in schemes.glob("*.json")) == ["00000.json", "00001.json"]
    code, said = quantize(recipe, output, 2)
    assert code == 0, said
    assert_same(output, tmp_path / "one")
    reports = [json.loads((folder / "report.json").read_text())["schemes"] for folder in (output, tmp_path / "one")]
    assert reports[0] == reports[1]
    assert len({row["scheme"] for row in reports[0]["layers"]}) == 2
