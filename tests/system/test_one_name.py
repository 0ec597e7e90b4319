"""The package in a folder whose own files are called as the clone's folders are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "quantizers", "--version"],
        ["-m", "quantizers", "plan", "tiny-minimax-m2-fp8-int4"],
        # As in a notebook, whose folder comes first on the path.
        ["-c", "import quantizers; quantizers.evaluate, quantizers.verify; import eval, tests; eval.MINE, tests.MINE"],
    ],
)
def test_a_folder_with_its_own_eval_stitch_and_tests(command: list[str], tmp_path: Path) -> None:
    for name in ("eval", "stitch", "tests/__init__", "quantize"):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text("MINE = True\n")
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_environment_gets_one_name() -> None:
    """An editable install too, which this environment has, or else the wheel."""
    names = "quantizers", "eval", "stitch", "benchmarks"
    code = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['quantizers']"
