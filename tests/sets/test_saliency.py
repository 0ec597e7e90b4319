"""REAP's scores against transformers' own model, what is written of them, and a checkpoint pruned by its list."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import tiny
import torch
import zoo
from commands import Command
from edited import MOE, edit
from sets import rows_set
from streamed import divergence, held_out_texts, log_probabilities
from torch import Tensor
from whole_models import finished_weights, source_weights, stored

from quantizers.calibration.load_set import load_set
from quantizers.commands.question import Question
from quantizers.eval.coverage.figures import CoverageReport, LayerSaliency, Saliency
from quantizers.eval.coverage.summary import summarise
from quantizers.eval.report.plots import saliency_figure
from quantizers.recipe.schema import CoverageGate
from quantizers.sets.coverage import measure_coverage
from quantizers.sets.saliency import lists, saliency_table

CPU = torch.device("cpu")
Contributions = dict[int, list[tuple[str, Tensor, Tensor, Tensor]]]  # by layer: category, chosen, weights, norms (T, K)


@torch.no_grad()
def contributions(model: Any, samples: list[tuple[str, Tensor]], limits: list[float] | None = None) -> Contributions:
    """Of a whole model, from what enters its MoE blocks: routing and experts again in float64, token by token.

    Args:
        limits: of the layers' own gates.
    """
    found: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def observe(block: Any, inputs: tuple[Tensor, ...], number: int) -> None:
        x = inputs[0].flatten(0, 1).double()
        logits = x @ block.gate.weight.double().T
        bias = next((one.double() for name, one in block.named_buffers() if name.endswith("correction_bias")), None)
        scores = logits.softmax(-1) if bias is None else logits.sigmoid()
        chosen = (scores if bias is None else scores + bias).topk(2).indices
        weights = scores.gather(1, chosen)
        norms = torch.zeros_like(weights)
        for token in range(len(x)):
            for k, expert in enumerate(chosen[token].tolist()):
                gate, up = (block.experts.gate_up_proj[expert].double() @ x[token]).chunk(2)
                gate = torch.nn.functional.silu(gate)
                if limits and limits[number]:
                    gate, up = gate.clamp(max=limits[number]), up.clamp(-limits[number], limits[number])
                norms[token, k] = (block.experts.down_proj[expert].double() @ (gate * up)).square().sum().sqrt()
        found.setdefault(number, []).append((chosen, weights / weights.sum(-1, keepdim=True), norms))

    for name, module in model.named_modules():
        if hasattr(module, "gate") and hasattr(module, "experts"):
            number = int(re.findall(r"layers\.(\d+)\.", name)[0])
            module.register_forward_pre_hook(lambda block, inputs, number=number: observe(block, inputs, number))
    for _, tokens in samples:
        model(tokens[None])
    return {n: [(name, *row) for (name, _), row in zip(samples, rows, strict=True)] for n, rows in found.items()}


def mean_score(rows: list[tuple[str, Tensor, Tensor, Tensor]], expert: int, category: str | None = None) -> float:
    products = [
        float(weights[token, k] * norms[token, k])
        for name, chosen, weights, norms in rows
        for token, k in (chosen == expert).nonzero().tolist()
        if category in (None, name)
    ]
    return sum(products) / len(products) if products else 0.0


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of texts of many lengths in three categories."""
    words = "fn add ( a , b ) return the sum of two numbers die Summe zweier Zahlen"
    rows = [(("code/rust", "spoken/hindi", "math")[n % 3], (words * 3)[5 * n : 12 * n + 30]) for n in range(9)]
    return rows_set(tmp_path_factory.mktemp("texts"), rows, sequence_length=64)


