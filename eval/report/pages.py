"""report.html and README.md of an output, made from its report.json; see templates/.

report.html is one self-contained page. README.md is the Hub's model card, and its front matter follows the Hub's
conventions (https://huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from eval.fidelity.tables import by_part, past_the_model, shown_categories
from eval.serving.cards import DEEP_GEMM, KEEPS_SCALES
from eval.serving.check import ONE_SCHEME, REFUSES
from eval.serving.engines import READ, SGLANG, TRANSFORMERS
from eval.serving.kernels import NEGATIVE_SCALES, UNSCALED
from quantizers.calibration.samples import in_words
from quantizers.recipe.portable import is_hub_id
from quantizers.system.formatting import gate_figures, gib, number, size
from quantizers.system.output_files import CALIBRATION_PICTURE, COVERAGE_PICTURE
from quantizers.system.strict_yaml import dump

from .summary import (
    NAMELESS,
    REASONS,
    expert_schemes,
    layer_rows,
    repository,
    scheme_lines,
    sglang_command,
    summary,
    under_routed_line,
    vllm_command,
    without_vllm,
)

SMALL = 20e9  # bytes of an output up to which transformers, which dequantizes it, is worth naming
SHARED = ".shared_expert"  # in the names of the matrices of experts that every token passes through
CONVERSIONS = {
    "bf16": "dequantized from FP8 and rounded once to bfloat16, so not the source's bytes",
    "fp8": "converted to FP8 with a scale per row, by least squares; servers quantize their inputs as they run",
    "fp8-block": "converted to FP8 in blocks of 128 x 128, each scale a power of two; servers quantize their inputs as "
    "they run",
}
DIGITS = 5  # significant digits of the figures in the front matter


def html_report(report: dict[str, Any], drawn: Mapping[str, bytes]) -> str:
    """The whole page; sections without data are left out.

    Args:
        report: the contents of report.json, from a run or a stitch.
        drawn: of `plots.draw`, made from the same report.
    """
    place = "." if repository(report) == NAMELESS else repository(report)
    parts = by_part(report) if "kl" in report else {}
    return _render(
        "report.html.jinja",
        report,
        place,
        name=base_name(report["source"]["model"]),
        tiles=_tiles(report),
        summary=summary(report),
        plots={name: f"data:image/png;base64,{base64.b64encode(raw).decode()}" for name, raw in drawn.items()},
        parts=parts,
        fidelity=[
            (name, row)
            for label, part in parts.items()
            for name, row in [(label, part), *shown_categories(part).items()]
        ],
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
        (_numbers(report), "experts"),
        (f"{passed} of {len(report['gates'])}", "gates passed"),
    ]


def model_card(report: dict[str, Any]) -> str:
    """The model card as Markdown with front matter, of the contents of report.json, from a run or a stitch."""
    report = json.loads(json.dumps(report, sort_keys=True))  # so the card is the same from memory and from the file
    stitch, plan, name = "stitched" in report, report["plan"], repository(report)
    dense, serving, findings = plan["dense_layers"], report["serving"], report.get("consumers", {}).get("findings", [])
    failing = {
        engine
        for one in findings
        if one["consequence"].startswith((REFUSES, ONE_SCHEME, UNSCALED))
        for engine in one["engine"].split(", ")
    }
    text = _render(
        "card.md.jinja",
        report,
        name,
        stitch=stitch,
        plan=plan,
        front=dump(front_matter(report)),
        title=_title(report),
        forced=report.get("forced"),
        folds="fold" in plan["actions"],
        shared=any(SHARED in row["kind"] for row in plan["kinds"]),
        dense=dense,
        moe_layers=plan["layers"] - len(dense),
        form=_fp8_form(plan) or "in 16 bits",
        attention=_attention(plan),
        conversion=CONVERSIONS.get(plan.get("attention")),
        peaks=[max(row["kv_peaks"][n] for row in report["layers"] if "kv_peaks" in row) for n in range(2)]
        if plan.get("kv_cache")
        else [],
        stored=_stored(report),
        plots={"calibration": CALIBRATION_PICTURE, "coverage": COVERAGE_PICTURE},
        parts=by_part(report) if "kl" in report else {},
        reasons=REASONS,
        repository=name,
        sglang=None if SGLANG.name in failing else sglang_command(serving, name),
        loads=serving.get("transformers", True) and TRANSFORMERS not in failing,
        limits=[one for one in findings if one["severity"] == "warning"],
        rerounded=_rerounded(report),
        read=READ["vllm"],
        small=SMALL,
        versions=", ".join(f"{package} {version}" for package, version in report["versions"].items()),
        **(_of_stitch(report) if stitch else _of_run(report)),
    )
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def _numbers(report: dict[str, Any]) -> str:
    names = ("NVFP4" if s.format == "nvfp4" else f"INT{s.bits}" for s in expert_schemes(report))
    return " and ".join(dict.fromkeys(names))


def _title(report: dict[str, Any]) -> str:
    attention = "FP8 attention" if _fp8_form(report["plan"]) else "attention as published"
    if report["plan"].get("attention") == "bf16":
        attention = "BF16 attention"
    return f"{base_name(report['source']['model'])}: {attention}, {_numbers(report)} experts"


def _stored(report: dict[str, Any]) -> str:
    """The storage format of the experts in words."""
    if "stitched" in report:
        return " and ".join(
            str(s) if s.format == "nvfp4" else f"INT{s.bits} in groups of {s.group_size}"
            for s in expert_schemes(report)
        )
    if report.get("schemes"):
        return f"{_numbers(report)}, symmetric, one bfloat16 scale per group ({report['schemes']['chosen']})"
    (scheme,) = expert_schemes(report)
    if scheme.format == "nvfp4":
        return f"{scheme}: FP4 (E2M1), one FP8 scale per {scheme.group_size} weights, one float32 scale per matrix"
    return f"{_numbers(report)}, symmetric, one bfloat16 scale per {scheme.group_size} weights"


def _fp8_form(plan: dict[str, Any]) -> str | None:
    """How attention is FP8, if it is: of what passes through, scales per block are renamed, those per row are not."""
    if (attention := plan.get("attention")) is not None:
        return {"fp8": "in FP8 with a scale per row", "fp8-block": "in FP8 with a scale per block"}.get(attention)
    if any(row["action"] == "keep" and row["kind"].endswith(".weight_scale") for row in plan["kinds"]):
        return "in FP8 with a scale per row"
    return "in FP8 with a scale per block" if "rename" in plan["actions"] else None


def _rerounded(report: dict[str, Any]) -> dict[str, str]:
    """By card where vLLM rounds FP8 blocks of the source once more, what in its environment prevents that.

    Blocks that a run made have powers of two as scales, so they are not among them.
    """
    if report["plan"].get("attention") is not None:
        return {}
    kernels = report.get("consumers", {}).get("kernels", {})
    return {
        card: variable
        for card, variable in KEEPS_SCALES.items()
        if any(
            row.startswith("vLLM") and row.endswith(f" {card}") and DEEP_GEMM.name in by_kind.values()
            for row, by_kind in kernels.items()
        )
    }


def _attention(plan: dict[str, Any]) -> list[str]:
    """The names of attention's linear modules."""
    names = (row["kind"].rpartition(".self_attn.")[2] for row in plan["kinds"] if ".self_attn." in row["kind"])
    weights = (name.removesuffix(".weight") for name in names if name.endswith(".weight") and "norm" not in name)
    return list(dict.fromkeys(weights))


