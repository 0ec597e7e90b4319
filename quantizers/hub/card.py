"""What publishing adds to a report and its card: the repository, licence and base model, and a forced publication."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from quantizers.output.manifest import add_files, write_record
from quantizers.recipe.portable import is_hub_id
from quantizers.run.report_files import read_front_matter, write_with_card
from quantizers.system.errors import InputError
from quantizers.system.files import write_text
from quantizers.system.output_files import CARD, PAGE, REPORT
from quantizers.system.strict_yaml import dump

GIVEN = ("license", "license_name", "license_link", "base_model", "base_model_relation")  # keys that publishing decides


def described(report: dict[str, Any], repo: str, license: str | None, base_model: str | None) -> dict[str, Any]:
    """The report with what is known of its publication.

    Args:
        license, base_model: None for what an earlier publication was given, or what the source says.

    Raises:
        InputError: one of them is not written as the Hub writes it.
    """
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license):
        raise InputError(f"--license {license}: write the Hub's name of it, such as apache-2.0, mit or other")
    if base_model is not None and not is_hub_id(base_model):
        raise InputError(f"--base-model {base_model}: write it as owner/name")
    given = {"repo": repo, "license": license, "base_model": base_model}
    return report | {"published": report.get("published", {}) | {key: v for key, v in given.items() if v is not None}}


def with_statement(report: dict[str, Any], reason: str | None, problems: list[str]) -> dict[str, Any]:
    """The report with a statement that it is published despite its problems, or without one if there are none.

    Args:
        reason: given by the user, with --force.
    """
    kept = {key: value for key, value in report.items() if key != "forced"}
    return kept | ({"forced": {"reason": reason, "problems": problems}} if problems else {})


def rewrite(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Write report, page and card of a changed report; an edited card keeps its text.

    Args:
        before: the report as it was read.
        after: see `described` and `with_statement`.

    Returns:
        The names of the files written; none if nothing changed.
    """
    if after == before:
        return []
    card = folder / CARD
    raw = card.read_bytes() if card.is_file() else b""
    text = raw.decode(errors="replace").replace("\r\n", "\n")
    edited = "card" in before and hashlib.sha256(raw).hexdigest() != before["card"]["sha256"]
    if edited and read_front_matter(text) and after.get("forced") == before.get("forced"):
        _keep_edited(folder, text, before, after)
    else:
        write_with_card(folder, after)
    return [REPORT, PAGE, CARD]


def _keep_edited(folder: Path, text: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Change only commands and front matter of a card that somebody has edited."""
    from eval.report.html_report import html_report
    from eval.report.model_card import front_matter
    from eval.report.plots import draw
    from eval.report.serve_commands import repository

    old, new, front = repository(before), repository(after), front_matter(after)
    for words in ("vllm serve {}", "--model-path {}", 'from_pretrained("{}"'):
        text = text.replace(words.format(old), words.format(new))
    for key in GIVEN:
        if front.get(key) != before["card"]["front_matter"].get(key):
            text = _with_key(text, key, front.get(key))
    write_text(text, folder / CARD)
    write_text(html_report(after, draw(after)), folder / PAGE)
    write_record(folder, add_files(folder, after | {"card": before["card"] | {"front_matter": front}}, [PAGE]))


def _with_key(text: str, key: str, value: Any) -> str:
    """A card with another value of a key of its front matter, at the end of it; without the key if it is None."""
    head, front, rest = text.split("---\n", 2)
    front = re.sub(rf"(?m)^{key}:.*\n(?:[ -].*\n)*", "", front)
    return f"{head}---\n{front}{'' if value is None else dump({key: value})}---\n{rest}"
