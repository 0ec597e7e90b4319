"""Helpers that the commands share: common options, printing, prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from quantizers.distributed.process_group import ProcessGroup
from quantizers.system.errors import InputError, Interrupted, first_line
from quantizers.system.extras import lacking
from quantizers.system.files import json_finite, ready_file
from quantizers.system.formatting import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantizers.eval.report.schema import AuditFigures


NoPicture = Annotated[bool, Option("--no-picture", help="do not draw a picture")]
Json = Annotated[bool, Option("--json", help="one JSON object on standard output, all else on standard error")]
Debug = Annotated[bool, Option("--debug", help="show a traceback with every error")]


def typed() -> tuple[str, ...]:
    """The command as the user typed it, however the program was started."""
    return ("quantize", *sys.argv[1:])


def accounted(audit: AuditFigures) -> str:
    """Describe how many of the source's tensors an audit accounts for, and how."""
    converted, how = audit.converted_matrices, ""
    if converted:
        how = f", {converted:,} converted again and compared"
    if audit.values:
        how = f", {converted:,} converted and compared value by value: {audit.values:,} values"
    return f"{audit.tensors:,} source tensors accounted for, {audit.kept_tensors:,} compared byte for byte{how}"


def asked(question: str, option: str) -> bool:
    """The user's answer to a question that `option` needs. Raises InputError without a terminal."""
    if sys.stdin is not None:
        try:
            return typer.confirm(question, err=True)
        except typer.Abort:
            if sys.stdin.isatty():
                raise  # Ctrl-C or Ctrl-D
            print(file=sys.stderr)  # the question has no line end
    raise InputError(option, f"{question} There is no terminal to confirm on", "pass --yes")


PICTURES = (".png", ".pdf", ".svg")


def picture_file(given: Path | None, default: str, dist: ProcessGroup, *, unwanted: bool) -> Path | None:
    """The file for a picture, None if it is `unwanted`; a given one is checked here, before the work.

    Raises InputError: it cannot be drawn, or not written.
    """
    if unwanted or given is None:
        return None if unwanted else Path(default)
    if lack := lacking("matplotlib"):
        raise InputError(f"--picture {given}", *lack)
    if given.suffix.lower() not in PICTURES:
        raise InputError(f"--picture {given}", "is no kind of picture that is drawn", "end it in .png, .pdf or .svg")
    if dist.is_main:
        ready_file(given, "--picture")
    return given


def emit(
    data: dict[str, Any],
    as_json: bool,
    shown: RenderableType,
    *,
    passed: bool = True,
    pictures: Mapping[Path, Callable[[], Any]] | None = None,
) -> None:
    """Print a result: as JSON, or as the text, or what rich renders, that was made from it.

    Args:
        passed: of no gate that failed; else the command ends with exit code 3.
        pictures: by file what draws each, after the result is printed. One that fails is a note on standard error, and
            the command ends as it would without.
    """
    if as_json:
        print(json.dumps(json_finite(data), indent=1, sort_keys=True))
    elif isinstance(shown, str):
        print("\n".join(map(printable, shown.split("\n"))))
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 120, markup=False).print(shown)
    sys.stdout.flush()
    for path, figure in (pictures or {}).items():
        try:
            from quantizers.eval.report.plots import saved

            line = saved(figure, path)
        except Interrupted:
            raise
        except Exception as failure:  # of libraries and disks that are no part of the result
            print(f"no picture: {printable(first_line(failure))}", file=sys.stderr)
        else:
            print(f"\n{printable(line)}", file=sys.stderr if as_json else sys.stdout)
    if not passed:
        raise typer.Exit(3)
