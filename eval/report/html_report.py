"""report.html: report.json as one self-contained page; see templates/report.html.jinja."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from eval.fidelity.tables import by_part, past_the_model, shown_categories
from quantizers.system.formatting import number, size

from .rendering import base_name, render
from .schemes import choice_lines, expert_bits, layer_rows, under_routed_line
from .serve_commands import NAMELESS, knows_vllm, repository, vllm_command
from .summary import summary


def html_report(report: dict[str, Any], drawn: Mapping[str, bytes]) -> str:
    """The whole page.

    Args:
        report: the contents of report.json, from a run or a stitch, of this or an older version; sections without data
            are left out.
        drawn: of `plots.draw`, made from the same report.
    """
    about = report.get("serving")
    place = "." if repository(report) == NAMELESS else repository(report)
    schemes, layers = report.get("schemes"), report.get("layers", [])
    return render(
        "report.html.jinja",
        r=report,
        name=base_name(report["source"]["model"]),
        tiles=_tiles(report),
        summary=summary(report),
        failed=any(not gate["passed"] for gate in report.get("gates", ())),
        plots={name: f"data:image/png;base64,{base64.b64encode(raw).decode()}" for name, raw in drawn.items()},
        fidelity=_fidelity(report) if "kl" in report else [],
        positions=[
            _row(band["name"], band)[:-2] + _row(band["name"], band)[-1:] for band in report.get("positions", ())
        ],
        past_the_model=past_the_model(report),
        layer_coverage=_layer_coverage(report),
        under_routed="" if "stitched" in report else under_routed_line(report),
        fallbacks=[f"layer {layer['layer']}: {line}" for layer in layers for line in layer.get("fallbacks", ())],
        choice=choice_lines(schemes) if schemes else [],
        scheme_table=layer_rows(schemes) if schemes else None,
        sizes=_sizes(report["plan"]) if "plan" in report else [],
        worst_weight=_worst(report.get("audit", {}).get("weight_error")),
        engine_table=_engines(report["consumers"]) if report.get("consumers") else None,
        command=vllm_command(about, place) if about and knows_vllm(about) else None,
        command_here=place == ".",
        settings=_settings(report) if "settings" in report else [],
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
    if "plan" in report:
        before, after = report["plan"]["source_bytes"], report["plan"]["output_bytes"]
        tiles.append((size(after), f"{after / before:.0%} of the source's {size(before)}"))
        tiles.append((" and ".join(f"INT{n}" for n in expert_bits(report)), "experts"))
    gates = report.get("gates", ())
    passed = sum(gate["passed"] for gate in gates)
    return tiles + ([(f"{passed} of {len(gates)}", "gates passed")] if gates else [])


def _row(name: str, one: dict[str, Any]) -> list[str]:
    """A row of the tables of fidelity."""
    return [
        name,
        f"{one['samples']:,}",
        f"{one['tokens']:,}",
        number(one["perplexity"]["source"], ".3f"),
        number(one["perplexity"]["increase"], "+.2%"),
        number(one["kl"]["mean"], ".5f"),
        number(one["kl"].get("p99"), ".4f"),
        number(one["top1"], ".2%"),
    ]


def _fidelity(report: dict[str, Any]) -> list[list[str]]:
    return [
        _row(name, one)
        for label, part in by_part(report).items()
        for name, one in [(label, part), *shown_categories(part).items()]
    ]


def _layer_coverage(report: dict[str, Any]) -> list[list[str]]:
    """Layer, fewest routed tokens and whose they are, median, uncovered experts, entropy."""
    return [
        [
            str(row["layer"]),
            f"{row['min']:,}",
            str(row["worst_expert"]),
            f"{row['median']:,.0f}",
            f"{row['uncovered']:,}",
            f"{row['entropy']:.3f}",
        ]
        for row in report.get("coverage", {}).get("per_layer", ())
    ]


def _sizes(plan: dict[str, Any]) -> list[list[str]]:
    rows = [
        [kind, f"{row['tensors']:,}", size(row["bytes_before"]), size(row["bytes_after"])]
        for kind, row in plan["actions"].items()
    ]
    return [*rows, ["all", "", size(plan["source_bytes"]), size(plan["output_bytes"])]]


def _worst(errors: list[float | None] | None) -> str:
    return number(max((e for e in errors if e is not None), default=None), ".3f") if errors else "not read"


def _engines(consumers: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: how each engine reads each kind of module that there is."""
    schemes = consumers["schemes"]
    kinds = [kind for kind in next(iter(schemes.values())) if any(by_kind[kind] != "-" for by_kind in schemes.values())]
    return ["", *kinds], [[engine, *(by_kind[kind] for kind in kinds)] for engine, by_kind in schemes.items()]


def _settings(report: dict[str, Any]) -> list[tuple[str, object]]:
    settings, calibration = report["settings"], report["calibration"]
    drawn = f", {calibration['tokens']:,} tokens drawn from it" if calibration.get("drawn") else ""
    return [
        *((f"experts.{key}", value) for key, value in settings["recipe"]["experts"].items()),
        ("calibration", f"{calibration['name']}{drawn} (digest {calibration['digest'][:16]})"),
        ("hash of the recipe", settings["hash"][:16]),
        *((f"machine: {key}", value) for key, value in settings["machine"].items()),
    ]
