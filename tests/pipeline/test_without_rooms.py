"""The main job without the rooms that the core does not import: it works, and says that nobody checked the servers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from tiny import write_job

PROGRAM = """
import contextlib, io, json, sys
import quantizers

errors = io.StringIO()
with contextlib.redirect_stderr(errors):
    made = quantizers.run("recipe.yaml", "output")
    verified = quantizers.verify("output", "model").consumers.as_text()
    dry = [quantizers.publish("output", "me/tiny", dry_run=True, force=force) for force in (None, "tried")]
    try:
        quantizers.publish("output", "me/tiny")
    except quantizers.QuantizeError as failure:
        refused = str(failure)
    without = []
    for asked in ({"imatrix": True}, {"settings": ["verify.as_served=[hopper]"]}):
        try:
            quantizers.run("recipe.yaml", "other", **asked)
        except quantizers.QuantizeError as failure:
            without.append(str(failure))
print(json.dumps({
    "file": quantizers.__file__, "functions": quantizers.__all__, "passed": made.passed, "said": errors.getvalue(),
    "report": made.report, "verified": verified, "problems": dry[0].problems, "refused": refused,
    "stops": [found.figures["stops"] for found in dry], "without": without,
}))
"""
UNCHECKED = "consumers: not checked, for this installation has no rules of serving engines"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run, `verify` and `publish` of a copy of the package say, in which no folder has a `hooks.py`."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(REPOSITORY / "quantizers", folder / "site" / "quantizers", ignore=shutil.ignore_patterns("*.pyc"))
    rooms = list((folder / "site" / "quantizers").glob("*/hooks.py"))
    assert {file.parent.name for file in rooms} == {"llama_cpp", "repair", "serving", "sets"}
    for file in rooms:
        shutil.rmtree(file.parent)
    write_job(folder, layers=1, words=12)
    environment = os.environ | {"PYTHONPATH": str(folder / "site"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert Path(found["file"]).is_relative_to(folder)
    return found | {"page": (folder / "output" / "report.html").read_text(), "card": folder / "output" / "README.md"}


@pytest.mark.slow
def test_the_main_job_works_and_says_and_records_what_is_not_checked(told: dict[str, Any]) -> None:
    assert told["functions"] == [
        "InputError", "QuantizeError", "doctor", "evaluate", "layer", "plan", "publish", "run", "verify",
    ]  # fmt: skip
    assert told["passed"]
    assert UNCHECKED in told["said"].splitlines()
    report = told["report"]
    assert report["consumers"]["checked"] is False
    assert UNCHECKED in report["notes"]
    assert [gate["name"] for gate in report["gates"]] == ["audit"], "none that would seem to have passed"
    assert told["verified"] == UNCHECKED
    assert "Every engine reads it" not in told["page"]
    assert UNCHECKED in told["card"].read_text()
    assert "This installation knows no server" in told["card"].read_text()
    assert report["serving"]["servers"] == []


@pytest.mark.slow
def test_nothing_unchecked_is_published_without_force(told: dict[str, Any]) -> None:
    assert told["problems"] == [UNCHECKED]
    without, forced = told["stops"]
    assert "1 failed check" in without
    assert "1 failed check" not in forced
    assert UNCHECKED in told["refused"]


@pytest.mark.slow
def test_an_option_of_an_absent_room_is_refused(told: dict[str, Any]) -> None:
    imatrix, as_served = told["without"]
    assert imatrix.startswith("--imatrix: the part of quantize that does this is not installed")
    assert "verify.as_served: the part of quantize that does this is not installed" in as_served
