"""On a CPU the number of threads decides bits: what was begun with one goes on with it, however it is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import quantize
from conftest import Finished
from runs import Small

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for
from quantizers.checkpoint.reader import open_folder
from quantizers.device import devices
from quantizers.device.devices import use_threads
from quantizers.distributed.process_group import ProcessGroup
from quantizers.eval.fidelity import scoring
from quantizers.output.journal import begun_with
from quantizers.pipeline import layer_entry
from quantizers.system.errors import InputError, OutputError

NO_NUMBER = "OMP_NUM_THREADS: '{}' is no number of threads, 1 to 1,024; unset it, or set OMP_NUM_THREADS="


@pytest.fixture
def kept_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's threads are as before afterwards; OMP_NUM_THREADS is not set."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def facts(finished: Finished) -> Architecture:
    config = open_folder(finished.source).config
    return architecture_for(config, "")


@pytest.mark.usefixtures("kept_threads")
@pytest.mark.parametrize(
    ("begun_with", "given", "processes", "wanted"),
    [
        (3, None, 1, 3),
        (3, "3", 1, 3),
        (3, "1", 2, 3),  # torchrun sets 1 where nothing is set
        (1, "1", 2, 1),
        (3, "1", 1, "OMP_NUM_THREADS is 1, .* begun with 3 threads, .* unset it, or set OMP_NUM_THREADS=3"),
        (3, "2", 2, "OMP_NUM_THREADS is 2, .* begun with 3 threads, .* unset it, or set OMP_NUM_THREADS=3"),
        (3, "3,2", 1, 3),  # of nested threads the outermost
        (3, "", 1, 3),
        (None, "3", 1, 3),
        (None, " 2, 1", 1, 2),
        (None, None, 1, 1),  # a small layer
        *((None, text, 1, NO_NUMBER.format(text)) for text in ("many", "0", "-1", "4,", "1e2", "9999", "2 2")),
        (3, "many", 2, NO_NUMBER.format("many")),
    ],
)
def test_another_number_of_processes_keeps_the_threads(
    begun_with: int | None,
    given: str | None,
    processes: int,
    wanted: int | str,
    facts: Architecture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, the run was refused for another machine.threads at default settings."""
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    torch.set_num_threads(4)
    dist = ProcessGroup()
    dist.world_size = processes
    if isinstance(wanted, str):
        with pytest.raises(InputError, match=wanted):
            use_threads(facts, begun_with, dist)
        return
    use_threads(facts, begun_with, dist)
    assert torch.get_num_threads() == wanted


@pytest.mark.slow
@pytest.mark.usefixtures("kept_threads")
def test_a_run_begun_with_other_threads_goes_on_with_them(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one process: begun with 2, the rule says 1; then an explicit number is refused in one line."""
    output = tmp_path / "output"
    words = ("run", small.recipe, "--output", output, "--device", "cpu")
    real = layer_entry.write_json

    def cut(path: Path, entry: Any) -> None:
        real(path, entry)
        if entry.get("layer") == 0:
            raise OutputError("", "cut here")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(devices, "SMALL_LAYER", 0)
        patched.setattr(devices, "cores", lambda: 2)
        patched.setattr(layer_entry, "write_json", cut)
        assert quantize(patched, *words) == 2
    assert torch.get_num_threads() == 2
    assert begun_with(output / ".quantize")["threads"] == 2
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")
        assert quantize(patched, *words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "quantize: OMP_NUM_THREADS is 1, but the unfinished work here was begun with 2 threads, and their number "
        "decides bits; unset it, or set OMP_NUM_THREADS=2"
    )
    assert quantize(monkeypatch, *words) == 0
    assert json.loads((output / "report.json").read_text())["settings"]["machine"]["threads"] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("kept_threads")
def test_an_evaluation_goes_on_with_its_threads(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: «holds an unfinished evaluation of other models or data»."""

    words = ("eval", finished.source, finished.folder, "--data", finished.held_out, "--no-picture", "--device", "cpu")
    words += ("--work", tmp_path / "work", "--json")
    assert quantize(monkeypatch, *words) == 0
    wanted = json.loads(capsys.readouterr().out)
    real = scoring.score_text

    def cut(*_: Any) -> Any:
        raise OutputError("", "cut here")

    monkeypatch.setattr(scoring, "score_text", cut)
    assert quantize(monkeypatch, *words) == 2
    monkeypatch.setattr(scoring, "score_text", real)
    capsys.readouterr()
    monkeypatch.setattr(devices, "SMALL_LAYER", 0)
    monkeypatch.setattr(devices, "cores", lambda: 2)
    assert quantize(monkeypatch, *words) == 0
    assert json.loads(capsys.readouterr().out) == wanted
