"""What a run prints at its end: paths, percentages, and after a failed gate what to do about it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from commands import quantize
from conftest import Finished

from quantizers.cli.run import closer, run_table
from quantizers.eval.coverage.figures import Gate
from quantizers.eval.coverage.summary import gate_figures
from quantizers.eval.report.schema import checked
from quantizers.recipe.schema import Experts
from quantizers.system.formatting import percent, short_path
from quantizers.system.strict_yaml import parse_value


def shown(report: dict[str, Any], output: Path, source: object) -> list[str]:
    return run_table(checked(report), output, str(source), "mine.yaml").splitlines()


def failed(report: dict[str, Any], *names: str) -> dict[str, Any]:
    """A copy of a report in which these gates have failed."""
    copy = deepcopy(report)
    gate = {"value": 0.5, "limit": 0.01, "passed": False, "meaning": "made up"}
    copy["gates"] = [one for one in copy["gates"] if one["name"] not in names] + [gate | {"name": n} for n in names]
    return copy


def test_all_that_is_to_be_looked_at_is_there_by_its_shortest_path(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.folder.parent)
    lines = shown(finished.report, finished.folder, finished.source)
    named = [line for line in lines if line.startswith(("report ", "card ", "pictures "))]
    assert named == [
        "report    output/report.html, output/report.json",
        "card      output/README.md",
        "pictures  output/calibration.png, output/coverage.png",
    ]
    assert all(Path(path).is_file() for line in named for path in line[10:].split(", "))
    assert lines[-3] == "next: quantize verify output"
    assert lines[-2] == "      quantize eval tiny-minimax-m2 output --data held-out"
    assert lines[-1] == "      vllm serve output"


def test_the_time_of_a_resumed_run_is_that_of_its_last_command_beside_all_layers(finished: Finished) -> None:
    def time(command: float, layers: float) -> str:
        seconds = {"seconds": {"this_process": command, "layers": layers}}
        return next(
            line for line in shown(finished.report | seconds, finished.folder, "mine") if line.startswith("time")
        )

    assert time(90.0, 60.0).startswith("time      1 min 30 s, of it 1 min 00 s for the layers; peak memory ")
    assert time(60.0, 90.0).startswith("time      1 min 00 s in this command, 1 min 30 s for all layers; peak memory ")


def test_the_suggested_verify_works_as_it_stands(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a shipped source it needs no --source; of any other folder it has one."""
    monkeypatch.chdir(finished.folder.parent)
    line = shown(finished.report, finished.folder, finished.source)[-3]
    assert quantize(monkeypatch, *line.removeprefix("next: quantize ").split()) == 0
    assert shown(finished.report, finished.folder, "/a/tiny-minimax-m2")[-3].endswith("--source /a/tiny-minimax-m2")
    other = finished.report | {"source": finished.report["source"] | {"model": "mine"}}
    assert shown(other, finished.folder, "/a/mine")[-3].endswith("verify output --source /a/mine")
    hub = finished.report | {"source": finished.report["source"] | {"model": "me/mine"}}
    assert shown(hub, finished.folder, "me/mine")[-3].endswith("verify output")
    assert shown(hub, finished.folder, "/a/mine")[-3].endswith("verify output --source /a/mine")


@pytest.mark.parametrize(
    ("gates", "line"),
    [
        (["coverage"], "coverage: `quantize coverage mine.yaml` shows which experts get few tokens; add samples"),
        (["coverage code/rust"], "add samples of code/rust to the calibration set"),
        (["entropy"], "entropy: `quantize coverage mine.yaml`"),
        (["perplexity", "kl"], "perplexity, kl: change the recipe: more calibration tokens or experts.budget,"),
        (["audit"], "audit: `quantize verify output` lists everything; make it again with --fresh, and report it"),
        (["consumers"], "consumers: `quantize verify output` lists everything; make it again with --fresh"),
    ],
)
def test_after_a_failed_gate_it_says_what_to_do_and_not_how_to_serve(
    gates: list[str], line: str, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.folder.parent)
    lines = shown(failed(finished.report, *gates), finished.folder, finished.source)
    told = [one for one in lines if one.startswith("to do: ")]
    assert len(told) == 1
    assert line in told[0]
    assert not any("vllm serve" in one for one in lines)
    assert "vllm serve output" in shown(finished.report, finished.folder, finished.source)[-1]


def test_only_what_a_recipe_does_not_do_yet_is_proposed() -> None:
    usual = {"bits": 4, "group_size": 128, "rounding": "gptq", "awq": {"grid": 20}}
    assert closer(usual)[0] == "experts.group_size: 32"
    two = closer(usual | {"rounding": "nearest", "awq": False})[:2]
    assert two == ["experts.rounding: gptq", "experts.awq: {grid: 20}"]
    for step in two:  # a recipe takes them as they stand
        key, _, value = step.removeprefix("experts.").partition(": ")
        Experts.model_validate({key: parse_value(value)})
    assert closer(usual | {"bits": 8, "group_size": 32}) == ["more calibration tokens"]
    assert closer({"budget": "1GB"}) == ["a larger experts.budget", "more calibration tokens"]


def test_a_family_that_vllm_does_not_know_is_not_to_be_served(finished: Finished) -> None:
    report = finished.report | {"serving": finished.report["serving"] | {"servers": []}}
    assert not any("vllm" in line for line in shown(report, finished.folder, finished.source)[-3:])


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (1.494e-05, "0.00149%"),
        (0, "0%"),
        (0.01, "1%"),
        (0.125, "12.5%"),
        (1, "100%"),
        (-0.0016, "-0.16%"),
        (12, "1200%"),
    ],
)
def test_shares_in_per_cent(share: float, text: str) -> None:
    assert percent(share) == text


def test_shares_are_per_cent_and_kl_stays_in_nats() -> None:
    gate = Gate(name="perplexity", passed=True, value=0.002, limit=0.01, meaning="x")
    assert gate_figures(gate) == ("0.2%", "<= 1%")
    assert gate_figures(gate.changed(name="coverage code/rust")) == ("0.2%", "<= 1%")
    assert gate_figures(gate.changed(name="kl")) == ("0.002", "<= 0.01")
    assert gate_figures(gate.changed(name="entropy", at_least=True)) == ("0.002", ">= 0.01")
    assert gate_figures(gate.changed(value=None))[0] == "no number"


def test_a_path_is_relative_where_that_is_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(tmp_path / "a" / "b") == "a/b"
    assert short_path("/a") == "/a"
    assert short_path("me/model") == "me/model"
