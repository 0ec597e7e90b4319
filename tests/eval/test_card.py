"""The card: everything in it comes from the report, and the Hub's own classes take its front matter."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished
from huggingface_hub import ModelCard
from own_tokenizer import write_own_tokenizer

from quantizers.architectures.families import architecture_for
from quantizers.checkpoint.reader import CONFIG, Checkpoint, open_folder
from quantizers.eval.fidelity.figures import Fidelity
from quantizers.eval.report.pages import front_matter, model_card
from quantizers.eval.report.plots import calibration_figure, draw
from quantizers.eval.report.schema import Calibration, checked
from quantizers.hub.publish import card_points
from quantizers.pipeline.report import source_card
from quantizers.serving.check import ONE_SCHEME, REFUSES
from quantizers.serving.report_section import server_options
from quantizers.system.output_files import CALIBRATION_PICTURE, COVERAGE_PICTURE

Report = dict[str, Any]


@pytest.fixture
def report(finished: Finished) -> Report:
    return copy.deepcopy(finished.report)


LICENSES = [
    ("---\nlicense: [mit, Apache-2.0]\n---\n", {"license": ["mit", "apache-2.0"]}, "done", "mit, apache-2.0"),
    ("\ufeff---\r\nlicense: mit\r\n---\r\n# x\r\n", {"license": "mit"}, "done", "mit"),
    ("---\nname: a---\nlicense: [gemma]\n---\n", {"license": "gemma"}, "done", "gemma"),
    (
        "---\nlicense: other\nlicense_name: modified-mit\nlicense_link: LICENSE\n---\n",
        {"license": "other", "license_name": "modified-mit", "license_link": "LICENSE"},
        "done",
        "modified-mit",
    ),
    (
        "---\nlicense: [mit, My License 2]\n---\n",
        {"license": "other", "license_name": "mit-and-my-license-2"},
        "missing",
        "My License 2: no name of the Hub's, so the card says other; give --license NAME",
    ),
    ("---\nlicense: {a: b}\n---\n", {}, "missing", "the source names none; give --license NAME"),
    ("---\nlicense: null\n---\n", {}, "missing", "the source names none; give --license NAME"),
    ("---\nlicense: mit\n---\n# caf\udce9 in Latin-1\n", {"license": "mit"}, "done", "mit"),
]


@pytest.mark.parametrize(("card", "wanted", "state", "words"), LICENSES)
def test_a_licence_is_kept_as_the_hub_takes_it(
    report: Report, tiny_model: Path, tmp_path: Path, card: str, wanted: dict[str, Any], state: str, words: str
) -> None:
    """Several, one that the Hub calls `other`, one by no name of the Hub's; behind a byte order mark, with CRLF."""
    (tmp_path / "README.md").write_text(card, encoding="utf-8", errors="surrogateescape", newline="")
    source = replace(open_folder(tiny_model), folder=tmp_path)
    report["source"] |= source_card(architecture_for(source.config, CONFIG), "model", source).as_dict()
    front = ModelCard(model_card(checked(report))).data.to_dict()
    assert {key: value for key, value in front.items() if key.startswith("license")} == wanted
    assert checked(report).source.license == report["source"]["license"]
    assert (state, words) in [(point.state, point.words) for point in card_points(checked(report))]
    given = report | {"published": {"repo": "a/b", "license": "mit"}}
    assert front_matter(checked(given))["license"] == "mit"
    assert card_points(checked(given))[0].words == "mit"


@pytest.fixture
def published(report: Report) -> Report:
    """As it would be for a model of the Hub with a set of Hub datasets."""
    report["source"] = {
        "model": "MiniMaxAI/MiniMax-M2.1",
        "revision": "main",
        "digest": "0" * 64,
        "license": {"license": "other", "license_name": "modified-mit"},
    }
    report["calibration"]["datasets"] = ["HuggingFaceH4/ultrachat_200k", "nvidia/HelpSteer"]
    report["calibration"]["languages"]["spoken"] = {"Chinese": 3, "Hindi": 0, "French": 1}
    return report


def test_the_card_of_a_run_is_that_of_its_report(finished: Finished) -> None:
    from_file = json.loads((finished.folder / "report.json").read_text())
    text = (finished.folder / "README.md").read_text()
    assert model_card(checked(from_file)) == model_card(checked(finished.report)) == text
    for file, digest in from_file["audit"]["digests"].items():
        assert f"| `{file}` | `{digest['sha256']}` |" in text


