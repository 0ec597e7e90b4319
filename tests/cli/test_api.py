"""The functions of `import quantizers`: as the commands, with dataclasses back."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished

import quantizers
from quantizers.cli import coverage, doctor, evaluate, imatrix, plan, publish, run, serve_check, stitch, verify

COMMANDS = {
    "run": run.run,
    "plan": plan.plan,
    "doctor": doctor.doctor,
    "evaluate": evaluate.evaluate,
    "verify": verify.verify,
    "coverage": coverage.coverage,
    "imatrix": imatrix.imatrix,
    "serve_check": serve_check.serve_check,
    "stitch": stitch.stitch,
    "publish": publish.publish,
}
# Of the command alone: printing, asking, and pictures; and what has another name in Python.
COMMAND_ONLY = {"as_json", "debug", "yes", "picture", "no_picture", "folder", "candidate"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_an_argument(name: str) -> None:
    options = set(inspect.signature(COMMANDS[name]).parameters) - COMMAND_ONLY
    if name != "plan":
        options -= {"context"}  # typer's own
    assert options <= set(inspect.signature(getattr(quantizers, name)).parameters)


def test_importing_is_quick_and_unknown_names_are_refused() -> None:
    code = "import quantizers, sys; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not hasattr(quantizers, "quantise")


@pytest.mark.every  # examples/python_api.py does the same in CI
def test_a_finished_run_is_found_evaluated_and_verified(finished: Finished, tmp_path: Path) -> None:
    made = quantizers.run(finished.recipe, finished.folder)
    assert made.report["already_done"]
    assert made.passed
    assert Path(made.source) == finished.source
    again = quantizers.evaluate(made.source, [made.folder, made.folder], finished.held_out, work=tmp_path / "work")
    first, second = again.candidates
    assert (first.kl, first.perplexity) == (made.kl, made.perplexity) == (second.kl, second.perplexity)
    assert again.paired[0]["difference"] == 0
    assert quantizers.verify(made.folder, made.source).passed
    counted = quantizers.coverage(finished.recipe, work=tmp_path / "work")
    assert counted.passed == all(gate["passed"] for gate in made.report["gates"] if gate["name"] == "coverage")


def test_settings_as_a_mapping_are_those_of_set(finished: Finished) -> None:
    def action(settings: Any) -> Any:
        return quantizers.plan(finished.recipe, settings=settings).figures

    given: dict[str, Any] = {"experts.group_size": 64, "verify": None}
    assert action(given) == action(["experts.group_size=64", "verify=null"]) != action({})
    with pytest.raises(quantizers.InputError, match=r"experts\.group_sise"):
        action({"experts.group_sise": 16})


def test_a_dry_publication_lists_what_would_be_sent(finished: Finished) -> None:
    found = quantizers.publish(finished.folder, "me/tiny", dry_run=True)
    assert not found.uploaded
    assert {file["name"] for file in found.figures["files"]} >= {"config.json", "report.json"}
