"""Rewrites report and model card for a publication: repository, licence, base model, and a forced publication."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from quantizers.output.manifest import add_files, write_record
from quantizers.pipeline.report_files import FRONT_MATTER, pictures, read_front_matter, write_with_card
from quantizers.recipe.portable import is_hub_id
from quantizers.system.errors import InputError
from quantizers.system.files import write_text
from quantizers.system.output_files import CARD, PAGE, REPORT
from quantizers.system.strict_yaml import dump

PUBLICATION_KEYS = ("license", "license_name", "license_link", "base_model", "base_model_relation")


def with_publication(report: dict[str, Any], repo: str, license: str | None, base_model: str | None) -> dict[str, Any]:
    """The report with repository, licence and base model.

    Args:
        license, base_model: None for those of an earlier publication, or of the source.

    Raises:
        InputError: one of them is not in the Hub's format.
    """
    if not is_hub_id(repo):
        raise InputError(f"--repo {repo}: write it as owner/name")
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise InputError(f"--license {license}: use the Hub's identifier, such as apache-2.0, mit or other")
    if base_model is not None and not is_hub_id(base_model):
        raise InputError(f"--base-model {base_model}: write it as owner/name")
    given = {"repo": repo, "license": license, "base_model": base_model}
    return report | {"published": report.get("published", {}) | {key: v for key, v in given.items() if v is not None}}


def rewrite(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Write report, HTML report and card after a change; an edited card keeps its text.

    Args:
        before, after: the report as read, and as changed for the publication.

    Returns:
        The names of the written files; none if nothing changed.
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
    """Change only commands and front matter of a model card that was edited."""
    from eval.report.html_report import html_report
    from eval.report.model_card import front_matter
    from eval.report.serve_commands import repository

    old, new, written = repository(before), repository(after), before["card"]["front_matter"]
    front = {key: value for key, value in front_matter(after).items() if key in written or key in PUBLICATION_KEYS}
    for words in ("vllm serve {}", "--model-path {}", 'from_pretrained("{}"'):
        text = text.replace(words.format(old), words.format(new))
    for key in PUBLICATION_KEYS:
        if front.get(key) != written.get(key):
            text = _with_key(text, key, front.get(key))
    write_text(text, folder / CARD)
    write_text(html_report(after, pictures(after)), folder / PAGE)
    write_record(folder, add_files(folder, after | {"card": before["card"] | {"front_matter": front}}, [PAGE]))


def _with_key(text: str, key: str, value: Any) -> str:
    """A card with a key of its front matter set, or removed if the value is None."""
    found = FRONT_MATTER.match(text)
    assert found is not None
    front = re.sub(rf"(?m)^{key}:.*\n(?:[ -].*\n)*", "", found[2])
    return f"{found[1]}{front}{'' if value is None else dump({key: value})}{text[found.end() :]}"
