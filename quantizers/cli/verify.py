"""`quantize verify`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import GATE_FAILED, DebugOption, DeviceOption, FactsOption, JsonOption, emit


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
    from eval.serving.check import render
    from quantizers.cli.tables.commands import audit_table
    from quantizers.commands.verify import verify as verify_checkpoint

    found = verify_checkpoint(candidate, source, revision=revision, with_vllm=with_vllm, facts=facts, device=device)
    report = found.as_dict()
    text = audit_table(report)
    if found.consumers is not None:
        text += "\n\n" + render(found.consumers)
    if found.vllm is not None:
        different = found.vllm["differences"]
        text += f"\n\nvLLM {found.vllm['version']}, asked for {found.vllm['asked']:,} modules: " + (
            "\n".join([f"{len(different)} differ", *different]) if different else "every scheme is the one above"
        )
    emit(report, as_json, text)
    if not found.passed:
        raise typer.Exit(GATE_FAILED)
