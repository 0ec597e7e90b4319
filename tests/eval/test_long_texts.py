"""Long held-out texts: a part of their own, figures by position, and a gate that reads the short ones only."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Finished
from runs import Small
from sets import EMBEDDED, LONG, SHORT, write_set
from whole_models import Figures, compared, finished_weights, run_whole, source_weights

from quantizers.calibration.load_set import load_set
from quantizers.calibration.samples import CalibrationData
from quantizers.checkpoint.reader import open_folder
from quantizers.cli.run import run_table
from quantizers.commands.evaluate import measure
from quantizers.eval.fidelity.figures import Cut, EvalReport, EvaluatedCandidate, Fidelity, HeldOutSet, LayerFigures
from quantizers.eval.fidelity.metrics import Measured, Text, by_position, figures
from quantizers.eval.fidelity.tables import eval_table
from quantizers.eval.report.pages import html_report, model_card
from quantizers.eval.report.plots import fidelity_figure, png
from quantizers.eval.report.schema import checked

CPU = torch.device("cpu")

ABOUT = HeldOutSet(name="held-out", digest="0" * 64, past_the_model=Cut(texts=0, tokens=0))


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("set"))


@pytest.fixture(scope="module")
def report(finished: Finished, held_out: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The finished output measured on it."""
    work = tmp_path_factory.mktemp("work") / "eval"
    return measure(open_folder(finished.source), [open_folder(finished.folder)], held_out, CPU, work)[0].as_dict()


@pytest.fixture(scope="module")
def data(finished: Finished, held_out: Path) -> CalibrationData:
    return load_set(held_out, str(finished.source))


def expected(wanted: Figures, where: range = range(LONG)) -> dict[str, float]:
    """Mean KL, perplexities and top-1 of the tokens at these positions."""
    chosen = (wanted.position >= where.start) & (wanted.position < where.stop)
    source, candidate = (math.exp(nll[chosen].mean()) for nll in wanted.nll)
    both = {"source": source, "candidate": candidate, "top1": float(wanted.same_top1[chosen].double().mean())}
    return {"tokens": int(chosen.sum()), "kl": float(wanted.kl[chosen].mean())} | both


def found(table: dict[str, Any]) -> dict[str, float]:
    both = {name: table["perplexity"][name] for name in ("source", "candidate")}
    return {"tokens": table["tokens"], "kl": table["kl"]["mean"], "top1": table["top1"]} | both


def test_figures_are_what_whole_models_give(
    report: dict[str, Any], data: CalibrationData, whole_model: Callable[..., Any], finished: Finished
) -> None:
    """Of the short and of the long texts, and by position in the long ones."""
    texts = [torch.from_numpy(sample.tokens).long() for sample in data.samples]
    assert [len(tokens) for tokens in texts] == [SHORT] * 3 + [LONG] * 2
    models = (source_weights(finished.source), finished_weights(finished.folder))
    runs = [run_whole(whole_model(*model), texts) for model in models]
    short, long = (compared(*runs, texts, numbers) for numbers in ([0, 1, 2], [3, 4]))
    for table, wanted, length, count in ((report, short, SHORT, 3), (report["long"], long, LONG, 2)):
        assert found(table) == pytest.approx(expected(wanted), rel=1e-5, abs=1e-6)
        assert (table["samples"], table["longest"]) == (count, length)
        assert table["router"]["agreement"] == pytest.approx(wanted.agreement)
        assert table["hidden_error"] == pytest.approx(wanted.hidden_error, rel=1e-5)
    assert set(report["long"]["families"]) == {"long"}
    assert not any(name.startswith("long") for name in report["categories"])
    assert [row["name"] for row in report["positions"]] == ["first 256", "256 to 1k"]
    for row, where in zip(report["positions"], (range(256), range(256, 1024)), strict=True):
        assert found(row) == pytest.approx(expected(long, where), rel=1e-5, abs=1e-6)
        assert row["samples"] == 2
        assert row["perplexity"]["increase"] == row["perplexity"]["candidate"] / row["perplexity"]["source"] - 1


