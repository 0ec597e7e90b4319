"""The card and the page written beside report.json, and the card's front matter read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from quantizers.output.record import as_read, text_sha256, write_record
from quantizers.system.atomic import write_text
from quantizers.system.own_files import CARD, PAGE


def write_with_card(folder: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Write the page and the card that a run's report gives, and the report that holds their hashes.

    Args:
        report: with `files` and `sha256`, see `describe_files`.
    """
    from eval.report.card import card, front_matter
    from eval.report.page import page

    report = as_read(report)  # what is made of it is then the same from memory and from the file
    texts = {PAGE: page(report), CARD: card(report)}
    hashes = {name: text_sha256(text) for name, text in texts.items()}
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
