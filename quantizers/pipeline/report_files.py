"""Writes report.json, and the HTML report and the model card made from it; reads a card's front matter back."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from quantizers.output.manifest import as_read, describe_files, text_sha256, write_record
from quantizers.system.files import atomic, disk_errors, write_text
from quantizers.system.output_files import CALIBRATION_PICTURE, CARD, COVERAGE_PICTURE, PAGE

FRONT_MATTER = re.compile(r"(\ufeff?\s*---[ \t]*\n)(.*?)(?=^---[ \t]*$)", re.DOTALL | re.MULTILINE)
PLOTS = {"calibration": CALIBRATION_PICTURE, "coverage": COVERAGE_PICTURE}  # that are files beside the model card


def write_report(folder: Path, report: dict[str, Any], texts: Mapping[str, str]) -> None:
    """Finish an output that is complete but for its report: plots, page, card, and the report with all files' hashes.

    Args:
        report: of `report.run_report` or `report.stitch_report`.
        texts: the original text of some files, by name; see `describe_files`.

    Raises:
        pydantic.ValidationError: the report does not have the schema of eval/report/schema.py, which is a bug.
    """
    from eval.report.plots import draw
    from eval.report.schema import checked

    drawn, failed = draw(as_read(report))
    report = as_read(report | {"notes": [*report["notes"], *failed]})
    for name, file in PLOTS.items():
        if name in drawn:
            with disk_errors(folder / file), atomic(folder / file) as stream:
                stream.write(drawn[name])
    files = describe_files(folder, texts, later=(CARD, PAGE))
    checked(write_with_card(folder, report | files, drawn))


def write_with_card(folder: Path, report: dict[str, Any], drawn: Mapping[str, bytes] | None = None) -> dict[str, Any]:
    """Write the page and the card made from a report, then the report with their hashes added.

    Args:
        report: with `files` and `sha256`, see `describe_files`; of this or an older version.
        drawn: its plots; None to draw them.

    Returns:
        The report as it will be read back.
    """
    from eval.report.html_report import html_report
    from eval.report.model_card import front_matter, model_card

    report = as_read(report)  # so page and card come out the same from memory and from the file
    texts = {PAGE: html_report(report, pictures(report) if drawn is None else drawn), CARD: model_card(report)}
    hashes = {name: text_sha256(text) for name, text in texts.items()}
    for name, text in texts.items():
        write_text(text, folder / name)
    card = {"front_matter": front_matter(report), "sha256": hashes[CARD]}
    return write_record(folder, report | {"sha256": report["sha256"] | {PAGE: hashes[PAGE]}, "card": card})


def pictures(report: dict[str, Any]) -> dict[str, bytes]:
    """The pictures of a finished output's page; those that fail are named on standard error."""
    from eval.report.plots import draw

    drawn, failed = draw(report)
    for line in failed:
        print(line, file=sys.stderr)
    return drawn


def read_front_matter(text: str) -> dict[str, Any]:
    """The YAML at the head of a card, with either line ending and a byte order mark or without; empty if there is none
    or it cannot be parsed.

    Every value stays a string: PyYAML's other loaders turn the language `no` into False, and fail on a date that
    does not exist.
    """
    found = FRONT_MATTER.match(text.replace("\r\n", "\n"))
    try:
        front = yaml.load(found[2], Loader=yaml.BaseLoader) if found else {}
    except (yaml.YAMLError, RecursionError):
        return {}
    return front if isinstance(front, dict) else {}