@pytest.mark.parametrize("model", ["minimax_m2", "qwen3_moe with a dense layer and windows", "step3p7"])
@pytest.mark.slow
def test_scores_equal_those_from_the_whole_model(model: str, texts: Path, tmp_path: Path) -> None:
    """Sigmoid and softmax routers, a dense layer, and gates with limits of their own; and REAP's own tracker."""
    if model == "step3p7":
        folder = zoo.save(model, tmp_path / "model")
        limits = zoo.TYPES[model]["swiglu_limits"]
        whole = zoo.whole_model(model, *source_weights(folder))
    else:
        folder = families.write(tmp_path / "model", families.family_of(model), **families.MODELS[model])
        limits, whole = None, families.whole_model(*source_weights(folder))
    samples = [(s.category, torch.from_numpy(s.tokens).long()) for s in load_set(texts, str(folder)).samples]
    wanted = contributions(whole, samples, limits)
    question = Question(str(folder), "main", False, (texts,), "x")
    made = measure_coverage(question, CoverageGate(), CPU, tmp_path, scored=True)
    assert isinstance(made, CoverageReport)
    assert made.saliency is not None
    report = made.as_dict()
    assert CoverageReport.model_validate(report).as_dict() == report
    found = report["saliency"]
    assert [row["layer"] for row in found["per_layer"]] == list(wanted)
    for i, (row, rows) in enumerate(zip(found["per_layer"], wanted.values(), strict=True)):
        experts = range(len(row["scores"]))
        assert row["scores"] == pytest.approx([mean_score(rows, e) for e in experts], rel=1e-5)
        for name, there in found["by_category"].items():
            assert there["scores"][i] == pytest.approx([mean_score(rows, e, name) for e in experts], rel=1e-5)
        block = whole.get_submodule(row["block"])
        assert len(block.gate.weight) == len(experts), "its name is the whole model's"
    least = json.loads(lists(made, made.saliency)["least-salient-first.json"])
    for row, rows in zip(found["per_layer"], wanted.values(), strict=True):
        assert sorted(least[row["block"]][3:]) == retained_by_llm_compressor(rows, len(experts), 3)


def retained_by_llm_compressor(rows: list[tuple[str, Tensor, Tensor, Tensor]], experts: int, drop: int) -> list[int]:
    """The experts that its REAPPruningModifier would keep."""
    pytest.importorskip("llmcompressor", reason="it takes no transformers after 5.17")
    from llmcompressor.modifiers.pruning.reap.utils import REAPSaliencyTracker

    tracker = REAPSaliencyTracker(experts)
    for _, chosen, weights, norms in rows:
        tracker.update(chosen, weights, {e: norms.T[e == chosen.T] for e in range(experts)})
    kept: list[int] = tracker.compute_retained_experts(drop, None, None).tolist()
    return kept


def pruned(folder: Path, kept: dict[int, list[int]], target: Path) -> None:
    """A checkpoint of tiny.py's with these experts of each layer alone, in this order."""
    config, tensors = stored(folder)
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer = re.match(r"model\.layers\.(\d+)\.block_sparse_moe\.(?:experts\.(\d+)\.)?", name)
        if layer is None:
            made[name] = tensor
        elif layer[2] is None:  # the router and its bias
            made[name] = tensor[kept[int(layer[1])]]
        elif (expert := int(layer[2])) in kept[int(layer[1])]:
            number = kept[int(layer[1])].index(expert)
            made[name.replace(f".experts.{expert}.", f".experts.{number}.")] = tensor
    tiny.write_tokenizer(tiny.write(target, config | {"num_local_experts": len(kept[0])}, made))


