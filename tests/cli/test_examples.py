"""examples/ and AGENTS.md. The steps of the CI job are run as GitHub's runner would; .ci/run runs python_api.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY
from schema_tables import models_in

from quantizers.eval.report.schema import MeasuredRunReport

# https://docs.github.com/actions/reference/workflows-and-actions/workflow-syntax: what runs a step, by its `shell`.
SHELLS = {None: ["bash", "-e"], "bash": ["bash", "--noprofile", "--norc", "-eo", "pipefail"]}
RECIPE = """
source: {{model: {model}}}
calibration: {{set: embedded, tokens: 1024}}
verify: {{coverage: {{min_routed_tokens: {least}}}}}
"""


@pytest.fixture
def job() -> Any:
    return yaml.safe_load((REPOSITORY / "examples" / "ci-coverage.yml").read_text(encoding="utf-8"))["jobs"]["coverage"]


@pytest.mark.parametrize(("least", "code"), [pytest.param(0, 0, marks=pytest.mark.every), (1_000_000, 3)])
def test_the_coverage_job_ends_as_its_gate_says(least: int, code: int, job: Any, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("pip", 'printf "%s\\n" "$@" > installed'),
        ("quantize", f'exec {sys.executable} -m quantizers "$@"'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "mine.yaml").write_text(RECIPE.format(model=REPOSITORY / "models" / "tiny-minimax-m2", least=least))
    assert set(job["env"]) == {"QUANTIZE", "RECIPE"}
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "QUANTIZE": "a wheel.whl", "RECIPE": "mine.yaml",
    }  # fmt: skip
    ends = []
    for step in job["steps"]:
        if "run" in step:
            (tmp_path / "step.sh").write_text(step["run"], encoding="utf-8")
            words = [*SHELLS[step.get("shell")], "step.sh"]
            ended = subprocess.run(words, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True)
            ends.append(ended.returncode)
    assert ends == [0, code], ended.stderr
    assert (tmp_path / "installed").read_text().splitlines()[:2] == ["install", "a wheel.whl"]
    assert "routed tokens" in (tmp_path / "summary").read_text(encoding="utf-8")
    assert (tmp_path / "coverage.png").stat().st_size > 0


def test_the_image_has_the_vllm_that_ci_loads_outputs_with() -> None:
    image = (REPOSITORY / "examples" / "Dockerfile").read_text(encoding="utf-8")
    pins = (REPOSITORY / ".ci" / "vllm-requirements.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^ARG VLLM=vllm==(\S+)$", image, re.MULTILINE)
    assert f"\nvllm-cpu=={version}\n" in pins


def test_what_a_wheel_is_made_of_goes_to_the_build_of_the_image() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"], *wheel["packages"]}
    links = [path for path in (REPOSITORY / "quantizers").rglob("*") if path.is_symlink()]
    needed |= {path.resolve().relative_to(REPOSITORY).as_posix() for path in links}
    sent = (REPOSITORY / "examples" / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert {f"!{name}" for name in needed} <= set(sent)


def test_agents_find_on_one_page_every_exit_code_and_key_that_there_is() -> None:
    text = (REPOSITORY / "AGENTS.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    codes = re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE)
    assert {int(code) for cell in codes for code in cell.split(", ")} == {0, 1, 2, 3, 130, 143}
    keys = re.findall(r"`([\w.]+)(?:\[\])?`", "".join(re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)))
    assert len(keys) > 10
    for key in keys:
        part: Any = MeasuredRunReport
        for name in key.split("."):
            field = part.model_fields[name]
            part = next(models_in(field.annotation), None)
