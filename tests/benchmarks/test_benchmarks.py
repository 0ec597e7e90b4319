"""The benchmarks on the smallest sizes: what they return and print, not how long anything takes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import answers
import bits
import budgets
import compare
import gguf_types
import layer
import measured_rows
import methods
import modifiers
import numpy as np
import other_tools
import parts
import pytest
import torch
from conftest import REPOSITORY
from tiny import write_job
from transformers import AutoModelForCausalLM

import quantizers
from quantizers.planning.job import Job, prepare
from quantizers.recipe.read import set_location
from quantizers.recipe.schema import Awq, Experts
from quantizers.system.errors import InputError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), layers=1)


@pytest.fixture(scope="module")
def small_job(recipe: Path) -> Job:
    return prepare(str(recipe))


@pytest.fixture
def printed(recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a script prints for the small recipe and these options."""

    def of(script: Any, *words: str) -> str:
        monkeypatch.setattr("sys.argv", [script.__name__, str(recipe), "--device", "cpu", *words])
        script.main()
        return capsys.readouterr().out

    return of


@pytest.mark.slow
@pytest.mark.every
def test_all_methods_go_through_a_whole_model(small_job: Job, printed: Any) -> None:
    text = printed(methods, "--tokens", "256")
    asked = methods.methods(small_job.recipe.experts, small_job.facts, torch.float32)
    names = [method.name for method in asked.rows]
    rows = {name: next(line for line in text.splitlines() if line.startswith(f"{name}  ")) for name in names}
    kl = {name: float(row.removeprefix(name).split()[0]) for name, row in rows.items()}
    assert min(kl.values()) > 0
    assert len(set(kl.values())) == len(kl), "two rows are the same method"
    assert any("norm not folded" in name for name in names)
    assert asked.left_out == {"gram AWQ, default, router in F32": "the default is that"}  # as MiniMax-M2's is served
    assert text.endswith("\nleft out: gram AWQ, default, router in F32: the default is that\n")


@pytest.mark.slow
@pytest.mark.every
def test_both_kinds_of_scales_are_compared_at_each_number_of_bits(printed: Any) -> None:
    rows = json.loads(printed(bits, "--bits", "3", "--draws", "1", "--tokens", "100", "--json"))
    assert [(row["sign"], row["draw"]) for row in rows] == [(sign, n) for sign in ("positive", "both") for n in (0, 1)]
    assert len({row["kl"] for row in rows}) == 4
    cells = bits.bits_table(rows).splitlines()[-1].split("  ")
    assert [cell for cell in cells if cell][:3] == ["INT3 group 32", *(f"{rows[n]['kl']:.5f}" for n in (0, 2))]
    (alone,) = [row for row in rows if (row["sign"], row["draw"]) == ("both", 1)]
    words = bits.bits_table([alone]).splitlines()[-1].split()
    assert words == ["INT3", "group", "32", f"{alone['kl']:.5f}", f"{alone['top1']:.1%}"]


@pytest.mark.slow
@pytest.mark.every
def test_a_model_without_its_outlier_channels_is_the_same_function(small_job: Job, tmp_path: Path) -> None:
    """All factors are powers of two, so transformers' logits are equal; and some channels were moved."""
    both = [gguf_types.plain_tensors(small_job, flat) for flat in (False, True)]
    assert any(not torch.equal(both[0][name], both[1][name]) for name in both[0])
    logits = []
    for number, tensors in enumerate(both):
        folder = gguf_types.written(tensors, small_job.opened, tmp_path / str(number))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logits.append(model(torch.arange(2, 40)[None]).logits)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.every
