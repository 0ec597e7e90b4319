"""`quantize stitch`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from quantizers.cli import common
from quantizers.cli.adapter import Call, command
from quantizers.system.formatting import collapse_lines, size
from quantizers.system.output_files import CARD, PAGE, REPORT

if TYPE_CHECKING:
    from quantizers.commands.run import FinishedCheckpoint
    from quantizers.eval.report.schema import Engines, StitchReport


@command("quantizers.repair.stitch:stitch_experts")
def stitch(call: Call) -> None:
    """Build a mixed checkpoint from existing experts.

    Everything else comes from the FP8 source. Exit 3 if its router is uncompensated.

    Example: quantize stitch --source tiny-minimax-m2 --experts out/awq --output out/mixed --repair-router
    """
    from quantizers.pipeline.report_files import parsed_stitch

    made: FinishedCheckpoint = call()
    table = ""
    if not call.as_json:
        table = stitch_table(parsed_stitch(made.report, made.folder / REPORT), made.folder, made.source)
    common.emit(made.report, call.as_json, table, passed=made.passed)


def stitch_table(report: StitchReport, output: Path, source: str) -> str:
    """The output of `quantize stitch`; `source` is a Hub id, or a folder relative to the current one."""
    audit, findings = report.audit, report.consumers.findings if report.consumers else []
    unfit = [line for line in audit.differences if "not compensated" in line]
    misread = [finding for finding in findings if finding.severity == "error"]
    lines = [f"{output} was finished before; nothing was touched"] if report.already_done else []
    lines += report.notes
    if report.stitched.repair_router:
        lines.append("the router of every smoothed layer was compensated: router * norm / norm', in float32")
    elif unfit:
        lines.append(
            f"the source's router reads a smoothed norm in {len(unfit)} layers, and sends tokens to other experts "
            "than the source does; write the compensated router with --repair-router"
        )
    lines += [
        "",
        f"audit     {common.accounted(audit)}, {len(audit.differences)} differences",
        *(f"          {line}" for line in collapse_lines(audit.differences)[:10]),
        f"servers   {_servers(report.consumers, len(misread))}",
        *(f"          {finding.where}: {finding.problem}" for finding in misread[:10]),
        f"size      {size(report.plan.source_bytes)} -> {size(report.plan.output_bytes)}",
        f"output    {output}: {REPORT}, {PAGE} to look at, {CARD} (the model card)",
        "",
    ]
    named, given = quote(str(output)), quote(source)
    if unfit:
        after = ["the same command with --repair-router and another --output, which writes compensated routers"]
    elif audit.differences or misread:
        after = [f"repair what differs; quantize verify {named} --source {given} checks it again"]
    else:
        after = [
            f"quantize eval {given} {named} --data held-out",
            f"quantize publish {named} --repo OWNER/NAME --dry-run",
            f"vllm serve {named}",
        ]
    return "\n".join([*lines, "next: " + "\n      ".join(after)])


def _servers(consumers: Engines | None, misread: int) -> str:
    if consumers and consumers.checked is False:
        return "not checked"
    return f"{misread} ways in which one would misread it" if misread else "all read it as meant"
