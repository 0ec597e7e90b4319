"""report.json, and the HTML report and the model card made from it: written, read back, and checked."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from quantizers.output.manifest import as_read, describe_files, seal_of, text_sha256, write_record
from quantizers.system.errors import InputError, Interrupted, QuantizeError, first_line
from quantizers.system.files import atomic, disk_errors, file_sha256, write_text
from quantizers.system.output_files import CALIBRATION, CARD, FACTS, PAGE, RECIPE, REPORT, is_within

if TYPE_CHECKING:
    from quantizers.eval.report.schema import Report, StitchReport

FRONT_MATTER = re.compile(r"(\ufeff?\s*---[ \t]*\n)(.*?)(?=^---[ \t]*$)", re.DOTALL | re.MULTILINE)
# Keys of the front matter that describe the checkpoint itself; who publishes it may add other keys, and list entries.
CARD_KEYS = (
    "base_model", "base_model_relation", "pipeline_tag", "library_name", "license", "license_name", "license_link",
    "tags", "datasets", "language",
)  # fmt: skip


def write_report(folder: Path, report: Report, texts: Mapping[str, str]) -> None:
    """Finish an output that is complete but for its report: plots, page, card, and the report with all files' hashes.

    Args:
        report: its files not yet recorded; shards of its audit may be missing in the folder.
        texts: the original text of some files, by name; see `describe_files`.
    """
    from quantizers.eval.report.pages import PLOTS
    from quantizers.eval.report.plots import draw

    drawn, failed = draw(_as_read(report))
    for name, file in PLOTS.items():
        if name in drawn:
            try:
                with disk_errors(file), atomic(folder / file) as stream:
                    stream.write(drawn[name])
            except QuantizeError as failure:
                failed.append(f"the picture of {name} is not there: {failure}")
    files = describe_files(folder, texts, others=(CARD, PAGE, *report.audit.digests))
    write_with_card(folder, report.changed(notes=[*report.notes, *failed], **files), drawn)


def write_with_card(folder: Path, report: Report, drawn: Mapping[str, bytes] | None = None) -> None:
    """Write the page and the card made from a report, then the report with their hashes added.

    A page that cannot be made is a note in the report: nothing is computed from it.

    Args:
        report: with `files` and `sha256`, see `describe_files`.
        drawn: its plots; None to draw them.
    """
    from quantizers.eval.report.pages import front_matter, html_report, model_card
    from quantizers.eval.report.schema import CardRecord

    report, texts = _as_read(report), dict[str, str]()
    try:
        texts[PAGE] = html_report(report, pictures(report) if drawn is None else drawn)
    except Interrupted:
        raise
    except Exception as failure:  # of a template or a library that is no part of the result
        (folder / PAGE).unlink(missing_ok=True)
        note = f"{PAGE} could not be made ({type(failure).__name__}: {first_line(failure)})"
        report = report.changed(notes=[*report.notes, note], files=[name for name in report.files if name != PAGE])
    texts[CARD] = model_card(report)
    hashes = {name: text_sha256(text) for name, text in texts.items()}
    for name, text in texts.items():
        write_text(text, folder / name)
    card = CardRecord(front_matter=front_matter(report), sha256=hashes.pop(CARD))
    sha256 = {name: hash_ for name, hash_ in report.sha256.items() if name != PAGE} | hashes
    write_record(folder, report.changed(sha256=sha256, card=card).as_dict())


def _as_read(report: Report) -> Report:
    """A report as its file gives it back, so that page and card come out the same from memory and from the file."""
    from quantizers.eval.report.schema import checked

    return checked(as_read(report.as_dict()))


def parsed(contents: Mapping[str, Any], file: Path) -> Report:
    """A report.json as it was read; an InputError if another version of this program wrote it."""
    from pydantic import ValidationError

    from quantizers.eval.report.schema import checked

    try:
        return checked(contents)
    except ValidationError as failure:
        key, fault = ".".join(map(str, failure.errors()[0]["loc"])), failure.errors()[0]["msg"]
        raise InputError(f"{file}: {key}", fault, "take the version of this program that wrote it") from None


def parsed_stitch(contents: Mapping[str, Any], file: Path) -> StitchReport:
    """The report.json of a stitch, see `parsed`."""
    from quantizers.eval.report.schema import StitchReport

    report = parsed(contents, file)
    assert isinstance(report, StitchReport)
    return report


def pictures(report: Report) -> dict[str, bytes]:
    """The pictures of a finished output's page; those that fail are named on standard error."""
    from quantizers.eval.report.plots import draw

    drawn, failed = draw(report)
    for line in failed:
        print(line, file=sys.stderr)
    return drawn


def read_front_matter(text: str) -> dict[str, Any]:
    """The YAML at the head of a card, with either line ending and with a byte order mark or without; empty if none can
    be parsed.

    Every value stays a string: PyYAML's other loaders turn the language `no` into False, and fail on a date that does
    not exist.
    """
    head = FRONT_MATTER.match(text.replace("\r\n", "\n"))
    try:
        front = yaml.load(head[2], Loader=yaml.BaseLoader) if head else {}
    except (yaml.YAMLError, RecursionError):
        return {}
    return front if isinstance(front, dict) else {}


@dataclass(frozen=True)
class Record:
    """Result of `check_manifest`.

    Each difference is a line that starts with the file's name; a note is a line on what is no fault but worth knowing.
    """

    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check_manifest(folder: Path) -> Record:
    """Check a finished checkpoint's report.json, of this program or another, against its own seal, and the files that
    it records against their hashes, except shards.
    """
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        for name in (PAGE, RECIPE, CALIBRATION, FACTS):
            if (folder / name).is_file():
                return Record((f"{REPORT}: is gone, though {name} is there; copy it from where this was made",))
        return Record(notes=(f"no {REPORT}, so what its maker wrote cannot be compared",))
    except (OSError, ValueError, RecursionError) as failure:
        return Record((f"{REPORT}: cannot be read ({type(failure).__name__})",))
    if not isinstance(report, dict) or not {"seal", "sha256", "audit"} & set(report):
        return Record(notes=(f"{REPORT} was not written by this program, so what its maker wrote cannot be compared",))
    if report.get("seal") != seal_of(report):
        return Record((f"{REPORT}: is not as it was sealed; it was changed since the run wrote it",))
    hashes, names = report.get("sha256"), report.get("files")
    card = report.get("card", {"front_matter": {}})
    if not isinstance(hashes, dict) or not isinstance(names, list) or not isinstance(card, dict):
        return Record((f"{REPORT}: holds no record of the files beside it; it was changed since the run wrote it",))
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
    recorded, lines = dict(written.get("front_matter") or {}), []
    for key in CARD_KEYS:
        before, now = recorded.get(key), front.get(key)
        extended = isinstance(before, list) and isinstance(now, list) and all(item in now for item in before)
        if now != before and not extended:
            lines.append(f"{CARD}: front matter: {key} is {_shown(now)}, the run wrote {_shown(before)}")
    gone = _figures(recorded) - _figures(front)
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
