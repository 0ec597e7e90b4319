"""The time that is said to be left, against a clock of the test's own."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finished

from quantizers.checkpoint.reader import open_folder
from quantizers.commands.evaluate import measure
from quantizers.eval.fidelity import scoring
from quantizers.model import activation_stream
from quantizers.system import progress as shown


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time.monotonic says, in its only item."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_layers_and_texts_have_an_estimate_each(
    finished: Finished,
    clock: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Four layers of half a minute in each model, twelve texts of a second: what is left of the texts is seconds."""

    def slow_down(module: Any, name: str, seconds: float) -> None:
        work = getattr(module, name)

        def slow(*arguments: Any, **named: Any) -> Any:
            clock[0] += seconds
            return work(*arguments, **named)

        monkeypatch.setattr(module, name, slow)

    slow_down(activation_stream, "attend", 30.0)
    slow_down(scoring, "score_text", 1.0)
    source, candidate = open_folder(finished.source), open_folder(finished.folder)
    work = tmp_path / "work"
    measure(source, [candidate], finished.held_out, torch.device("cpu"), work, lambda: None)
    assert capsys.readouterr().err.splitlines() == [
        "evaluating: 1 of 4  layer 0",
        "evaluating: 2 of 4  layer 1",
        "evaluating: 3 of 4, 1 min 00 s left  layer 2",
        "evaluating: 4 of 4  layer 3",
        "scoring: 1 of 12  text 1 of 12",
        "scoring: 6 of 12, 6 s left  text 6 of 12",
        "scoring: 11 of 12, 1 s left  text 11 of 12",
        "scoring: 12 of 12  text 12 of 12",
    ]


def test_what_was_done_before_counts_as_done_and_not_as_speed(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with shown.progress("scoring", 12, done=4) as step:
        for number in range(5, 13):
            clock[0] += 1
            step(f"text {number}")
    assert capsys.readouterr().err.splitlines() == [
        "scoring: 5 of 12  text 5",
        "scoring: 10 of 12, 2 s left  text 10",
        "scoring: 12 of 12  text 12",
    ]


def test_a_phase_has_a_line_only_after_a_while_without_one(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with shown.progress("quantizing", 2, unit="layer", trusted=1) as step:
        for phase in ("reading", "search", "rounding"):
            clock[0] += 31
            shown.doing(phase)  # at 31 s, 62 s and 93 s: only the last one is a line
        shown.doing("audit")  # at once: no line
        clock[0] += 7
        step("100 s")
        clock[0] += 89
        shown.doing("search")
        clock[0] += 1
        shown.doing("rounding")
    shown.doing("rounding")  # nothing shows it any more
    assert capsys.readouterr().err.splitlines() == [
        "quantizing: layer 1 of 2: rounding",
        "quantizing: layer 1 of 2, 1 min 40 s left  100 s",
        "quantizing: layer 2 of 2: rounding",
    ]


def test_a_terminal_shows_steps_and_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    with shown.progress("quantizing", 2, unit="layer") as step:
        step("12 s")
        shown.doing("rounding")
    drawn = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.getvalue()).split()
    assert {"quantizing", "1/2"} < set(drawn)
    assert drawn[-4:] == ["rounding", "last:", "12", "s"]


def test_a_terminal_of_80_columns_keeps_a_line_for_each_layer_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The figures of a layer were in the bar, where they left no room for the rest, and were gone with the next one."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    note = "4.2 s, rounding 0.0504, experts within 12.5%, hidden error 0.0543, router agreement 98.26%"
    with shown.progress("quantizing", 62, 2, unit="layer", kept=True) as step:
        shown.doing("held-out texts")
        step(note)
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.getvalue()).replace("\r", "\n").splitlines()
    assert f"quantizing: layer 3 of 62  {note}" in lines
    last = next(line for line in reversed(lines) if line.strip())
    assert re.fullmatch(r"quantizing +\S+ +3/62 0:00:0\d left -:--:-- held-out texts *", last)


def test_the_first_layer_with_experts_says_how_long_the_others_take(capsys: pytest.CaptureFixture[str]) -> None:
    """Once: 60 s a layer, and 61 layers after the second one; nothing after the last layer."""
    say = shown.forecast(63)
    say(0, 1.0, False)
    say(1, 60.0, True)
    say(2, 1.0, True)
    assert capsys.readouterr().err == "forecast from layer 1: about 1 h 01 min for 61 more layers\n"
    shown.forecast(2)(1, 1.0, True)
    assert capsys.readouterr().err == ""
