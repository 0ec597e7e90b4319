"""What `quantize eval` prints: one row per candidate, then tables by category, by depth and by position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quantizers.system.formatting import number, text_table

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
SERVED = {"as_served", "kv_cache"}
Results = Sequence[tuple[str, dict[str, Any]]]  # name and figures of each candidate
CATEGORY_ROWS, WORST = 24, 5  # with more categories than rows, families and the WORST categories are shown


def eval_table(report: dict[str, Any]) -> str:
    """All tables of one evaluation, of what `quantize eval --json` prints: source, candidates, notes, and with several
    candidates `paired`.
    """
    results = [(one["model"], one) for one in report["candidates"]]
    first = report["candidates"][0]
    long = f", and {first['long']['samples']} long ones, {first['long']['tokens']:,} tokens" if "long" in first else ""
    parts = [
        fidelity_table(results),
        worst_table(results),
        f"{first['samples']} samples, {first['tokens']:,} scored tokens of {first['evaluated_on']['name']}"
        f"{long}; scored: all but the first of each text; KL(source || candidate) in nats; reverse: mean "
        "KL(candidate || source); at: position of the predicted token; router: share of equal choices in the worst "
        "layer; [95 % percentile-bootstrap interval over texts], or one sample, which has none",
    ]
    if any(SERVED & one.keys() for _, one in results):
        parts += [served_table(results), SERVED_WORDS]
    for name, one in results:
        count, short = len(one["categories"]), ", short texts" if "long" in one else ""
        more = f" ({count}: by family, then the {WORST} that lose most; all of them with --json)"
        parts += [f"{name}, by category{more if count > CATEGORY_ROWS else ''}", _categories(one)]
        parts += [f"{name}, by depth{short}", _depth(one)]
        if len(one["positions"]) > 1:
            parts += [f"{name}, by position in {'its long' if 'long' in one else 'all'} texts", positions_table(one)]
    for one in report.get("paired", ()):
        title = f"{one['model']} against {one['against']}, the first, paired over the same texts"
        parts += [title, paired_table(one)]
    if "paired" in report:
        parts += [PAIRED_WORDS, NOTE]
    return "\n\n".join([*parts, *past_the_model(first), *report["notes"]])


def paired_table(one: dict[str, Any]) -> str:
    """Differences of mean KL by category, or by family if there are too many, and over all texts."""
    few = len(one["categories"]) <= CATEGORY_ROWS
    rows = [
        (
            name, row["texts"], f"{row['tokens']:,}", f"{row['first']:.5f}", f"{row['other']:.5f}",
            f"{row['difference']:+.6f}" if row["difference"] else "0", _paired_interval(row),
        )
        for label, part in by_part(one).items()
        for name, row in [*part["categories" if few else "families"].items(), (label, part)]
    ]  # fmt: skip
    header = ("category" if few else "family", "texts", "tokens", "KL first", "KL this", "difference", "95 % interval")
    return text_table(header, rows)


def _paired_interval(row: dict[str, Any]) -> str:
    if row["interval"]:
        low, high = row["interval"]
        return f"[{low:+.6f}, {high:+.6f}]" if row["difference"] or low or high else "[0, 0]"
    return "too few texts" if row["texts"] < FEWEST else "too few texts differ"


def by_part(one: dict[str, Any]) -> dict[str, Any]:
    """The parts of a candidate's figures, by name: all texts, or short and long ones separately."""
    return {"short texts": one, "long texts": one["long"]} if "long" in one else {"all": one}


def shown_categories(one: dict[str, Any]) -> dict[str, Any]:
    """The categories of one part's figures to show: all, or if there are too many, the families and the WORST by KL."""
    if len(one["categories"]) <= CATEGORY_ROWS:
        return dict(one["categories"])
    worst = sorted(one["categories"].items(), key=lambda item: -item[1]["kl"]["mean"])[:WORST]
    return {**one["families"], **dict(worst)}


# The columns of tables of figures by their headings, each made of one row of figures.
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "samples": lambda row: str(row["samples"]),
    "texts": lambda row: str(row["samples"]),
    "tokens": lambda row: f"{row['tokens']:,}",
    "ppl source": lambda row: f"{row['perplexity']['source']:.4f}",
    "ppl": lambda row: f"{row['perplexity']['candidate']:.4f}",
    "change": lambda row: f"{row['perplexity']['increase']:+.2%}",
    "bits/byte": lambda row: number(row["bits_per_byte"]["candidate"], ".4f"),
    "KL mean": lambda row: f"{row['kl']['mean']:.5f}",
    "KL interval": lambda row: _interval(row, "kl", ".5f"),
    "median": lambda row: f"{row['kl']['median']:.5f}",
    "p99": lambda row: f"{row['kl']['p99']:.4f}",
    "p99.9": lambda row: f"{row['kl']['p999']:.4f}",
    "max": lambda row: f"{row['kl']['max']:.4f}",
    "reverse": lambda row: f"{row['reverse_kl']['mean']:.5f}",
    "top-1": lambda row: f"{row['top1']:.2%}",
    "top-1 interval": lambda row: _interval(row, "top1", ".2%"),
    "router": lambda row: f"{row['router']['min']:.2%}",
}