def test_front_matter(published: Report) -> None:
    data = ModelCard(model_card(checked(published))).data
    assert ModelCard(model_card(checked(published))).data.to_dict() == {
        "base_model": "MiniMaxAI/MiniMax-M2.1",
        "base_model_relation": "quantized",
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "license": "other",
        "license_name": "modified-mit",
        "tags": ["compressed-tensors", "awq", "fp8", "int4", "w4a16", "moe", "vllm"],
        "datasets": ["HuggingFaceH4/ultrachat_200k", "nvidia/HelpSteer"],
        "model-index": front_matter(checked(published))["model-index"],
    }
    assert data.base_model == "MiniMaxAI/MiniMax-M2.1"
    assert "base_model" not in front_matter(
        checked(published | {"source": published["source"] | {"model": "../models/x"}})
    )


def test_the_hub_reads_the_figures(report: Report) -> None:
    """By huggingface_hub's own parser; a report without figures has none."""
    results = ModelCard(model_card(checked(report))).data.eval_results
    figures = {one.metric_type: one.metric_value for one in results}
    wanted = {
        "perplexity": report["perplexity"]["candidate"],
        "kl_divergence": report["kl"]["mean"],
        "top1_agreement": report["top1"],
    }
    assert figures == pytest.approx(wanted, rel=1e-4)
    assert {one.dataset_name for one in results} == {report["evaluated_on"]["name"]}
    report = {key: value for key, value in report.items() if key not in Fidelity.model_fields}
    assert ModelCard(model_card(checked(report))).data.eval_results is None


@pytest.mark.parametrize(
    ("card", "wanted"),
    [("language: [en, no, zh]", ["en", "no", "zh"]), ("language: ar", ["ar"]), ("license: mit", None)],
)
def test_the_languages_are_those_of_the_sources_card(
    report: Report, tiny_model: Path, tmp_path: Path, card: str, wanted: list[str] | None
) -> None:
    """Not those of the calibration set, which the Hub would show as the model's; `no` is no boolean."""
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
    source = replace(open_folder(tiny_model), folder=tmp_path)
    report["source"] |= source_card(architecture_for(source.config, CONFIG), "model", source).as_dict()
    report["calibration"]["languages"]["spoken"] = {"French": 1}
    assert ModelCard(model_card(checked(report))).data.to_dict().get("language") == wanted
    assert checked(report).source.language == wanted


def test_a_card_says_how_vllm_keeps_the_scales_of_kept_blocks(published: Report) -> None:
    """Beside the command; not of blocks that the run made, and not where no kernel rounds them."""
    words = "Put `VLLM_USE_DEEP_GEMM_E8M0=0` before it on Hopper, `VLLM_USE_DEEP_GEMM=0` before it on Blackwell: "
    text = model_card(checked(published))
    assert words in text.partition("vllm serve")[2].partition("SGLang")[0]
    made = published | {"plan": published["plan"] | {"attention": "fp8-block"}}
    rows = {card: dict.fromkeys(row, "CUTLASS") for card, row in published["consumers"]["kernels"].items()}
    kept = published | {"consumers": published["consumers"] | {"kernels": rows}}
    for other in (made, kept):
        assert "VLLM_USE_DEEP_GEMM" not in model_card(checked(other))


def test_how_to_run_it_comes_first(published: Report) -> None:
    headings = [line for line in model_card(checked(published)).splitlines() if line.startswith("## ")]
    assert headings[:2] == ["## How to run it", "## Measured against the source"]


LEFT_OUT = [{"source": "x", "reason": "code/c is not in languages", "count": 3, "first": "x:1", "left_out": True}]


