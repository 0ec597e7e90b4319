"""Writes the card and the page beside report.json, and reads the card's front matter back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from quantizers.output.record import as_read, text_sha256, write_record
from quantizers.system.files import write_text
from quantizers.system.output_files import CARD, PAGE


def write_with_card(folder: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Write the page and the card made from a run's report, then the report with their hashes added.

    Args:
        report: with `files` and `sha256`, see `output.record.describe_files`.
    """
    from eval.report.card import card
    from eval.report.front_matter import front_matter
    from eval.report.page import page

    report = as_read(report)  # so page and card come out the same from memory and from the file
    texts = {PAGE: page(report), CARD: card(report)}
    hashes = {name: text_sha256(text) for name, text in texts.items()}
    for name, text in texts.items():
        write_text(text, folder / name)
    kept = {"front_matter": front_matter(report), "sha256": hashes[CARD]}
    return write_record(folder, report | {"sha256": report["sha256"] | {PAGE: hashes[PAGE]}, "card": kept})


def read_front_matter(text: str) -> dict[str, Any]:
    """The YAML at the head of a card, with either line ending; empty if there is none or it cannot be parsed.

    Every value stays a string: PyYAML's other loaders turn the language `no` into False, and fail on a date that
    does not exist.
    """
    parts = text.replace("\r\n", "\n").split("---\n", 2)
    try:
        front = yaml.load(parts[1], Loader=yaml.BaseLoader) if len(parts) == 3 and not parts[0].strip() else {}
    except (yaml.YAMLError, RecursionError):
        return {}
    return front if isinstance(front, dict) else {}
