"""What `quantize publish` prints."""

from __future__ import annotations

from typing import Any

from quantizers.system.formatting import collapse_lines, size, text_table


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
