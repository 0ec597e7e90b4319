"""The report's figures against an oracle: whole models in memory, weights rebuilt by compressed-tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finished
from torch import Tensor
from whole_models import Run, finished_weights, run_whole, source_weights

from quantizers.calibration.load_set import load_set
from quantizers.checkpoint.reader import open_folder
from quantizers.commands.evaluate import measure


@dataclass(frozen=True)
class Oracle:
    texts: list[Tensor]
    categories: list[str]
    source: Run
    candidate: Run


@pytest.fixture(scope="module")
def oracle(finished: Finished, whole_model: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> Oracle:
    data = load_set(finished.held_out, str(finished.source))
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
