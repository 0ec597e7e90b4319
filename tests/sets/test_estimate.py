"""Intervals and verdicts against simulated comparisons, whose truth is known, from the KL of 48 runs of one model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quantizers.sets.estimate import ERROR, Estimate, holm, log_ratio, verdict

DRAWS, COMPARISONS = 5, 300


@pytest.fixture(scope="module")
def runs() -> list[np.ndarray]:
    """Sums of KL over each text, (24 draws, 88 texts), of two sets; see benchmarks/calibration_sets.py."""
    stored = json.loads((Path(__file__).parent / "draws.json").read_text())
    found = [np.array(kl) * np.array(stored["tokens"]) for kl in stored["kl"].values()]
    assert [one.shape for one in found] == [(24, 88)] * 2
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("same", "smaller"),
    [
        (False, 1.0),
        pytest.param(False, 0.9, marks=pytest.mark.every),
        pytest.param(True, 1.0, marks=pytest.mark.every),
        (True, 0.8),
    ],
)
def test_intervals_hold_the_truth(
    runs: list[np.ndarray], same: bool, smaller: float, say: Callable[[str], None]
) -> None:
    """Of new draws and new texts: in 90 to 98 of 100, and at most 5 of 100 verdicts are wrong."""
    first, other = runs[0], (runs[0] if same else runs[1]) * smaller
    truth, rng = math.log(other.sum() / first.sum()), np.random.default_rng(1)
    held = wrong = found = 0
    for _ in range(COMPARISONS):
        texts = rng.integers(first.shape[1], size=first.shape[1])
        a, b = (one[rng.integers(len(one), size=DRAWS)][:, texts] for one in (first, other))
        estimate = log_ratio(b, a)
        low, high = estimate.interval() or (math.inf, -math.inf)
        held += low <= truth <= high
        said = verdict(estimate, estimate.p)
        found += said != "no difference"
        wrong += said != "no difference" and (truth == 0 or (said == "better") != (truth < 0))
    say(f"of {COMPARISONS}: {held} intervals hold the truth, {found} have a verdict, {wrong} a wrong one")
    assert 0.9 <= held / COMPARISONS <= 0.98
    assert wrong / COMPARISONS <= ERROR
    assert smaller > 0.8 or found / COMPARISONS >= 0.9, "a difference of a fifth is seen"


@pytest.mark.parametrize("draws", [1, 4])
def test_resamples_are_those_of_a_loop(draws: int) -> None:
    """One by one, as the docstring says it."""
    rng = np.random.default_rng(3)
    b, a = rng.exponential(size=(2, draws, 9))
    estimate = log_ratio(b, a)
    drawn = np.random.default_rng(0).multinomial(9, [1 / 9] * 9, 20_000)
    student = np.random.default_rng(1).standard_t(draws - 1, 20_000) if draws > 1 else np.zeros(20_000)

    def ratio(texts: list[int]) -> tuple[float, float]:
        """The logarithm of the ratio over some texts, and its error."""
        over, under = (one.mean(0)[texts] for one in (b, a))
        u = over / over.sum() - under / under.sum()
        return math.log(over.sum() / under.sum()), math.sqrt(9 / 8 * sum(u**2))

    value, error = ratio(list(range(9)))
    share = np.array([row_b / row_b.sum() - row_a / row_a.sum() for row_b, row_a in zip(b, a, strict=True)])
    in_one_draw = 9 / 8 * sum(np.var(share[:, i], ddof=1) / draws for i in range(9)) if draws > 1 else 0.0
    of_texts = math.sqrt(max(error**2 - in_one_draw, 0))
    logs = [math.log(row_b.sum() / row_a.sum()) for row_b, row_a in zip(b, a, strict=True)]
    of_draws = np.std(logs, ddof=1) / math.sqrt(draws) if draws > 1 else 0.0
    assert estimate.value == pytest.approx(value)
    assert estimate.resamples is not None
    for n in range(200):
        again, its_error = ratio([text for text in range(9) for _ in range(drawn[n, text])])
        wanted = value - of_texts * (again - value) / its_error + of_draws * student[n]
        assert estimate.resamples[n] == pytest.approx(wanted)


def test_draws_alone_give_students_interval() -> None:
    """Texts that are all alike leave a textbook's t-interval: 2.776 standard errors on each side for five draws."""
    rng = np.random.default_rng(2)
    logs = rng.normal(0.1, 0.05, 5)
    low, high = log_ratio(np.exp(logs)[:, None] * np.ones((5, 20)), np.ones((5, 20))).interval() or (0, 0)
    middle = math.log(np.exp(logs).mean())
    assert (high - low) / 2 == pytest.approx(2.776 * logs.std(ddof=1) / math.sqrt(5), rel=0.05)
    assert (high + low) / 2 == pytest.approx(middle, abs=0.003)


