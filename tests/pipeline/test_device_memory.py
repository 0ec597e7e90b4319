"""--device-memory decides how much is held at a time and no byte, whatever it is and whenever it changes."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from calibration_tokenizer import write_tokenizer
from one_layer import batches_cached
from runs import hashes

from quantizers.calibration.load_set import load_set
from quantizers.calibration.samples import token_tensors
from quantizers.pipeline import layer_entry
from quantizers.pipeline.layer_entry import _by_expert
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning import expert_batches
from quantizers.planning.device_memory import device_memory
from quantizers.planning.job import prepare
from quantizers.recipe.read import set_location
from quantizers.solve import solver
from quantizers.system.errors import Interrupted, OutputError

CPU = torch.device("cpu")
LAYERS, EXPERTS = 2, 4


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe for layers of four experts that are solved one by one, so that four sums can be held at a time."""
    monkeypatch.setattr(expert_batches, "CPU_EXPERTS", 1)
    monkeypatch.setattr(expert_batches, "CPU_TOKENS", 32)  # of a layer this small more would need more than its experts
    folder = tmp_path / "job"
    write_tokenizer(tiny.make(folder / "model", num_hidden_layers=LAYERS, num_local_experts=EXPERTS))
    recipe = tiny.write_recipe(folder, words=2, samples=3, awq={"grid": 3})
    for name in ("calibration.yaml", "held-out.yaml"):  # memory follows the texts, not the length that they may have
        body = (folder / name).read_text()
        (folder / name).write_text(body.replace("sequence_length: 256", f"sequence_length: {10**12}"))
    return recipe


def limits(job: Path) -> dict[int, int]:
    """For every number of sums a limit with which so many are held."""
    prepared = prepare(str(job))
    data = load_set(set_location(prepared.recipe.calibration_set, job), prepared.opened.folder)
    lengths = [len(sequence) for sequence in token_tensors(data, prepared.facts.vocab_size)]
    assert max(lengths) <= 32  # what attention takes of longer ones would be most
    needs = partial(device_memory, prepared.plan, prepared.facts, max(lengths), False, tokens=sum(lengths))
    whole = needs(limit=None)
    step, found = (whole.peak - whole.smallest) // 100, dict[int, int]()
    for limit in range(whole.smallest, whole.peak + step, step):
        found.setdefault(needs(limit=limit).resident, limit)
    assert list(found) == list(range(1, EXPERTS + 1))
    return found


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sums were gathered in each sweep."""
    return batches_cached(monkeypatch)


@pytest.mark.slow
def test_the_limit_decides_no_byte(
    job: Path, tmp_path: Path, held: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of shards, index and config, by hash, and no figure; with another limit at a resume, and on a full device."""
    of, wanted = limits(job), dict[str, Any]()

    def same(name: str, report: dict[str, Any]) -> None:
        found = hashes(tmp_path / name), [(layer["error"], layer["fallbacks"]) for layer in report["layers"]]
        assert (*found, report["kl"]) == wanted.setdefault("whole", (*found, report["kl"])), name

    same("whole", run(prepare(str(job)), Options(tmp_path / "whole", CPU, of[EXPERTS])))
    assert held == [EXPERTS] * LAYERS

    def interrupted(path: Path, entry: Any) -> None:
        write_json(path, entry)
        if entry.get("layer") == 0:
            raise Interrupted("", "stopped", "", 15)

    write_json, resumed = layer_entry.write_json, tmp_path / "resumed"
    held.clear()
    with monkeypatch.context() as patched:
        patched.setattr(layer_entry, "write_json", interrupted)
        with pytest.raises(Interrupted):
            run(prepare(str(job)), Options(resumed, CPU, of[1]))
    with monkeypatch.context() as patched:  # it is the expert batches that a resumed run must keep, not the memory
        patched.setattr(expert_batches, "CPU_EXPERTS", 2)
        with pytest.raises(OutputError, match=r"unfinished run with another batches\.experts \(1, now 2\)"):
            run(prepare(str(job)), Options(resumed, CPU))
    same("resumed", run(prepare(str(job)), Options(resumed, CPU, of[3])))
    assert held == [1, 1, 1, 1, 2, 2]

    real, calls = solver.solve_batch, itertools.count()

    def full(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 2:  # the first layer's third expert
            raise torch.OutOfMemoryError("injected")
        return real(*arguments, **named)

    held.clear()
    capsys.readouterr()
    monkeypatch.setattr(solver, "solve_batch", full)
    same("full", run(prepare(str(job)), Options(tmp_path / "full", CPU)))
    assert held == [4, 2, 2, 2]
    lines = [line for line in capsys.readouterr().err.splitlines() if "memory was full" in line]
    assert lines == [
        "the device's memory was full: from now on the Hessians of 2 expert batches of 1 experts are kept at a time; "
        "the output stays the same"
    ]


def test_fallbacks_are_in_the_order_of_experts_however_they_were_solved() -> None:
    lines = ["rows left out", "expert 10: a", "expert 2: b", "expert 10: b", "expert 2: a"]
    assert _by_expert(lines) == ["rows left out", "expert 2: b", "expert 2: a", "expert 10: a", "expert 10: b"]
