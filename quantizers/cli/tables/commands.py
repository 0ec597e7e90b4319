"""What the smaller commands print: verify, stitch, publish and `--version`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from quantizers.system.formatting import collapse_lines, gib, size, text_table
from quantizers.system.output_files import CARD, PAGE, REPORT


def audit_table(audit: dict[str, Any]) -> str:
    """The part of `quantize verify`'s output that compares the files with the source and report.json."""
    digests = "compared with" if audit["digests_checked"] else "not compared: there are none in"
    lines = [
        f"{audit['tensors']:,} source tensors accounted for, {audit['kept_tensors']:,} compared byte for byte",
        f"digests of the output: {digests} report.json",
        *audit["notes"],
    ]
    if audit["weight_error"]:
        lines.append(f"experts: largest relative weight error {max(audit['weight_error']):.3f}")
    differences = audit["differences"]
    lines.append(f"{len(differences):,} difference{'s'[: len(differences) != 1]}:" if differences else "no differences")
    return "\n".join([*lines, *(f"  {line}" for line in collapse_lines(differences))])


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
        f"audit     {audit['tensors']:,} source tensors accounted for, {audit['kept_tensors']:,} compared byte for "
        f"byte, {len(audit['differences'])} differences",
        *(f"          {line}" for line in collapse_lines(audit["differences"])[:10]),
        f"servers   {f'{len(misread)} ways in which one would misread it' if misread else 'all read it as meant'}",
        *(f"          {finding['where']}: {finding['problem']}" for finding in misread[:10]),
        f"size      {size(report['plan']['source_bytes'])} -> {size(report['plan']['output_bytes'])}",
        f"output    {output}: {REPORT}, {PAGE} to look at, {CARD} (the model card)",
        "",
    ]
    named, given = shlex.quote(str(output)), shlex.quote(source)
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


def dry_run_table(plan: dict[str, Any]) -> str:
    """The output of `--dry-run`: the files that would be sent, those that would not, failed checks, a checklist."""
    rows = [(file["name"], f"{file['size']:,}", file["sha256"]) for file in plan["files"]]
    visibility = {True: "private", False: "public", None: "with your account's default visibility"}[plan["private"]]
    lines = [
        f"would send {len(rows)} files, {size(plan['bytes'])}, to {plan['repo']} ({plan['revision']}), if new "
        f"{visibility}:",
        "",
        text_table(("file", "bytes", "SHA-256"), rows),
    ]
    if plan["not_sent"]:
        lines += ["", f"not of this run, so not sent: {', '.join(plan['not_sent'])}"]
    if plan["problems"]:
        forced = f", forced: {plan['forced']}" if plan["forced"] else ""
        lines += ["", f"fails {len(plan['problems'])} checks{forced}", *collapse_lines(plan["problems"])[:10]]
    points = [(point["state"], point["name"], point["words"]) for point in plan["checklist"]]
    return "\n".join([*lines, "", text_table(("state", "what", ""), points)])


def published_table(result: dict[str, Any]) -> str:
    """The output after an upload: where the files are."""
    lines = [
        f"{result['url']} ({result['revision']}, commit {result['commit'][:12]}): {len(result['files'])} files, "
        f"{size(result['bytes'])}; the Hub's hashes equal the local ones"
    ]
    if result["strangers"]:
        lines.append(f"on the Hub, but not in this folder: {', '.join(result['strangers'])}")
    if result["problems"]:
        lines.append(f"published though {len(result['problems'])} checks fail; the card says so: {result['forced']}")
    return "\n".join(lines)


def version_table(found: dict[str, Any]) -> str:
    """The program's version first, as scripts expect it; then what it runs on."""
    versions = dict(found["versions"])
    own, python, torch = (versions.pop(name) for name in ("moe-quantizers", "python", "torch"))
    built = [f"{word} {found[key]}" for key, word in (("cuda", "CUDA"), ("rocm", "ROCm")) if found[key]]
    lines = [
        f"quantize {own}",
        f"python {python}, torch {torch}, {built[0] if built else 'CPU build'}",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    for device in found["devices"]:
        kernels = f", kernels: {device['kernels']}" if "kernels" in device else ""
        lines.append(f"{device['device']}: {device['name']}, {gib(device['bytes'])}{kernels}")
    return "\n".join(lines)
