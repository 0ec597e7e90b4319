"""`quantize report`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from . import common


def report(
    folder: Annotated[Path, Argument(metavar="DIR", help="a finished checkpoint with its report.json")],
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE", help="HTML file to write; report.html beside report.json by default"),
    ] = None,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Write report.json as one self-contained HTML page.

    Example: quantize report out/tiny
    """
    from pydantic import ValidationError

    from quantizers.checkpoint.reader import read_json
    from quantizers.eval.report.pages import html_report
    from quantizers.eval.report.schema import checked
    from quantizers.output.journal import refuse_unfinished
    from quantizers.output.manifest import add_files, seal_of, write_record
    from quantizers.pipeline.report_files import pictures
    from quantizers.system.errors import InputError
    from quantizers.system.files import write_text
    from quantizers.system.output_files import PAGE, REPORT

    refuse_unfinished(folder)
    target, contents = output or folder / PAGE, read_json(folder / REPORT)
    try:
        checked(contents)
    except ValidationError as failure:
        key, fault = ".".join(map(str, failure.errors()[0]["loc"])), failure.errors()[0]["msg"]
        raise InputError(f"{folder / REPORT}: {key}: {fault}; take the version of this program that wrote it") from None
    write_text(html_report(contents, pictures(contents)), target)
    if target.resolve() == (folder / PAGE).resolve() and contents.get("seal") == seal_of(contents):
        write_record(folder, add_files(folder, contents, [PAGE]))
    common.emit({"page": str(target)}, as_json, f"page: {target}")
