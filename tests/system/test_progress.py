"""The time that is said to be left, against a clock of the test's own."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finished

from eval.fidelity import scoring
from quantizers.checkpoint.reader import open_folder
from quantizers.commands.evaluate import measure
from quantizers.forward import activation_stream
from quantizers.system import progress as shown
from quantizers.system.errors import Interrupted

LAYER, TEXT = 30.0, 1.0  # seconds


class Clock:
    """What time.monotonic says: a layer takes half a minute in each model, a text a second, all else nothing."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patched.setattr(time, "monotonic", lambda: self.now)
        patched.setattr(activation_stream, "attend", self.slowed(activation_stream.attend, LAYER))
        patched.setattr(scoring, "score_text", self.slowed(scoring.score_text, TEXT))

    def slowed(self, work: Any, seconds: float) -> Any:
        def slow(*arguments: Any, **named: Any) -> Any:
            self.now += seconds
            return work(*arguments, **named)

        return slow


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def evaluated(finished: Finished, work: Path, check: Any = lambda: None) -> None:
    source, candidate = open_folder(finished.source), open_folder(finished.folder)
    measure(source, [candidate], finished.held_out, torch.device("cpu"), work, check, resumable=True)


def test_layers_and_texts_have_an_estimate_each(
    finished: Finished, clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four layers of a minute, twelve texts of a second: what is left of the texts is seconds."""
    evaluated(finished, tmp_path / "work")
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


def test_an_evaluation_that_goes_on_counts_what_was_done_before_as_done(
    finished: Finished, clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as speed: after the cut the estimates are those of an unbroken evaluation. Cut in layers, then in texts."""

    def cut_in(module: Any, name: str, calls: int) -> None:
        real, count = getattr(module, name), iter(range(1_000_000))

        def cut(*arguments: Any, **named: Any) -> Any:
            if next(count) == calls:
                raise Interrupted("cut", 2)
            return real(*arguments, **named)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(module, name, cut)
            with pytest.raises(Interrupted):
                evaluated(finished, tmp_path / "work")

    cut_in(activation_stream, "attend", 3)  # the candidate's in layer 1
    cut_in(scoring, "score_text", 4)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "evaluating: 1 of 4  layer 0",
        "evaluating: 2 of 4  layer 1",
        "evaluating: 3 of 4  layer 2",
        "evaluating: 4 of 4  layer 3",
        "scoring: 1 of 12  text 1 of 12",
    ]
    evaluated(finished, tmp_path / "work")
    assert capsys.readouterr().err.splitlines() == [
        "scoring: 5 of 12  text 5 of 12",
        "scoring: 10 of 12, 2 s left  text 10 of 12",
        "scoring: 12 of 12  text 12 of 12",
    ]


def test_bars_come_one_after_the_other(
    finished: Finished, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal rich draws them, which cannot draw two at a time; each is full at its end."""
    import rich.progress

    bars: list[rich.progress.Progress] = []
    original = rich.progress.Progress.__enter__

    def enter(bar: rich.progress.Progress) -> rich.progress.Progress:
        assert not any(other.live.is_started for other in bars)
        bars.append(bar)
        return original(bar)

    monkeypatch.setattr(rich.progress.Progress, "__enter__", enter)
    monkeypatch.setattr(shown.sys.stderr, "isatty", lambda: True, raising=False)
    evaluated(finished, tmp_path / "work")
    drawn = [(task.description, task.completed, task.total) for bar in bars for task in bar.tasks]
    assert drawn[-2:] == [
        ("evaluating", 4, 4),
        ("scoring", 12, 12),
    ]


def test_a_phase_has_a_line_only_after_a_while_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with shown.progress("quantizing", 2, unit="layer", trusted=1) as step:
        for phase in ("reading", "search", "rounding"):
            now[0] += 31
            shown.doing(phase)  # at 31 s, 62 s and 93 s: only the last one is a line
        shown.doing("audit")  # at once: no line
        now[0] += 7
        step("100 s")
        now[0] += 89
        shown.doing("search")
        now[0] += 1
        shown.doing("rounding")
    shown.doing("rounding")  # nothing shows it any more
    assert capsys.readouterr().err.splitlines() == [
        "quantizing: layer 1 of 2: rounding",
        "quantizing: layer 1 of 2, 1 min 40 s left  100 s",
        "quantizing: layer 2 of 2: rounding",
    ]


def test_a_terminal_shows_the_phase_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each phase is drawn once, however often it is said."""
    from rich.progress import Progress

    drawn: list[Any] = []
    real = Progress.update

    def update(self: Any, task: Any, **fields: Any) -> None:
        drawn.append(fields)
        real(self, task, **fields)

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(Progress, "update", update)
    with shown.progress("quantizing", 2, unit="layer") as step:
        for phase in ("search", "search", "rounding", "search"):
            shown.doing(phase)
        step("12 s")
    assert [fields["phase"].strip() for fields in drawn if "phase" in fields] == ["search", "rounding", "search"]
    assert [fields["note"] for fields in drawn if "note" in fields] == ["last: 12 s"]


def test_the_first_layer_with_experts_says_how_long_the_others_take(capsys: pytest.CaptureFixture[str]) -> None:
    """Once: 60 s a layer, and 61 layers after the second one; nothing after the last layer."""
    say = shown.forecast(63)
    say({"layer": 0, "routed": [], "seconds": {"read": 1.0}})  # without experts
    say({"layer": 1, "routed": [[5, 3]], "seconds": {"read": 20.0, "solve": 40.0}})
    say({"layer": 2, "routed": [[5, 3]], "seconds": {"read": 1.0}})
    assert capsys.readouterr().err == "forecast from layer 1: about 1 h 01 min for 61 more layers\n"
    shown.forecast(2)({"layer": 1, "routed": [[5, 3]], "seconds": {"read": 1.0}})
    assert capsys.readouterr().err == ""
