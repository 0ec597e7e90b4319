"""`quantize publish`: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quantizers.system.errors import CheckpointError, InputError

from .options import GATE_FAILED, DebugOption, DeviceOption, JsonOption, emit


def publish(
    *,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a finished output of `quantize run`")],
    repo: Annotated[str, typer.Option(help="repository on the Hub, owner/name; created if it does not exist")],
    license: Annotated[
        str | None, typer.Option(metavar="NAME", help="licence, by the Hub's name; the source's by default")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="the source's Hub id, if it was read from a folder")
    ] = None,
    thorough: Annotated[
        bool,
        typer.Option("--thorough", help="compare every tensor with the source again, as `quantize verify` does"),
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(
            help="the source model, a folder or Hub id; implies --thorough; the one in report.json by default"
        ),
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="visibility of a new repository; your account's default otherwise"),
    ] = None,
    revision: Annotated[str, typer.Option(help="branch; created if it does not exist")] = "main",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="verify and list the files, without uploading")] = False,
    force: Annotated[
        str | None,
        typer.Option(metavar="REASON", help="publish even if a check fails; the model card states the reason"),
    ] = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check a finished checkpoint and upload it to the Hub.

    Afterwards the Hub's hashes are compared with the local ones. Every file must have the hash recorded in
    report.json, and every gate must have passed. If the report has no hashes, the checkpoint is compared with its
    source. The model card's commands then name the repository. An interrupted upload resumes when the command is
    repeated. The token is that of `hf auth login` or HF_TOKEN.

    Example: quantize publish out/tiny --repo me/tiny-minimax-m2-FP8-INT4 --dry-run
    """
    from quantizers.cli.tables.commands import dry_run_table, published_table
    from quantizers.device.devices import choose_device
    from quantizers.hub.checklist import checklist
    from quantizers.hub.checks import check_output, local_files, read_report, rehash
    from quantizers.hub.publication import rewrite, with_publication, with_statement
    from quantizers.hub.upload import upload
    from quantizers.pipeline.verification import source_of
    from quantizers.recipe.portable import is_hub_id
    from quantizers.system.progress import progress

    if not is_hub_id(repo):
        raise InputError(f"--repo {repo}: write it as owner/name")
    if force is not None and not force.strip():
        raise InputError("--force: give the reason, which the card states")
    report = read_report(folder)
    after = with_publication(report, repo, license, base_model)
    with progress("hashing", len(report["files"]) + 1) as step:
        files = local_files(folder, report, step)
    checks = check_output(
        folder,
        report,
        files,
        lambda: source_of(folder, source, report["source"]["revision"]),
        choose_device(device),
        thorough=thorough or source is not None,
    )
    for note in checks.notes:
        print(note, file=sys.stderr)
    if checks.problems and force is None and not dry_run:
        more = f" (and {len(checks.problems) - 1} more)" if len(checks.problems) > 1 else ""
        raise CheckpointError(f"{folder}: {checks.problems[0]}{more}; repair it, or give --force with a reason")
    result: dict[str, Any] = {
        "repo": repo, "revision": revision, "problems": checks.problems, "forced": force
    }  # fmt: skip
    if dry_run:
        not_sent = sorted(path.name for path in folder.iterdir() if path.name not in {file.name for file in files})
        result |= {
            "private": private,
            "files": [vars(file) for file in files],
            "bytes": sum(file.size for file in files),
            "not_sent": not_sent,
            "checklist": [vars(point) for point in checklist(after, files, checks, repo, private)],
        }
        emit(result, as_json, dry_run_table(result))
        if checks.problems and force is None:
            raise typer.Exit(GATE_FAILED)
        return
    after = with_statement(_completed(after), force, checks.problems)
    files = rehash(folder, files, rewrite(folder, report, after))
    with progress("publishing", 2) as step:
        published = upload(folder, files, repo, revision, private, step)
    emit(published.as_dict() | result, as_json, published_table(published.as_dict() | result))


def _completed(report: dict[str, Any]) -> dict[str, Any]:
    """The report with the licence and base model that its card lacks: asked for on a terminal, elsewhere named."""
    from eval.report.model_card import front_matter
    from quantizers.hub.checklist import base_model_point, license_point
    from quantizers.hub.publication import with_publication

    asked: dict[str, str | None] = {"license": None, "base_model": None}
    for point in (license_point(report, front_matter(report)), base_model_point(report, front_matter(report))):
        if point.state == "done":
            continue
        if sys.stdin.isatty():
            answer = typer.prompt(f"{point.name} (empty: none)", default="", show_default=False, err=True)
            asked[point.name] = answer.strip() or None
        else:
            print(f"the card has no {point.name}: {point.words}", file=sys.stderr)
    return with_publication(report, report["published"]["repo"], asked["license"], asked["base_model"])
