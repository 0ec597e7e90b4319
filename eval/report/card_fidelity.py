"""The card's table of perplexity, KL and top-1 against the source, over all texts and by category."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from eval.fidelity.tables import by_part
from quantizers.system.formatting import number

GROUPS = {"code": "programming languages", "spoken": "spoken languages"}
OTHER = "other fields"


def fidelity(report: dict[str, Any]) -> str:
    """The section as Markdown; empty if nothing was measured."""
    if "kl" not in report:
        return ""
    categories = report["categories"]
    header = [
        "| texts | tokens | perplexity of the source | of this | change | bits per byte | KL mean | p99 | top-1 |"
    ]
    header += ["|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    parts = by_part(report)
    overall, *long = (_row(f"**{name}**", part) for name, part in parts.items())
    groups = [_group_row(f"{name} ({len(members)})", members) for name, members in _grouped(categories).items()]
    return "\n".join(
        [
            "## Measured against the source",
            "",
            *header,
            overall,
            *groups,
            *long,
            "",
            *_positions(report),
            "<details><summary>By category</summary>",
            "",
            *header,
            *(_row(name, row) for part in parts.values() for name, row in sorted(part["categories"].items())),
            "",
            "</details>",
            "",
            f"Held-out set `{report['evaluated_on']['name']}`: {report['samples']} texts, {report['tokens']:,} scored "
            f"tokens{_long(report)}. KL is KL(source || this) in nats over the whole vocabulary{_ranges(report)}; "
            f"top-1 is how often the most likely token is the same. The router chooses the same experts for "
            f"{report['router']['min']:.2%} in the worst layer{_long_router(report)}.",
        ]
    )


def _positions(report: dict[str, Any]) -> list[str]:
    """The table by position in the text; nothing if all texts end in the first band."""
    rows = report.get("positions", ())
    if len(rows) < 2:
        return []
    return [
        f"By position of the predicted token in {'the long' if 'long' in report else 'all'} texts:",
        "",
        "| position | texts | tokens | perplexity of the source | of this | change | KL mean | top-1 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {row['name']} | {row['samples']:,} | {row['tokens']:,} | {row['perplexity']['source']:.4f} | "
            f"{row['perplexity']['candidate']:.4f} | {row['perplexity']['increase']:+.2%} | {row['kl']['mean']:.5f} | "
            f"{row['top1']:.2%} |"
            for row in rows
        ),
        "",
    ]


def _long(report: dict[str, Any]) -> str:
    long = report.get("long")
    return f", and {long['samples']} long texts, {long['tokens']:,} tokens" if long else ""


def _long_router(report: dict[str, Any]) -> str:
    return f", and for {report['long']['router']['min']:.2%} in long texts" if "long" in report else ""


def _row(name: str, row: Mapping[str, Any]) -> str:
    p, kl = row["perplexity"], row["kl"]
    cells = [
        name,
        f"{row['tokens']:,}",
        f"{p['source']:.4f}",
        f"{p['candidate']:.4f}",
        f"{p['increase']:+.2%}{_interval(row, 'increase', '+.2%')}",
        number(row["bits_per_byte"]["candidate"], ".4f"),
        f"{kl['mean']:.5f}{_interval(row, 'kl', '.5f')}",
        f"{kl['p99']:.4f}",
        f"{row['top1']:.2%}{_interval(row, 'top1', '.2%')}",
    ]
    return f"| {' | '.join(cells)} |"


def _group_row(name: str, members: list[dict[str, Any]]) -> str:
    """Several categories as one row, weighted by tokens. The p99 cell stays empty: it does not follow from theirs."""
    source, candidate = (_perplexity(members, which) for which in ("source", "candidate"))
    # Bytes of a category = its bits / its bits per byte. Categories where bits per byte is None (tokens without bytes)
    # or 0 (a loss of exactly 0) are left out.
    bits = {n: row["tokens"] * math.log2(row["perplexity"]["candidate"]) for n, row in enumerate(members)}
    rates = {n: members[n]["bits_per_byte"]["candidate"] for n in bits}
    known = [n for n in bits if rates[n]]
    size = sum(bits[n] / rates[n] for n in known)
    cells = [
        name,
        f"{sum(row['tokens'] for row in members):,}",
        f"{source:.4f}",
        f"{candidate:.4f}",
        f"{candidate / source - 1:+.2%}",
        number(sum(bits[n] for n in known) / size if size else None, ".4f"),
        f"{_mean(members, lambda row: row['kl']['mean']):.5f}",
        "",
        f"{_mean(members, lambda row: row['top1']):.2%}",
    ]
    return f"| {' | '.join(cells)} |"


def _interval(row: Mapping[str, Any], figure: str, form: str) -> str:
    low, high = (row["interval"] or {}).get(figure, (None, None))
    return "" if low is None else f" [{low:{form}}, {high:{form}}]"


def _ranges(report: Mapping[str, Any]) -> str:
    return "; in brackets 95 % intervals over texts" if report["interval"] else ""


def _grouped(categories: Mapping[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, row in sorted(categories.items()):
        prefix, slash, _ = name.partition("/")
        groups.setdefault(GROUPS.get(prefix, OTHER) if slash else OTHER, []).append(row)
    return groups


def _mean(rows: list[dict[str, Any]], value: Any) -> float:
    """Mean of a figure, weighted by tokens."""
    return float(sum(value(row) * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows))


def _perplexity(rows: list[dict[str, Any]], which: str) -> float:
    return math.exp(_mean(rows, lambda row: math.log(row["perplexity"][which])))
