"""What the smaller commands print: verify, stitch, publish, `new --facts` and `--version`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantizers.checkpoint.safetensors_header import printed
from quantizers.planning.fit_facts import Fitted
from quantizers.system.formatting import collapse_lines, gib, size, text_table
from quantizers.system.output_files import CARD, PAGE, REPORT


def audit_table(audit: dict[str, Any]) -> str:
    """The part of `quantize verify`'s output that compares the files with the source and report.json."""
    lines = [
        f"{audit['tensors']:,} source tensors accounted for, {audit['kept_tensors']:,} compared byte for byte",
        "what the run wrote: "
        + (
            "compared with the digests in report.json"
            if audit["digests_checked"]
            else "not compared, for report.json has no digests of it"
        ),
        *audit["notes"],
    ]
    if audit["weight_error"]:
        lines.append(f"experts: largest relative weight error {max(audit['weight_error']):.3f}")
    if not audit["differences"]:
        return "\n".join([*lines, "no differences"])
    found = len(audit["differences"])
    listed = collapse_lines(audit["differences"])
    heading = f"{found:,} difference{'s' if found > 1 else ''}"
    return "\n".join([*lines, f"{heading}:", *(f"  {line}" for line in listed)])


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


def dry_run_table(plan: dict[str, Any]) -> str:
    """What `--dry-run` prints: every file that would be sent, those that would not, failed checks, and a checklist."""
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
    lines += [
        "",
        text_table(
            ("state", "what", ""), [(point["state"], point["name"], point["words"]) for point in plan["checklist"]]
        ),
    ]
    return "\n".join(lines)


def published_table(result: dict[str, Any]) -> str:
    """What is printed after an upload: where the files are now."""
    lines = [
        f"{result['url']} ({result['revision']}, commit {result['commit'][:12]}): {len(result['files'])} files, "
        f"{size(result['bytes'])}; the Hub's hashes equal the local ones",
    ]
    if result["strangers"]:
        lines.append(f"on the Hub, but not in this folder: {', '.join(result['strangers'])}")
    if result["problems"]:
        lines.append(f"published though {len(result['problems'])} checks fail; the card says so: {result['forced']}")
    return "\n".join(lines)


HEADER = ("what differs", "name (* = a number)", "tensors", "kept facts", "this checkpoint", "new facts")
REFUSED = "no words: refused"


def facts_table(fitted: Fitted, path: Path) -> str:
    """Every difference from the kept facts, what the user has to check, and what comes next."""
    lines = [f"nothing differs from the facts kept for {fitted.family}"]
    if fitted.differences:
        rows = [
            (
                one.what,
                printed(one.name),
                f"{one.tensors:,}" if one.tensors else "",
                one.kept,
                one.found,
                REFUSED if one.written is None else one.written,
            )
            for one in fitted.differences
        ]
        lines = [f"differences from the facts kept for {fitted.family}:", "", text_table(HEADER, rows), ""]
    if fitted.suspects:
        norm = fitted.values["norm"]["tensor"]
        lines += [
            f"nothing is known about these tensors of decoder layers, so they are named as readers of {norm}, and AWQ "
            "folds nothing into it; take those that do not read it out of norm.readers:",
            *(f"  {printed(name)}" for name in fitted.suspects),
        ]
    lines += [
        f"{one.name}: the kept facts rely on {one.kept}; check that transformers computes this model with {one.found}"
        for one in fitted.differences
        if one.what == "assert"
    ]
    if not fitted.fits:
        lines.append("`quantize plan` still refuses this checkpoint: facts have no words for the rows marked so")
    return "\n".join([*lines, f"wrote {path}; next: name it in a recipe, source: {{model: ..., facts: {path}}}"])


def version_table(found: dict[str, Any]) -> str:
    """The program's version first, as scripts expect it; then what it runs on."""
    versions = dict(found["versions"])
    own, python, torch = (versions.pop(name) for name in ("moe-quantizers", "python", "torch"))
    built = [f"{word} {found[key]}" for key, word in (("cuda", "CUDA"), ("rocm", "ROCm")) if found[key]]
    return "\n".join(
        [
            f"quantize {own}",
            f"python {python}, torch {torch}, {built[0] if built else 'CPU build'}",
            ", ".join(f"{name} {version}" for name, version in versions.items()),
            *(_described(device) for device in found["devices"]),
        ]
    )


def _described(device: dict[str, Any]) -> str:
    """A device, and what computes there if it is a GPU."""
    kernels = [f"kernels: {device['kernels']}"] if "kernels" in device else []
    return ", ".join([f"{device['device']}: {device['name']}", gib(device["bytes"]), *kernels])