def test_what_cannot_be_tested_is_said() -> None:
    few, same = log_ratio(np.ones((3, 7)), 2 * np.ones((3, 7))), log_ratio(np.ones((3, 9)), np.ones((3, 9)))
    assert (few.value, few.interval(), few.p) == (-math.log(2), None, 1.0)
    assert verdict(few, few.p) == "too few texts"
    assert verdict(same, same.p) == "no difference"
    nothing = log_ratio(np.zeros((3, 9)), np.ones((3, 9)))
    assert (nothing.value, nothing.interval()) == (-math.inf, None)
    assert log_ratio(np.zeros((2, 9)), np.zeros((2, 9))).value == 0
    assert verdict(log_ratio(np.zeros((2, 9)), np.zeros((2, 9))), 1.0) == "no difference"


@pytest.mark.slow
def test_a_difference_of_the_detectable_size_is_found_in_four_of_five() -> None:
    rng, found = np.random.default_rng(4), 0
    for _ in range(100):
        a, b = np.exp(rng.normal(0, 0.1, (2, 8, 60)))
        detectable = log_ratio(b, a).detectable()
        assert detectable
        found += verdict(shifted := log_ratio(b * math.exp(detectable), a), shifted.p) == "worse"
    assert 70 <= found <= 90


@pytest.mark.every  # it prints the table of docs/how-to/compare-sets.md
def test_more_draws_and_more_texts_make_smaller_what_would_be_seen(
    runs: list[np.ndarray], say: Callable[[str], None]
) -> None:
    rng, found = np.random.default_rng(1), {}
    for draws in (2, 3, 5, 10):
        for count in (22, 44, 88):
            seen = []
            for _ in range(12):
                texts = rng.integers(88, size=count)
                a, b = (one[rng.integers(24, size=draws)][:, texts] for one in runs)
                seen.append(math.expm1(log_ratio(b, a).detectable() or math.inf))
            found[draws, count] = float(np.median(seen))
            say(f"{draws} draws of {count} texts: {found[draws, count]:.1%}")
    assert found[2, 88] > found[5, 88] > found[10, 88]
    assert found[10, 22] > found[10, 44] > found[10, 88]


def test_holm() -> None:
    """The textbook's example: thresholds are the error over 4, 3, 2 and 1."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    rng = np.random.default_rng(0)
    missed = sum(min(holm(list(rng.uniform(size=12)))) <= ERROR for _ in range(1000))
    assert missed <= 65, "more than 5 % of families find something where nothing is"


@pytest.mark.slow
def test_looks_keep_the_error_rate(runs: list[np.ndarray]) -> None:
    """Three looks at two sets that do not differ: at most 5 of 100 find something at any of them."""
    rng, wrong = np.random.default_rng(5), 0
    for _ in range(COMPARISONS):
        texts = rng.integers(88, size=88)
        a, b = (runs[0][rng.integers(24, size=9)][:, texts] for _ in range(2))
        looks: list[Estimate] = [log_ratio(b[:draws], a[:draws]) for draws in (3, 6, 9)]
        wrong += any(verdict(one, one.p, ERROR / 3) != "no difference" for one in looks)
    assert wrong / COMPARISONS <= ERROR
