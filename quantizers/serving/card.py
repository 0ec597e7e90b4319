"""Values about serving engines on the model card and the HTML report, by the findings and kernels in report.json."""

from __future__ import annotations

from typing import Any

from quantizers.eval.report.schema import Report

from .check import ONE_SCHEME, REFUSES, UNREAD
from .engines import READ, SGLANG, TRANSFORMERS
from .kernels import BLOCKS_FUSED, DEEP_GEMM, KEEPS_SCALES, NEGATIVE_SCALES, UNSCALED
from .server_commands import REASONS, sglang_command, vllm_command, why_not_vllm


def on_card(report: Report, place: str) -> dict[str, Any]:
    """Values for the templates of HTML report and card: commands, engines that load it, and what to know of them.

    Args:
        place: the checkpoint's folder or Hub id.
    """
    about = report.serving
    findings = report.consumers.findings if report.consumers else []
    fails = (
        finding for finding in findings if finding.consequence.startswith((REFUSES, ONE_SCHEME, UNSCALED, BLOCKS_FUSED))
    )
    failing = {engine for finding in fails for engine in finding.engine.split(", ")}
    unserved = why_not_vllm(about.servers, transformers=about.transformers is not False)
    unread = next(
        (f"{finding.engine}: {finding.consequence}." for finding in findings if finding.consequence == UNREAD), None
    )
    return {
        "vllm": vllm_command(about, place),
        "unserved": unread or unserved,
        "sglang": None if SGLANG.name in failing else sglang_command(about, place),
        "loads": about.transformers is not False and TRANSFORMERS not in failing,
        "reasons": REASONS,
        "rerounded": _rerounded(report),
        "read": READ["vllm"],
        "negative": NEGATIVE_SCALES,
    }


def _rerounded(report: Report) -> dict[str, str]:
    """By card where vLLM rounds FP8 blocks of the source once more, what in its environment prevents that.

    Blocks that a run made have powers of two as scales, so they are not among them.
    """
    if report.plan.attention is not None:
        return {}
    kernels = report.consumers.kernels if report.consumers else {}
    rows = [row for row, kinds in kernels.items() if row.startswith("vLLM") and DEEP_GEMM.name in kinds.values()]
    cards = [row.rpartition(" ")[2] for row in rows]
    return {card: variable for card, variable in KEEPS_SCALES.items() if card in cards}