def _of_run(report: dict[str, Any]) -> dict[str, Any]:
    """What only the card of a run says."""
    calibration = report["calibration"]
    drawn, dropped = calibration.get("drawn"), calibration["dropped"]
    source = "" if is_hub_id(report["source"]["model"]) else " --source SOURCE"
    experts = report["settings"]["recipe"]["experts"]
    return {
        "experts": experts,
        "negative": NEGATIVE_SCALES if experts.get("scales_sign") == "both" and experts["engine"] == "gram" else None,
        "shown": {kind: sum(map(bool, counts.values())) for kind, counts in calibration["languages"].items()},
        "asked": sum(map(len, calibration.get("asked_for", {}).values())),
        "licences": list(in_words(calibration["licences"])) if calibration.get("licences") else [],
        "cut": calibration["truncated_samples"] - (drawn["cut"] if drawn else 0),
        "unusable": sum(row["count"] for row in dropped if not row["left_out"]),
        "unlisted": sum(row["count"] for row in dropped if row["left_out"]),
        "made_by": f"quantize run recipe.yaml --output DIR{source}",
    }


def _of_stitch(report: dict[str, Any]) -> dict[str, Any]:
    """What only the card of a stitch says: its experts were quantized elsewhere, and what is not known is said."""
    stitched, smoothed = report["stitched"], [layer for layer in report["layers"] if layer["folded"]]
    flags = " --repair-router" if stitched["repair_router"] else ""
    flags += " --facts facts.yaml" if "facts.yaml" in stitched else ""
    models = (report["source"]["model"], report["experts"]["model"])
    source, experts = (
        shlex.quote(" ".join((model if is_hub_id(model) else base_name(model)).split())) for model in models
    )
    return {
        "smoothed": smoothed,
        "negative": None,
        "left_out": sum(layer["router"] == "not compensated" for layer in smoothed),
        "made_by": f"quantize stitch --source {source} --experts {experts} --output DIR{flags}",
    }


