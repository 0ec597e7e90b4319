"""The card of a stitched checkpoint: its experts were packed by another tool, and what nobody here knows is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantizers.recipe.portable import is_hub_id
from quantizers.system.formatting import gib

from .card_kept import kept
from .card_parts import audit, failed, forced, linked, plan_tables, title
from .card_serving import serving


def stitched(report: dict[str, Any]) -> list[str]:
    """The sections as Markdown, without front matter.

    Args:
        report: of `quantize stitch`.
    """
    return [
        _head(report),
        forced(report) or failed(report),
        _taken(report),
        _routers(report),
        _unknown(report),
        audit(report),
        serving(report),
        _made(report),
        _limits(report),
    ]


def _head(report: dict[str, Any]) -> str:
    source, plan = report["source"], report["plan"]
    at = f" (revision `{source['revision']}`)" if is_hub_id(source["model"]) else ""
    return (
        f"# {title(report)}\n\n"
        f"{linked(source['model'])}{at}, {gib(plan['source_bytes'])}, with the packed experts of "
        f"{linked(report['experts']['model'])}, as a compressed-tensors checkpoint of {gib(plan['output_bytes'])} for "
        f"vLLM. Put together with moe-quantizers {report['versions']['moe-quantizers']}. Every number below is from "
        "`report.json` beside this file."
    )


def _taken(report: dict[str, Any]) -> str:
    plan = report["plan"]
    layers = plan["layers"] - len(plan.get("dense_layers", []))
    schemes = " and ".join(f"INT{s['bits']} in groups of {s['group_size']}" for s in report["experts"]["schemes"])
    return "\n".join(
        [
            "## What was kept and what was taken",
            "",
            f"The {plan['quantized_matrices']:,} matrices of the routed experts ({layers} layers, "
            f"{plan['experts_per_layer']} experts each) are {schemes}, symmetric, packed as they were in "
            f"{linked(report['experts']['model'])}, and so are the norms that their scales were folded into. "
            "Everything else keeps the source's bytes, except for the routers below.",
            *kept(plan),
            "",
            *plan_tables(plan),
        ]
    )


def _routers(report: dict[str, Any]) -> str:
    smoothed = [layer for layer in report["layers"] if layer["folded"]]
    if not smoothed:
        return "## Norms and routers\n\nNo norm was smoothed, so every norm and router keeps the source's bytes."
    worst = max(layer["error"] for layer in smoothed)
    ours = (
        "Here each was multiplied by the ratio of the norms, `router * norm / norm'`, in float32."
        if report["stitched"]["repair_router"]
        else "**Here each has the source's values, and was not compensated.**"
    )
    left_out = [layer for layer in smoothed if layer["router"] == "not compensated"]
    theirs = (
        f"In the experts' own checkpoint {len(left_out)} of these routers were not compensated for that, so while it "
        "was made they chose other experts than the source's. "
        if left_out
        else ""
    )
    return (
        f"## Norms and routers\n\nThe norm before the experts was divided by a scale in {len(smoothed)} of "
        f"{len(report['layers'])} layers, and the router reads it too. {theirs}{ours} The ratio was confirmed on some "
        f"experts of each layer, which are at most {worst:.1%} away from the source's times the ratio."
    )


def _unknown(report: dict[str, Any]) -> str:
    experts = report["experts"]
    form, said = experts.get("format", {}), experts.get("card", {})
    lines = [
        *([f"format: {' '.join(form.values())}"] if form else []),
        *([f"steps in its recipe: {', '.join(experts['modifiers'])}"] if "modifiers" in experts else []),
        *(f"{key} on its card: {', '.join(names)}" for key, names in sorted(said.items())),
    ]
    told = ["", "What that checkpoint says of itself:", "", *(f"- {line}" for line in lines)] if lines else []
    return "\n".join(
        [
            "## What is not known",
            "",
            "The experts were quantized elsewhere. On which texts they were calibrated, how many tokens each expert "
            "saw, and how they were rounded is not recorded, so this card has no section on calibration and coverage.",
            *told,
        ]
    )


def _made(report: dict[str, Any]) -> str:
    flags = " --repair-router" if report["stitched"]["repair_router"] else ""
    flags += " --facts facts.yaml" if "facts.yaml" in report["stitched"] else ""
    names = [name if is_hub_id(name) else Path(name).name for name in _both(report)]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    digests = report["stitched"]["digests"]
    return "\n".join(
        [
            "## How it was made",
            "",
            "```",
            f"quantize stitch --source {names[0]} --experts {names[1]} --output DIR{flags}",
            "```",
            "",
            f"Digest of the source `{digests['source'][:16]}`, of the experts' checkpoint `{digests['experts'][:16]}`. "
            f"{versions}.",
        ]
    )


def _both(report: dict[str, Any]) -> tuple[str, str]:
    return report["source"]["model"], report["experts"]["model"]


def _limits(report: dict[str, Any]) -> str:
    lines = [
        "Perplexity and KL were not measured; `quantize eval SOURCE DIR --data SET` measures them.",
        *(note for note in report["notes"] if note not in report["examined"]),  # those are under norms and routers
    ]
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines)
