"""KL of INT4 experts by AutoRound and by GPTQModel beside ours, at the same size and with the same tokens.

    python3 -m venv autoround && autoround/bin/pip install auto-round==0.16.1
    python3 -m venv gptqmodel && gptqmodel/bin/pip install gptqmodel==7.7.0
    python benchmarks/other_tools.py mine.yaml --autoround autoround/bin/python --gptqmodel gptqmodel/bin/python

Each tool quantizes a BF16 copy of the model in an environment of its own (run_tool.py), and its checkpoint is measured
as it is. A tool whose Python is not given is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from gguf_types import plain_tensors, written
from measured_rows import Maker, Row, Table, recipe_job, row_options
from methods import calibration_data, spread
from parts import DEFAULT, rows_of

from quantizers.calibration.samples import CalibrationData, token_tensors
from quantizers.checkpoint.reader import CONFIG, Checkpoint, open_folder
from quantizers.device.devices import choose_device
from quantizers.planning.job import Job
from quantizers.recipe.schema import Experts
from quantizers.system.errors import InputError
from quantizers.system.formatting import text_table

TOOLS = {"autoround": "AutoRound", "gptqmodel": "GPTQModel"}
# AutoRound 0.16 does not find Mixtral's experts when it loads them one by one; GPTQModel 7.7 needs two workers.
ENVIRONMENT = {"AR_DISABLE_META_LOAD": "1", "GPTQMODEL_CPU_WORKERS": "2"}


def by_tool(tool: str, python: Path, copy: Path, job: Job, data: CalibrationData, iters: int, work: Path) -> Checkpoint:
    """The checkpoint that a tool made of the BF16 copy."""
    tokens = [sequence.tolist() for sequence in token_tensors(data, job.facts.vocab_size)]
    (work / "job.json").write_text(json.dumps({"sequences": tokens, "iters": iters}))
    script = Path(__file__).absolute().with_name("run_tool.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | ENVIRONMENT
    command = [str(python.absolute()), str(script), tool, str(copy), str(work / "job.json"), str(work / "output")]
    with (work / "log").open("w") as log:
        # GPTQModel writes logs into the folder that it is called in.
        ended = subprocess.run(command, cwd=work, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        last = (work / "log").read_text().strip().splitlines()[-1:]
        raise InputError(f"--{tool}", f"failed: {' '.join(last)}", "run the same with its Python to see all of it")
    config = next((work / "output").rglob(CONFIG))  # AutoRound makes a folder in the one that it is given
    return open_folder(config.parent)


def compare_tools(job: Job, given: argparse.Namespace) -> list[Row]:
    """A row for each tool whose Python is given, and ours."""
    device = choose_device(given.device)
    with tempfile.TemporaryDirectory() as folder:
        copy = written(plain_tensors(job, flat=False), job.opened, Path(folder) / "bf16")
        data = spread(calibration_data(job), given.tokens)
        makers: dict[str, Maker] = {}
        for tool, name in TOOLS.items():
            if python := getattr(given, tool):
                row = f"{name}, {given.iters} steps" if tool == "autoround" else name
                makers[row] = partial(by_tool, tool, python, copy, job, data, given.iters)
        makers[DEFAULT] = partial(rows_of(Experts())[DEFAULT].output, job, data, device=device)
        return Table(job, given, "other tools").measure(makers)


def tools_table(rows: list[Row]) -> str:
    """The rows as text; ratios are relative to the last."""
    cells = [
        (
            row["name"],
            f"{row['kl']:.5f}",
            f"{row['kl'] / rows[-1]['kl']:.2f}",
            f"{row['median']:.5f}",
            f"{row['top1']:.1%}",
        )
        for row in rows
    ]
    return text_table(("experts", "KL", "ratio", "median", "top-1"), cells)


def main() -> None:
    """Compare the tools on a recipe's model."""
    parser = row_options(__doc__)
    for tool, name in TOOLS.items():
        parser.add_argument(f"--{tool}", type=Path, metavar="PYTHON", help=f"of the environment that has {name}")
    parser.add_argument("--iters", type=int, default=200, help="AutoRound's steps; its default is 200")
    given = parser.parse_args()
    for name in (name for tool, name in TOOLS.items() if not getattr(given, tool)):
        print(f"{name} is left out", file=sys.stderr)
    rows = compare_tools(recipe_job(given.recipe), given)
    print(json.dumps(rows, indent=1) if given.json else tools_table(rows))


if __name__ == "__main__":
    main()
