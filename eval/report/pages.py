"""report.html and README.md of an output, made from its report.json; see templates/.

report.html is one self-contained page. README.md is the Hub's model card, and its front matter follows the Hub's
conventions (https://huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from quantizers.calibration.samples import in_words
from quantizers.eval.coverage.summary import gate_figures
from quantizers.eval.fidelity.figures import Fidelity
from quantizers.eval.fidelity.tables import by_part, past_the_model, shown_categories
from quantizers.formats.fp8 import Fp8Blocks
from quantizers.hooks import hook
from quantizers.recipe.portable import is_hub_id
from quantizers.system.formatting import gib, number, size
from quantizers.system.output_files import CALIBRATION_PICTURE, COVERAGE_PICTURE, FACTS
from quantizers.system.strict_yaml import dump

from . import summary
from .schema import ConversionReport, Plan, Planned, PlannedByRecipe, PlannedRun, Report, RunReport, StitchReport

SMALL = 20e9  # bytes of an output up to which transformers, which dequantizes it, is worth naming
SHARED = ".shared_expert"  # in the names of the matrices of experts that every token passes through
CONVERSIONS = {
    "bf16": "dequantized from FP8 and rounded once to bfloat16, so not the source's bytes",
    "fp8": "converted to FP8 with a scale per row, by least squares; servers quantize their inputs as they run",
    "fp8-block": "converted to FP8 in blocks of 128 x 128, each scale a power of two; servers quantize their inputs as "
    "they run",
}
DECLARED = "compressed-tensors"  # what config.json declares, unless all is plain
DIGITS = 5  # significant digits of the figures in the front matter
# What page and card say of servers, in an installation that knows no rules of theirs; see `quantizers.hooks`.
UNCHECKED: dict[str, Any] = {
    "vllm": None,
    "unserved": "This installation knows no server, so no command is given here.",
    "sglang": None,
    "loads": False,
    "reasons": {},
    "rerounded": {},
    "read": None,
    "negative": None,
}
PLOTS = {"calibration": CALIBRATION_PICTURE, "coverage": COVERAGE_PICTURE}  # that are files beside the model card


def html_report(report: Report, drawn: Mapping[str, bytes]) -> str:
    """The whole page of a run or a stitch, of its report and its plots (`plots.draw`); sections without data are left
    out.
    """
    place = "." if summary.repository(report) == summary.NAMELESS else summary.repository(report)
    return _render(
        "report.html.jinja",
        report,
        place,
        name=base_name(report.source.model),
        numbers=_numbers(report),
        summary=summary.summary(report),
        plots={name: f"data:image/png;base64,{base64.b64encode(raw).decode()}" for name, raw in drawn.items()},
        shown_categories=shown_categories,
        command_here=place == ".",
    )


def model_card(report: Report) -> str:
    """The model card of a run or a stitch as Markdown with front matter."""
    plan, target = report.plan, summary.converted_to(report)
    name = summary.repository(report)
    text = _render(
        "card.md.jinja",
        report,
        name,
        stitch=isinstance(report, StitchReport),
        plan=plan,
        front=dump(front_matter(report)),
        title=_title(report),
        folds="fold" in plan.actions,
        shared=any(SHARED in row.kind for row in plan.kinds),
        dense=plan.dense_layers,
        form=_in_words(plan.attention_form),
        mtp_form=_in_words(plan.mtp.form if plan.mtp else None),
        attention=_attention(plan),
        conversion=CONVERSIONS.get(plan.attention or ""),
        declared=DECLARED in _tags(report),
        rounds_inputs=target is not None and isinstance(target.form, Fp8Blocks),
        stored=_stored(report),
        plots=PLOTS,
        repository=name,
        findings=report.consumers.findings if report.consumers else [],
        small=SMALL,
        **_of_command(report),
    )
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def _numbers(report: Planned) -> str:
    if (target := summary.converted_to(report)) is not None:
        return target.short
    return " and ".join(dict.fromkeys(scheme.short for scheme in summary.expert_schemes(report)))


def _title(report: Planned) -> str:
    form = report.plan.attention_form
    attention = f"{'FP8' if form.startswith('FP8') else form} attention" if form else "attention as published"
    if report.plan.attention == "bf16":
        attention = "BF16 attention"
    return f"{base_name(report.source.model)}: {attention}, {_numbers(report)} experts"


def _stored(report: Report) -> str:
    if (target := summary.converted_to(report)) is not None:
        return target.words
    schemes = summary.expert_schemes(report)
    if isinstance(report, StitchReport):
        return " and ".join(" in ".join(scheme.words) for scheme in schemes)
    if isinstance(report, RunReport) and report.schemes:
        return f"{_numbers(report)}, symmetric, one bfloat16 scale per group ({report.schemes.chosen})"
    (scheme,) = schemes
    return scheme.in_words


def _in_words(form: str | None) -> str:
    """A format of the output's matrices in words; None for those that are not quantized."""
    for name, words in (("FP8 block", "in FP8 with a scale per block"), ("FP8 per", "in FP8 with a scale per row")):
        if form and form.startswith(name):
            return words
    return f"in {form}" if form else "in 16 bits"


