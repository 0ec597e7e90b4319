"""Serving engines on the model card, by the findings and kernels in report.json."""

from __future__ import annotations

from typing import Any

from quantizers.eval.serving.cards import DEEP_GEMM, KEEPS_SCALES, NEGATIVE_SCALES, UNSCALED
from quantizers.eval.serving.engines import READ, SGLANG, TRANSFORMERS

from .check import ONE_SCHEME, REFUSES


def on_card(report: dict[str, Any]) -> dict[str, Any]:
    """Values of the card's template: which engines load it, and what to know of them."""
    findings = report.get("consumers", {}).get("findings", [])
    fails = (one for one in findings if one["consequence"].startswith((REFUSES, ONE_SCHEME, UNSCALED)))
    failing = {engine for one in fails for engine in one["engine"].split(", ")}
    return {
        "sglang_loads": SGLANG.name not in failing,
        "transformers_loads": TRANSFORMERS not in failing,
        "rerounded": _rerounded(report),
        "read": READ["vllm"],
        "negative": NEGATIVE_SCALES,
    }


def _rerounded(report: dict[str, Any]) -> dict[str, str]:
    """By card where vLLM rounds FP8 blocks of the source once more, what in its environment prevents that.

    Blocks that a run made have powers of two as scales, so they are not among them.
    """
    if report["plan"].get("attention") is not None:
        return {}
    kernels = report.get("consumers", {}).get("kernels", {})
    rows = [row for row, kinds in kernels.items() if row.startswith("vLLM") and DEEP_GEMM.name in kinds.values()]
    cards = [row.rpartition(" ")[2] for row in rows]
    return {card: variable for card, variable in KEEPS_SCALES.items() if card in cards}