def test_both_engines_and_both_routes_are_compared(printed: Any) -> None:
    sizes = ("--experts", "4", "--hidden", "128", "--width", "64", "--tokens", "48")
    found = json.loads(printed(compare, *sizes, "--json"))
    assert found["layer"]["tokens"] == 48
    for who in ("ours", "library"):
        assert found["layer"][who]["seconds"] > 0
        assert found["route"][who]["kl"] > 0
    assert set(found["route"]["library"]["bytes"]) == {"bf16", "saved", "stitched"}
    text = compare.compare_table(found)
    assert "4 experts of 128 x 64, 48 tokens" in text


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("form", ["int4", "nvfp4"])
def test_all_modifiers_give_outputs_of_one_size(printed: Any, form: str) -> None:
    rows = json.loads(printed(modifiers, "--format", form, "--tokens", "100", "--json"))[""]
    assert [row["name"] for row in rows] == [*modifiers.library_rows(form, Awq()), *modifiers.ours(form)]
    kl = {row["name"]: row["kl"] for row in rows}
    assert len(set(kl.values())) == len(kl), "two rows are the same method"
    assert modifiers.modifiers_table({"": rows, ", flat": rows}).count("\n") == len(rows) + 1


@pytest.mark.slow
@pytest.mark.every
def test_the_method_is_measured_without_each_of_its_parts(printed: Any) -> None:
    rows = json.loads(printed(parts, "--draws", "1", "--tokens", "100", "--flat", "--json"))
    assert [row["method"] for row in rows] == [*parts.rows_of(Experts())]
    assert len({row["kl"] for row in rows}) == len(rows), "two rows are the same method"
    assert parts.parts_table(rows).count("\n") == len(rows) + 1


@pytest.mark.slow
@pytest.mark.every
def test_mixtures_are_measured_beside_the_uniform_scheme(printed: Any) -> None:
    words = ("--bits-per-weight", "3", "--draws", "1", "--no-whole", "--tokens", "100", "--json")
    (row,) = json.loads(printed(budgets, *words))
    assert row["draw"] == 1
    assert min(row["mixture_kl"], row["uniform_kl"]) > 0
    assert budgets.budgets_table([row]).count("\n") == 2


def test_rows_have_the_figures_of_an_evaluation(small_job: Job, recipe: Path, tmp_path: Path) -> None:
    """Of one output; the recipe has short texts alone."""
    output = methods.quantized(small_job, methods.calibration_data(small_job), tmp_path / "made", CPU)
    given = measured_rows.row_options("").parse_args([str(recipe), "--device", "cpu"])
    figures = measured_rows.Table(small_job, given, "").figures(output)
    texts = set_location(small_job.recipe.verify.perplexity.data, small_job.path)
    (asked,) = quantizers.evaluate(small_job.opened.folder, output.folder, texts, device="cpu").candidates
    assert figures["kl"] == pytest.approx(asked.kl, rel=1e-6)
    assert figures["median"] == pytest.approx(asked.figures["kl"]["median"], rel=1e-6)
    assert figures["top1"] == asked.figures["top1"]
    assert figures["router"] == asked.figures["router"]["min"]
    assert figures["increase"] == pytest.approx(asked.figures["perplexity"]["increase"], abs=1e-9)


def test_a_table_goes_on_with_the_rows_that_it_kept(small_job: Job, recipe: Path, tmp_path: Path) -> None:
    """Only what is missing is made; and the rows of other options are not taken for these."""
    made = []

    def make(name: str, _: Path) -> Any:
        if name == "second" and len(made) == 1:
            raise KeyboardInterrupt
        made.append(name)
        return small_job.opened

    words = [str(recipe), "--device", "cpu", "--keep", str(tmp_path / "rows.json")]
    given = measured_rows.row_options("").parse_args(words)
    makers = {name: partial(make, name) for name in ("first", "second")}
    with pytest.raises(KeyboardInterrupt):
        measured_rows.Table(small_job, given, "table").measure(makers)
    made.append("interrupted")
    assert [row["name"] for row in measured_rows.Table(small_job, given, "table").measure(makers)] == [
        "first",
        "second",
    ]
    assert made == ["first", "interrupted", "second"]
    given.only = ["third"]
    with pytest.raises(InputError, match="no row is called 'third'; give one of first, second"):
        measured_rows.Table(small_job, given, "table").measure(makers)
    other = measured_rows.row_options("").parse_args([*words, "--tokens", "5"])
    with pytest.raises(InputError, match="has rows of another model, or of other options"):
        measured_rows.Table(small_job, other, "table")


