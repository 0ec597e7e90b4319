"""Text output of `quantize eval`: one row per candidate, then tables by category, by depth and by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from quantizers.system.formatting import number, text_table

from .figures import (
    Band,
    Difference,
    EvalReport,
    Fidelity,
    Figures,
    HeldOutSet,
    PairedCandidate,
    PartDifference,
    PartFigures,
)  # fmt: skip
from .paired import FEWEST, NOTE

PAIRED_WORDS = (
    "difference: mean KL of this checkpoint minus the first's, nats per token; negative is closer to the source; "
    f"[95 % bootstrap-t interval over texts], from {FEWEST} texts on; each row stands for itself, and of twenty "
    "intervals about one misses the true difference by chance"
)
SERVED_WORDS = (
    "card: as vLLM's kernels there compute, see docs/how-to/evaluate.md; KL(source there || candidate "
    "there); card alone: KL(source as stored || source there); from stored: KL(source as stored || candidate there); "
    "FP8 cache: of keys and values, all else as stored"
)
Results = Sequence[tuple[str, Fidelity]]  # name and figures of each candidate
CATEGORY_ROWS, WORST = 24, 5  # with more categories than rows, families and the WORST categories are shown


def eval_table(report: EvalReport) -> str:
    """All tables of one evaluation: source, candidates, notes, and with several candidates `paired`."""
    results: Results = [(candidate.model, candidate) for candidate in report.candidates]
    first = report.candidates[0]
    long = f", and {first.long.samples} long ones, {first.long.tokens:,} tokens" if first.long else ""
    parts = [
        fidelity_table(results),
        worst_table(results),
        f"{first.samples} samples, {first.tokens:,} scored tokens of {first.evaluated_on.name}"
        f"{long}; scored: all but the first of each text; KL(source || candidate) in nats; reverse: mean "
        "KL(candidate || source); at: position of the predicted token; router: share of equal choices in the worst "
        "layer; [95 % percentile-bootstrap interval over texts], or one sample, which has none",
    ]
    if any(map(is_served, report.candidates)):
        parts += [served_table(results), SERVED_WORDS]
    for name, candidate in results:
        count, short = len(candidate.categories), ", short texts" if candidate.long else ""
        more = f" ({count}: by family, then the {WORST} that lose most; all of them with --json)"
        parts += [f"{name}, by category{more if count > CATEGORY_ROWS else ''}", _categories(candidate)]
        parts += [f"{name}, by depth{short}", _depth(candidate)]
        if len(candidate.positions) > 1:
            which = "its long" if candidate.long else "all"
            parts += [f"{name}, by position in {which} texts", positions_table(candidate)]
    for pair in report.paired or ():
        title = f"{pair.model} against {pair.against}, the first, paired over the same texts"
        parts += [title, paired_table(pair)]
    if report.paired:
        parts += [PAIRED_WORDS, NOTE]
    return "\n\n".join([*parts, *past_the_model(first.evaluated_on), *report.notes])


def is_served(candidate: Fidelity) -> bool:
    """Whether there are figures for `served_table`: of cards, or of an FP8 cache."""
    return bool(candidate.as_served or candidate.kv_cache)


def paired_table(pair: PairedCandidate) -> str:
    """Differences of mean KL by category, or by family if there are too many, and over all texts."""
    few = len(pair.categories) <= CATEGORY_ROWS
    parts: dict[str, PartDifference] = {"short texts": pair, "long texts": pair.long} if pair.long else {"all": pair}
    rows = [
        (
            name, row.texts, f"{row.tokens:,}", f"{row.first:.5f}", f"{row.other:.5f}",
            f"{row.difference:+.6f}" if row.difference else "0", _paired_interval(row),
        )
        for label, part in parts.items()
        for name, row in [*(part.categories if few else part.families).items(), (label, part)]
    ]  # fmt: skip
    header = ("category" if few else "family", "texts", "tokens", "KL first", "KL this", "difference", "95 % interval")
    return text_table(header, rows)


def _paired_interval(row: Difference) -> str:
    if row.interval:
        low, high = row.interval
        return f"[{low:+.6f}, {high:+.6f}]" if row.difference or low or high else "[0, 0]"
    return "too few texts" if row.texts < FEWEST else "too few texts differ"


def by_part(candidate: Fidelity) -> dict[str, PartFigures]:
    """The parts of a candidate's figures, by name: all texts, or short and long ones separately."""
    if candidate.long:
        return {"short texts": candidate, "long texts": candidate.long}
    return {"all": candidate}


def shown_categories(part: PartFigures) -> dict[str, Figures]:
    """The categories of one part's figures to show: all, or if there are too many, the families and the WORST by KL."""
    if len(part.categories) <= CATEGORY_ROWS:
        return part.categories
    worst = sorted(part.categories.items(), key=lambda item: -_mean_kl(item[1]))[:WORST]
    return {**part.families, **dict(worst)}


def _mean_kl(row: Figures) -> float:
    return math.nan if row.kl.mean is None else row.kl.mean