def _attention(plan: Plan) -> list[str]:
    names = (row.kind.rpartition(".self_attn.")[2] for row in plan.kinds if ".self_attn." in row.kind)
    weights = (name.rpartition(".")[0] for name in names if name.endswith((".weight", ".weight_packed")))
    return [name for name in dict.fromkeys(weights) if "norm" not in name]


def _of_command(report: Report) -> dict[str, Any]:
    """Card fields that depend on the command that made the output."""
    if isinstance(report, StitchReport):
        return _of_stitch(report)
    if isinstance(report, RunReport):
        return _of_run(report)
    return {"both_signs": False, "made_by": _run_command(report)}


def _run_command(report: Report) -> str:
    source = "" if is_hub_id(report.source.model) else " --source SOURCE"
    return f"quantize run recipe.yaml --output DIR{source}"


def _of_run(report: RunReport) -> dict[str, Any]:
    experts, licences = report.settings.recipe["experts"], report.calibration.licences
    peaks = [layer.kv_peaks for layer in report.layers if layer.kv_peaks] if report.plan.kv_cache else []
    return {
        "experts": experts,
        "both_signs": experts.get("scales_sign") == "both" and experts["engine"] == "gram",
        "licences": list(in_words(licences)) if licences else [],
        "made_by": _run_command(report),
        "peaks": [max(of_layers) for of_layers in zip(*peaks, strict=True)],
    }


def _of_stitch(report: StitchReport) -> dict[str, Any]:
    """Card fields of a stitch; the sign of its scales is not known, as its experts were quantized elsewhere."""
    flags = " --repair-router" if report.stitched.repair_router else ""
    flags += " --facts facts.yaml" if FACTS in (report.stitched.model_extra or {}) else ""
    models = (report.source.model, report.experts.model)
    names = (model if is_hub_id(model) else base_name(model) for model in models)
    source, experts = (shlex.quote(" ".join(name.split())) for name in names)
    return {
        "both_signs": False,
        "made_by": f"quantize stitch --source {source} --experts {experts} --output DIR{flags}",
    }


# Front matter ------------------------------------------------------------------------------------------------------


def front_matter(report: Planned) -> dict[str, Any]:
    """YAML metadata of the model card, by which the Hub indexes a model, with the figures that it shows.

    What was given for its publication comes before what is known of the source.
    """
    from huggingface_hub import EvalResult, ModelCardData

    given, datasets = report.published, report.calibration.datasets if isinstance(report, PlannedRun) else []
    base = (given.base_model if given else None) or report.source.model
    derived: dict[str, Any] = {"base_model": base, "base_model_relation": "quantized"} if is_hub_id(base) else {}
    data = ModelCardData(
        **derived,
        pipeline_tag="text-generation",
        library_name="transformers",
        **_license(report.source.license, given.license if given else None),
        tags=_tags(report),
        datasets=datasets or None,
        language=report.source.language,
        model_name=_title(report),
        eval_results=[EvalResult(**row) for row in _results(report)] or None,
    )
    front: dict[str, Any] = data.to_dict()
    return front if "model-index" in front else {key: value for key, value in front.items() if key != "model_name"}


@cache
def _hub_licenses() -> frozenset[str]:
    """The Hub's identifiers of licences, as its documentation lists them."""
    return frozenset(files("quantizers.eval.report").joinpath("licenses.txt").read_text().split())