@pytest.mark.parametrize(
    ("path", "value", "shown"),
    [
        ("plan/source_bytes", 7 * 2**30, "7.0 GiB"),
        ("plan/output_bytes", 5 * 2**30, "checkpoint of 5.0 GiB"),
        ("plan/quantized_matrices", 98_765, "The 98,765 matrices"),
        ("plan/actions/keep/tensors", 77_771, "| keep | 77,771 |"),
        ("plan/kinds/0/bytes_after", 66_661, "66,661"),
        ("calibration/samples", 55_551, "55,551 samples"),
        ("calibration/tokens", 44_441, "44,441 tokens"),
        ("calibration/digest", "abc" * 20, "abcabcabcabcabca"),
        ("calibration/truncated_samples", 33_331, "33,331 samples were cut"),
        ("calibration/asked_for", {"programming": {"Zig": 2}, "spoken": {}}, "Prompts ask for 1 language, which"),
        ("calibration/licences", {"a/b": "cc-by-nc-4.0", "c": "mit"}, "Licences: cc-by-nc-4.0 (1), mit (1)."),
        ("calibration/licences", {"a/b": "cc-by-nc-4.0"}, "Not for commercial use: a/b (cc-by-nc-4.0)."),
        ("calibration/dropped", LEFT_OUT, "3 were left out: the set does not list their language."),
        ("settings/recipe/experts/routed_weight", 0.37, "count for 37% of it"),
        ("settings/recipe/experts/group_size", 64, "one bfloat16 scale per 64 weights"),
        ("settings/recipe/experts/rounding", "nearest", "nearest rounding"),
        ("coverage/min", 22_221, "at least 22,221 tokens"),
        ("coverage/median", 11_112.0, "11,112 in the median"),
        ("coverage/uncovered", 9_876, "9,876 of "),
        ("perplexity/source", 12.3456, "| 12.3456 |"),
        ("perplexity/candidate", 65.4321, "| 65.4321"),
        ("perplexity/increase", 0.4321, "+43.21%"),
        ("bits_per_byte/candidate", 9.8765, "9.8765"),
        ("kl/mean", 0.98765, "0.98765"),
        ("kl/p99", 8.7654, "8.7654"),
        ("kl/p999", 7.6543, "7.6543"),
        ("kl/max", 6.5432, "6.5432"),
        ("reverse_kl/mean", 0.87654, "0.87654"),
        ("worst/place", "mine.jsonl:7", "`mine.jsonl:7`"),
        ("worst/kl", 0.76543, "0.76543"),
        ("worst/max", 5.4321, "5.4321"),
        ("worst/position", 65_431, "at position 65,431"),
        ("top1", 0.4567, "45.67%"),
        ("router/min", 0.3456, "chooses the same experts for 34.56%"),
        ("tokens", 87_654, "87,654 scored tokens"),
        ("audit/tensors", 76_543, "76,543 source tensors"),
        ("audit/kept_tensors", 65_432, "65,432 passthrough tensors"),
        ("audit/kept_bytes_equal", False, "**not all equal**"),
        ("audit/differences", ["x"], "**1 difference**"),
        ("gates/0/value", 4321, "| 4321 |"),
        ("gates/0/passed", False, "**Gates of the recipe that failed: audit.**"),
        ("serving/parsers", {"tool-call-parser": "mine"}, "--tool-call-parser mine"),
        ("serving/sglang", {"tool-call-parser": "its"}, "--model-path PATH_OR_ID \\\n    --tool-call-parser its"),
        ("serving/sampling", {"temperature": 0.123}, '{"temperature": 0.123}'),
        ("serving/fits/0/weights", 99 * 2**30, "99.0 GiB"),
        ("serving/fits/0/utilisation", 0.5, "--gpu-memory-utilization 0.5"),
        ("seconds/layers", 54_321.0, "54,321 s for the layers"),
        ("peak_memory_bytes", 123_400_000_000, "123.4 GB of memory at most"),
        ("settings/hash", "f" * 64, "hash `ffffffffffffffff`"),
        ("versions/torch", "99.1", "torch 99.1"),
        ("notes", ["a note"], "- a note"),
    ],
)
def test_every_number_comes_from_the_report(report: Report, path: str, value: Any, shown: str) -> None:
    assert shown not in model_card(checked(report))
    *parents, last = path.split("/")
    part: Any = report
    for key in parents:
        part = part[int(key)] if isinstance(part, list) else part[key]
    assert last in part
    part[last] = value
    assert shown in model_card(checked(report))


def test_what_was_not_measured_is_said(report: Report) -> None:
    report = {key: value for key, value in report.items() if key not in Fidelity.model_fields}
    text = model_card(checked(report))
    assert "## Measured" not in text
    assert "were not measured" in text


def test_a_forced_publication_is_said_first(report: Report) -> None:
    report["forced"] = {"reason": "because", "problems": [f"tensor {i}: bytes differ" for i in range(30)]}
    text = model_card(checked(report))
    assert text.index("Reason given: because") < text.index("## What was passed through")
    assert "and 10 more" in text


def test_plots_have_the_same_bytes_twice(report: Report, finished: Finished) -> None:
    drawn, _ = draw(checked(report))
    for name, raw in ((CALIBRATION_PICTURE, drawn["calibration"]), (COVERAGE_PICTURE, drawn["coverage"])):
        assert raw.startswith(b"\x89PNG")
        assert raw == (finished.folder / name).read_bytes()
        assert f"]({name})" in model_card(checked(report))


