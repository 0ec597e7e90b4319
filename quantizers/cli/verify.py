"""`quantize verify`: parse, call, print, exit code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quantizers.system.formatting import collapse_lines, number

from . import common
from .adapter import Call, command

if TYPE_CHECKING:
    from quantizers.commands.verify import Verification
    from quantizers.eval.report.schema import AuditFigures


@command("quantizers.commands.verify:verify")
def verify(call: Call) -> None:
    """Compare a finished checkpoint with its source.

    Exit 3 on any difference. Reads files only: passthrough bytes by hash, experts, the router's compensation;
    config.json key by key, index, tokenizer and every other side file; report.json, recipe and card; then the
    rules by which vLLM, SGLang and transformers give each tensor its scheme. Checkpoints of AutoAWQ, GPTQ
    and AutoRound are refused: `quantize eval` measures those.

    Example: quantize verify out/tiny
    """
    from quantizers.eval.report.schema import AuditFigures

    verification: Verification = call()
    report = verification.as_dict()
    figures = AuditFigures.model_validate(verification.audit.as_dict() | {"differences": verification.differences})
    text = audit_table(figures, verification.record.notes)
    if verification.consumers is not None:
        text += "\n\n" + verification.consumers.as_text()
    if verification.vllm is not None:
        different = verification.vllm["differences"]
        text += f"\n\nvLLM {verification.vllm['version']}, asked for {verification.vllm['asked']:,} modules: " + (
            "\n".join([f"{len(different)} differ", *different]) if different else "every scheme is the one above"
        )
    common.emit(report, call.as_json, text, passed=verification.passed)


def audit_table(audit: AuditFigures, notes: Sequence[str]) -> str:
    """The part of `quantize verify`'s output that compares the files with the source and report.json."""
    digests = "compared with" if audit.digests_checked else "not compared: there are none in"
    lines = [common.accounted(audit), f"digests of the output: {digests} report.json", *notes]
    if audit.weight_error:
        largest = max(audit.weight_error, key=lambda error: math.nan if error is None else error)
        lines.append(f"experts: largest relative weight error {number(largest, '.3f')}")
    differences = audit.differences
    lines.append(f"{len(differences):,} difference{'s'[: len(differences) != 1]}:" if differences else "no differences")
    return "\n".join([*lines, *(f"  {line}" for line in collapse_lines(differences))])
