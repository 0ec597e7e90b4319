"""Text output of `quantize compare` and `quantize calibration why`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quantizers.eval.fidelity.figures import HeldOutSet
from quantizers.eval.fidelity.tables import past_the_model
from quantizers.system.formatting import number, several, text_table

from .estimate import ERROR

ROWS = 15  # of a table of fields, at most
LAYERS = 5  # of a table of layers, at most
LANGUAGES = 5  # categories that are named, at most
UNTOLD = ("no difference", "too few texts")
SETS_WORDS = (
    "KL: mean KL(source || output), nats per token; perplexity: its increase; router: the source's choices of experts "
    "that the output makes too; [{} interval over draws and texts]"
)


def sets_table(comparison: dict[str, Any]) -> str:
    """Verdicts, sets, and what each other set changes against the first: fields, hidden states, experts.

    Args:
        comparison: see `SetComparison` in quantizers/sets/schema.py.
    """
    pairs = against_first(comparison)
    parts = ["\n".join(pair["words"] for pair in comparison["pairs"]), *_sets(comparison["sets"], comparison)]
    for pair in pairs:
        parts += [*_fields(pair, comparison), _routing(pair)]
    more = len(comparison["pairs"]) - len(pairs)
    if more:
        parts.append(f"pairs without the first set, field by field and expert by expert with --json: {more}")
    return "\n\n".join(
        [
            *parts,
            *_layers(comparison["sets"]),
            *past_the_model(HeldOutSet.model_validate(comparison["evaluated_on"])),
            *comparison["notes"],
        ]
    )


def sources_table(effects: dict[str, Any]) -> str:
    """Verdicts, the whole set, and the effect of each source.

    Args:
        effects: see `SourceEffects` in quantizers/sets/schema.py.
    """
    sources, label = effects["sources"], effects["set"]["label"]
    verdicts = [f"{row['source']} {row['words']}" for row in sources if row["verdict"] not in UNTOLD]
    rows = [
        (row["source"], span(row["texts"]), span(row["tokens"]), *_change(row), row["verdict"]) for row in sources
    ]  # fmt: skip
    columns = ("source", "samples", "tokens", "KL without it", *_change_columns(effects), "verdict")
    return "\n\n".join(
        [
            "\n".join(verdicts) or f"The effect of no source of {label} can be told from chance.",
            text_table(columns, rows),
            "KL without it: mean KL of outputs without the source, against those with it; more means that it helps",
            *_sets([effects["set"]], effects),
            *past_the_model(HeldOutSet.model_validate(effects["evaluated_on"])),
            *effects["notes"],
        ]
    )


def against_first(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """The pairs of the first set with each other one."""
    return [pair for pair in comparison["pairs"] if pair["first"] == comparison["sets"][0]["label"]]


def telling(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with a change: first those with a verdict, then those without, the largest change first in both."""
    return sorted(rows, key=lambda row: (row["verdict"] in UNTOLD, -abs(row["change"] or 0)))