# Front matter ------------------------------------------------------------------------------------------------------


def front_matter(report: dict[str, Any]) -> dict[str, Any]:
    """What the Hub indexes a model by, and the figures that it shows.

    What was given for its publication comes before what is known of the source.
    """
    from huggingface_hub import EvalResult, ModelCardData

    calibration, given = report.get("calibration", {}), report.get("published", {})
    base = given.get("base_model") or report["source"]["model"]
    data = ModelCardData(
        **({"base_model": base, "base_model_relation": "quantized"} if is_hub_id(base) else {}),
        pipeline_tag="text-generation",
        library_name="transformers",
        **_license(report["source"]["license"], given.get("license")),
        tags=_tags(report),
        datasets=calibration.get("datasets") or None,
        language=report["source"].get("language"),
        model_name=_title(report),
        eval_results=[EvalResult(**row) for row in _results(report)] or None,
    )
    front: dict[str, Any] = data.to_dict()
    return front if "model-index" in front else {key: value for key, value in front.items() if key != "model_name"}


@cache
def _hub_licenses() -> frozenset[str]:
    """The Hub's identifiers of licences, as its documentation lists them."""
    return frozenset(files("eval.report").joinpath("licenses.txt").read_text().split())


def strange_licenses(license: dict[str, Any]) -> list[str]:
    """The licences of a source that have none of the Hub's names, which refuses a card with another."""
    names = license.get("license", [])
    return [name for name in ([names] if isinstance(names, str) else names) if name.lower() not in _hub_licenses()]


def _license(known: dict[str, Any], given: str | None) -> dict[str, Any]:
    """The licence in the front matter: a name that the Hub does not have is the name of another, as it calls it.

    Args:
        known: of the source, with the name and link of a licence that the Hub calls `other`.
        given: for the publication.
    """
    if given not in (None, known.get("license")):
        return {"license": given}
    names = known.get("license", [])
    if strange_licenses(known):
        words = names if isinstance(names, str) else " and ".join(names)
        return {"license": "other", "license_name": re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")} | {
            key: value for key, value in known.items() if key != "license"
        }
    return known | (
        {"license": names.lower() if isinstance(names, str) else [n.lower() for n in names]} if names else {}
    )


