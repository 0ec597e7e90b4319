"""The report's figures against an oracle: whole models in memory, weights rebuilt by compressed-tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finished
from safetensors.torch import load_file
from torch import Tensor

from quantizers.calibration import load_samples
from quantizers.checkpoint import open_folder
from quantizers.proof import measure


def stored(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    return json.loads((folder / "config.json").read_text()), tensors


def fp8_by_the_library(weight: Tensor, scale: Tensor, block: list[int]) -> Tensor:
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    library = FP8BlockDequantizer(targets=["m"], weight_block_size=tuple(block), dtype=torch.float32)
    return library.process({"m.weight": weight, "m.weight_scale_inv": scale})["m.weight"]


def source_weights(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json, and every parameter as a number: FP8 by compressed-tensors' FP8BlockDequantizer."""
    config, tensors = stored(folder)
    block = config["quantization_config"]["weight_block_size"]
    weights = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            weights[name] = fp8_by_the_library(tensor, tensors[f"{name}_scale_inv"], block)
        elif not name.endswith("_scale_inv"):
            weights[name] = tensor
    return config, weights


def finished_weights(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same of a finished checkpoint, as its quantization_config tells compressed-tensors to read it.

    The library validates the section, finds each module's scheme, and decompresses with the compressor of
    the scheme's format. Scales are handed over as float32, for the library answers in their dtype.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_name

    config, tensors = stored(folder)
    section = QuantizationConfig.model_validate(config["quantization_config"])
    weights, used = {}, set()
    for module in sorted({name.rpartition(".")[0] for name in tensors if name.endswith(".weight_scale")}):
        assert not any(match_name(module, pattern) for pattern in section.ignore), module
        schemes = [s for s in section.config_groups.values() if any(match_name(module, t) for t in s.targets)]
        assert len(schemes) == 1, f"{module} has {len(schemes)} schemes"
        scheme = schemes[0]
        parts = {n.removeprefix(f"{module}."): t for n, t in tensors.items() if n.startswith(f"{module}.")}
        used |= {f"{module}.{part}" for part in parts}
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        assert set(parts) == set(compressor.compression_param_names(scheme)), module
        weight = compressor.decompress(parts | {"weight_scale": parts["weight_scale"].float()}, scheme)["weight"]
        assert weight.dtype == torch.float32
        if scheme.weights.type == "float":  # two ways of the library to the same numbers
            again = fp8_by_the_library(parts["weight"], parts["weight_scale"], scheme.weights.block_structure)
            assert torch.equal(weight, again), module
        weights[f"{module}.weight"] = weight
    plain = {name: tensor for name, tensor in tensors.items() if name not in used}
    assert all(tensor.is_floating_point() and tensor.element_size() > 1 for tensor in plain.values())
    return config, weights | plain


@dataclass
class Run:
    """A whole model's answers: for each text its log-probabilities; by layer and text choices and states."""

    logs: list[Tensor] = field(default_factory=list)
    choices: list[list[list[set[int]]]] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)


@torch.no_grad()
def run_whole(model: Any, texts: list[Tensor]) -> Run:
    result = Run()
    for layer in model.model.layers:
        choices: list[list[set[int]]] = []
        states: list[Tensor] = []
        result.choices.append(choices)
        result.states.append(states)
        layer.mlp.gate.register_forward_hook(
            lambda _module, _inputs, output, kept=choices: kept.append([set(row) for row in output[2].tolist()])
        )
        layer.register_forward_hook(lambda _module, _inputs, output, kept=states: kept.append(output[0].double()))
    for text in texts:
        result.logs.append(torch.log_softmax(model(text[None]).logits[0].double(), dim=-1))
    return result


@dataclass(frozen=True)
class Oracle:
    texts: list[Tensor]
    categories: list[str]
    source: Run
    candidate: Run


