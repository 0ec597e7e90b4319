"""`quantize publish`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    report.json, and every gate must have passed. The model card's commands then name the repository. An interrupted
    upload resumes when the command is repeated. The token is that of `hf auth login` or HF_TOKEN.

    Example: quantize publish out/tiny --repo me/tiny-minimax-m2-FP8-INT4 --dry-run
    """
    from quantizers.cli.tables.commands import dry_run_table, published_table
    from quantizers.hub.publish import publish as check_and_upload

    found = check_and_upload(
        folder,
        repo,
        license=license,
        base_model=base_model,
        thorough=thorough,
        source=source,
        private=private,
        revision=revision,
        dry_run=dry_run,
        force=force,
        device=device,
    )
    emit(found.figures, as_json, (published_table if found.uploaded else dry_run_table)(found.figures))
    if not found.passed:
        raise typer.Exit(GATE_FAILED)
