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
    from quantizers.checkpoint.reader import read_json
    from quantizers.eval.report.pages import html_report
    from quantizers.output.journal import refuse_unfinished
    from quantizers.output.manifest import add_files, seal_of, write_record
    from quantizers.pipeline.report_files import parsed, pictures
    from quantizers.system.files import ready_file, write_text
    from quantizers.system.output_files import PAGE, REPORT

    refuse_unfinished(folder)
    target, contents = output or folder / PAGE, read_json(folder / REPORT)
    made = parsed(contents, folder / REPORT)
    ready_file(target)
    write_text(html_report(made, pictures(made)), target)
    if target.resolve() == (folder / PAGE).resolve() and contents.get("seal") == seal_of(contents):
        write_record(folder, add_files(folder, contents, [PAGE]))
    common.emit({"page": str(target)}, as_json, f"page: {target}")
