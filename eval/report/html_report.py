"""report.html: report.json as one self-contained page; see templates/report.html.jinja."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from eval.fidelity.tables import by_part, past_the_model, shown_categories
from quantizers.system.formatting import number, size

from .rendering import base_name, render
from .serve_commands import NAMELESS, knows_vllm, repository, vllm_command, without_vllm
from .summary import choice_lines, expert_bits, layer_rows, summary, under_routed_line


def html_report(report: dict[str, Any], drawn: Mapping[str, bytes]) -> str:
    """The whole page.

    Args:
        report: the contents of report.json, from a run or a stitch; sections without data are left out.
        drawn: of `plots.draw`, made from the same report.
    """
    about = report["serving"]
    place = "." if repository(report) == NAMELESS else repository(report)
    schemes, layers = report.get("schemes"), report["layers"]
    return render(
        "report.html.jinja",
        r=report,
        name=base_name(report["source"]["model"]),
        tiles=_tiles(report),
        summary=summary(report),
        failed=any(not gate["passed"] for gate in report["gates"]),
        plots={name: f"data:image/png;base64,{base64.b64encode(raw).decode()}" for name, raw in drawn.items()},
        fidelity=_fidelity(report) if "kl" in report else [],
        past_the_model=past_the_model(report),
        under_routed="" if "stitched" in report else under_routed_line(report),
        fallbacks=[f"layer {layer['layer']}: {line}" for layer in layers for line in layer.get("fallbacks", ())],
        choice=choice_lines(schemes) if schemes else [],
        scheme_table=layer_rows(schemes) if schemes else None,
        command=vllm_command(about, place) if knows_vllm(about) else None,
        without_vllm=without_vllm(about),
        command_here=place == ".",
    )


def _tiles(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures at the head of the page, each with what it is."""
    tiles = []
    if "kl" in report:
        tiles = [
            (number(report["kl"]["mean"], ".4f"), "mean KL, nats per token"),
            (number(report["perplexity"]["increase"], "+.2%"), "perplexity"),
            (number(report["top1"], ".1%"), "same most likely token"),
        ]
    before, after = report["plan"]["source_bytes"], report["plan"]["output_bytes"]
    passed = sum(gate["passed"] for gate in report["gates"])
    return [
        *tiles,
        (size(after), f"{after / before:.0%} of the source's {size(before)}"),
        (" and ".join(f"INT{n}" for n in expert_bits(report)), "experts"),
        (f"{passed} of {len(report['gates'])}", "gates passed"),
    ]


def _fidelity(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Name and figures of each row of the table of fidelity."""
    return [
        (name, row)
        for label, part in by_part(report).items()
        for name, row in [(label, part), *shown_categories(part).items()]
    ]
