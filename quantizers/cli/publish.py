"""`quantize publish`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantizers.system.errors import CheckpointError, InputError

from .options import DebugOption, DeviceOption, JsonOption, emit


def publish(
    *,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a finished output of `quantize run`")],
    repo: Annotated[str, typer.Option(help="the repository on the Hub, owner/name; made where there is none")],
    source: Annotated[
        str | None, typer.Option(help="what it was made from: a folder or Hub id; as in report.json by default")
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
    """Verify a finished checkpoint, upload it to the Hub, and compare the Hub's hashes with the local ones.

    An interrupted upload goes on when the same command is given again. The token is the one of `hf auth login`
    or of HF_TOKEN.

    Example: quantize publish out/tiny --repo me/tiny-minimax-m2-FP8-INT4 --source models/tiny-minimax-m2 --dry-run
    """
    from quantizers.cli.tables.publish import dry_run_table, published_table
    from quantizers.device.devices import choose_device
    from quantizers.hub.local_files import local_files
    from quantizers.hub.publish import problems_of, read_report, state
    from quantizers.hub.upload import upload
    from quantizers.run.verification import source_of
    from quantizers.system.progress import progress

    if repo.count("/") != 1 or not all(repo.split("/")):
        raise InputError(f"--repo {repo}: write it as owner/name")
    if force is not None and not force.strip():
        raise InputError("--force: give the reason, which the card states")
    report = read_report(folder)
    opened = source_of(folder, source, report["source"]["revision"])
    problems = problems_of(folder, report, opened, choose_device(device))
    if problems and force is None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(f"{folder}: {problems[0]}{more}; repair it, or give --force with a reason")
    if not dry_run:
        state(folder, report, force, problems)
        report = read_report(folder)
    with progress("hashing", len(report["files"]) + 1) as step:
        files = local_files(folder, report, step)
    if dry_run:
        not_sent = sorted(path.name for path in folder.iterdir() if path.name not in {file.name for file in files})
        plan = {
            "repo": repo,
            "revision": revision,
            "private": private,
            "problems": problems,
            "forced": force,
            "files": [vars(file) for file in files],
            "bytes": sum(file.size for file in files),
            "not_sent": not_sent,
        }
        emit(plan, as_json, dry_run_table(plan))
        return
    with progress("publishing", 2) as step:
        published = upload(folder, files, repo, revision, private, step)
    result = published.as_dict() | {"repo": repo, "revision": revision, "problems": problems, "forced": force}
    emit(result, as_json, published_table(result))
