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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .atomic import disk_errors, write_json, write_text
from .own_files import CALIBRATION, CARD, PAGE, RECIPE, REPORT, file_sha256, is_plain
from .plain_json import finite

# What the front matter may say of the checkpoint itself; whoever publishes may add other keys, and tags.
CARD_KEYS = (
    "base_model", "base_model_relation", "pipeline_tag", "library_name", "license", "license_name", "license_link",
    "tags", "datasets", "language",
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """What `check_record` found.

    Attributes:
        differences: one line each, beginning with the file's name.
        notes: what is no fault and should be known.
    """

    differences: tuple[str, ...]
    notes: tuple[str, ...]


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
    hashes |= {name: _text_sha256(text) for name, text in texts.items()}
    return {"files": sorted(names | set(later)), "sha256": hashes}


def _text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def add_files(folder: Path, report: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A report that records these files of its folder as well."""
    added = {name: file_sha256(folder / name) for name in names}
    return report | {"files": sorted({*report["files"], *added}), "sha256": report["sha256"] | added}


def write_record(folder: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Seal a report and write report.json; returns it as a reader finds it."""
    report = _as_read(report)
    report["seal"] = seal_of(report)
    write_json(folder / REPORT, report)
    return report


def _as_read(report: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(finite(report), sort_keys=True))
    return read


def write_with_card(folder: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Write the page and the card that a run's report gives, and the report that holds their hashes.

    Args:
        report: with `files` and `sha256`, see `describe_files`.
    """
    from eval.card import card, front_matter
    from eval.report_html import page

    report = _as_read(report)  # what is made of it is then the same from memory and from the file
    texts = {PAGE: page(report), CARD: card(report)}
    hashes = {name: _text_sha256(text) for name, text in texts.items()}
    for name, text in texts.items():
        write_text(text, folder / name)
    kept = {"front_matter": front_matter(report), "sha256": hashes[CARD]}
    return write_record(folder, report | {"sha256": report["sha256"] | {PAGE: hashes[PAGE]}, "card": kept})


def front_matter_of(text: str) -> dict[str, Any]:
    """The YAML at the head of a card, whatever ends its lines; empty where there is none that can be read.

    Every value is the text that stands there: PyYAML's other readings make False of the language `no`, and fail on
    a date that the calendar does not have.
    """
    parts = text.replace("\r\n", "\n").split("---\n", 2)
    try:
        front = yaml.load(parts[1], Loader=yaml.BaseLoader) if len(parts) == 3 and not parts[0].strip() else {}
    except (yaml.YAMLError, RecursionError):
        return {}
    return front if isinstance(front, dict) else {}


def check_record(folder: Path) -> Record:
    """Whether report.json is as it was sealed, and everything that it records still what it was; shards apart.

    Args:
        folder: a finished checkpoint, of this program or another's.
    """
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        left = [name for name in (PAGE, RECIPE, CALIBRATION) if (folder / name).is_file()]
        if left:
            return Record((f"{REPORT}: is gone, though {left[0]} is there; take it from where this was made",), ())
        return Record((), (f"no {REPORT}, so what its maker wrote cannot be compared",))
    except (OSError, ValueError, RecursionError) as failure:
        return Record((f"{REPORT}: cannot be read ({type(failure).__name__})",), ())
    if not isinstance(report, dict) or ("seal" not in report and "sha256" not in report and "audit" not in report):
        return Record((), (f"{REPORT} is none of this program's, so what its maker wrote cannot be compared",))
    if report.get("seal") != seal_of(report):
        return Record((f"{REPORT}: is not as it was sealed; it was changed since the run wrote it",), ())
    hashes, names, card = report.get("sha256"), report.get("files"), report.get("card", {"front_matter": {}})
    if not isinstance(hashes, dict) or not isinstance(names, list) or not isinstance(card, dict):
        return Record((f"{REPORT}: holds no record of the files beside it; it was changed since the run wrote it",), ())
    lines = [line for name, before in hashes.items() if (line := _file_change(folder, str(name), before))]
    missing = [name for name in names if name not in hashes and not (is_plain(name) and (folder / name).is_file())]
    lines += [f"{name}: named in {REPORT}, not in the folder" for name in missing]
    changed, notes = _card_changes(folder, card) if "card" in report else ([], [])
    return Record((*lines, *changed), tuple(notes))


def _file_change(folder: Path, name: str, before: object) -> str | None:
    if not is_plain(name):
        return f"{REPORT}: records {name!r}, which is no file beside it"
    try:
        return None if file_sha256(folder / name) == before else f"{name}: changed since the run wrote it"
    except OSError as failure:
        return f"{name}: cannot be read ({failure.strerror})"


def _card_changes(folder: Path, written: dict[str, Any]) -> tuple[list[str], list[str]]:
    try:
        raw = (folder / CARD).read_bytes()
        front = front_matter_of(raw.decode())
    except (OSError, UnicodeDecodeError):
        return ([f"{CARD}: cannot be read"] if (folder / CARD).exists() else []), []
    lines = []
    for key in CARD_KEYS:
        before, now = dict(written.get("front_matter") or {}).get(key), front.get(key)
        grown = isinstance(before, list) and isinstance(now, list) and all(item in now for item in before)
        if now != before and not grown:
            lines.append(f"{CARD}: front matter: {key} is {_shown(now)}, the run wrote {_shown(before)}")
    edited = hashlib.sha256(raw).hexdigest() != written.get("sha256")
    return lines, [f"{CARD}: was edited since the run wrote it"] if edited and not lines else []


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value, ensure_ascii=False)
