"""README.md of the output: the Hub's model card. Every number in it comes from report.json.

The front matter follows the Hub's conventions (https://huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import json
from typing import Any

from eval.fidelity.tables import past_the_model
from quantizers.recipe.portable import is_hub_id
from quantizers.system.formatting import gib
from quantizers.system.output_files import CALIBRATION_PICTURE, COVERAGE_PICTURE
from quantizers.system.strict_yaml import dump

from .card_fidelity import fidelity
from .card_kept import kept, smoothing
from .card_parts import audit, failed, forced, linked, plan_tables, title
from .card_serving import serving
from .card_stitched import stitched
from .front_matter import expert_bits, front_matter
from .schemes import choice_lines, layer_rows, leaning_line


def card(report: dict[str, Any]) -> str:
    """The card as Markdown with front matter.

    Args:
        report: the contents of report.json, of a run or of a stitch.
    """
    report = json.loads(json.dumps(report, sort_keys=True))  # so the card is the same from memory and from the file
    parts = stitched(report) if "stitched" in report else _run(report)
    front = dump(front_matter(report))
    return f"---\n{front}---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _run(report: dict[str, Any]) -> list[str]:
    """The sections of the card of a run."""
    return [
        _head(report),
        forced(report) or failed(report),
        _quantized(report),
        _calibration(report),
        fidelity(report),
        audit(report),
        serving(report),
        _made(report),
        _limits(report),
    ]


def _stored(report: dict[str, Any]) -> str:
    """The storage format of the experts in words."""
    if report.get("schemes"):
        name = " and ".join(f"INT{n}" for n in expert_bits(report))
        return f"{name}, symmetric, one bfloat16 scale per group ({report['schemes']['chosen']})"
    experts = report["settings"]["recipe"]["experts"]
    return f"INT{experts['bits']}, symmetric, one bfloat16 scale per {experts['group_size']} weights"


def _chosen(report: dict[str, Any]) -> list[str]:
    """What was chosen within the recipe's budget; nothing if it has none."""
    schemes = report.get("schemes")
    if not schemes:
        return []
    header, rows = layer_rows(schemes)
    return [
        "",
        "Bits and group size were chosen for each layer within a budget, by what was measured: "
        + ". ".join(choice_lines(schemes))
        + ".",
        "",
        "<details><summary>Every layer</summary>",
        "",
        f"| {' | '.join(header)} |",
        "|---|---|" + "---:|" * (len(header) - 2),
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        "</details>",
    ]


def _head(report: dict[str, Any]) -> str:
    source, plan = report["source"], report["plan"]
    return (
        f"# {title(report)}\n\n"
        f"{linked(source['model'])} (revision `{source['revision']}`), {gib(plan['source_bytes'])}, as a "
        f"compressed-tensors checkpoint of {gib(plan['output_bytes'])} for vLLM. Made with moe-quantizers "
        f"{report['versions']['moe-quantizers']}. Every number below is from `report.json` beside this file."
    )


def _quantized(report: dict[str, Any]) -> str:
    experts, plan = report["settings"]["recipe"]["experts"], report["plan"]
    layers = plan["layers"] - len(plan.get("dense_layers", []))
    return "\n".join(
        [
            "## What was kept and what was quantized",
            "",
            f"The {plan['quantized_matrices']:,} matrices of the routed experts ({layers} layers, "
            f"{plan['experts_per_layer']} experts each) are {_stored(report)}: "
            f"{f'{smoothing(plan)}; ' if experts['awq'] else ''}{experts['scales']} group scales, "
            f"{experts['rounding']} rounding (engine `{experts['engine']}`). Everything else keeps the source's bytes.",
            *kept(plan),
            *_chosen(report),
            "",
            *plan_tables(plan),
        ]
    )


def _drawn(drawn: dict[str, Any] | None) -> str:
    """How many tokens the recipe had drawn from the set, if it says how many."""
    if drawn is None:
        return ""
    whole = f"{drawn['samples']:,} samples with {drawn['tokens']:,} tokens"
    if drawn["asked"] >= drawn["tokens"]:
        return f" That is the whole set; the recipe would have drawn {drawn['asked']:,} tokens."
    return (
        f" {drawn['asked']:,} tokens were drawn evenly over the categories of the set's {whole}; "
        f"samples cut where their category's share ended: {drawn['cut']:,}."
    )


