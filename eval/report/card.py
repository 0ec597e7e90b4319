"""README.md of the output: the Hub's model card. Every number in it comes from report.json.

The front matter follows the Hub's conventions (https://huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.fidelity.tables import past_the_model
from quantizers.recipe.portable import is_hub_id
from quantizers.system.byte_size import gib
from quantizers.system.own_files import CALIBRATION_PICTURE, COVERAGE_PICTURE
from quantizers.system.strict_yaml import dump
from quantizers.system.text_table import number

from .card_fidelity import fidelity
from .card_serving import serving
from .front_matter import expert_bits, front_matter, has_fp8_attention
from .schemes import choice_lines, layer_rows, leaning_line


def card(report: dict[str, Any]) -> str:
    """The card as Markdown with front matter.

    Args:
        report: the contents of report.json.
    """
    report = json.loads(json.dumps(report, sort_keys=True))  # so the card is the same from memory and from the file
    parts = [
        _head(report),
        _forced(report) or _failed(report),
        _quantized(report),
        _calibration(report),
        fidelity(report),
        _audit(report),
        serving(report),
        _made(report),
        _limits(report),
    ]
    front = dump(front_matter(report))
    return f"---\n{front}---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


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


def _title(report: dict[str, Any]) -> str:
    name = Path(report["source"]["model"]).name
    attention = "FP8 attention" if has_fp8_attention(report) else "attention as published"
    return f"{name}: {attention}, {' and '.join(f'INT{n}' for n in expert_bits(report))} experts"


def _head(report: dict[str, Any]) -> str:
    source, plan = report["source"], report["plan"]
    name = source["model"]
    model = f"[{name}](https://huggingface.co/{name})" if is_hub_id(name) else f"`{Path(name).name}`"
    return (
        f"# {_title(report)}\n\n"
        f"{model} (revision `{source['revision']}`), {gib(plan['source_bytes'])}, as a compressed-tensors checkpoint "
        f"of {gib(plan['output_bytes'])} for vLLM. Made with moe-quantizers {report['versions']['moe-quantizers']}. "
        "Every number below is from `report.json` beside this file."
    )


def _failed(report: dict[str, Any]) -> str:
    failed = [gate["name"] for gate in report["gates"] if not gate["passed"]]
    return f"> **Gates of the recipe that failed: {', '.join(failed)}.** See the audit below." if failed else ""


def _forced(report: dict[str, Any]) -> str:
    forced = report.get("forced")
    if not forced:
        return ""
    problems = "\n".join(f"> - {line}" for line in forced["problems"][:20])
    more = len(forced["problems"]) - 20
    tail = f"\n> - and {more} more" if more > 0 else ""
    return (
        "> **This checkpoint did not pass its checks and was published all the same.** Reason given: "
        f"{forced['reason']}\n>\n{problems}{tail}"
    )


def _quantized(report: dict[str, Any]) -> str:
    experts, plan = report["settings"]["recipe"]["experts"], report["plan"]
    smoothing = "AWQ scales from the calibration sums, folded into the norm and compensated in the router; "
    rows = [
        f"| `{row['kind']}` | {row['action']} | {row['tensors']:,} | {row['bytes_before']:,} | {row['bytes_after']:,} |"
        for row in plan["kinds"]
    ]
    actions = [
        f"| {kind} | {row['tensors']:,} | {row['bytes_before']:,} | {row['bytes_after']:,} |"
        for kind, row in plan["actions"].items()
    ]
    return "\n".join(
        [
            "## What was kept and what was quantized",
            "",
            f"The {plan['quantized_matrices']:,} matrices of the routed experts ({plan['layers']} layers, "
            f"{plan['experts_per_layer']} experts each) are {_stored(report)}: "
            f"{smoothing if experts['awq'] else ''}{experts['scales']} group scales, "
            f"{experts['rounding']} rounding (engine `{experts['engine']}`). Everything else keeps the source's bytes.",
            *_chosen(report),
            "",
            "| action | tensors | bytes before | bytes after |",
            "|---|---:|---:|---:|",
            *actions,
            "",
            "<details><summary>Every kind of tensor</summary>",
            "",
            "| tensors | action | number | bytes before | bytes after |",
            "|---|---|---:|---:|---:|",
            *rows,
            "",
            "</details>",
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
    dropped = f" {len(calibration['dropped'])} samples were dropped." if calibration["dropped"] else ""
    return "\n".join(
        [
            "## Calibration",
            "",
            f"Set `{calibration['name']}` (digest `{calibration['digest'][:16]}`): {calibration['samples']:,} samples, "
            f"{calibration['tokens']:,} tokens, {shown['programming']} programming and {shown['spoken']} spoken "
            f"languages, {len(calibration['categories'])} categories.{_drawn(drawn)}{cut}{dropped} "
            f"Every expert saw every token; tokens that the router sends to an expert count for {routed:.0%} of it.",
            "",
            f"![Samples by language and field]({CALIBRATION_PICTURE})",
            "",
            f"What the router itself sent: at least {coverage['min']:,} tokens to every expert, "
            f"{coverage['median']:,.0f} in the median; {coverage['uncovered']:,} of {coverage['pairs']:,} experts got "
            f"fewer than {coverage['min_routed_tokens']:,}.",
            "",
            f"![Routed tokens by layer and expert]({COVERAGE_PICTURE})",
        ]
    )


def _audit(report: dict[str, Any]) -> str:
    audit = report["audit"]
    equal = "all equal" if audit["kept_bytes_equal"] else "**not all equal**"
    verdict = "no difference" if not audit["differences"] else f"**{len(audit['differences'])} differences**"
    bar = "\\|"
    gates = [
        f"| {gate['name']} | {gate['meaning'].replace('|', bar)} | {number(gate['value'], '.4g')} | "
        f"{gate['limit']:.4g} | {'passed' if gate['passed'] else '**failed**'} |"
        for gate in report["gates"]
    ]
    hashes = [f"| `{file}` | `{digest['sha256']}` |" for file, digest in sorted(audit["digests"].items())]
    return "\n".join(
        [
            "## Audit",
            "",
            f"After writing, {audit['tensors']:,} source tensors were accounted for against these files: {verdict}. "
            f"{audit['kept_tensors']:,} kept tensors were compared with the source's by SHA-256, {equal}. The router "
            "of each layer was checked against the ratio of the folded norm, each expert against its source matrix.",
            "",
            "| gate | what it is | value | limit | |",
            "|---|---|---:|---:|---|",
            *gates,
            "",
            "<details><summary>SHA-256 of every shard</summary>",
            "",
            "| file | SHA-256 |",
            "|---|---|",
            *hashes,
            "",
            "</details>",
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
