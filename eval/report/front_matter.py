"""The front matter of the card: what the Hub shows and searches a checkpoint by."""

from __future__ import annotations

from typing import Any

from quantizers.calibration.language_id import language_code
from quantizers.recipe.portable import is_hub_id


def front_matter(report: dict[str, Any]) -> dict[str, Any]:
    """What the Hub indexes a model by.

    Args:
        report: of a run, or of a stitch, of whose calibration nothing is known. What was given for its publication
            comes before what is known of the source.
    """
    calibration, given = report.get("calibration", {}), report.get("published", {})
    front: dict[str, Any] = {}
    base = given.get("base_model") or report["source"]["model"]
    if is_hub_id(base):
        front |= {"base_model": base, "base_model_relation": "quantized"}
    front |= {"pipeline_tag": "text-generation", "library_name": "transformers"}
    known = report["source"]["license"]  # with the name and link of a licence that the Hub calls `other`
    front |= known if given.get("license") in (None, known.get("license")) else {"license": given["license"]}
    front["tags"] = [
        "compressed-tensors",
        *(["awq"] if _by_awq(report) else []),
        *(["fp8"] if has_fp8_attention(report) else []),
    ]
    front["tags"] += [*(tag for n in expert_bits(report) for tag in (f"int{n}", f"w{n}a16")), "moe", "vllm"]
    if calibration.get("datasets"):
        front["datasets"] = calibration["datasets"]
    if calibration:
        spoken = [name for name, samples in calibration["languages"]["spoken"].items() if samples]
        codes = {code for name in spoken if (code := language_code(name)) is not None}
        front["language"] = sorted({"en", *codes})
    return front


def _by_awq(report: dict[str, Any]) -> bool:
    """Whether AWQ searched the scales: as the recipe says, or the recipe of another tool."""
    if "stitched" in report:
        return "AWQModifier" in report["experts"].get("modifiers", ())
    return bool(report["settings"]["recipe"]["experts"]["awq"])


def has_fp8_attention(report: dict[str, Any]) -> bool:
    """Whether FP8 weights are kept: those with a scale per block have it renamed, those with one per row keep it."""
    plan = report["plan"]
    per_row = any(row["action"] == "keep" and row["kind"].endswith(".weight_scale") for row in plan.get("kinds", ()))
    return per_row or "rename" in plan["actions"]


def expert_bits(report: dict[str, Any]) -> list[int]:
    """Bit widths of the experts' integers; several if layers differ."""
    if report.get("schemes"):
        return sorted({layer["bits"] for layer in report["schemes"]["layers"]})
    if "stitched" in report:
        return sorted({scheme["bits"] for scheme in report["experts"]["schemes"]})
    return [report["settings"]["recipe"]["experts"]["bits"]]