def _calibration(report: dict[str, Any]) -> str:
    calibration, coverage = report["calibration"], report["coverage"]
    languages, routed = calibration["languages"], report["settings"]["recipe"]["experts"]["routed_weight"]
    shown = {kind: sum(1 for count in counts.values() if count) for kind, counts in languages.items()}
    lengths = calibration["lengths"]
    drawn = calibration.get("drawn")
    at_length = calibration["truncated_samples"] - (drawn["cut"] if drawn else 0)
    cut = f" {at_length:,} samples were cut at {' or '.join(f'{n:,}' for n in lengths)} tokens." if at_length else ""
    unusable, left_out = (
        sum(row["count"] for row in calibration["dropped"] if row.get("left_out", False) is unlisted)
        for unlisted in (False, True)
    )
    dropped = f" {unusable:,} rows were unusable." if unusable else ""
    dropped += f" {left_out:,} were left out: the set does not list their language." if left_out else ""
    return "\n".join(
        [
            "## Calibration",
            "",
            f"Set `{calibration['name']}` (digest `{calibration['digest'][:16]}`): {calibration['samples']:,} samples, "
            f"{calibration['tokens']:,} tokens, {shown['programming']} programming and {shown['spoken']} spoken "
            f"languages, {len(calibration['categories'])} categories.{_drawn(drawn)}{cut}{dropped} "
            f"Every expert saw every token; tokens that the router sends to an expert count for {routed:.0%} of it.",
            "",
            f"![Tokens by language and field]({CALIBRATION_PICTURE})",
            "",
            f"What the router itself sent: at least {coverage['min']:,} tokens to every expert, "
            f"{coverage['median']:,.0f} in the median; {coverage['uncovered']:,} of {coverage['pairs']:,} experts got "
            f"fewer than {coverage['min_routed_tokens']:,}.",
            "",
            f"![Routed tokens by layer and expert, relative to an even load]({COVERAGE_PICTURE})",
        ]
    )


def _made(report: dict[str, Any]) -> str:
    settings, seconds = report["settings"], report["seconds"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join(
        [
            "## How it was made",
            "",
            "```",
            "quantize run recipe.yaml --output DIR"
            + ("" if is_hub_id(report["source"]["model"]) else " --source SOURCE"),
            "```",
            "",
            f"with `recipe.yaml` and the sets beside this file (`{settings['file']}`, hash `{settings['hash'][:16]}`) "
            f"on {settings['machine']['device']} with {settings['machine']['threads']} CPU threads: "
            f"{seconds['layers']:,.0f} s for the layers, {seconds['this_process']:,.0f} s in the last process, "
            f"verifying and measuring included; {report['peak_memory_bytes'] / 1e9:.1f} GB of memory at most. "
            f"{versions}.",
        ]
    )


def _limits(report: dict[str, Any]) -> str:
    fallbacks = sum(len(layer["fallbacks"]) for layer in report["layers"])
    lines = [*report["notes"]]
    if "kl" not in report:
        lines.append("Perplexity and KL were not measured: the recipe names no held-out set.")
    elif "long" in report:
        lines.append(
            f"Measured on held-out texts of at most {report['longest']:,} tokens, and in a row of their own on "
            f"{report['long']['samples']} long ones of at most {report['long']['longest']:,}; not on longer contexts, "
            "benchmarks or tool use. Gates read the short ones only."
        )
    else:
        lines.append("Measured on short held-out texts, not on benchmarks, tool use or long contexts.")
    lines += [
        f"`{finding['where']}`: {finding['problem']}; {finding['engine']}: {finding['consequence']}."
        for finding in report.get("consumers", {}).get("findings", ())
        if finding["severity"] == "note"
    ]
    lines += [f"{line}." for line in past_the_model(report)]
    leaning = leaning_line(report)
    if leaning:
        lines.append(f"{leaning}.")
    if fallbacks:
        lines.append(
            f"{fallbacks:,} fallbacks while solving (no routed tokens, rows left out, groups of zeros, more damping), "
            "listed in `report.json`."
        )
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines)
