"""Checks that a finished folder is still as its report.json recorded it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizers.output.manifest import seal_of
from quantizers.system.files import file_sha256
from quantizers.system.output_files import CALIBRATION, CARD, FACTS, PAGE, RECIPE, REPORT, is_within

from .report_files import read_front_matter

# Keys of the front matter that describe the checkpoint itself; who publishes it may add other keys, and list entries.
CARD_KEYS = (
    "base_model", "base_model_relation", "pipeline_tag", "library_name", "license", "license_name", "license_link",
    "tags", "datasets", "language",
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """What `check_manifest` found.

    Attributes:
        differences: one line each, starting with the file's name.
        notes: what is not a fault but worth knowing.
    """

    differences: tuple[str, ...]
    notes: tuple[str, ...]


def check_manifest(folder: Path) -> Record:
    """Check report.json against its own seal, and the files it records against their hashes, except shards.

    Args:
        folder: a finished checkpoint, made by this program or another.
    """
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        orphans = [name for name in (PAGE, RECIPE, CALIBRATION, FACTS) if (folder / name).is_file()]
        if orphans:
            return Record((f"{REPORT}: is gone, though {orphans[0]} is there; copy it from where this was made",), ())
        return Record((), (f"no {REPORT}, so what its maker wrote cannot be compared",))
    except (OSError, ValueError, RecursionError) as failure:
        return Record((f"{REPORT}: cannot be read ({type(failure).__name__})",), ())
    if not isinstance(report, dict) or ("seal" not in report and "sha256" not in report and "audit" not in report):
        return Record((), (f"{REPORT} was not written by this program, so what its maker wrote cannot be compared",))
    if report.get("seal") != seal_of(report):
        return Record((f"{REPORT}: is not as it was sealed; it was changed since the run wrote it",), ())
    hashes, names, card = report.get("sha256"), report.get("files"), report.get("card", {"front_matter": {}})
    if not isinstance(hashes, dict) or not isinstance(names, list) or not isinstance(card, dict):
        return Record((f"{REPORT}: holds no record of the files beside it; it was changed since the run wrote it",), ())
    lines = [line for name, before in hashes.items() if (line := _file_change(folder, str(name), before))]
    missing = [name for name in names if name not in hashes and not (is_within(name) and (folder / name).is_file())]
    lines += [f"{name}: named in {REPORT}, not in the folder" for name in missing]
    changed, notes = _card_changes(folder, card) if "card" in report else ([], [])
    return Record((*lines, *changed), tuple(notes))


def _file_change(folder: Path, name: str, before: object) -> str | None:
    if not is_within(name):
        return f"{REPORT}: records {name!r}, which is no file of this folder"
    try:
        return None if file_sha256(folder / name) == before else f"{name}: changed since the run wrote it"
    except OSError as failure:
        return f"{name}: cannot be read ({failure.strerror})"


def _card_changes(folder: Path, written: dict[str, Any]) -> tuple[list[str], list[str]]:
    try:
        raw = (folder / CARD).read_bytes()
        front = read_front_matter(raw.decode())
    except (OSError, UnicodeDecodeError):
        return ([f"{CARD}: cannot be read"] if (folder / CARD).exists() else []), []
    lines = []
    for key in CARD_KEYS:
        before, now = dict(written.get("front_matter") or {}).get(key), front.get(key)
        extended = isinstance(before, list) and isinstance(now, list) and all(item in now for item in before)
        if now != before and not extended:
            lines.append(f"{CARD}: front matter: {key} is {_shown(now)}, the run wrote {_shown(before)}")
    gone = _figures(dict(written.get("front_matter") or {})) - _figures(front)
    lines += [f"{CARD}: front matter: {kind} {value:g} on {data} is gone" for data, kind, value in sorted(gone)]
    edited = hashlib.sha256(raw).hexdigest() != written.get("sha256")
    return lines, [f"{CARD}: was edited since the run wrote it"] if edited and not lines else []


def _figures(front: dict[str, Any]) -> set[tuple[str, str, float]]:
    """The figures in a front matter that the Hub shows: data set, metric, value; none if it is damaged."""
    try:
        return {
            (str(result["dataset"]["name"]), str(metric["type"]), float(metric["value"]))
            for model in front.get("model-index", ())
            for result in model["results"]
            for metric in result["metrics"]
        }
    except (KeyError, TypeError, ValueError):
        return set()


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value, ensure_ascii=False)
