"""What `quantize stitch` prints at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantizers.system.formatting import collapse_lines, size
from quantizers.system.output_files import CARD, PAGE, REPORT


def stitch_table(report: dict[str, Any], output: Path, source: str) -> str:
    """What was found, whether it holds, and what can be done next.

    Args:
        source: the source's Hub id, or its folder relative to the current one.
    """
    audit, consumers = report["audit"], report.get("consumers", {"findings": []})
    unfit = [line for line in audit["differences"] if "not compensated" in line]
    misread = [finding for finding in consumers["findings"] if finding["severity"] == "error"]
    lines = [f"{output} was finished before; nothing was touched"] if report.get("already_done") else []
    lines += report["notes"]
    if report["stitched"]["repair_router"]:
        lines.append("the router of every smoothed layer was compensated: router * norm / norm', in float32")
    elif unfit:
        lines.append(
            f"the source's router reads a smoothed norm in {len(unfit)} layers, and sends tokens to other experts "
            "than the source does; write the compensated router with --repair-router"
        )
    lines += [
        "",
        f"audit     {audit['tensors']:,} source tensors accounted for, {audit['kept_tensors']:,} compared byte for "
        f"byte, {len(audit['differences'])} differences",
        *(f"          {line}" for line in collapse_lines(audit["differences"])[:10]),
        f"servers   {f'{len(misread)} ways in which one would misread it' if misread else 'all read it as meant'}",
        *(f"          {finding['where']}: {finding['problem']}" for finding in misread[:10]),
        f"size      {size(report['plan']['source_bytes'])} -> {size(report['plan']['output_bytes'])}",
        f"output    {output}: {REPORT}, {PAGE} to look at, {CARD} (the model card)",
        "",
    ]
    after = [
        f"quantize eval {source} {output} --data held-out",
        f"quantize publish {output} --repo OWNER/NAME --dry-run",
        f"vllm serve {output}",
    ]
    if unfit:
        after = ["the same command with --repair-router and another --output, which writes compensated routers"]
    elif audit["differences"] or misread:
        after = [f"repair what differs; quantize verify {output} --source {source} checks it again"]
    return "\n".join([*lines, *(f"{'next: ' if n == 0 else '      '}{line}" for n, line in enumerate(after))])