def _results(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures that the Hub shows."""
    if "kl" not in report:
        return []
    name = report["evaluated_on"]["name"]
    common = {
        "task_type": "text-generation",
        "task_name": "Text generation, compared with the source",
        "dataset_name": name,
        "dataset_type": re.sub(r"[^\w.-]+", "-", name),
    }
    figures = (
        ("perplexity", "perplexity", report["perplexity"]["candidate"]),
        ("kl_divergence", "mean KL(source || this), nats per token", report["kl"]["mean"]),
        ("top1_agreement", "same most likely token as the source", report["top1"]),
    )
    return [
        common | {"metric_type": kind, "metric_name": words, "metric_value": float(f"{value:.{DIGITS}g}")}
        for kind, words, value in figures
        if value is not None
    ]


def _tags(report: dict[str, Any]) -> list[str]:
    if "stitched" in report:
        awq = "AWQModifier" in report["experts"].get("modifiers", ())
    else:
        awq = report["settings"]["recipe"]["experts"]["awq"]
    kinds = (["awq"] if awq else []) + (["fp8"] if _fp8_form(report["plan"]) else [])
    names = (
        ("nvfp4" if s.format == "nvfp4" else f"int{s.bits}", f"w{s.bits}a{s.activations}")
        for s in expert_schemes(report)
    )
    widths = dict.fromkeys(tag for pair in names for tag in pair)
    return ["compressed-tensors", *kinds, *widths, "moe", *(["vllm"] if "vllm" in report["serving"]["servers"] else [])]


# Templates ---------------------------------------------------------------------------------------------------------


def _render(template: str, report: dict[str, Any], place: str, **context: Any) -> str:
    """A template of this folder; in `.html.jinja` every value is escaped, in `.md.jinja` those with the filters below.

    What is no character, such as half of a surrogate pair in a JSON file, becomes a question mark.

    Args:
        report: for what both pages say.
        place: the checkpoint's folder or Hub id in commands.
        context: what this page alone says.
    """
    context |= {
        "r": report,
        "failed": [gate["name"] for gate in report["gates"] if not gate["passed"]],
        "choice": scheme_lines(report),
        "scheme_table": layer_rows(report["schemes"]) if report.get("schemes") else None,
        "past_the_model": past_the_model(report),
        "under_routed": under_routed_line(report),
        "fallbacks": [f"layer {row['layer']}: {line}" for row in report["layers"] for line in row.get("fallbacks", ())],
        "vllm": vllm_command(report["serving"], place),
        "without_vllm": without_vllm(report["serving"]),
    }
    return _environment().get_template(template).render(context).encode(errors="replace").decode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("eval.report"),
        autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "n": lambda value: f"{value:,}",
        "f": number,
        "size": size,
        "gib": gib,
        "md": md,
        "cell": cell,
        "code": code,
        "commands": commands,
        "linked": linked,
        "is_hub_id": is_hub_id,
        "gate_figures": gate_figures,
    }
    return environment


# What Markdown or the Hub's mathematics read within a line; an underscore between two letters is none.
_MARKS = re.compile(r"[\\`*\[\]<>&$~]|(?<![^\W_])_|_(?![^\W_])|(?<!\S)#")
_OPENING = re.compile(r"[+=-]|\d+(?=[.)](?: |$))")  # what makes more than a paragraph of a line that begins with it


def md(text: object) -> str:
    """Plain text in a line of Markdown, of which nothing is a mark."""
    line = _MARKS.sub(lambda mark: f"&#{ord(mark[0])};", " ".join(str(text).split()))
    return f"&#{ord(line[0])};{line[1:]}" if _OPENING.match(line) else line


def code(text: object) -> str:
    """Text as code in a line of Markdown, between more backticks than are in it."""
    line = " ".join(str(text).split()) or " "
    ticks = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    room = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{room}{line}{room}{ticks}"


def commands(text: str) -> Markup:
    """A line of HTML, escaped, in which what stands between backticks is code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def cell(markdown: str) -> str:
    """A line of Markdown in a cell of a table."""
    return markdown.replace("|", r"\|")


def linked(model: str) -> str:
    """A model's name as Markdown: a link if it is a Hub id, else the name of its folder."""
    return f"[{md(model)}](https://huggingface.co/{model})" if is_hub_id(model) else code(base_name(model))


def base_name(model: object) -> str:
    """The last part of a Hub id or folder."""
    return str(model).rstrip("/").rpartition("/")[2]
