"""The notebook runs, and what is stored of it is what it gives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "one_layer.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
ON_A_MACHINE = re.compile(r"/(?:home|root|tmp|work|usr|opt|mnt|var|Users)/")


def kinds(cells: list[dict[str, Any]]) -> list[list[Any]]:
    """What each cell gives: figures differ a little on another CPU."""
    return [[(output["output_type"], sorted(output.get("data", ()))) for output in cell["outputs"]] for cell in cells]


@pytest.mark.slow
def test_it_runs_offline_in_an_empty_folder_and_gives_what_is_stored(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    own = {"HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "JUPYTER_PLATFORM_DIRS": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "JUPYTER", "IPYTHON"))}
    words = [sys.executable, REPOSITORY / "scripts" / "run_notebook.py", NOTEBOOK, tmp_path / "copy.ipynb"]
    done = subprocess.run(words, env=kept | own, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "copy.ipynb").read_text(encoding="utf-8"))["cells"]
    assert [cell["source"] for cell in cells] == [cell["source"] for cell in CELLS]
    assert kinds([cell for cell in cells if cell["cell_type"] == "code"]) == kinds(CODE)


def test_it_is_stored_as_it_was_executed_from_top_to_bottom() -> None:
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    assert all(cell["outputs"] for cell in CODE)
    allowed = {"image/png", "text/plain"}
    assert {kind for cell in kinds(CODE) for _, data in cell for kind in data} <= allowed
    assert "error" not in {kind for cell in kinds(CODE) for kind, _ in cell}


def test_nothing_of_the_machine_is_stored_and_a_browser_has_it_at_once() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < 300_000
    outputs = [json.dumps(output) for cell in CODE for output in cell["outputs"] if "image/png" not in str(output)]
    assert not [output for output in outputs if ON_A_MACHINE.search(output)]


def test_its_links_lead_somewhere() -> None:
    text = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    found = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert len(found) > 5
    missing = [link for link in found if not (NOTEBOOK.parent / link).is_file()]
    assert missing == []