def _figures_table(first: str, names: Sequence[str], rows: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """A table of these columns, after one with the name of each row."""
    return text_table((first, *names), [(name, *(COLUMNS[column](row) for column in names)) for name, row in rows])


def _categories(one: dict[str, Any]) -> str:
    columns = (
        "samples", "tokens", "ppl source", "change", "KL mean", "KL interval", "p99", "reverse", "top-1",
        "top-1 interval",
    )  # fmt: skip
    rows = [row for label, part in by_part(one).items() for row in [*shown_categories(part).items(), (label, part)]]
    return _figures_table("category", columns, rows)


def _interval(table: dict[str, Any], key: str, form: str) -> str:
    interval = table["interval"]
    return f"[{interval[key][0]:{form}}, {interval[key][1]:{form}}]" if interval else "one sample"


def _depth(one: dict[str, Any]) -> str:
    rows = [
        (layer, f"{hidden:.4f}", "" if agreement is None else f"{agreement:.2%}")
        for layer, (hidden, agreement) in enumerate(zip(one["hidden_error"], one["router"]["agreement"], strict=True))
    ]
    weights = [tuple(f"{row[kind]:.4f}" for kind in ("experts", "attention")) for row in one.get("weight_error", ())]
    header = ("layer", "hidden states", "router", *(("experts' weights", "attention's weights") if weights else ()))
    return text_table(header, [(*row, *more) for row, more in zip(rows, weights or [()] * len(rows), strict=True)])


def fidelity_table(results: Results) -> str:
    """One row per candidate, followed by one for its long texts if they were measured separately."""
    columns = (
        "ppl source", "ppl", "change", "bits/byte", "KL mean", "median", "p99", "p99.9", "max", "reverse", "top-1",
        "router",
    )  # fmt: skip
    return _figures_table("", columns, _with_long(results))


def worst_table(results: Results) -> str:
    """The text with the largest mean KL of each candidate, and of its long texts if they were measured separately."""
    rows = []
    for name, part in _with_long(results):
        one = part["worst"]
        figures = (f"{one['tokens']:,}", f"{one['kl']:.5f}", f"{one['max']:.4f}", f"{one['position']:,}")
        rows.append((name, one["place"], one["category"], *figures))
    return text_table(("", "worst text", "category", "tokens", "KL mean", "max", "at"), rows)


def _with_long(results: Results) -> list[tuple[str, dict[str, Any]]]:
    """Each candidate, followed by its long texts if they were measured separately."""
    return [(label, part) for name, r in results for label, part in ((name, r), ("long", r.get("long"))) if part]


def served_table(results: Results) -> str:
    """Rows for each candidate as stored, as served on each card, and with an FP8 cache of keys and values.

    They are of the short texts where there are long ones.
    """
    columns, rows = ("KL mean", "median", "p99", "top-1", "change"), []
    mean = COLUMNS["KL mean"]
    for name, one in results:
        shown = [("as stored", one, "0", mean(one))]
        for card, row in one.get("as_served", {}).items():
            shown.append((card, row["served"], mean(row["card_alone"]), mean(row["from_stored"])))
        for kind, row in one.get("kv_cache", {}).items():
            shown.append((f"FP8 cache{'' if kind == 'calibrated' else ', scales of 1'}", row, "-", mean(row)))
        for n, (card, row, *more) in enumerate(shown):
            rows.append((name if n == 0 else "", card, *(COLUMNS[column](row) for column in columns), *more))
    return text_table(("", "card", *columns, "card alone", "from stored"), rows)


def positions_table(report: dict[str, Any]) -> str:
    """A row per band of positions; over the long texts if they were measured separately."""
    columns = ("texts", "tokens", "ppl source", "ppl", "change", "KL mean", "reverse", "top-1")
    first = "position, long" if "long" in report else "position"
    return _figures_table(first, columns, [(row["name"], row) for row in report["positions"]])


def past_the_model(report: dict[str, Any]) -> list[str]:
    """A line if texts were truncated at the model's last position; otherwise an empty list."""
    lost = report.get("evaluated_on", {}).get("past_the_model", {"texts": 0})
    if not lost["texts"]:
        return []
    return [
        f"{lost['texts']} texts were cut at {lost['positions']:,} tokens, the model's max_position_embeddings; "
        f"{lost['tokens']:,} tokens were not measured"
    ]
