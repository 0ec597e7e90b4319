"""Text about a run: its figures in a few sentences, and a bit budget with its candidates, choice and measurements."""

from __future__ import annotations

from typing import Any

from quantizers.system.formatting import number, size, text_table

NAMES = {"gate": "w1 (gate)", "up": "w3 (up)", "down": "w2 (down)"}


def summary(report: dict[str, Any]) -> list[str]:
    """Sentences: the gates, and the KL against its limit.

    Args:
        report: the contents of report.json, from a run or a stitch.
    """
    return [_gates(report["gates"]), *([_kl(report)] if "kl" in report else [])]


def _gates(gates: list[dict[str, Any]]) -> str:
    failed = [gate["name"] for gate in gates if not gate["passed"]]
    if not failed:
        return f"All {len(gates)} gates passed." if len(gates) > 1 else "The only gate passed."
    return f"{len(failed)} of {len(gates)} gates failed: {', '.join(failed)}."


def _kl(report: dict[str, Any]) -> str:
    limit = next((gate for gate in report["gates"] if gate["name"] == "kl"), None)
    within = "its recipe sets no limit"
    if limit is not None:
        side = "within" if limit["passed"] else "above"
        within = f"{side} the limit of {limit['limit']:.4g} that its recipe sets"
    return (
        f"KL {number(report['kl']['mean'], '.4f')} nats per token on {report['evaluated_on']['name']}: {within}. "
        f"Perplexity {number(report['perplexity']['increase'], '+.2%')}, the same most likely token at "
        f"{number(report['top1'], '.1%')} of the positions."
    )


# Bit budget --------------------------------------------------------------------------------------------------------


def limit_text(schemes: dict[str, Any]) -> str:
    """The recipe's budget in words."""
    if schemes["unit"] == "bytes":
        return f"{size(schemes['limit'])} of shards ({schemes['limit']:,} bytes)"
    return f"{schemes['limit']:.6g} bits per expert weight"


def candidate_lines(schemes: dict[str, Any]) -> list[str]:
    """The candidate schemes, and the bounds of possible budgets."""
    rows = []
    for row in schemes["candidates"]:
        least, most = row["layer_bytes"]
        layer = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        gpus = " ".join(map(str, row["tensor_parallel"]))
        rows.append((row["scheme"], f"{row['bits_per_weight']:g}", layer, f"{row['output_bytes']:,}", gpus))
    least, most = schemes["candidates"][0], schemes["candidates"][-1]
    bounds = (
        f"{least['output_bytes']:,} to {most['output_bytes']:,} bytes"
        if schemes["unit"] == "bytes"
        else f"{least['bits_per_weight']:g} to {most['bits_per_weight']:g} bits per weight"
    )
    above = "; above all of them, so every layer gets the best" if schemes["above_the_largest"] else ""
    return [
        f"budget {limit_text(schemes)}; possible are {bounds}{above}",
        text_table(
            ("for each layer", "bits per weight", "bytes of a layer", "shards, if everywhere", "tensor parallel"), rows
        ),
    ]


def choice_lines(schemes: dict[str, Any]) -> list[str]:
    """The choice in a few lines."""
    shares, coarsest = schemes["by_matrix"], schemes["coarsest"]
    kl = [row["loss"][coarsest] for row in schemes["layers"]]
    numbers = [row["layer"] for row in schemes["layers"]]
    worst, least = kl.index(max(kl)), kl.index(min(kl))
    parts = ", ".join(f"{NAMES[matrix]} {share:.0%}" for matrix, share in sorted(shares.items(), key=lambda p: -p[1]))
    above = "; the budget is above the largest possible" if schemes["above_the_largest"] else ""
    return [
        f"{schemes['chosen']}: {size(schemes['output_bytes'])} of shards, {schemes['bits_per_weight']:.4g} bits per "
        f"weight, within {limit_text(schemes)}{above}",
        f"predicted KL of a layer as {coarsest}: most {kl[worst]:.2g} (layer {numbers[worst]}), least {kl[least]:.2g} "
        f"(layer {numbers[least]}), first {kl[0]:.2g}; of it {parts}",
    ]


def layer_rows(schemes: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of a table: each layer's scheme with its measurements."""
    coarsest = schemes["coarsest"]
    header = ("layer", "scheme", "bytes", "predicted KL", f"as {coarsest}", *(f"error of {m}" for m in NAMES))
    rows = [
        (
            str(row["layer"]),
            row["scheme"],
            f"{row['bytes']:,}",
            f"{row['loss'][row['scheme']]:.5f}",
            f"{row['loss'][coarsest]:.5f}",
            *(f"{row['by_matrix'][coarsest][matrix] ** 0.5:.2%}" for matrix in NAMES),
        )
        for row in schemes["layers"]
    ]
    return header, rows


def under_routed_line(report: dict[str, Any]) -> str:
    """How many experts got too few routed tokens for the recipe's full `routed_weight`; empty if none did.

    Args:
        report: of a run with either engine, or of a stitch; without these counts the line is empty.
    """
    rows = [layer["leaning"] for layer in report["layers"] if layer.get("leaning")]
    few = sum(row["experts"] for row in rows)
    if not few:
        return ""
    experts, weight = report["plan"]["experts_per_layer"], report["settings"]["recipe"]["experts"]["routed_weight"]
    smallest = min(row["smallest_share"] for row in rows)
    return (
        f"{few:,} of {experts * len(rows):,} experts got fewer than {rows[0]['full_share_at']:,} routed tokens "
        f"and rely on all tokens in part (smallest share {smallest:.2f} of {weight:g})"
    )


def scheme_lines(report: dict[str, Any]) -> list[str]:
    """`choice_lines` of a report; nothing if the recipe has no budget."""
    return choice_lines(report["schemes"]) if "schemes" in report else []


def expert_bits(report: dict[str, Any]) -> list[int]:
    """Bit widths of the experts' integers; several if layers differ."""
    if report.get("schemes"):
        return sorted({layer["bits"] for layer in report["schemes"]["layers"]})
    if "stitched" in report:
        return sorted({scheme["bits"] for scheme in report["experts"]["schemes"]})
    return [report["settings"]["recipe"]["experts"]["bits"]]