def test_the_calibration_picture_shows_tokens_and_what_was_cut(published: Report) -> None:
    """The heights of the bars, against sums over the report's rows; and the set's totals in its heading."""
    calibration = published["calibration"]
    rows = {"samples": 3, "tokens": 60, "truncated": 2, "truncated_tokens": 140}
    whole = {"samples": 1, "tokens": 90, "truncated": 0, "truncated_tokens": 0}
    fields = {"code/rust": rows, "math": whole}
    languages = {"programming": {"Rust": rows, "Zig": dict.fromkeys(rows, 0)}, "spoken": {}}
    totals = {"samples": 4, "tokens": 150, "truncated_samples": 2, "truncated_tokens": 140}
    of_texts = {"categories": fields, "by_language": languages, "asked_for": {"programming": {"Zig": 3}}}
    figure = calibration_figure(Calibration.model_validate(calibration | totals | of_texts), "tiny")
    assert figure.axes[0].get_title("left").endswith("; 3 more only ask for one")
    heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    assert heights == [[60, 0], [0.7, 0], [90], [0]]
    names = [[label.get_text() for label in axes.get_xticklabels()] for axes in figure.axes]
    assert names == [[], ["Rust", "Zig"], [], ["math"]]
    assert [axes.get_ylim()[1] for axes in figure.axes][1::2] == [1, 1], "a share is drawn from 0 to 100 %"
    heading = figure.get_suptitle()
    assert "for tiny: 4 samples, 150 tokens; 2 samples were cut, and lost 48% of the texts' tokens" in heading
    uncut = calibration | totals | {"truncated_samples": 0, "truncated_tokens": 0}
    assert "no sample was cut" in calibration_figure(Calibration.model_validate(uncut), "tiny").get_suptitle()


def test_a_family_that_vllm_does_not_know_has_no_command_to_serve_it(published: Report) -> None:
    assert "vllm serve" in model_card(checked(published))
    for servers, sentence in (
        (["sglang"], "No release of vLLM that was known when this was made has a model of this family. transformers"),
        ([], "so none was checked; vLLM may take it with a model of its own or by its Transformers backend"),
    ):
        text = model_card(checked(published | {"serving": published["serving"] | {"servers": servers}}))
        assert "vllm serve" not in text
        assert sentence in text


@pytest.mark.parametrize(
    ("engine", "consequence", "command"),
    [("SGLang", f"{REFUSES}: why", "sglang.launch_server"), ("transformers", ONE_SCHEME, "AutoModelForCausalLM")],
)
def test_an_engine_that_fails_has_no_command_and_is_named(
    published: Report, engine: str, consequence: str, command: str
) -> None:
    warning = {
        "severity": "warning",
        "engine": engine,
        "problem": "INT2",
        "consequence": "needs x",
        "where": "",
        "count": 1,
    }
    published["consumers"] |= {"findings": [warning], "ktransformers": "takes them"}
    text = model_card(checked(published))
    assert command in text
    assert f"- {engine} (INT2): needs x\n- KTransformers with experts in RAM, by its source: takes them\n" in text
    warning["consequence"] = consequence
    text = model_card(checked(published))
    assert command not in text
    assert f"- {engine} (INT2): {consequence}\n" in text


# Families with more than attention and routed experts ----------------------------------------------


def kinds(*rows: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "action": action, "tensors": 1, "bytes_before": 1, "bytes_after": 1} for kind, action in rows
    ]


ATTENTION = "model.layers.*.self_attn."
SHARED = "model.layers.*.mlp.shared_experts.up_proj.weight"
PER_ROW = kinds(
    (f"{ATTENTION}q_proj.weight", "keep"),
    (f"{ATTENTION}q_proj.weight_scale", "keep"),
    (f"{ATTENTION}q_proj.bias", "keep"),
    (f"{ATTENTION}q_norm.weight", "keep"),
    (f"{ATTENTION}o_proj.weight", "keep"),
    (SHARED, "keep"),
)
IN_BLOCKS = kinds(
    (f"{ATTENTION}kv_a_proj_with_mqa.weight", "keep"),
    (f"{ATTENTION}kv_a_proj_with_mqa.weight_scale_inv", "rename"),
    (f"{ATTENTION}kv_a_layernorm.weight", "keep"),
    (f"{ATTENTION}kv_b_proj.weight", "keep"),
    (SHARED, "keep"),
)
ROW = {"tensors": 1, "bytes_before": 1, "bytes_after": 1}
ROWS, BLOCKS = "FP8 per channel", "FP8 block 128x128"


