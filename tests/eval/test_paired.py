"""Paired differences between candidates: against slow sums over the texts, simulated truths, and the command."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Command
from conftest import Finished

from quantizers.eval.fidelity.figures import Cut, EvalReport, Fidelity, HeldOutSet, LayerFigures, PairedCandidate
from quantizers.eval.fidelity.metrics import Measured, Text, figures
from quantizers.eval.fidelity.paired import INTERVAL, RESAMPLES, SEED, difference_of, paired
from quantizers.eval.fidelity.tables import eval_table, paired_table


def figures_of(kl: list[float], tokens: list[int], categories: list[str]) -> Fidelity:
    """A candidate's figures, with so much KL at every position of each text."""
    texts = [Text(torch.zeros(t + 1, dtype=torch.int64), name, t) for name, t in zip(categories, tokens, strict=True)]
    losses = np.repeat(kl, tokens)
    layers = [LayerFigures(agreement=1.0, hidden_error=0.0)]
    about = HeldOutSet(name="held-out", digest="0" * 64, past_the_model=Cut(texts=0, tokens=0))
    return figures(Measured(losses, losses, losses, losses, losses < 1, layers), texts, about)


def difference(first: Fidelity, other: Fidelity) -> PairedCandidate:
    return paired(first, other, model="other", against="first")


def slow_interval(differences: list[float], tokens: list[int]) -> tuple[float, list[float]]:
    """The bootstrap-t interval by its definition, one resample at a time, in plain Python."""

    def ratio_and_error(chosen: list[int]) -> tuple[float, float]:
        whole = sum(tokens[i] for i in chosen)
        ratio = math.fsum(differences[i] * tokens[i] for i in chosen) / whole
        residuals = [differences[i] * tokens[i] - ratio * tokens[i] for i in chosen]  # their mean is zero
        return ratio, math.sqrt(len(chosen) * statistics.variance(residuals)) / whole

    n = len(tokens)
    ratio, error = ratio_and_error(list(range(n)))
    statistic = []
    for row in np.random.default_rng(SEED).integers(n, size=(RESAMPLES, n)).tolist():
        again, its_error = ratio_and_error(row)
        statistic.append((again - ratio) / its_error)
    statistic.sort()
    low, high = (statistic[math.ceil(share * RESAMPLES) - 1] for share in INTERVAL)
    return ratio, [ratio - error * high, ratio - error * low]


