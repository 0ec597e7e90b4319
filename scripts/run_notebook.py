"""Executes a notebook in a new folder, and stores it with outputs: `python scripts/run_notebook.py NOTEBOOK [COPY]`.

Progress on standard error, execution times and the machine's Python are left out, so that a file changes only where a
cell does, or a figure. With COPY the notebook stays as it is. Raises an error if a cell does.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
LIMIT = 300  # seconds for a cell


def execute(notebook: Path, copy: Path) -> None:
    """Execute the cells of a notebook, in a folder of their own, and write it with their outputs."""
    read = nbformat.read(notebook, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(read, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    read.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for number, cell in enumerate(read.cells):
        cell.id = f"cell-{number}"
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(read, copy)


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]]
    execute(given[0], given[-1])
