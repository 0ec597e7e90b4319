"""`quantize stitch`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from typer import Context, Option

from quantizers.cli import common
from quantizers.system.formatting import collapse_lines, size
from quantizers.system.output_files import CARD, PAGE, REPORT


def stitch(
    *,
    context: Context,
    source: Annotated[str, Option(help="the FP8 model: a folder or Hub id")],
    experts: Annotated[str, Option(help="a checkpoint with packed experts, quantized from a BF16 copy of the source")],
    output: Annotated[
        Path | None,
        common.output("folder for the mixed checkpoint, new or empty; out/<name of --experts>-stitched by default"),
    ] = None,
    repair_router: Annotated[
        bool, Option("--repair-router", help="compensate the router for the smoothed norms of the experts' checkpoint")
    ] = False,
    facts: common.Facts = None,
    device: common.Device = "auto",
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Build a mixed checkpoint from existing experts.

    Everything else comes from the FP8 source. Exit 3 if its router is uncompensated.

    Example: quantize stitch --source tiny-minimax-m2 --experts out/awq --output out/mixed --repair-router
    """
    from quantizers.repair.stitch import stitch_experts

    made = stitch_experts(**common.given(context), command=common.typed())
    common.emit(made.report, as_json, stitch_table(made.report, made.folder, made.source), passed=made.passed)


def stitch_table(report: dict[str, Any], output: Path, source: str) -> str:
    """The output of `quantize stitch`; `source` is a Hub id, or a folder relative to the current one."""
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
        f"audit     {common.accounted(audit)}, {len(audit['differences'])} differences",
        *(f"          {line}" for line in collapse_lines(audit["differences"])[:10]),
        f"servers   {_servers(consumers, len(misread))}",
        *(f"          {finding['where']}: {finding['problem']}" for finding in misread[:10]),
        f"size      {size(report['plan']['source_bytes'])} -> {size(report['plan']['output_bytes'])}",
        f"output    {output}: {REPORT}, {PAGE} to look at, {CARD} (the model card)",
        "",
    ]
    named, given = quote(str(output)), quote(source)
    if unfit:
        after = ["the same command with --repair-router and another --output, which writes compensated routers"]
    elif audit["differences"] or misread:
        after = [f"repair what differs; quantize verify {named} --source {given} checks it again"]
    else:
        after = [
            f"quantize eval {given} {named} --data held-out",
            f"quantize publish {named} --repo OWNER/NAME --dry-run",
            f"vllm serve {named}",
        ]
    return "\n".join([*lines, "next: " + "\n      ".join(after)])


def _servers(consumers: dict[str, Any], misread: int) -> str:
    if "checked" in consumers:
        return "not checked"
    return f"{misread} ways in which one would misread it" if misread else "all read it as meant"
