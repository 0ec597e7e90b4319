"""The output folder of a run: whether it may be used, whether it is finished, and the final move into it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from quantizers.checkpoint.reader import CONFIG, INDEX
from quantizers.system.errors import OutputError, QuantizeError
from quantizers.system.files import disk_errors, sync_folder
from quantizers.system.output_files import CARD, REPORT

from . import journal

MOVED_LAST = (REPORT, CARD, INDEX, CONFIG)  # moved last, because these files mark a folder as finished


def finished_report(output: Path) -> dict[str, Any] | None:
    """The report of a finished output; None if the output is not finished, {} if its report is not a JSON object."""
    if journal.unfinished(output) or not (output / CONFIG).is_file():
        return None
    try:
        report: dict[str, Any] = json.loads((output / REPORT).read_text())
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) else {}


def refuse_strangers(output: Path) -> None:
    """Refuse a folder that contains files of others.

    Raises:
        OutputError: the path is a file, or a folder with other files in it.
    """
    existing = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise OutputError(f"{existing}: is a file; give a new or empty folder as --output")
    if output.is_dir() and not journal.work_folder(output).exists() and any(output.iterdir()):
        raise OutputError(f"{output}: is not empty and holds no run of this program; give a new or empty folder")


def check_room(work: Path, needed: int) -> None:
    """Refuse to start a run that would fill the disk.

    Args:
        needed: bytes of the output and of all temporary files.

    Raises:
        QuantizeError: the disk has less free space; the message gives both numbers.
    """
    # Files of an interrupted run already have their space: count their allocated blocks, not their sizes.
    written = sum(512 * file.stat().st_blocks for file in work.rglob("*") if file.is_file())
    free = shutil.disk_usage(work).free
    if needed - written > free:
        raise QuantizeError(
            f"{work.parent}: the output and its hidden states need {(needed - written) / 1e9:.3g} GB more, "
            f"{free / 1e9:.3g} GB are free; make room or choose another --output"
        )


def move_into_place(work: Path, output: Path) -> dict[str, Any]:
    """Move the finished files: shards first, config.json last. Continues an interrupted move.

    Returns:
        The report.
    """
    folder = work / "output"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    shards = [name for name in names if name.endswith(".safetensors")]
    rest = [name for name in names if name not in shards and name not in MOVED_LAST]
    with disk_errors(output):
        for name in [*shards, *rest, *(name for name in MOVED_LAST if name in names)]:
            os.replace(folder / name, output / name)
        sync_folder(output)
    report: dict[str, Any] = json.loads((output / REPORT).read_text())
    journal.remove(work)
    return report
