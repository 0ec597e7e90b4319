"""What the figures of a run amount to, in a few sentences for the head of the page.

A KL has no scale of its own. It is held against the recipe's limit, and against what other methods gave on the one
model that all of them were measured on, which is the tiny one: see docs/method.md, "How it compares".
"""

from __future__ import annotations

from typing import Any

from quantizers.system.formatting import number

# KL on the tiny MiniMax-M2, 4 bits in groups of 32: the first and the default row of the table in docs/method.md.
NEAREST, DEFAULT = 0.0561, 0.0053


def summary(report: dict[str, Any]) -> list[str]:
    """Sentences: the gates, the KL against its limit, and what is known to hold it against.

    Args:
        report: the contents of report.json, from a run or a stitch.
    """
    lines = [_gates(report["gates"])] if report.get("gates") else []
    return lines + ([_kl(report), _scale()] if "kl" in report else [])


def _gates(gates: list[dict[str, Any]]) -> str:
    failed = [gate["name"] for gate in gates if not gate["passed"]]
    if not failed:
        return f"All {len(gates)} gates passed." if len(gates) > 1 else "The only gate passed."
    return f"{len(failed)} of {len(gates)} gates failed: {', '.join(failed)}."


def _kl(report: dict[str, Any]) -> str:
    limit = next((gate for gate in report.get("gates", ()) if gate["name"] == "kl"), None)
    within = "its recipe sets no limit"
    if limit is not None:
        side = "within" if limit["passed"] else "above"
        within = f"{side} the limit of {limit['limit']:.4g} that its recipe sets"
    return (
        f"KL {number(report['kl']['mean'], '.4f')} nats per token on {report['evaluated_on']['name']}: {within}. "
        f"Perplexity {number(report['perplexity']['increase'], '+.2%')}, the same most likely token at "
        f"{number(report['top1'], '.1%')} of the positions."
    )


def _scale() -> str:
    return (
        "For scale: on the tiny MiniMax-M2 that comes with the program, with 4 bits and groups of 32, rounding to "
        f"nearest gives KL {NEAREST:.4f} and the default method {DEFAULT:.4f}. Another model has a scale of its own: "
        "measure it with benchmarks/methods.py."
    )
