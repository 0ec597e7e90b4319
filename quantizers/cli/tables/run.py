"""What `quantize run` prints at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.fidelity.tables import fidelity_table, past_the_model, positions_table
from eval.report.schemes import leaning_line, scheme_lines
from quantizers.system.progress import duration
from quantizers.system.repeated import repeated
from quantizers.system.text_table import number, plain, size


def run_table(report: dict[str, Any], output: Path, source: str) -> str:
    """What `quantize run` prints at its end.

    Args:
        source: the source's Hub id, or its folder relative to the current one, for the suggested next commands.
    """
    lines = []
    if report.get("already_done"):
        lines.append(f"{output} was finished before; nothing was touched")
    rows = [
        (
            gate["name"],
            number(gate["value"], ".4g"),
            f"{'>=' if gate.get('at_least') else '<='} {gate['limit']:.4g}",
            "passed" if gate["passed"] else "FAILED",
            gate["meaning"],
        )
        for gate in report["gates"]
    ]
    lines += ["", plain(("gate", "value", "limit", "", "what it is"), rows), ""]
    if "kl" in report:
        lines += [fidelity_table([("output", report)]), ""]
        if len(report.get("positions", ())) > 1:
            lines += [positions_table(report), ""]
    plan, seconds = report["plan"], report["seconds"]
    coverage = report["coverage"]
    lines += [
        f"audit     {report['audit']['tensors']:,} source tensors accounted for, "
        f"{report['audit']['kept_tensors']:,} kept byte for byte",
        *(f"          {line}" for line in repeated(report["audit"]["differences"])[:10]),
        f"coverage  routed tokens per expert: min {coverage['min']:,}, median {coverage['median']:,.0f}; "
        f"{coverage['uncovered']} of {coverage['pairs']:,} below {coverage['min_routed_tokens']}",
        *(f"held out  {line}" for line in past_the_model(report)),
        f"size      {size(plan['source_bytes'])} -> {size(plan['output_bytes'])}",
        *(f"{'schemes' if n == 0 else '':10}{line}" for n, line in enumerate(scheme_lines(report))),
        f"time      {duration(seconds['this_process'])}, of it {duration(seconds['layers'])} for the layers; "
        f"peak memory {size(report['peak_memory_bytes'])}",
    ]
    leaning = leaning_line(report)
    if leaning:
        lines.append(f"shares    {leaning}")
    fallbacks = sum(len(layer["fallbacks"]) for layer in report["layers"])
    if fallbacks:
        lines.append(f"fallbacks {fallbacks}, listed in report.json under layers")
    lines += [
        f"output    {output}",
        "",
        f"next: quantize verify {output} --source {source}",
        f"      quantize eval {source} {output} --data held-out",
        f"      vllm serve {output}",
    ]
    return "\n".join(lines).strip("\n")
