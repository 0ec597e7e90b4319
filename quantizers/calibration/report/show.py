"""Show samples as the model reads them: with the chat template and its special tokens, cut where they are cut."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from quantizers.calibration.data import CalibrationData, Sample
from quantizers.calibration.loading import load_samples
from quantizers.calibration.tokens import Renderer
from quantizers.system.errors import InputError

NAMED = 20  # names that a message lists at most


@dataclass(frozen=True)
class Shown:
    """One sample as the model reads it, special tokens included; `position` in the whole set counts from 0."""

    position: int
    category: str
    place: str
    tokens: int
    truncated: int
    text: str


def show_samples(
    path: Path,
    count: int,
    tokenizer: str,
    *,
    source: str | None = None,
    category: str | None = None,
    revision: str = "main",
    trust_remote_code: bool = False,
    cache: Path | None = None,
) -> list[Shown]:
    """`count` samples of a set at evenly spaced positions.

    Args:
        source: only those of sources whose name contains this.
        category: only those of this category and the ones below it: `code` takes `code/rust` too.

    Raises:
        CalibrationError: as `load_samples`.
        InputError: the set has no such sample.
    """
    data = load_samples(
        path,
        tokenizer,
        revision=revision,
        trust_remote_code=trust_remote_code,
        cache=cache,
        require_languages=False,
    )
    chosen = _chosen(data, source, category)
    decoder = Renderer(tokenizer, revision, trust_remote_code)
    shown = []
    for number in sorted({number * len(chosen) // count for number in range(count)}):
        position, sample = chosen[number]
        text = decoder.text(sample.tokens)
        shown.append(Shown(position, sample.category, sample.place, len(sample.tokens), sample.truncated, text))
    return shown


def _chosen(data: CalibrationData, source: str | None, category: str | None) -> list[tuple[int, Sample]]:
    """Positions and samples that pass both filters."""
    chosen = [
        (position, sample)
        for position, sample in enumerate(data.samples)
        if (source is None or source in sample.source)
        and (category is None or f"{sample.category}/".startswith(f"{category.rstrip('/')}/"))
    ]
    if not chosen:
        asked = " and ".join(text for text in (source and f"source {source}", category) if text)
        sources = _some({sample.source for sample in data.samples})
        families = _some({sample.category.partition("/")[0] for sample in data.samples})
        raise InputError(f"{data.name}: no sample of {asked}; it has {families}, from {sources}")
    return chosen


def _some(names: set[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(sorted(names)[:NAMED]) + more


def render_samples(shown: list[Shown]) -> RenderableType:
    """Samples with a headline each; rich does not interpret their text as markup."""
    parts: list[RenderableType] = []
    for sample in shown:
        cut = f", {sample.truncated} cut" if sample.truncated else ""
        title = f"{sample.position}: {sample.category}, {sample.place}, {sample.tokens} tokens{cut}"
        parts += [Rule(Text(title), align="left"), Text(sample.text)]
    return Group(*parts)
