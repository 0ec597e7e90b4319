"""`quantize publish`: parse, call, print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantizers.system.formatting import collapse_lines, size, text_table

from . import common
from .adapter import Call, command

if TYPE_CHECKING:
    from quantizers.hub.publish import Publication

STATES = {
    "stops": "the upload would end there, with exit code 2",
    "missing": "it would be published without",
    "open": "only the upload itself shows this",
}


@command("quantizers.hub.publish:publish")
def publish(call: Call) -> None:
    """Check a finished checkpoint and upload it to the Hub.

    Afterwards the Hub's hashes are compared with the local ones. Every file must have the hash recorded in
    report.json, and every gate must have passed. The model card's commands then name the repository. An interrupted
    upload resumes when the command is repeated. The token is that of `hf auth login` or HF_TOKEN.

    Example: quantize publish out/tiny --repo me/tiny-minimax-m2-FP8-INT4 --dry-run
    """
    publication: Publication = call()
    table = published_table if publication.uploaded else dry_run_table
    common.emit(publication.figures, call.as_json, table(publication.figures), passed=publication.passed)


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
    meant = [f"{state}: {STATES[state]}" for state in dict.fromkeys(state for state, _, _ in points) if state in STATES]
    last = (
        f"would stop the upload: {', '.join(plan['stops'])}" if plan["stops"] else "nothing here would stop the upload"
    )
    return "\n".join([*lines, "", text_table(("state", "what", ""), points), "", *meant, last])


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
