"""The report's figures against an oracle: whole models in memory, weights rebuilt by compressed-tensors."""

from __future__ import annotations

import hashlib
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


def spread(kl: Tensor) -> dict[str, float]:
    ends = {name: float(kl.quantile(share)) for name, share in (("median", 0.5), ("p99", 0.99), ("p999", 0.999))}
    return {"mean": float(kl.mean()), "max": float(kl.max())} | ends


def test_kl_and_top1(oracle: Oracle, wanted: Figures, finished: Finished) -> None:
    """Over all scored positions, and in every category."""
    report, kl = finished.report, wanted.kl
    for name, values in (("kl", kl), ("reverse_kl", wanted.reverse)):
        found, exact = dict(report[name]), spread(values)
        for middle in ("mean", "median"):
            assert found.pop(middle) == pytest.approx(exact.pop(middle), abs=1e-6), name
        assert found == pytest.approx(exact, abs=2e-6, rel=1e-6), name
    assert abs(report["kl"]["mean"] - report["reverse_kl"]["mean"]) > 1e-5, "the two ways differ"
    assert report["kl"]["mean"] > 1e-4, "a comparison of two equal models would prove nothing"
    assert report["top1"] == pytest.approx(float(wanted.same_top1.double().mean()), abs=1e-12)
    assert report["tokens"] == len(kl)
    assert set(report["categories"]) == set(oracle.categories)
    for name, table in report["categories"].items():
        numbers = [i for i, category in enumerate(oracle.categories) if category == name]
        own = compared(oracle.source, oracle.candidate, oracle.texts, numbers)
        assert (table["tokens"], table["kl"]["mean"]) == (len(own.kl), pytest.approx(float(own.kl.mean()), abs=2e-6))
        assert table["reverse_kl"]["mean"] == pytest.approx(float(own.reverse.mean()), abs=2e-6)


def test_the_worst_text_is_found_in_the_set(oracle: Oracle, finished: Finished) -> None:
    """By its mean KL, and named by the line of its file, whose published name is its content's."""
    texts = range(len(oracle.texts))
    of_texts = [compared(oracle.source, oracle.candidate, oracle.texts, [i]).kl for i in texts]
    number = max(texts, key=lambda i: float(of_texts[i].mean()))
    kl, worst = of_texts[number], finished.report["worst"]
    assert worst == finished.report["per_text"][number]
    assert worst["kl"] == pytest.approx(float(kl.mean()), abs=2e-6)
    assert (worst["max"], worst["position"]) == (pytest.approx(float(kl.max()), abs=2e-6), int(kl.argmax()) + 1)
    sample = load_set(finished.held_out, str(finished.source)).samples[number]
    file, row = sample.place.split(":")
    digest = hashlib.sha256((finished.held_out.parent / file).read_bytes()).hexdigest()
    assert worst["place"] == f"data-{digest[:16]}.jsonl:{row}"
    assert worst["category"] == sample.category


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