@pytest.fixture(scope="module")
def unreachable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a model of eight experts, in which the bias of layer 1 makes expert 3 unreachable."""
    folder = tmp_path_factory.mktemp("unreachable")
    tiny.write_tokenizer(tiny.make(folder / "model", num_local_experts=8))
    name = f"{MOE}.e_score_correction_bias"
    edit(folder / "model", name, lambda tensors: tensors[name][3:4].fill_(-1e3))
    return tiny.write_recipe(folder)


@pytest.mark.slow
def test_a_checkpoint_pruned_by_the_list_runs(unreachable: Path, tmp_path: Path, command: Command) -> None:
    """Six of eight experts of each layer: quantized as usual, and transformers' whole model computes it as we do."""
    files = tmp_path / "files"
    words = ("--picture", tmp_path / "coverage.png", "--output", files, "--json")
    assert command("coverage", unreachable, "--saliency", *words) == 3
    report = json.loads(command.out)
    assert json.loads((files / "saliency.json").read_text()) == report
    assert report["saliency"]["without_tokens"] == report["uncovered_pairs"] == [[1, 3]]
    assert report["saliency"]["per_layer"][1]["scores"][3] == 0
    assert "experts without tokens, which score 0: 1 (layer 1 expert 3)" in saliency_table(
        Saliency.model_validate(report["saliency"])
    )
    assert (files / "saliency.png").read_bytes().startswith(b"\x89PNG")
    salient, hot = (
        {
            int(number): experts
            for line in (files / name).read_text().splitlines()
            for number, experts in json.loads(line).items()
        }
        for name in ("most-salient-first.jsonl", "hottest-first.jsonl")
    )
    for row, scored in zip(report["per_layer"], report["saliency"]["per_layer"], strict=True):
        assert salient[row["layer"]] == sorted(range(8), key=lambda e: -scored["scores"][e])
        assert hot[row["layer"]] == sorted(range(8), key=lambda e: -row["routed_tokens"][e])
    assert salient[1][-1] == hot[1][-1] == 3
    model, texts = unreachable.parent / "model", held_out_texts(unreachable.parent)
    pruned(model, {number: sorted(experts[:6]) for number, experts in salient.items()}, tmp_path / "model")
    pruned(model, {number: sorted(experts[2:]) for number, experts in salient.items()}, tmp_path / "worse")
    better, worse = (log_probabilities(tmp_path / name, texts) for name in ("model", "worse"))
    source = log_probabilities(model, texts)
    assert 2 * divergence(source, better) < divergence(source, worse)
    assert command("run", unreachable, "--source", tmp_path / "model", "--output", tmp_path / "output") == 0
    ours = log_probabilities(tmp_path / "output", texts)
    whole = families.whole_model(*finished_weights(tmp_path / "output"))
    assert whole.config.num_local_experts == 6
    theirs = [torch.log_softmax(whole(text[None]).logits[0, :-1].double(), -1) for text in texts]
    assert divergence(theirs, ours) < 1e-9


def test_the_heat_map_shows_the_ratio_to_the_layers_mean_and_crosses_out_what_has_no_tokens() -> None:
    tokens, scores = [[3, 0, 9, 4], [1, 1, 1, 1]], [[1.0, 0.0, 4.0, 3.0], [0.1, 0.1, 0.1, 0.1]]
    layers = summarise([np.array([row]) for row in tokens], ["x"], 1, (1, 2)).per_layer
    scored = [LayerSaliency(layer=n, block=f"layers.{n}", scores=row) for n, row in enumerate(scores, 1)]
    axes = saliency_figure(layers, scored, "m").axes[0]
    np.testing.assert_allclose(axes.images[0].get_array().filled(np.nan), [[0.5, np.nan, 2.0, 1.5], [1, 1, 1, 1]])
    assert [marks.get_offsets().tolist() for marks in axes.collections] == [[[1, 0]]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--saliency", "--compare", "a", "b"), "--saliency scores experts on one set; leave out --compare"),
        (("--output", "x"), "--output x: is for the files of --saliency; give that too, or leave it out"),
        (("--saliency", "--output", "FILE"), "(File exists); a file lies in a folder's place: give another"),
    ],
)
def test_wrong_questions(words: tuple[str, ...], said: str, unreachable: Path, command: Command) -> None:
    given = {"FILE": unreachable}
    assert command("coverage", unreachable, *(given.get(word, word) for word in words)) == 2
    assert said in command.err