def random_measured(texts: list[Text], seed: int) -> Measured:
    rng = np.random.default_rng(seed)
    count = sum(len(text.tokens) - 1 for text in texts)
    nll, kl = rng.normal(3, 1, count), rng.exponential(0.1, count)
    long = LayerFigures(agreement=0.7, hidden_error=0.3)
    known = ((1.0, 0.1), (0.5, 0.2))
    layers = [LayerFigures(agreement=share, hidden_error=error, long=long) for share, error in known]
    return Measured(nll, nll + rng.normal(0.1, 0.1, count), kl, kl * rng.random(count), kl < 0.1, layers)


def random_texts(*kinds: tuple[int, bool]) -> list[Text]:
    return [Text(torch.zeros(n, dtype=torch.int64), f"a/{i % 2}", 3 * n, long) for i, (n, long) in enumerate(kinds)]


def test_short_figures_do_not_move_by_one_bit_when_long_texts_are_added() -> None:
    """Wherever the long ones stand among them."""
    texts = random_texts((60, False), (900, True), (40, False), (20, False), (700, True), (90, False))
    mixed = random_measured(texts, 1)
    mask = np.repeat([not text.long for text in texts], [len(text.tokens) - 1 for text in texts])
    columns = (mixed.source_nll, mixed.candidate_nll, mixed.kl, mixed.reverse_kl, mixed.same_top1)
    alone = Measured(*(column[mask] for column in columns), mixed.layers)
    both = figures(mixed, texts, ABOUT).as_dict()
    short = figures(alone, [text for text in texts if not text.long], ABOUT).as_dict()
    assert both.pop("long")["samples"] == 2
    assert [row["tokens"] for row in both.pop("positions")] == [2 * 255, 899 + 699 - 2 * 255]
    assert [row["tokens"] for row in short.pop("positions")] == [59 + 39 + 19 + 89]
    assert both == short


def test_a_set_of_one_kind_only_has_no_parts() -> None:
    for long in (False, True):
        texts = random_texts((60, long), (400, long))
        measured = random_measured(texts, 2)
        found = figures(measured, texts, ABOUT).as_dict()
        assert "long" not in found
        assert (found["samples"], found["tokens"]) == (2, 458)
        assert found["kl"]["mean"] == measured.kl.mean()
        assert found["router"]["min"] == 0.5


@pytest.mark.parametrize("lengths", [[1], [255, 256, 257], [4095, 4096, 4097, 3], [10, 5000, 1023, 1024]])
def test_bands_of_positions_against_a_loop(lengths: list[int]) -> None:
    rng = np.random.default_rng(7)
    columns = [rng.exponential(1.0, sum(lengths)) for _ in range(4)] + [rng.random(sum(lengths)) < 0.5]
    tokens = zip(*columns, strict=True)
    placed = [(text, place, next(tokens)) for text, length in enumerate(lengths) for place in range(1, length + 1)]
    rows = iter([band.as_dict() for band in by_position(np.array(lengths), np.stack(columns))])
    edges = {"first 256": range(256), "256 to 1k": range(256, 1024), "1k to 4k": range(1024, 4096),
             "beyond 4k": range(4096, 9999)}  # fmt: skip
    for name, band in edges.items():
        values = [value for _, place, value in placed if place in band]
        if not values:
            continue
        row = next(rows)
        assert (row["name"], row["tokens"]) == (name, len(values))
        assert row["samples"] == len({text for text, place, _ in placed if place in band})
        source, candidate, kl, reverse, same = (sum(column) / len(values) for column in zip(*values, strict=True))
        assert row["perplexity"]["source"] == pytest.approx(math.exp(source))
        assert row["perplexity"]["candidate"] == pytest.approx(math.exp(candidate))
        assert (row["kl"]["mean"], row["top1"]) == (pytest.approx(kl), pytest.approx(same))
        assert row["reverse_kl"]["mean"] == pytest.approx(reverse)
    assert list(rows) == []


