"""`quantize verify`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import GATE_FAILED, DebugOption, DeviceOption, FactsOption, JsonOption, emit, refuse_unfinished_runs


def verify(
    *,
    candidate: Annotated[Path, typer.Argument(metavar="CANDIDATE", help="a finished checkpoint")],
    source: Annotated[
        str | None, typer.Option(help="the source model, a folder or Hub id; the one in report.json by default")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="revision of the source on the Hub; the one in report.json by default")
    ] = None,
    with_vllm: Annotated[
        bool, typer.Option("--with-vllm", help="also ask the installed vLLM for the scheme of every layer")
    ] = False,
    facts: FactsOption = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare a finished checkpoint with its source.

    Exit 3 on any difference. Reads files only: passthrough bytes by hash, experts, the router's compensation;
    config.json key by key, index, tokenizer and every other side file; report.json, recipe and card; then the
    rules by which vLLM, SGLang and transformers give each tensor its scheme. Checkpoints of AutoAWQ, GPTQ
    and AutoRound are refused: `quantize eval` measures those.

    Example: quantize verify out/tiny --source models/tiny-minimax-m2
    """
    from eval.serving.findings import render
    from quantizers.cli.tables.commands import audit_table
    from quantizers.device.devices import choose_device
    from quantizers.output.manifest import carried_facts
    from quantizers.pipeline.verification import source_of, verify_folder

    refuse_unfinished_runs([candidate, *([source] if source else [])])
    verification = verify_folder(candidate, source_of(candidate, source, revision), choose_device(device), facts)
    report = verification.as_dict()
    text, failed = audit_table(report), bool(verification.differences or verification.misread)
    if verification.consumers is not None:
        text += "\n\n" + render(verification.consumers)
    if with_vllm:
        from eval.serving.ask_vllm import ask_vllm

        report["vllm"] = answers = ask_vllm(candidate, facts or carried_facts(candidate))
        text += f"\n\nvLLM {answers['version']}, asked for {answers['asked']:,} modules: " + (
            "\n".join([f"{len(answers['differences'])} differ", *answers["differences"]])
            if answers["differences"]
            else "every scheme is the one above"
        )
        failed = failed or bool(answers["differences"])
    emit(report, as_json, text)
    if failed:
        raise typer.Exit(GATE_FAILED)
