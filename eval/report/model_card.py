"""README.md of an output: the Hub's model card; see templates/card.md.jinja.

The front matter follows the Hub's conventions (https://huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from importlib.resources import files
from typing import Any

from eval.fidelity.tables import by_part, past_the_model
from quantizers.calibration.samples import in_words
from quantizers.calibration.set import CODES
from quantizers.recipe.portable import is_hub_id
from quantizers.system.output_files import CALIBRATION_PICTURE, COVERAGE_PICTURE
from quantizers.system.strict_yaml import dump

from .rendering import base_name, render
from .serve_commands import REASONS, knows_vllm, repository, sglang_command, vllm_command, without_vllm
from .summary import choice_lines, expert_bits, layer_rows, under_routed_line

SHARED = ".shared_expert"  # in the names of the matrices of experts that every token passes through
DIGITS = 5  # significant digits of the figures in the front matter


def model_card(report: dict[str, Any]) -> str:
    """The card as Markdown with front matter.

    Args:
        report: the contents of report.json, of a run or of a stitch.
    """
    report = json.loads(json.dumps(report, sort_keys=True))  # so the card is the same from memory and from the file
    stitch, plan, about = "stitched" in report, report["plan"], report["serving"]
    dense, name, schemes = plan["dense_layers"], repository(report), report.get("schemes")
    text = render(
        "card.md.jinja",
        r=report,
        stitch=stitch,
        plan=plan,
        front=dump(front_matter(report)),
        title=_title(report),
        forced=report.get("forced"),
        failed=[gate["name"] for gate in report["gates"] if not gate["passed"]],
        folds="fold" in plan["actions"],
        shared=any(SHARED in row["kind"] for row in plan["kinds"]),
        dense=dense,
        moe_layers=plan["layers"] - len(dense),
        form=_form(plan),
        attention=_attention(plan),
        stored=_stored(report),
        choice=choice_lines(schemes) if schemes else [],
        scheme_table=layer_rows(schemes) if schemes else None,
        plots={"calibration": CALIBRATION_PICTURE, "coverage": COVERAGE_PICTURE},
        parts=by_part(report) if "kl" in report else {},
        reasons=REASONS,
        repository=name,
        vllm=vllm_command(about, name) if knows_vllm(about) else None,
        without_vllm=without_vllm(about),
        sglang=sglang_command(about, name),
        versions=", ".join(f"{package} {version}" for package, version in report["versions"].items()),
        **(_of_stitch(report) if stitch else _of_run(report)),
    )
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def _title(report: dict[str, Any]) -> str:
    attention = "FP8 attention" if has_fp8_attention(report) else "attention as published"
    bits = " and ".join(f"INT{n}" for n in expert_bits(report))
    return f"{base_name(report['source']['model'])}: {attention}, {bits} experts"


def _stored(report: dict[str, Any]) -> str:
    """The storage format of the experts in words."""
    if "stitched" in report:
        return " and ".join(f"INT{s['bits']} in groups of {s['group_size']}" for s in report["experts"]["schemes"])
    name = " and ".join(f"INT{n}" for n in expert_bits(report))
    if report.get("schemes"):
        return f"{name}, symmetric, one bfloat16 scale per group ({report['schemes']['chosen']})"
    return f"{name}, symmetric, one bfloat16 scale per {report['settings']['recipe']['experts']['group_size']} weights"


def _form(plan: dict[str, Any]) -> str:
    """How the passthrough linear weights are stored."""
    if _per_row(plan):
        return "in FP8 with a scale per row"
    return "in FP8 with a scale per block" if "rename" in plan["actions"] else "in 16 bits"


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
    return {
        "experts": report["settings"]["recipe"]["experts"],
        "shown": {kind: sum(map(bool, counts.values())) for kind, counts in calibration["languages"].items()},
        "asked": sum(map(len, calibration.get("asked_for", {}).values())),
        "licences": list(in_words(calibration["licences"])) if calibration.get("licences") else [],
        "cut": calibration["truncated_samples"] - (drawn["cut"] if drawn else 0),
        "unusable": sum(row["count"] for row in dropped if not row["left_out"]),
        "unlisted": sum(row["count"] for row in dropped if row["left_out"]),
        "made_by": f"quantize run recipe.yaml --output DIR{source}",
        "past_the_model": past_the_model(report),
        "under_routed": under_routed_line(report),
        "fallbacks": sum(len(layer["fallbacks"]) for layer in report["layers"]),
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
        "left_out": sum(layer["router"] == "not compensated" for layer in smoothed),
        "made_by": f"quantize stitch --source {source} --experts {experts} --output DIR{flags}",
    }


# Front matter ------------------------------------------------------------------------------------------------------


def front_matter(report: dict[str, Any]) -> dict[str, Any]:
    """What the Hub indexes a model by, and the figures that it shows.

    Args:
        report: of a run, or of a stitch, of whose calibration nothing is known. What was given for its publication
            comes before what is known of the source.
    """
    from huggingface_hub import EvalResult, ModelCardData

    calibration, given = report.get("calibration", {}), report.get("published", {})
    base = given.get("base_model") or report["source"]["model"]
    spoken = [name for name, samples in calibration.get("languages", {}).get("spoken", {}).items() if samples]
    codes = {CODES[name.title()] for name in spoken if name.title() in CODES}
    data = ModelCardData(
        **({"base_model": base, "base_model_relation": "quantized"} if is_hub_id(base) else {}),
        pipeline_tag="text-generation",
        library_name="transformers",
        **_license(report["source"]["license"], given.get("license")),
        tags=_tags(report),
        datasets=calibration.get("datasets") or None,
        language=sorted({"en", *codes}) if calibration else None,
        model_name=_title(report),
        eval_results=[EvalResult(**row) for row in _results(report)] or None,
    )
    front: dict[str, Any] = data.to_dict()
    return front if "model-index" in front else {key: value for key, value in front.items() if key != "model_name"}


@cache
def hub_licenses() -> frozenset[str]:
    """The Hub's identifiers of licences, as its documentation lists them."""
    return frozenset(files("eval.report").joinpath("licenses.txt").read_text().split())


def strange_licenses(license: dict[str, Any]) -> list[str]:
    """The licences of a source that have none of the Hub's names, which refuses a card with another."""
    names = license.get("license", [])
    return [name for name in ([names] if isinstance(names, str) else names) if name.lower() not in hub_licenses()]


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
    widths = (tag for n in expert_bits(report) for tag in (f"int{n}", f"w{n}a16"))
    kinds = (["awq"] if _by_awq(report) else []) + (["fp8"] if has_fp8_attention(report) else [])
    return ["compressed-tensors", *kinds, *widths, "moe", *(["vllm"] if knows_vllm(report["serving"]) else [])]


def _by_awq(report: dict[str, Any]) -> bool:
    """Whether AWQ searched the scales: as the recipe says, or the recipe of another tool."""
    if "stitched" in report:
        return "AWQModifier" in report["experts"].get("modifiers", ())
    return bool(report["settings"]["recipe"]["experts"]["awq"])


def has_fp8_attention(report: dict[str, Any]) -> bool:
    """Whether FP8 weights are passed through: scales per block are renamed for it, those per row keep their name."""
    return _per_row(report["plan"]) or "rename" in report["plan"]["actions"]


def _per_row(plan: dict[str, Any]) -> bool:
    return any(row["action"] == "keep" and row["kind"].endswith(".weight_scale") for row in plan["kinds"])
