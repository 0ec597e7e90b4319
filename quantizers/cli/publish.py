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
    repo: Annotated[str, typer.Option(help="the repository on the Hub, owner/name; made where there is none")],
    license: Annotated[
        str | None, typer.Option(metavar="NAME", help="the licence, as the Hub calls it; that of the source by default")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="the source on the Hub, where it was read from a folder")
    ] = None,
    thorough: Annotated[
        bool,
        typer.Option("--thorough", help="compare every tensor with the source once more, as `quantize verify` does"),
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(help="where the source is, a folder or Hub id; implies --thorough. As in report.json by default"),
    ] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="of a new repository; your account's default otherwise")
    ] = None,
    revision: Annotated[str, typer.Option(help="the branch; made where there is none")] = "main",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="verify, and show what would be sent; send nothing")
    ] = False,
    force: Annotated[
        str | None, typer.Option(metavar="REASON", help="publish although a check fails; the card states the reason")
    ] = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check a finished checkpoint, upload it to the Hub, and compare the Hub's hashes with the local ones.

    Every file must have the hash that the sealed report.json has of it, and every gate must have passed. Where the
    report cannot say that, the checkpoint is compared with its source. The card's commands then name the repository. An
    interrupted upload goes on when the same command is given again. The token is the one of `hf auth login` or of
    HF_TOKEN.

    Example: quantize publish out/tiny --repo me/tiny-minimax-m2-FP8-INT4 --dry-run
    """
    from quantizers.cli.tables.commands import dry_run_table, published_table
    from quantizers.device.devices import choose_device
    from quantizers.hub.card import described, rewrite, with_statement
    from quantizers.hub.local_files import hashed_again, local_files
    from quantizers.hub.publish import check_folder_by, read_report
    from quantizers.hub.remaining import checklist
    from quantizers.hub.upload import upload
    from quantizers.recipe.portable import is_hub_id
    from quantizers.run.verification import source_of
    from quantizers.system.progress import progress

    if not is_hub_id(repo):
        raise InputError(f"--repo {repo}: write it as owner/name")
    if force is not None and not force.strip():
        raise InputError("--force: give the reason, which the card states")
    report = read_report(folder)
    after = described(report, repo, license, base_model)
    with progress("hashing", len(report["files"]) + 1) as step:
        files = local_files(folder, report, step)
    checks = check_folder_by(
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
    files = hashed_again(folder, files, rewrite(folder, report, after))
    with progress("publishing", 2) as step:
        published = upload(folder, files, repo, revision, private, step)
    emit(published.as_dict() | result, as_json, published_table(published.as_dict() | result))


def _completed(report: dict[str, Any]) -> dict[str, Any]:
    """The report with the licence and base model that its card lacks: asked for on a terminal, elsewhere named."""
    from eval.report.model_card import front_matter
    from quantizers.hub.card import described
    from quantizers.hub.remaining import base_model_point, license_point

    asked: dict[str, str | None] = {"license": None, "base_model": None}
    for point in (license_point(report, front_matter(report)), base_model_point(report, front_matter(report))):
        if point.state == "done":
            continue
        if sys.stdin.isatty():
            answer = typer.prompt(f"{point.name} (empty: none)", default="", show_default=False, err=True)
            asked[point.name] = answer.strip() or None
        else:
            print(f"the card has no {point.name}: {point.words}", file=sys.stderr)
    return described(report, report["published"]["repo"], asked["license"], asked["base_model"])