def test_difference_and_interval_equal_a_slow_version() -> None:
    rng = np.random.default_rng(7)
    tokens = rng.integers(20, 300, 14).tolist()
    first, other = rng.gamma(2, 0.01, 14), rng.gamma(2, 0.012, 14)
    names = ["code/c", "code/rust"] * 4 + ["math"] * 6
    found = difference(figures_of(first.tolist(), tokens, names), figures_of(other.tolist(), tokens, names)).as_dict()
    ratio, interval = slow_interval((other - first).tolist(), tokens)
    assert found["difference"] == pytest.approx(ratio, rel=1e-12)
    assert found["interval"] == pytest.approx(interval, rel=1e-9)
    assert found["other"] - found["first"] == pytest.approx(ratio, rel=1e-9)
    assert (found["texts"], found["tokens"]) == (14, sum(tokens))
    code, slow = found["families"]["code"], slow_interval((other - first)[:8].tolist(), tokens[:8])
    assert (code["difference"], code["interval"]) == (pytest.approx(slow[0]), pytest.approx(slow[1]))
    assert {name: row["interval"] for name, row in found["categories"].items()} == dict.fromkeys(set(names))
    turned = difference(figures_of(other.tolist(), tokens, names), figures_of(first.tolist(), tokens, names)).as_dict()
    assert turned["difference"] == -found["difference"]


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Simulated with few texts of unequal length; a percentile interval holds it in 89 of 100 cases."""
    rng = np.random.default_rng(11)
    held, cases = 0, 400
    for _ in range(cases):
        tokens = rng.integers(100, 500, 9).astype(float)
        _, interval = difference_of(rng.normal(0.002, 0.01, 9), tokens)
        assert interval is not None
        held += interval[0] <= 0.002 <= interval[1]
    assert 0.92 < held / cases < 0.98


def test_too_few_texts_get_no_interval() -> None:
    values, tokens = np.arange(1, 9) / 1000, np.full(8, 50.0)
    assert difference_of(values[:7], tokens[:7]) == (pytest.approx(0.004), None)
    assert difference_of(values, tokens)[1] is not None
    assert difference_of(0 * values, tokens) == (0.0, [0.0, 0.0])
    lone = np.where(np.arange(8) == 3, 0.1, 0.0)
    assert difference_of(lone, tokens) == (pytest.approx(0.1 / 8), None), "most resamples hold no text that differs"
    rows = {
        n: difference(figures_of([0.0] * n, [50] * n, ["a"] * n), figures_of(kl.tolist(), [50] * n, ["a"] * n))
        for n, kl in ((7, values[:7]), (8, lone))
    }
    assert "too few texts\n" in paired_table(rows[7]) + "\n"
    assert "too few texts differ" in paired_table(rows[8])
    assert "too few texts differ" not in paired_table(rows[7])


def test_a_hundred_categories_are_paired_by_family() -> None:
    names = [f"code/{n}" for n in range(50)] + [f"spoken/{n}" for n in range(50)]
    one = difference(figures_of([0.1] * 100, [9] * 100, names), figures_of([0.2] * 100, [9] * 100, names))
    text = paired_table(one)
    assert len(text.splitlines()) == 2 + 3
    assert "code " in text
    assert "code/" not in text
    assert len(one.categories) == 100


def unplaced(figures: dict[str, Any]) -> Any:
    return json.loads(re.sub(r'"place": "[^"]+", ', "", json.dumps(figures)))


@pytest.mark.slow
def test_the_command_compares_every_candidate_with_the_first(
    finished: Finished, tmp_path: Path, command: Command
) -> None:
    """The output, and the source itself. What is printed has its schema and is drawn."""
    picture, work = tmp_path / "fidelity.png", tmp_path / "work"
    words = (finished.source, finished.folder, finished.source, "--data", finished.held_out)
    assert command("eval", *words, "--picture", picture, "--work", work, "--json") == 0
    report = json.loads(command.out)
    assert EvalReport.model_validate(report).as_dict() == report
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(work.iterdir()) == []
    first, itself = report["candidates"]
    alone = {key: value for key, value in first.items() if key not in ("model", "weight_error")}
    wanted = {key: finished.report[key] for key in alone}
    assert unplaced(alone) == unplaced(wanted), "from the folders, without the run, which names local files otherwise"
    assert itself["kl"] == itself["reverse_kl"] == dict.fromkeys(("mean", "median", "p99", "p999", "max"), 0.0)
    assert itself["top1"] == itself["router"]["min"] == 1.0
    assert set(itself["hidden_error"]) == {0.0}
    assert itself["interval"] == {"kl": [0.0, 0.0], "top1": [1.0, 1.0], "increase": [0.0, 0.0]}
    assert itself["weight_error"] == [{"experts": 0.0, "attention": 0.0}] * 4
    (source,) = report["paired"]
    assert source["against"] == str(finished.folder)
    # The source has no KL, so the difference is the first candidate's own figure, computed elsewhere from all tokens.
    assert source["difference"] == pytest.approx(-first["kl"]["mean"], rel=1e-9)
    for kind in ("categories", "families"):
        for name, row in first[kind].items():
            assert source[kind][name]["difference"] == pytest.approx(-row["kl"]["mean"], rel=1e-9)
            assert (source[kind][name]["texts"], source[kind][name]["tokens"]) == (row["samples"], row["tokens"])
    low, high = source["interval"]
    assert low < source["difference"] < high < 0
    out = eval_table(EvalReport.model_validate(report))
    assert f"{finished.source} against {finished.folder}, the first, paired over the same texts" in out
    for words in ("by category", "by depth", "one sample", "computed in float32, each", "too few texts"):
        assert words in out
    assert "\nThis compares these checkpoints on these texts; whether one calibration set is better" in out