def span(numbers: Sequence[int]) -> str:
    """The least and the largest of some counts: `3,900–4,100`."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def measured(figures: dict[str, Any]) -> str:
    """Summary of the measurement: draws, layers and held-out texts."""
    layers = f"{figures['solved_layers']} of {figures['layers']} layers quantized"
    tokens = "all tokens" if figures["tokens"] is None else f"{figures['tokens']:,} tokens each"
    return f"{several(figures['draws'], 'draw')}, {tokens}; {layers}; measured on {figures['evaluated_on']['name']}"


def level(figures: dict[str, Any]) -> str:
    """Confidence level of the intervals, such as `95 %`."""
    return f"{100 * (1 - figures.get('error', ERROR)):.3g} %"


def _sets(sets: Sequence[dict[str, Any]], figures: dict[str, Any]) -> list[str]:
    rows = [
        (
            row["label"], row["draws"], span(row["samples"]), span(row["tokens"]), *_estimate(row["kl"], ".5f"),
            *_estimate(row["top1"], ".2%"),
            *_estimate({**row["perplexity"], "mean": row["perplexity"]["increase"]}, "+.2%"),
            *(_estimate(row["router"], ".2%") if row["router"] else ("unknown", "")),
        )
        for row in sets
    ]  # fmt: skip
    columns = ("set", "draws", "samples", "tokens", "KL", "", "top-1", "", "perplexity", "", "router", "")
    return [text_table(columns, rows), SETS_WORDS.format(level(figures)), f"{figures['model']}: {measured(figures)}"]


def _estimate(row: dict[str, Any], form: str) -> tuple[str, str]:
    return number(row["mean"], form), _interval(row, form)


def _interval(row: dict[str, Any], form: str) -> str:
    return f"[{', '.join(number(end, form) for end in row['interval'])}]" if row["interval"] else "too few texts"


def _change_columns(figures: dict[str, Any]) -> tuple[str, str]:
    return f"{level(figures)} interval (unadjusted)", "p (Holm)"


def _change(row: dict[str, Any]) -> tuple[str, str, str]:
    """Change, its interval, and p adjusted."""
    p = ("< 0.001" if row["adjusted"] < 0.001 else f"{row['adjusted']:.3f}") if row["interval"] else ""
    return number(row["change"], "+.2%"), _interval(row, "+.2%"), p


def _fields(pair: dict[str, Any], comparison: dict[str, Any]) -> list[str]:
    known = [row for row in pair["fields"] if row["verdict"] != "too few texts"]
    shown, few = telling(known)[:ROWS], len(pair["fields"]) - len(known)
    counts = [f"{len(known) - len(shown)} more with --json"] if len(known) > len(shown) else []
    counts += [f"{few} with too few texts"] if few else []
    means = {row["label"]: row["kl"]["mean"] for row in comparison["sets"]}
    whole = pair | {"name": "all texts", "texts": "", "first": means[pair["first"]], "other": means[pair["other"]]}
    rows = [
        (
            row["name"], row["texts"], number(row["first"], ".5f"), number(row["other"], ".5f"), *_change(row),
            row["verdict"],
        )
        for row in (whole, *shown)
    ]  # fmt: skip
    title = f"{pair['other']} against {pair['first']}, by field{' (' + ', '.join(counts) + ')' if counts else ''}"
    columns = ("field", "texts", "KL first", "KL other", "change", *_change_columns(comparison), "verdict")
    return [title, text_table(columns, rows)]


def _routing(pair: dict[str, Any]) -> str:
    routing, other = pair["routing"], pair["other"]
    top = [row for row in routing["languages"] if row["won"] or row["lost"]][:LANGUAGES]
    most = ", ".join(f"{row['category']} +{row['won']:,} −{row['lost']:,}" for row in top)
    minimum = routing["min_routed_tokens"]
    return (
        f"experts newly covered by {other}: {len(routing['won']):,}; no longer covered: {len(routing['lost']):,} (of "
        f"{routing['after']['pairs']:,}; at equal size, {several(minimum, 'routed token')} at least)"
        + (f"\nby the texts of one category alone: {most}" if most else "")
    )


def _layers(sets: Sequence[dict[str, Any]]) -> list[str]:
    """The layers where the sets' hidden errors differ most, relative to the least."""

    def apart(layer: int) -> float:
        means = [row["hidden_error"][layer]["mean"] or 0.0 for row in sets]
        return max(means) / min(means) if min(means) else 0.0

    layers = sorted(sorted(range(len(sets[0]["hidden_error"])), key=apart)[-LAYERS:])
    rows = [(n, *(_error(row["hidden_error"][n]) for row in sets)) for n in layers]
    title = "Error of the hidden states, in the layers where the sets differ most; (least–largest draw)"
    return [title, text_table(("layer", *(row["label"] for row in sets)), rows)]


def _error(row: dict[str, Any]) -> str:
    mean, low, high = (number(row[key], ".4f") for key in ("mean", "low", "high"))
    return f"{mean} ({low}–{high})"