def strange_licenses(license: dict[str, Any]) -> list[str]:
    """The licences of a source that have none of the Hub's names, which refuses a card with another."""
    names = license.get("license", [])
    return [name for name in ([names] if isinstance(names, str) else names) if name.lower() not in _hub_licenses()]


def _license(known: dict[str, Any], given: str | None) -> dict[str, Any]:
    """The licence in the front matter, of what is `known` of the source and `given` for the publication.

    A name that the Hub does not have is the name of another, as it calls it.
    """
    if given not in (None, known.get("license")):
        return {"license": given}
    names = known.get("license", [])
    if strange_licenses(known):
        words = names if isinstance(names, str) else " and ".join(names)
        return {"license": "other", "license_name": re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")} | {
            key: value for key, value in known.items() if key != "license"
        }
    lower = names.lower() if isinstance(names, str) else [name.lower() for name in names]
    return known | ({"license": lower} if names else {})


def _results(report: Planned) -> list[dict[str, Any]]:
    if not isinstance(report, Fidelity):
        return []
    name = report.evaluated_on.name
    common = {
        "task_type": "text-generation",
        "task_name": "Text generation, compared with the source",
        "dataset_name": name,
        "dataset_type": re.sub(r"[^\w.-]+", "-", name),
    }
    figures = (
        ("perplexity", "perplexity", report.perplexity.candidate),
        ("kl_divergence", "mean KL(source || this), nats per token", report.kl.mean),
        ("top1_agreement", "same most likely token as the source", report.top1),
    )
    return [
        common | {"metric_type": kind, "metric_name": words, "metric_value": float(f"{value:.{DIGITS}g}")}
        for kind, words, value in figures
        if value is not None
    ]


def _tags(report: Planned) -> list[str]:
    awq = False
    if isinstance(report, StitchReport):
        awq = "AWQModifier" in (report.experts.modifiers or ())
    elif isinstance(report, PlannedRun):
        awq = bool(report.settings.recipe["experts"]["awq"])
    target = summary.converted_to(report)
    kept = report.plan.kept_forms or []
    in_fp8 = any(form.startswith("FP8") for form in kept)
    kinds = (["awq"] if awq else []) + (["fp8"] if in_fp8 else [])
    kinds += [target.tag] if target and target.tag and target.tag not in kinds else []
    names = ((s.short.lower(), f"w{s.bits}a{s.activations}") for s in summary.expert_schemes(report))
    widths = dict.fromkeys(tag for pair in names for tag in pair)
    plain = target is not None and not kinds and not kept
    return [
        *([] if plain else [DECLARED]),
        *kinds,
        *widths,
        "moe",
        *(["vllm"] if "vllm" in report.serving.servers else []),
    ]


# Templates ---------------------------------------------------------------------------------------------------------


def _render(template: str, report: Report, place: str, **context: Any) -> str:
    """A template of this folder; in `.html.jinja` every value is escaped, in `.md.jinja` those with the filters below.

    `place` is the checkpoint's folder or Hub id in commands, `context` what this page alone says. What is no character,
    such as half of a surrogate pair in a JSON file, becomes a question mark.
    """
    run = report if isinstance(report, RunReport) else None
    measured = report if isinstance(report, Fidelity) else None
    on_card = hook("on_card")
    context |= UNCHECKED if on_card is None else on_card(report, place)
    context |= {
        "r": report,
        "run": run,
        "converted": report.conversion if isinstance(report, ConversionReport) else None,
        "conversion_line": summary.conversion_line(report) if isinstance(report, ConversionReport) else "",
        "settings": report.settings if isinstance(report, PlannedByRecipe) else None,
        "measured": measured,
        "failed": [gate.name for gate in report.gates if not gate.passed],
        "choice": summary.scheme_lines(report),
        "scheme_table": summary.layer_rows(run.schemes) if run and run.schemes else None,
        "parts": by_part(measured) if measured else {},
        "past_the_model": past_the_model(measured.evaluated_on) if measured else [],
        "under_routed": summary.under_routed_line(report),
        "fallbacks": [f"layer {row.layer}: {line}" for row in run.layers for line in row.fallbacks] if run else [],
    }
    return _environment().get_template(template).render(context).encode(errors="replace").decode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("quantizers.eval.report"),
        autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = (size, gib, md, cell, code, commands, linked, is_hub_id, gate_figures)
    environment.filters |= {"n": "{:,}".format, "f": number} | {function.__name__: function for function in filters}
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
