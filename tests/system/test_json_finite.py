"""What this program writes as JSON is JSON: no NaN, no infinity, and every table can show what stands for them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Finished

from quantizers.cli.common import emit
from quantizers.cli.run import run_table
from quantizers.eval.fidelity.figures import Cut, HeldOutSet, LayerFigures
from quantizers.eval.fidelity.metrics import Measured, Text, figures
from quantizers.eval.fidelity.scoring import HeldOut
from quantizers.eval.report.pages import html_report, model_card
from quantizers.eval.report.schema import checked
from quantizers.output.manifest import write_record
from quantizers.system.errors import QuantizeError
from quantizers.system.files import json_finite, write_json

LENGTHS = [4, 6]

ABOUT = HeldOutSet(name="held-out", digest="0" * 64, past_the_model=Cut(texts=0, tokens=0))


def refused(word: str) -> Any:
    raise AssertionError(f"{word} is no JSON")


def strict(text: str) -> Any:
    """Read as a reader does that is not Python's."""
    return json.loads(text, parse_constant=refused)


def measured(**changes: Any) -> Measured:
    rows = {name: np.full(sum(LENGTHS), 0.5) for name in ("source_nll", "candidate_nll", "kl", "reverse_kl")} | changes
    return Measured(**rows, same_top1=rows["kl"] < 1, layers=[LayerFigures(agreement=1.0, hidden_error=0.0)])


def texts(*sizes: int) -> list[Text]:
    return [
        Text(torch.zeros(n + 1, dtype=torch.int64), f"kind/{i}", size)
        for i, (n, size) in enumerate(zip(LENGTHS, sizes, strict=True))
    ]


def test_numbers_that_json_has_not() -> None:
    data = {"a": [1.0, math.nan, (math.inf, 2)], "b": {"c": -math.inf, "d": None, "e": "NaN", "f": True}}
    assert json_finite(data) == {"a": [1.0, None, [None, 2]], "b": {"c": None, "d": None, "e": "NaN", "f": True}}


@pytest.mark.altered_report
def test_nan_is_never_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before, report.json could hold NaN, which Python alone reads."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"value": math.nan})
    assert not list(tmp_path.iterdir())
    write_record(tmp_path, {"value": math.inf, "rows": [math.nan]})
    report = strict((tmp_path / "report.json").read_text())
    assert (report["value"], report["rows"]) == (None, [None])
    emit({"value": math.nan}, True, "")
    assert strict(capsys.readouterr().out) == {"value": None}


def test_tokens_without_bytes_have_no_bits_per_byte(finished: Finished) -> None:
    """Special tokens stand for no text: a category of nothing else had inf there, and NaN in the card."""
    found = figures(measured(), texts(0, 12), ABOUT).as_dict()
    assert found["categories"]["kind/0"]["bits_per_byte"] == {"source": None, "candidate": None}
    wanted = 0.5 * 6 / (math.log(2) * 12)
    assert found["categories"]["kind/1"]["bits_per_byte"]["candidate"] == pytest.approx(wanted)
    assert strict(json.dumps(found)) == found
    none = figures(measured(), texts(0, 0), ABOUT).as_dict()
    for one in (found, none):
        report = checked(finished.report | one)
        shown = [
            model_card(report),
            html_report(report, {}),
            run_table(report, Path("out"), "source", "mine.yaml"),
        ]
        assert not [text for text in shown if re.search(r"\b(nan|inf|None)\b", text)]
    assert "no number" in run_table(report, Path("out"), "source", "mine.yaml")


def test_a_gate_without_a_number_has_failed_and_can_be_shown(finished: Finished) -> None:
    gate = finished.report["gates"][0] | {"value": None, "passed": False}
    report = checked(finished.report | {"gates": [gate]})
    for text in (
        model_card(report),
        html_report(report, {}),
        run_table(report, Path("out"), "source", "mine.yaml"),
    ):
        assert "no number" in text


@pytest.mark.parametrize("loss", [math.nan, math.inf, 800.0])
def test_a_loss_that_overflows_is_one_line(loss: float) -> None:
    spoilt = measured(candidate_nll=np.full(sum(LENGTHS), loss))
    with pytest.raises(OverflowError):
        figures(spoilt, texts(9, 9), ABOUT)
    with pytest.raises(QuantizeError, match=r"is not a number .*: logits overflow, and nothing can be compared"):
        HeldOut(texts(9, 9), "", ABOUT).figures(spoilt, "the output")
