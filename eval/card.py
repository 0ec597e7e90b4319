"""README.md of the output: the Hub card, every number of it taken from report.json."""

from __future__ import annotations

from typing import Any

import yaml

SPOKEN = {
    "arabic": "ar", "chinese": "zh", "french": "fr", "german": "de", "hebrew": "he", "hindi": "hi", "japanese": "ja",
    "korean": "ko", "portuguese": "pt", "russian": "ru", "spanish": "es", "turkish": "tr",
}  # fmt: skip


def card(report: dict[str, Any]) -> str:
    """The card as Markdown with front matter.

    Args:
        report: what report.json holds.
    """
    recipe, calibration, plan = report["settings"]["recipe"], report["calibration"], report["plan"]
    experts, model = recipe["experts"], report["source"]["model"]
    bits, group = experts["bits"], experts["group_size"]
    name = model.rstrip("/").rpartition("/")[2]
    spoken = [SPOKEN[c.partition("/")[2]] for c in calibration["categories"] if c.partition("/")[2] in SPOKEN]
    hub_model = model.count("/") == 1 and not model.startswith(".")
    front: dict[str, Any] = {"base_model": model, "base_model_relation": "quantized"} if hub_model else {}
    front |= {
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "tags": ["compressed-tensors", "awq", "fp8", f"int{bits}", f"w{bits}a16", "moe", "vllm"],
        "language": sorted({"en", *spoken}),
    }
    if name.startswith("MiniMax-"):
        front |= {
            "license": "other",
            "license_name": "modified-mit",
            "license_link": f"https://huggingface.co/{model}/blob/main/LICENSE",
        }
    method = (
        f"AWQ, {experts['scales']} group scales, {experts['rounding']} rounding"
        if experts["awq"]
        else experts["rounding"]
    )
    lines = [
        f"# {name}: FP8 attention, INT{bits} experts",
        "",
        f"Made from `{model}` (revision `{report['source']['revision']}`) with moe-quantizers "
        f"{report['versions']['moe-quantizers']}. Every number below is from `report.json` beside this file.",
        "",
        "## What was kept and what was quantized",
        "",
        "| action | tensors | bytes before | bytes after |",
        "|---|---:|---:|---:|",
        *(
            f"| {kind} | {row['tensors']:,} | {row['bytes_before']:,} | {row['bytes_after']:,} |"
            for kind, row in plan["actions"].items()
        ),
        "",
        f"The routed experts are INT{bits} in groups of {group} ({method}, engine `{experts['engine']}`). Kept and renamed "
        f"tensors are the source's bytes: {report['audit']['kept_tensors']:,} compared by SHA-256, "
        f"{'all equal' if report['audit']['kept_bytes_equal'] else '**not all equal**'}.",
        "",
        "## Calibration",
        "",
        f"Set `{calibration['name']}`: {calibration['samples']} samples, {calibration['tokens']:,} tokens in "
        f"{len(calibration['categories'])} categories (digest `{calibration['digest'][:16]}`). Every expert saw every token. "
        f"The router itself sent each expert a median of {report['coverage']['median']:,.0f} tokens, at least "
        f"{report['coverage']['min']:,}; {report['coverage']['uncovered']} of {report['coverage']['pairs']:,} "
        f"(layer, expert) pairs got fewer than {report['coverage']['min_routed_tokens']}.",
        "",
    ]
    if "kl" in report:
        lines += [
            "## Measured against the source",
            "",
            *table(report),
            "",
            f"On held-out set `{report['evaluated_on']['name']}` ({report['tokens']:,} tokens). "
            + " ".join(report["notes"]),
            "",
        ]
    lines += [
        "## Gates",
        "",
        *(
            f"- {'passed' if g['passed'] else '**failed**'}: {g['name']}, {g['value']:.4g} (limit {g['limit']:.4g})"
            for g in report["gates"]
        ),
        "",
        "## How to run it",
        "",
        "```",
        "vllm serve PATH_OR_ID --tensor-parallel-size 2 --enable-auto-tool-choice \\",
        "    --tool-call-parser minimax_m2 --reasoning-parser minimax_m2",
        "```",
        "",
        "## How it was made",
        "",
        "```",
        "quantize run recipe.yaml --output DIR",
        "```",
        "",
        "with `recipe.yaml` beside this file; " + ", ".join(f"{k} {v}" for k, v in report["versions"].items()) + ".",
        f"{report['seconds']['layers']:.0f} s for the layers, {report['peak_memory_bytes'] / 1e9:.1f} GB of memory at most.",
        "",
    ]
    return "---\n" + yaml.safe_dump(front, sort_keys=False) + "---\n\n" + "\n".join(lines)


def table(report: dict[str, Any]) -> list[str]:
    """Perplexity, bits per byte, KL, top-1 and routing as a Markdown table."""
    p, b, kl = report["perplexity"], report["bits_per_byte"], report["kl"]
    return [
        "| | source | this checkpoint |",
        "|---|---:|---:|",
        f"| perplexity | {p['source']:.4f} | {p['candidate']:.4f} ({p['increase']:+.2%}) |",
        f"| bits per byte | {b['source']:.4f} | {b['candidate']:.4f} |",
        f"| KL(source \\|\\| this), nats: mean / median / p99 | | {kl['mean']:.5f} / {kl['median']:.5f} / {kl['p99']:.4f} |",
        f"| same most likely token | | {report['top1']:.2%} |",
        f"| same experts chosen, worst layer | | {report['router']['min']:.2%} |",
    ]