# The columns of tables of figures by their headings, each made of one row of figures; those of Band are in both.
BAND_COLUMNS: dict[str, Callable[[Figures | Band], str]] = {
    "samples": lambda row: str(row.samples),
    "texts": lambda row: str(row.samples),
    "tokens": lambda row: f"{row.tokens:,}",
    "ppl source": lambda row: number(row.perplexity.source, ".4f"),
    "ppl": lambda row: number(row.perplexity.candidate, ".4f"),
    "change": lambda row: number(row.perplexity.increase, "+.2%"),
    "KL mean": lambda row: number(row.kl.mean, ".5f"),
    "reverse": lambda row: number(row.reverse_kl.mean, ".5f"),
    "top-1": lambda row: number(row.top1, ".2%"),
}
COLUMNS: dict[str, Callable[[Figures], str]] = BAND_COLUMNS | {
    "bits/byte": lambda row: number(row.bits_per_byte.candidate, ".4f"),
    "KL interval": lambda row: _interval(row.interval and row.interval.kl, ".5f"),
    "median": lambda row: number(row.kl.median, ".5f"),
    "p99": lambda row: number(row.kl.p99, ".4f"),
    "p99.9": lambda row: number(row.kl.p999, ".4f"),
    "max": lambda row: number(row.kl.max, ".4f"),
    "top-1 interval": lambda row: _interval(row.interval and row.interval.top1, ".2%"),
}


def _interval(ends: Sequence[float | None] | None, form: str) -> str:
    return f"[{', '.join(number(end, form) for end in ends)}]" if ends else "one sample"


def _cells(row: Figures, columns: Sequence[str]) -> list[str]:
    return [COLUMNS[column](row) for column in columns]


def _categories(candidate: Fidelity) -> str:
    columns = (
        "samples", "tokens", "ppl source", "change", "KL mean", "KL interval", "p99", "reverse", "top-1",
        "top-1 interval",
    )  # fmt: skip
    rows: list[tuple[str, Figures]] = []
    for label, part in by_part(candidate).items():
        rows += [*shown_categories(part).items(), (label, part)]
    return text_table(("category", *columns), [(name, *_cells(row, columns)) for name, row in rows])


def _depth(candidate: Fidelity) -> str:
    agreements = candidate.router.agreement
    rows = [
        (layer, number(hidden, ".4f"), "" if agreement is None else f"{agreement:.2%}")
        for layer, (hidden, agreement) in enumerate(zip(candidate.hidden_error, agreements, strict=True))
    ]
    header = ("layer", "hidden states", "router")
    if candidate.weight_error is None:
        return text_table(header, rows)
    weights = [(number(row.experts, ".4f"), number(row.attention, ".4f")) for row in candidate.weight_error]
    both = [(*row, *more) for row, more in zip(rows, weights, strict=True)]
    return text_table((*header, "experts' weights", "attention's weights"), both)


def fidelity_table(results: Results) -> str:
    """One row per candidate, followed by one for its long texts if they were measured separately."""
    columns = (
        "ppl source", "ppl", "change", "bits/byte", "KL mean", "median", "p99", "p99.9", "max", "reverse", "top-1",
    )  # fmt: skip
    rows = [(name, *_cells(part, columns), number(part.router.min, ".2%")) for name, part in _with_long(results)]
    return text_table(("", *columns, "router"), rows)


def worst_table(results: Results) -> str:
    """The text with the largest mean KL of each candidate, and of its long texts if they were measured separately."""
    rows = []
    for name, part in _with_long(results):
        worst = part.worst
        figures = (f"{worst.tokens:,}", number(worst.kl, ".5f"), number(worst.max, ".4f"), f"{worst.position:,}")
        rows.append((name, worst.place, worst.category, *figures))
    return text_table(("", "worst text", "category", "tokens", "KL mean", "max", "at"), rows)


def _with_long(results: Results) -> list[tuple[str, PartFigures]]:
    """Each candidate, followed by its long texts if they were measured separately."""
    rows: list[tuple[str, PartFigures]] = []
    for name, candidate in results:
        rows += [(name, candidate), *([("long", candidate.long)] if candidate.long else [])]
    return rows


def served_table(results: Results) -> str:
    """Rows for each candidate as stored, as served on each card, and with an FP8 cache of keys and values.

    They are of the short texts where there are long ones.
    """
    columns, rows = ("KL mean", "median", "p99", "top-1", "change"), []
    mean = COLUMNS["KL mean"]
    for name, candidate in results:
        shown: list[tuple[str, Figures, str, str]] = [("as stored", candidate, "0", mean(candidate))]
        for card, on_card in (candidate.as_served or {}).items():
            shown.append((card, on_card.served, mean(on_card.card_alone), mean(on_card.from_stored)))
        if cache := candidate.kv_cache:
            shown.append(("FP8 cache", cache.calibrated, "-", mean(cache.calibrated)))
            shown.append(("FP8 cache, scales of 1", cache.ones, "-", mean(cache.ones)))
        for n, (card, row, *more) in enumerate(shown):
            rows.append((name if n == 0 else "", card, *_cells(row, columns), *more))
    return text_table(("", "card", *columns, "card alone", "from stored"), rows)


def positions_table(candidate: Fidelity) -> str:
    """A row per band of positions; over the long texts if they were measured separately."""
    columns = ("texts", "tokens", "ppl source", "ppl", "change", "KL mean", "reverse", "top-1")
    first = "position, long" if candidate.long else "position"
    rows = [(band.name, *(BAND_COLUMNS[column](band) for column in columns)) for band in candidate.positions]
    return text_table((first, *columns), rows)


def past_the_model(evaluated_on: HeldOutSet) -> list[str]:
    """A line if texts were truncated at the model's last position; otherwise an empty list."""
    lost = evaluated_on.past_the_model
    if not lost.texts:
        return []
    return [
        f"{lost.texts} texts were cut at {lost.positions:,} tokens, the model's max_position_embeddings; "
        f"{lost.tokens:,} tokens were not measured"
    ]
