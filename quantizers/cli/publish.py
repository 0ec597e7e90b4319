"""`quantize publish`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Context, Option

from quantizers.system.formatting import collapse_lines, size, text_table

from . import common

STATES = {
    "stops": "the upload would end there, with exit code 2",
    "missing": "it would be published without",
    "open": "only the upload itself shows this",
}


def publish(
    *,
    context: Context,
    folder: Annotated[Path, Argument(metavar="DIR", help="a finished output of `quantize run`")],
    repo: Annotated[str, Option(help="repository on the Hub, owner/name; created if it does not exist")],
    license: Annotated[
        str | None, Option(metavar="NAME", help="licence, by the Hub's name; the source's by default")
    ] = None,
    base_model: Annotated[
        str | None, Option(metavar="OWNER/NAME", help="the source's Hub id, if it was read from a folder")
    ] = None,
    thorough: Annotated[
        bool, Option("--thorough", help="compare every tensor with the source again, as `quantize verify` does")
    ] = False,
    source: Annotated[
        str | None,
        Option(help="the source model, a folder or Hub id; implies --thorough; the one in report.json by default"),
    ] = None,
    private: Annotated[
        bool | None,
        Option("--private/--public", help="visibility of a new repository; your account's default otherwise"),
    ] = None,
    revision: Annotated[str, Option(help="branch; created if it does not exist")] = "main",
    dry_run: Annotated[
        bool, Option("--dry-run", help="verify, list the files, and say what would stop the upload, without it")
    ] = False,
    force: Annotated[
        str | None, Option(metavar="REASON", help="publish even if a check fails; the model card states the reason")
    ] = None,
    device: common.Device = "auto",
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Check a finished checkpoint and upload it to the Hub.

    Afterwards the Hub's hashes are compared with the local ones. Every file must have the hash recorded in
    report.json, and every gate must have passed. The model card's commands then name the repository. An interrupted
    upload resumes when the command is repeated. The token is that of `hf auth login` or HF_TOKEN.

    Example: quantize publish out/tiny --repo me/tiny-minimax-m2-FP8-INT4 --dry-run
    """
    from quantizers.hub.publish import publish as check_and_upload

    found = check_and_upload(folder, **common.given(context))
    table = published_table if found.uploaded else dry_run_table
    common.emit(found.figures, as_json, table(found.figures), passed=found.passed)


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
