"""`quantize verify`, `stitch` and `report`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .command_line import GATE_FAILED, DebugOption, DeviceOption, JsonOption, default_output, emit


def verify(
    candidate: Annotated[Path, typer.Argument(metavar="CANDIDATE", help="a finished checkpoint")],
    source: Annotated[
        str | None, typer.Option(help="what it was made from: a folder or Hub id; as in report.json by default")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="of the source on the Hub; as in report.json by default")] = None,
    with_vllm: Annotated[
        bool, typer.Option("--with-vllm", help="also ask the vLLM of this environment for the scheme of every layer")
    ] = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check a finished checkpoint against its source, and how servers would read it; exit 3 when something differs.

    Reads the files alone: kept bytes by hash, experts, the router's compensation; config.json key by key, index,
    tokenizer and every other side file; report.json, recipe and card; then the rules by which vLLM, SGLang and
    transformers give each tensor its scheme.

    Example: quantize verify out/tiny --source models/tiny-minimax-m2
    """
    from eval.consumers import render

    from .devices import choose_device
    from .tables import audit_table
    from .verification import source_of, verify_folder

    found = verify_folder(candidate, source_of(candidate, source, revision), choose_device(device))
    report = found.as_dict()
    text, failed = audit_table(report), bool(found.differences or found.misread)
    if found.consumers is not None:
        text += "\n\n" + render(found.consumers)
    if with_vllm:
        from eval.consumer_vllm import ask_vllm

        report["vllm"] = asked = ask_vllm(candidate)
        text += f"\n\nvLLM {asked['version']}, asked for {asked['asked']:,} modules: " + (
            "\n".join([f"{len(asked['differences'])} differ", *asked["differences"]])
            if asked["differences"]
            else "every scheme is the one above"
        )
        failed = failed or bool(asked["differences"])
    emit(report, as_json, text)
    if failed:
        raise typer.Exit(GATE_FAILED)


def stitch(
    source: Annotated[str, typer.Option(help="the FP8 checkpoint: a folder or Hub id")],
    experts: Annotated[str, typer.Option(help="a checkpoint with packed experts, made from a BF16 copy of it")],
    output: Annotated[
        Path | None,
        typer.Option(help="folder for the mixed checkpoint, new or empty; out/<name of --experts>-stitched by default"),
    ] = None,
    repair_router: Annotated[
        bool,
        typer.Option("--repair-router", help="compensate the router for the norms that the experts were made with"),
    ] = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Build a mixed checkpoint from an FP8 source and experts that exist; exit 3 when its router does not fit.

    Example: quantize stitch --source models/tiny-minimax-m2 --experts out/awq --output out/mixed --repair-router
    """
    from stitch.mix import mix, stitch_table

    from .checkpoint import open_checkpoint
    from .devices import choose_device, versions
    from .interrupts import interruptible
    from .resolved import source_name

    if output is None:
        output = default_output(f"{Path(source_name(experts, Path.cwd())).name}-stitched")
    opened, packed = open_checkpoint(source), open_checkpoint(experts)
    with interruptible("give the same command again to go on") as check:
        report = mix(
            opened,
            packed,
            output,
            choose_device(device),
            repair_router=repair_router,
            versions=versions(),
            check=check,
        )
    emit(report, as_json, f"{stitch_table(report, output)}\noutput    {output}")
    if report["audit"]["differences"]:
        raise typer.Exit(GATE_FAILED)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a finished checkpoint, with its report.json")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the page to write; report.html beside report.json by default")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write report.json as one page to look at, which needs no network.

    Example: quantize report out/tiny
    """
    from eval.report_html import page

    from .atomic import write_text
    from .checkpoint import read_json
    from .own_files import PAGE, REPORT
    from .record import add_files, seal_of, write_record

    target, found = output or folder / PAGE, read_json(folder / REPORT)
    write_text(page(found), target)
    if target.resolve() == (folder / PAGE).resolve() and found.get("seal") == seal_of(found):
        write_record(folder, add_files(folder, found, [PAGE]))
    emit({"page": str(target)}, as_json, f"page: {target}")
