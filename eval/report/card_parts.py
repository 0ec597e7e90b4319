"""What the cards of a run and of a stitch have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantizers.recipe.portable import is_hub_id
from quantizers.system.formatting import gate_figures

from .card_kept import folds
from .front_matter import expert_bits, has_fp8_attention


def title(report: dict[str, Any]) -> str:
    """The heading: the source's name, and how its parts are stored."""
    name = Path(report["source"]["model"]).name
    attention = "FP8 attention" if has_fp8_attention(report) else "attention as published"
    return f"{name}: {attention}, {' and '.join(f'INT{n}' for n in expert_bits(report))} experts"


def linked(model: str) -> str:
    """A model's name as Markdown: a link if it is a Hub id."""
    return f"[{model}](https://huggingface.co/{model})" if is_hub_id(model) else f"`{Path(model).name}`"


def failed(report: dict[str, Any]) -> str:
    """A warning if a gate failed."""
    names = [gate["name"] for gate in report["gates"] if not gate["passed"]]
    whose = "Gates" if "stitched" in report else "Gates of the recipe"
    return f"> **{whose} that failed: {', '.join(names)}.** See the audit below." if names else ""


def forced(report: dict[str, Any]) -> str:
    """A warning if it was published although a check failed."""
    stated = report.get("forced")
    if not stated:
        return ""
    problems = "\n".join(f"> - {line}" for line in stated["problems"][:20])
    more = len(stated["problems"]) - 20
    tail = f"\n> - and {more} more" if more > 0 else ""
    return (
        "> **This checkpoint did not pass its checks and was published all the same.** Reason given: "
        f"{stated['reason']}\n>\n{problems}{tail}"
    )


def plan_tables(plan: dict[str, Any]) -> list[str]:
    """The lines of two tables: tensors and bytes by action, and by kind of tensor."""
    kinds = [
        f"| `{row['kind']}` | {row['action']} | {row['tensors']:,} | {row['bytes_before']:,} | {row['bytes_after']:,} |"
        for row in plan["kinds"]
    ]
    actions = [
        f"| {kind} | {row['tensors']:,} | {row['bytes_before']:,} | {row['bytes_after']:,} |"
        for kind, row in plan["actions"].items()
    ]
    return [
        "| action | tensors | bytes before | bytes after |",
        "|---|---:|---:|---:|",
        *actions,
        "",
        "<details><summary>Every kind of tensor</summary>",
        "",
        "| tensors | action | number | bytes before | bytes after |",
        "|---|---|---:|---:|---:|",
        *kinds,
        "",
        "</details>",
    ]


def audit(report: dict[str, Any]) -> str:
    """The section on the audit: gates, and the hashes of the shards."""
    found = report["audit"]
    equal = "all equal" if found["kept_bytes_equal"] else "**not all equal**"
    verdict = "no difference" if not found["differences"] else f"**{len(found['differences'])} differences**"
    bar = "\\|"
    routers = "The router of each layer was checked against the ratio of the folded norm, each expert"
    checked = f"{routers if folds(report['plan']) else 'Each expert was checked'} against its source matrix."
    gates = []
    for gate in report["gates"]:
        value, limit = gate_figures(gate)
        passed = "passed" if gate["passed"] else "**failed**"
        gates.append(f"| {gate['name']} | {gate['meaning'].replace('|', bar)} | {value} | {limit} | {passed} |")
    hashes = [f"| `{file}` | `{digest['sha256']}` |" for file, digest in sorted(found["digests"].items())]
    return "\n".join(
        [
            "## Audit",
            "",
            f"After writing, {found['tensors']:,} source tensors were accounted for against these files: {verdict}. "
            f"{found['kept_tensors']:,} kept tensors were compared with the source's by SHA-256, {equal}. {checked}",
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
