"""report.json as the record of a finished folder: what lies there, by hash, under a seal.

files      the names of everything that was written
sha256     of each of them but the shards (their digests are under `audit`) and the card
card       the card's front matter, and the hash of its text: words may be edited later, figures of the Hub may not
seal       SHA-256 over all the rest of report.json, so that a change of the record itself shows
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quantizers.system.atomic import disk_errors, write_json
from quantizers.system.own_files import CARD, PAGE, REPORT, file_sha256
from quantizers.system.plain_json import finite


def seal_of(report: dict[str, Any]) -> str:
    """SHA-256 over everything in a report but its seal, hexadecimal."""
    rest = {key: value for key, value in report.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def describe_files(folder: Path, texts: Mapping[str, str], later: Iterable[str] = ()) -> dict[str, Any]:
    """`files` and `sha256` of a folder that is complete but for report.json and what is made of it.

    Args:
        texts: what some of the files were written from, by name: their hashes are of that, not of what lies there.
        later: names that will be there as well.

    Raises:
        QuantizeError: a file cannot be read.
    """
    own = {REPORT, CARD, PAGE}
    names = {path.name for path in folder.iterdir()} - own
    with disk_errors(folder):
        hashes = {name: file_sha256(folder / name) for name in names if not name.endswith(".safetensors")}
    hashes |= {name: text_sha256(text) for name, text in texts.items()}
    return {"files": sorted(names | set(later)), "sha256": hashes}


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def add_files(folder: Path, report: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A report that records these files of its folder as well."""
    added = {name: file_sha256(folder / name) for name in names}
    return report | {"files": sorted({*report["files"], *added}), "sha256": report["sha256"] | added}


def write_record(folder: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Seal a report and write report.json; returns it as a reader finds it."""
    report = as_read(report)
    report["seal"] = seal_of(report)
    write_json(folder / REPORT, report)
    return report


def as_read(report: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(finite(report), sort_keys=True))
    return read
