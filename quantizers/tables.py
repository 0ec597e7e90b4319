"""Short plain tables for the end of a command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .progress import duration


def plain(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned with spaces: first column left, the others by what they hold."""
    text = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in text]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def size(number: int) -> str:
    """Bytes in decimal units: `131.8 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number} B"


def number(value: float | None, form: str) -> str:
    """A figure of a report; null there is what JSON has no number for, see plain_json.py."""
    return "no number" if value is None else format(value, form)


def run_table(report: dict[str, Any], output: Path, source: str) -> str:
    """What `quantize run` prints at its end; `source` is the checkpoint as the next commands find it from here."""
    lines = []
    if report.get("already_done"):
        lines.append(f"{output} was finished before; nothing was touched")
    rows = [
        (
            gate["name"],
            number(gate["value"], ".4g"),
            f"{'>=' if gate.get('at_least') else '<='} {gate['limit']:.4g}",
            "passed" if gate["passed"] else "FAILED",
            gate["meaning"],
        )
        for gate in report["gates"]
    ]
    lines += ["", plain(("gate", "value", "limit", "", "what it is"), rows), ""]
    if "kl" in report:
        lines += [fidelity_table([("output", report)]), ""]
        if len(report.get("positions", ())) > 1:
            lines += [positions_table(report), ""]
    plan, seconds = report["plan"], report["seconds"]
    coverage = report["coverage"]
    lines += [
        f"audit     {report['audit']['tensors']:,} source tensors accounted for, "
        f"{report['audit']['kept_tensors']:,} kept byte for byte",
        *(f"          {line}" for line in report["audit"]["differences"][:10]),
        f"coverage  routed tokens per expert: min {coverage['min']:,}, median {coverage['median']:,.0f}; "
        f"{coverage['uncovered']} of {coverage['pairs']:,} below {coverage['min_routed_tokens']}",
        *(f"held out  {line}" for line in past_the_model(report)),
        f"size      {size(plan['source_bytes'])} -> {size(plan['output_bytes'])}",
        *(f"{'schemes' if n == 0 else '':10}{line}" for n, line in enumerate(scheme_lines(report))),
        f"time      {duration(seconds['this_process'])}, of it {duration(seconds['layers'])} for the layers; "
        f"peak memory {size(report['peak_memory_bytes'])}",
    ]
    leaning = leaning_line(report)
    if leaning:
        lines.append(f"shares    {leaning}")
    falls = sum(len(layer["fallbacks"]) for layer in report["layers"])
    if falls:
        lines.append(f"fallbacks {falls}, listed in report.json under layers")
    lines += [
        f"output    {output}",
        "",
        f"next: quantize verify {output} --source {source}",
        f"      quantize eval {source} {output} --data held-out",
        f"      vllm serve {output}",
    ]
    return "\n".join(lines).strip("\n")


def leaning_line(report: dict[str, Any]) -> str:
    """How many experts got too few routed tokens for these to count fully; empty where none did.

    Args:
        report: of a run with either engine, of a stitch, or of an older version: what it lacks is not said.
    """
    found = [layer["leaning"] for layer in report["layers"] if layer.get("leaning")]
    few = sum(one["experts"] for one in found)
    if not few:
        return ""
    experts, asked = report["plan"]["experts_per_layer"], report["settings"]["recipe"]["experts"]["routed_weight"]
    return (
        f"{few:,} of {experts * len(found):,} experts got fewer than {found[0]['full_share_at']:,} routed tokens and "
        f"lean on all tokens in part (smallest share {min(one['smallest_share'] for one in found):.2f} of {asked:g})"
    )


def scheme_lines(report: dict[str, Any]) -> list[str]:
    """What a budget chose; nothing where the recipe has none."""
    from .tables_schemes import choice_lines

    return choice_lines(report["schemes"]) if "schemes" in report else []


def fidelity_table(results: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """One row a candidate, and where it was measured on long texts too, another one for these."""
    parts = [(label, part) for name, r in results for label, part in ((name, r), ("long", r.get("long"))) if part]
    rows = [
        (
            name,
            f"{r['perplexity']['source']:.4f}",
            f"{r['perplexity']['candidate']:.4f}",
            f"{r['perplexity']['increase']:+.2%}",
            number(r["bits_per_byte"]["candidate"], ".4f"),
            f"{r['kl']['mean']:.5f}",
            f"{r['kl']['median']:.5f}",
            f"{r['kl']['p99']:.4f}",
            f"{r['top1']:.2%}",
            f"{r['router']['min']:.2%}",
        )
        for name, r in parts
    ]
    header = ("", "ppl source", "ppl", "change", "bits/byte", "KL mean", "median", "p99", "top-1", "router")
    return plain(header, rows)


def positions_table(report: dict[str, Any]) -> str:
    """A row for each band of positions, of the long texts where there are such."""
    rows = [
        (
            row["name"],
            row["samples"],
            f"{row['tokens']:,}",
            f"{row['perplexity']['source']:.4f}",
            f"{row['perplexity']['candidate']:.4f}",
            f"{row['perplexity']['increase']:+.2%}",
            f"{row['kl']['mean']:.5f}",
            f"{row['top1']:.2%}",
        )
        for row in report["positions"]
    ]
    first = "position, long" if "long" in report else "position"
    return plain((first, "texts", "tokens", "ppl source", "ppl", "change", "KL mean", "top-1"), rows)


def past_the_model(report: dict[str, Any]) -> list[str]:
    """A line where texts were cut at the last position that the model was made for; else nothing."""
    lost = report.get("evaluated_on", {}).get("past_the_model", {"texts": 0})
    if not lost["texts"]:
        return []
    return [
        f"{lost['texts']} texts were cut at {lost['positions']:,} tokens, the model's max_position_embeddings; "
        f"{lost['tokens']:,} tokens were not measured"
    ]


def methods_table(result: dict[str, Any]) -> str:
    """What `quantize bench methods` prints; ratios are to the library's AWQ with the router compensated."""
    base = next(row for row in result["rows"] if row["method"] == "llm-compressor AWQ, router compensated")
    rows = [
        (
            row["method"],
            f"{row['kl']:.4f}",
            f"{row['kl'] / base['kl']:.2f}",
            f"{row['top1']:.1%}",
            f"{row['router']:.1%}",
            f"{row['increase']:+.2%}",
            f"{row['seconds']:.1f}",
            f"{base['seconds'] / row['seconds']:.1f}x",
        )
        for row in result["rows"]
    ]
    calibration = result["calibration"]
    return plain(("method", "KL", "ratio", "top-1", "router", "perplexity", "seconds", "faster"), rows) + (
        f"\n\n{calibration['tokens']:,} calibration tokens, {result['held_out_tokens']:,} held-out; "
        f"{result['machine']['threads']} threads; seconds: observe + solve, median of {result['repeats']}"
    )


def audit_table(audit: dict[str, Any]) -> str:
    """What `quantize verify` prints."""
    lines = [
        f"{audit['tensors']:,} source tensors accounted for, {audit['kept_tensors']:,} compared byte for byte",
        "what the run wrote: "
        + (
            "compared with the digests in report.json"
            if audit["digests_checked"]
            else "not compared, for report.json has no digests of it"
        ),
        *audit["notes"],
    ]
    if audit["weight_error"]:
        lines.append(f"experts: largest relative weight error {max(audit['weight_error']):.3f}")
    if not audit["differences"]:
        return "\n".join([*lines, "no differences"])
    return "\n".join(
        [*lines, f"{len(audit['differences'])} differences:", *(f"  {line}" for line in audit["differences"])]
    )