def test_texts_are_cut_at_the_positions_that_the_model_was_made_for(
    small: Small, held_out: Path, tmp_path: Path
) -> None:
    """The same tokens as a set that is cut there; and what was cut is counted and said."""
    model = small.copied(tmp_path / "job").model
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    opened = open_folder(model)
    cut = measure(opened, [opened], held_out, CPU, tmp_path / "work")[0].as_dict()
    assert (cut["longest"], cut["long"]["longest"], cut["long"]["tokens"]) == (SHORT, 100, 2 * 99)
    assert cut["evaluated_on"].pop("past_the_model") == {"positions": 100, "texts": 2, "tokens": 2 * (LONG - 100)}
    shorter = write_set(tmp_path, long=100)
    same = measure(opened, [opened], shorter, CPU, tmp_path / "work")[0].as_dict()
    assert same["evaluated_on"].pop("past_the_model") == {"positions": 100, "texts": 0, "tokens": 0}
    assert cut["evaluated_on"].pop("digest") != same["evaluated_on"].pop("digest")
    assert cut == same
    one = cut | {
        "model": "x",
        "evaluated_on": {"name": "x", "digest": "", "past_the_model": {"positions": 9, "texts": 2, "tokens": 4}},
    }
    text = eval_table(EvalReport.model_validate({"source": "s", "candidates": [one], "notes": []}))
    assert "2 texts were cut at 9 tokens, the model's max_position_embeddings; 4 tokens were not measured" in text


def test_both_parts_are_shown_everywhere(finished: Finished, report: dict[str, Any], tmp_path: Path) -> None:
    """At the end of a run, by `quantize eval`, in the card, on the page, in the picture; not where there are none."""
    whole = finished.report | report
    candidate = EvaluatedCandidate.model_validate(report | {"model": "x"})
    parts, worst = f"{report['long']['kl']['mean']:.5f}", report["long"]["worst"]
    beyond = f"{report['positions'][1]['kl']['mean']:.5f}"
    shown = {
        "run": run_table(checked(whole), tmp_path, "source", "mine.yaml"),
        "eval": eval_table(EvalReport(source="s", candidates=[candidate], notes=[])),
        "card": model_card(checked(whole)),
        "page": html_report(checked(whole), {}),
    }
    for name, text in shown.items():
        assert parts in text, name
        assert beyond in text, name
        assert worst["place"] in text, name
        assert f"{worst['max']:.4f}" in text, name
        for way in (report, report["long"]):
            assert f"{way['reverse_kl']['mean']:.5f}" in text, name
            assert f"{way['kl']['p999']:.4f}" in text, name
    assert re.search(r"^output .*\nlong .*$", shown["run"], re.MULTILINE)
    assert re.search(r"^256 to 1k +2 +88 ", shown["run"], re.MULTILINE)
    assert f"on 2 long ones of at most {LONG}; not on longer contexts" in shown["card"]
    assert f"texts of at most {SHORT} tokens" in shown["card"]
    before = {
        "run": run_table(checked(finished.report), tmp_path, "source", "mine.yaml"),
        "card": model_card(checked(finished.report)),
    }
    assert not any("256 to 1k" in text for text in before.values())
    assert "long contexts" in before["card"]
    short = checked(finished.report)
    assert isinstance(short, Fidelity)
    pictures = [
        png(fidelity_figure([("x", candidate), ("y", candidate)], "title")),
        png(fidelity_figure([("x", short)], "title")),
    ]
    widths = [int.from_bytes(picture[16:20], "big") for picture in pictures]
    assert widths[0] > widths[1], "a third panel"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EMBEDDED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def strings(value: Any) -> Iterator[str]:
    """Every text in a row, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)


def test_the_shipped_long_texts_are_long_and_in_nothing_that_calibrates() -> None:
    """No run of thirteen words of one is in any text of embedded.yaml, however short that text is."""

    def runs(text: str) -> set[str]:
        words = re.findall(r"\w+", text.casefold())
        return {" ".join(words[i : i + 13]) for i in range(len(words) - 12)}

    long = rows("held-out-long")
    assert len(long) == 8
    assert {row["category"] for row in long} == {
        "long/code", "long/documentation", "long/essay", "long/german", "long/story", "long/tutorial"
    }  # fmt: skip
    assert min(len(row["text"].encode()) for row in long) > 15_000
    own = set().union(*(runs(row["text"]) for row in long))
    calibrating = [text for name in ("code", "spoken", "chat") for row in rows(name) for text in strings(row)]
    assert len(own) > 10_000
    assert len(calibrating) > 500
    assert not any(own & runs(text) for text in calibrating)
