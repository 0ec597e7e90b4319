"""The report's figures against an oracle: whole models in memory, weights rebuilt by compressed-tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import Finished
from torch import Tensor
from whole_models import Figures, Run, compared, finished_weights, run_whole, source_weights

from quantizers.calibration.load_set import load_set


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


@pytest.fixture(scope="module")
def wanted(oracle: Oracle) -> Figures:
    return compared(oracle.source, oracle.candidate, oracle.texts)


def test_kl_and_top1(oracle: Oracle, wanted: Figures, finished: Finished) -> None:
    """Over all scored positions, and in every category."""
    report, kl = finished.report, wanted.kl
    assert report["kl"]["mean"] == pytest.approx(float(kl.mean()), abs=1e-6)
    assert report["kl"]["median"] == pytest.approx(float(kl.quantile(0.5)), abs=1e-6)
    assert report["kl"]["p99"] == pytest.approx(float(kl.quantile(0.99)), abs=2e-6, rel=1e-6)
    assert report["kl"]["max"] == pytest.approx(float(kl.max()), abs=2e-6, rel=1e-6)
    assert report["kl"]["mean"] > 1e-4, "a comparison of two equal models would prove nothing"
    assert report["top1"] == pytest.approx(float(wanted.same_top1.double().mean()), abs=1e-12)
    assert report["tokens"] == len(kl)
    assert set(report["categories"]) == set(oracle.categories)
    for name, table in report["categories"].items():
        numbers = [i for i, category in enumerate(oracle.categories) if category == name]
        own = compared(oracle.source, oracle.candidate, oracle.texts, numbers).kl
        assert (table["tokens"], table["kl"]["mean"]) == (len(own), pytest.approx(float(own.mean()), abs=2e-6))


def test_perplexity_and_bits_per_byte(oracle: Oracle, wanted: Figures, finished: Finished) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(finished.source)
    size = sum(
        len(tokenizer.decode(text.tolist()).encode()) - len(tokenizer.decode(text[:1].tolist()).encode())
        for text in oracle.texts
    )
    reported = finished.report["perplexity"]
    for name, nll in zip(("source", "candidate"), wanted.nll, strict=True):
        assert reported[name] == pytest.approx(math.exp(float(nll.mean())), rel=1e-6)
        bits = float(nll.sum()) / math.log(2) / size
        assert finished.report["bits_per_byte"][name] == pytest.approx(bits, rel=1e-6)
    assert reported["increase"] == pytest.approx(reported["candidate"] / reported["source"] - 1, abs=1e-12)


def test_router_agreement_and_hidden_error(wanted: Figures, finished: Finished) -> None:
    """Layer by layer: the share of the source's choices that the finished model makes too, and ‖Δh‖ / ‖h‖."""
    assert finished.report["router"]["agreement"] == pytest.approx(wanted.agreement, abs=1e-12)
    assert finished.report["router"]["min"] == min(finished.report["router"]["agreement"])
    assert finished.report["hidden_error"] == pytest.approx(wanted.hidden_error, rel=1e-5)