def with_plan(report: Report, **changes: Any) -> Report:
    """The report of a model into whose norms nothing is folded."""
    return report | {"plan": report["plan"] | {"actions": {"keep": ROW, "quantize": ROW}} | changes}


def test_a_card_says_what_is_kept_besides_attention_and_in_which_form(published: Report) -> None:
    mtp = {"layers": [92], "bytes": 4_321_000_000, "form": "FP8 block 128x128"}
    text = model_card(
        checked(with_plan(published, layers=92, dense_layers=[0, 1, 2], mtp=mtp, kinds=PER_ROW, attention_form=ROWS))
    )
    assert (
        "Passed through, in FP8 with a scale per row: attention (`q_proj`, `o_proj`); the MLP of layers 0, 1, 2, "
        "without routed experts; the shared experts. Layer 92 predicts further tokens, for speculative decoding "
        "(MTP): passed through whole, routed experts in FP8 with a scale per block too (4.3 GB)."
    ) in text
    assert "(89 layers, " in text
    actions = {"keep": ROW, "rename": ROW, "quantize": ROW}
    text = model_card(
        checked(
            with_plan(published, layers=61, dense_layers=[0], kinds=IN_BLOCKS, attention_form=BLOCKS, actions=actions)
        )
    )
    assert (
        "Passed through, in FP8 with a scale per block: attention (`kv_a_proj_with_mqa`, `kv_b_proj`); the MLP of "
        "layer 0," in text
    )
    assert "MTP" not in text
    plain = [row for row in PER_ROW if not row["kind"].endswith("_scale")]
    assert "Passed through, in 16 bits: attention (`q_proj`, `o_proj`); the shared experts." in model_card(
        checked(with_plan(published, kinds=plain, attention_form=None))
    )


def test_a_card_speaks_of_folded_norms_only_where_there_are_any(published: Report) -> None:
    folded = model_card(checked(published))
    assert "folded into the norm and compensated in the router;" in folded
    assert "the ratio of the folded norm, each expert against its source matrix." in folded
    assert "Passed through, in" not in folded
    kept = model_card(checked(with_plan(published, kinds=PER_ROW, attention_form=ROWS)))
    assert "folded" not in kept
    assert "within each expert (no norm and no router is changed: the shared experts read these norms too);" in kept
    assert "Each expert was checked against its source matrix." in kept
    assert "(no norm and no router is changed);" in model_card(checked(with_plan(published)))


def test_an_option_without_a_value_has_none_in_the_commands_and_its_reason_below(published: Report) -> None:
    options = {"disable-shared-experts-fusion": True, "tool-call-parser": "its"}
    about = published["serving"] | {"fits": [], "sglang": options, "parsers": {"trust-remote-code": True}}
    text = model_card(checked(published | {"serving": about}))
    assert (
        "```\npython -m sglang.launch_server --model-path PATH_OR_ID \\\n    --disable-shared-experts-fusion \\\n"
        in text
    )
    assert (
        "\\\n    --tool-call-parser its\n```\n\n`--disable-shared-experts-fusion`: without it SGLang puts the " in text
    )
    assert "vllm serve PATH_OR_ID \\\n    --trust-remote-code" in text
    assert "`--trust-remote-code`: the tokenizer is code of its own." in text
    assert "True" not in text.partition("## How to run it")[2].partition("\n## ")[0]
    assert "from transformers import AutoModelForCausalLM\n" in text
    unknown = model_card(checked(published | {"serving": about | {"transformers": False}}))
    assert "from transformers" not in unknown
    assert "transformers does not know this type of model." in unknown


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("zai-org/GLM-4.6-FP8", {"reasoning-parser": "glm45", "tool-call-parser": "glm45"}),
        ("zai-org/GLM-4.7-FP8", {"reasoning-parser": "glm45", "tool-call-parser": "glm47"}),
        ("a/finetune", {"reasoning-parser": "glm45"}),
    ],
)
def test_options_of_a_model_are_added_to_those_of_its_family(
    model: str, options: dict[str, Any], tmp_path: Path
) -> None:
    facts = architecture_for({"model_type": "glm4_moe"}, "config.json")
    source = Checkpoint(tmp_path, model, {}, {})
    assert server_options(facts, "vllm", model, source) == options
    assert server_options(facts, "sglang", model, source) == options | {"disable-shared-experts-fusion": True}
    write_own_tokenizer(tmp_path, tmp_path / "ran")
    assert server_options(facts, "vllm", model, source) == options | {"trust-remote-code": True}
