"""The front matter of the card: what the Hub shows and searches a checkpoint by."""

from __future__ import annotations

from typing import Any

from quantizers.calibration.languages import language_code
from quantizers.recipe.portable import is_hub_id


def front_matter(report: dict[str, Any]) -> dict[str, Any]:
    """What the Hub indexes a model by."""
    experts, calibration = report["settings"]["recipe"]["experts"], report["calibration"]
    spoken = [name for name, samples in calibration["languages"]["spoken"].items() if samples]
    bits = expert_bits(report)
    front: dict[str, Any] = {}
    if is_hub_id(report["source"]["model"]):
        front |= {"base_model": report["source"]["model"], "base_model_relation": "quantized"}
    front |= {"pipeline_tag": "text-generation", "library_name": "transformers"} | report["source"]["license"]
    front["tags"] = [
        "compressed-tensors",
        *(["awq"] if experts["awq"] else []),
        *(["fp8"] if has_fp8_attention(report) else []),
    ]
    front["tags"] += [*(tag for n in bits for tag in (f"int{n}", f"w{n}a16")), "moe", "vllm"]
    if calibration["datasets"]:
        front["datasets"] = calibration["datasets"]
    codes = {code for name in spoken if (code := language_code(name)) is not None}
    return front | {"language": sorted({"en", *codes})}


def has_fp8_attention(report: dict[str, Any]) -> bool:
    """Whether FP8 weights are kept: those with a scale per block have it renamed, those with one per row keep it."""
    plan = report["plan"]
    per_row = any(row["action"] == "keep" and row["kind"].endswith(".weight_scale") for row in plan.get("kinds", ()))
    return per_row or "rename" in plan["actions"]


def expert_bits(report: dict[str, Any]) -> list[int]:
    """Bit widths of the experts' integers; several if layers differ."""
    if report.get("schemes"):
        return sorted({layer["bits"] for layer in report["schemes"]["layers"]})
    return [report["settings"]["recipe"]["experts"]["bits"]]
