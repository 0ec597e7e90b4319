"""vllm_probe.py, run by the interpreter that has a vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from conftest import REPOSITORY, VLLM_PYTHON


def probed(*words: object) -> tuple[int, dict[str, Any]]:
    """The probe's exit code and report."""
    path = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests" / "stand_ins")))
    done = subprocess.run(
        [os.environ[VLLM_PYTHON], "tests/vllm_probe.py", *map(str, words)],
        cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=False
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout)
