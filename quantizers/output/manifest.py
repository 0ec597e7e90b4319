"""report.json as the manifest of a finished folder: the hashes of its files, protected by a checksum, the seal.

files      the names of all files that the run wrote
sha256     their hashes, except the shards' (whose digests are under `audit`) and the card's
card       the card's front matter and the hash of its text: the text may be edited later, the front matter may not
seal       SHA-256 over the rest of report.json, which reveals changes of the record itself
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quantizers.checkpoint.reader import read_json
from quantizers.system.errors import CheckpointError, OutputError
from quantizers.system.files import disk_errors, file_sha256, json_finite, write_json
from quantizers.system.output_files import CARD, FACTS, PAGE, REPORT, files_below, is_within

from .journal import refuse_unfinished


def seal_of(report: dict[str, Any]) -> str:
    """SHA-256, hexadecimal, over everything in a report except its seal."""
    rest = {key: value for key, value in report.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def describe_files(folder: Path, texts: Mapping[str, str], others: Iterable[str] = ()) -> dict[str, Any]:
    """`files` and `sha256` of a folder that is complete except for report.json and the files made from it.

    Args:
        texts: the original text of some files, by name; their hashes cover this text, not the file on disk.
        others: names of files that will be added later, and of shards that were removed after their upload.
    """
    names = set(files_below(folder)) - {REPORT, CARD, PAGE}
    with disk_errors(folder):
        hashes = {name: file_sha256(folder / name) for name in names if not name.endswith(".safetensors")}
    hashes |= {name: text_sha256(text) for name, text in texts.items()}
    return {"files": sorted(names | set(others)), "sha256": hashes}


def text_sha256(text: str) -> str:
    """SHA-256, hexadecimal, of a text as it is written."""
    return hashlib.sha256(text.encode()).hexdigest()


def add_files(folder: Path, report: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The report with these files of its folder added to `files` and `sha256`."""
    added = {name: file_sha256(folder / name) for name in names}
    return report | {"files": sorted({*report["files"], *added}), "sha256": report["sha256"] | added}


def output_facts(folder: Path) -> Path | None:
    """The user's own facts with which a finished output was made; None if its report.json lists no such file.

    A facts.yaml that is not listed is no part of the output and is not read. One that is listed may be gone.
    """
    files = read_record(folder).get("files")
    return folder / FACTS if isinstance(files, list) and FACTS in files else None


def read_record(folder: Path) -> dict[str, Any]:
    """report.json of a folder; empty without one, or if it cannot be read, as pipeline/report_files.py reports."""
    try:
        return read_json(folder / REPORT)
    except CheckpointError:
        return {}


def refuse_incomplete(folder: Path) -> None:
    """Raise an OutputError with the remedy if an output is unfinished, or has shards that are on the Hub alone."""
    refuse_unfinished(folder)
    published = read_record(folder).get("published")
    removed = published.get("removed") if isinstance(published, dict) else None
    gone = [name for name in removed or () if is_within(name) and not (folder / name).is_file()]
    if gone and isinstance(published, dict):
        repo, more = published.get("repo"), f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        raise OutputError(
            folder,
            f"{gone[0]}{more} were removed here after their upload to {repo}",
            f"`hf download {repo} --local-dir {folder}` brings them back",
        )


def write_record(folder: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Seal a report and write report.json; returns the report as it will be read back."""
    report = as_read(report)
    report["seal"] = seal_of(report)
    write_json(folder / REPORT, report)
    return report


def as_read(report: dict[str, Any]) -> dict[str, Any]:
    """A report as report.json gives it back."""
    read: dict[str, Any] = json.loads(json.dumps(json_finite(report), sort_keys=True))
    return read
