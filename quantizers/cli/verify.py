"""`quantize verify`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Context, Option

from quantizers.system.formatting import collapse_lines

from . import common


def verify(
    *,
    context: Context,
    candidate: Annotated[Path, Argument(metavar="CANDIDATE", help="a finished checkpoint")],
    source: Annotated[
        str | None, Option(help="the source model, a folder or Hub id; the one in report.json by default")
    ] = None,
    revision: Annotated[
        str | None, Option(help="revision of the source on the Hub; the one in report.json by default")
    ] = None,
    with_vllm: Annotated[
        bool, Option("--with-vllm", help="also ask the installed vLLM for the scheme of every layer")
    ] = False,
    facts: common.Facts = None,
    stream: common.Stream = False,
    device: common.Device = "auto",
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Compare a finished checkpoint with its source.

    Exit 3 on any difference. Reads files only: passthrough bytes by hash, experts, the router's compensation;
    config.json key by key, index, tokenizer and every other side file; report.json, recipe and card; then the
    rules by which vLLM, SGLang and transformers give each tensor its scheme. Checkpoints of AutoAWQ, GPTQ
    and AutoRound are refused: `quantize eval` measures those.

    Example: quantize verify out/tiny
    """
    from quantizers.commands.verify import verify as verify_checkpoint

    found = verify_checkpoint(candidate, **common.given(context))
    report = found.as_dict()
    text = audit_table(report)
    if found.consumers is not None:
        text += "\n\n" + found.consumers.as_text()
    if found.vllm is not None:
        different = found.vllm["differences"]
        text += f"\n\nvLLM {found.vllm['version']}, asked for {found.vllm['asked']:,} modules: " + (
            "\n".join([f"{len(different)} differ", *different]) if different else "every scheme is the one above"
        )
    common.emit(report, as_json, text, passed=found.passed)


def audit_table(audit: dict[str, Any]) -> str:
    """The part of `quantize verify`'s output that compares the files with the source and report.json."""
    digests = "compared with" if audit["digests_checked"] else "not compared: there are none in"
    lines = [common.accounted(audit), f"digests of the output: {digests} report.json", *audit["notes"]]
    if audit["weight_error"]:
        lines.append(f"experts: largest relative weight error {max(audit['weight_error']):.3f}")
    differences = audit["differences"]
    lines.append(f"{len(differences):,} difference{'s'[: len(differences) != 1]}:" if differences else "no differences")
    return "\n".join([*lines, *(f"  {line}" for line in collapse_lines(differences))])