def test_matrices_of_any_width_are_laid_into_super_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows and whole super-blocks at a time, each weight with its column's importance; or refused by name."""
    seen = []

    def quantize(block: np.ndarray, kind: str, imatrix: np.ndarray) -> np.ndarray:
        seen.append((block.shape, imatrix))
        return block

    library = SimpleNamespace(
        GGMLQuantizationType={"Q2_K": "Q2_K"},
        quantize_rows=quantize,
        dequantize_rows=lambda stored, kind, n_per_row: stored,
    )
    monkeypatch.setitem(sys.modules, "libgguf", library)
    weight, importance = torch.randn(8, 192), torch.arange(192.0)
    stored, _ = gguf_types.in_type("Q2_K", weight, importance)
    torch.testing.assert_close(stored, weight)
    ((shape, weights),) = seen
    assert shape == (2, 768)
    np.testing.assert_array_equal(weights, np.tile(np.arange(192.0), 4))
    with pytest.raises(InputError, match="a matrix of 6 x 192 has no whole super-blocks"):
        gguf_types.in_type("Q2_K", weight[:6], importance)


def test_a_tool_that_fails_is_named_with_its_last_words(small_job: Job, tmp_path: Path) -> None:
    data = methods.calibration_data(small_job)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho first; echo last >&2; exit 1\n")
    python.chmod(0o755)
    with pytest.raises(InputError, match="--gptqmodel: failed: last"):
        other_tools.by_tool("gptqmodel", python, tmp_path, small_job, data, 1, tmp_path)


def test_answers_are_marked_where_they_part() -> None:
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: " ".join(f"w{n}" for n in tokens))
    parted = answers.Answers("Why?", [1, 2, 3], [1, 2, 4], 2, 0.5)
    assert answers.shown(parted, tokenizer, 12).splitlines() == [
        "Why?  [2 tokens alike, KL 0.5000]",
        "  w1 w2▲w3      w1 w2▲w4",
    ]
    alike = answers.Answers("Why?", [1, 2], [1, 2], 2, 0.0)
    assert "▲" not in answers.shown(alike, tokenizer, 12)


@pytest.mark.slow
@pytest.mark.every
def test_a_layer_beside_the_devices_rates(printed: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    text = printed(layer, "--tokens", "64", "--trace", str(trace))
    assert "the whole run: " in text
    assert "of the matmul's peak: forced pass " in text
    assert json.loads(trace.read_text())["traceEvents"]


def test_every_script_is_in_the_readme() -> None:
    page = (REPOSITORY / "benchmarks" / "README.md").read_text()
    for file in (REPOSITORY / "benchmarks").glob("*.py"):
        assert file.name in page


def test_where_the_norm_has_another_reader_rows_with_a_fold_are_left_out_by_name(small_job: Job) -> None:
    """Nothing is folded there, so no router is left out, kept or rounded; but the library folds nevertheless."""
    base, facts = small_job.recipe.experts, small_job.facts
    norm = facts.norm.model_copy(update={"readers": [*facts.norm.readers, "self_attn.q_proj"]})
    other = facts.model_copy(update={"norm": norm})
    found = methods.methods(base, other, torch.float32)
    assert len(found.rows) == 8
    assert [row.name for row in found.rows if row.others_left_out] == ["llm-compressor AWQ, other readers left out"]
    assert found.base == "llm-compressor AWQ, norm not folded"
    assert not found.left_out.keys() & {row.name for row in found.rows}
    assert len(found.left_out) == 4
    (why,) = set(found.left_out.values())
    assert why.startswith("post_attention_layernorm.weight is also read by self_attn.q_proj, ")
    jobs = {row.name: methods.variant(replace(small_job, facts=other), row) for row in found.rows}
    assert [name for name, job in jobs.items() if job.plan.folds] == ["llm-compressor AWQ, other readers left out"]