@pytest.fixture(scope="module")
def oracle(finished: Finished, whole_model: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> Oracle:
    data = load_samples(finished.held_out, str(finished.source))
    texts = [torch.from_numpy(sample.tokens).long() for sample in data.samples]
    source = run_whole(whole_model(*source_weights(finished.source)), texts)
    candidate = run_whole(whole_model(*finished_weights(finished.folder)), texts)
    return Oracle(texts, [sample.category for sample in data.samples], source, candidate)


def kl_of(oracle: Oracle, text: int) -> Tensor:
    p, q = oracle.source.logs[text][:-1], oracle.candidate.logs[text][:-1]
    return (p.exp() * (p - q)).sum(-1)


def nll_of(oracle: Oracle, run: Run, text: int) -> Tensor:
    return -run.logs[text][:-1].gather(1, oracle.texts[text][1:, None])[:, 0]


def test_kl(oracle: Oracle, finished: Finished) -> None:
    """Over all scored positions, and in every category."""
    parts = [kl_of(oracle, text) for text in range(len(oracle.texts))]
    whole = torch.cat(parts)
    reported = finished.report["kl"]
    assert reported["mean"] == pytest.approx(float(whole.mean()), abs=1e-6)
    assert reported["median"] == pytest.approx(float(whole.quantile(0.5)), abs=1e-6)
    assert reported["p99"] == pytest.approx(float(whole.quantile(0.99)), abs=2e-6, rel=1e-6)
    assert reported["max"] == pytest.approx(float(whole.max()), abs=2e-6, rel=1e-6)
    assert reported["mean"] > 1e-4, "a comparison of two equal models would prove nothing"
    assert finished.report["tokens"] == len(whole)
    assert set(finished.report["categories"]) == set(oracle.categories)
    for name, table in finished.report["categories"].items():
        own = torch.cat([part for part, category in zip(parts, oracle.categories, strict=True) if category == name])
        assert table["tokens"] == len(own)
        assert table["kl"]["mean"] == pytest.approx(float(own.mean()), abs=2e-6)


def test_perplexity_and_bits_per_byte(oracle: Oracle, finished: Finished) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(finished.source)
    size = sum(
        len(tokenizer.decode(text.tolist()).encode()) - len(tokenizer.decode(text[:1].tolist()).encode())
        for text in oracle.texts
    )
    perplexity = {}
    for name, run in (("source", oracle.source), ("candidate", oracle.candidate)):
        nll = torch.cat([nll_of(oracle, run, text) for text in range(len(oracle.texts))])
        perplexity[name] = math.exp(float(nll.mean()))
        assert finished.report["perplexity"][name] == pytest.approx(perplexity[name], rel=1e-6)
        bits = float(nll.sum()) / math.log(2) / size
        assert finished.report["bits_per_byte"][name] == pytest.approx(bits, rel=1e-6)
    increase = perplexity["candidate"] / perplexity["source"] - 1
    assert finished.report["perplexity"]["increase"] == pytest.approx(increase, abs=2e-6)


def test_top1(oracle: Oracle, finished: Finished) -> None:
    same = torch.cat(
        [a[:-1].argmax(-1) == b[:-1].argmax(-1) for a, b in zip(oracle.source.logs, oracle.candidate.logs, strict=True)]
    )
    assert finished.report["top1"] == pytest.approx(float(same.double().mean()), abs=1e-12)


def test_router_agreement(oracle: Oracle, finished: Finished) -> None:
    """The share of the source's choices that the finished model makes too, at every token, layer by layer."""
    expected = []
    for ours, theirs in zip(oracle.source.choices, oracle.candidate.choices, strict=True):
        pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
        assert len(pairs) == sum(len(text) for text in oracle.texts)
        expected.append(sum(len(a & b) for a, b in pairs) / sum(len(a) for a, _ in pairs))
    assert finished.report["router"]["agreement"] == pytest.approx(expected, abs=1e-12)
    assert finished.report["router"]["min"] == min(finished.report["router"]["agreement"])


def test_hidden_error(oracle: Oracle, finished: Finished) -> None:
    expected = []
    for ours, theirs in zip(oracle.source.states, oracle.candidate.states, strict=True):
        a, b = torch.cat(ours), torch.cat(theirs)
        expected.append(float((b - a).norm() / a.norm()))
    assert finished.report["hidden_error"] == pytest.approx(expected, rel=1e-5)


def test_measure_alone_gives_what_the_report_says(finished: Finished, tmp_path: Path) -> None:
    """From the finished folders, without the run: the same figures; and a source against itself differs in nothing."""
    source = open_folder(finished.source)
    both = measure(
        source, [open_folder(finished.folder), source], finished.held_out, torch.device("cpu"), tmp_path / "work"
    )
    assert both[0] == {key: finished.report[key] for key in both[0]}
    assert both[1]["kl"] == {"mean": 0.0, "median": 0.0, "p99": 0.0, "max": 0.0}
    assert both[1]["perplexity"]["increase"] == 0.0
    assert both[1]["top1"] == both[1]["router"]["min"] == 1.0
    assert set(both[1]["hidden_error"]) == {0.0}
    assert not (tmp_path / "work").exists()


def test_int4_weights_are_the_library_s(finished: Finished) -> None:
    """Every weight that the program reads from the finished files is the one compressed-tensors decompresses."""
    from quantizers.weights import read_weight

    checkpoint = open_folder(finished.folder)
    _, weights = finished_weights(finished.folder)
    packed = [name.removesuffix("_packed") for name in checkpoint.tensors if name.endswith(".weight_packed")]
    layers, experts = checkpoint.config["num_hidden_layers"], checkpoint.config["num_local_experts"]
    assert len(packed) == 3 * layers * experts
    for name in packed:
        assert torch.equal(read_weight(checkpoint, name.removesuffix(".weight"), torch.device("cpu")), weights[name])
