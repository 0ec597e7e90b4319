"""What several processes make together is what one makes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command
from conftest import Finished
from one_layer import EXPERTS, GROUP, assert_same, make_layer, plain
from rank_threads import together
from runs import Small
from sets import write_set

from quantizers.checkpoint.reader import open_folder
from quantizers.commands.evaluate import measure
from quantizers.commands.question import Question
from quantizers.device import devices
from quantizers.device.devices import choose_device
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.output import journal
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning import expert_batches
from quantizers.planning.device_memory import Residents
from quantizers.planning.job import prepare
from quantizers.recipe.schema import Awq, CoverageGate, Experts
from quantizers.sets.coverage import measure_coverage
from quantizers.solve.result import LayerResult
from quantizers.solve.solver import solve
from quantizers.system.errors import InputError, OutputError, QuantizeError

CPU = torch.device("cpu")


def one_of(rank: int, count: int, local: int = 0) -> ProcessGroup:
    """A rank that is not connected to the others."""
    dist = ProcessGroup()
    dist.rank, dist.world_size, dist.local_rank, dist.nodes = rank, count, local, [0] * count
    return dist


@pytest.mark.parametrize(
    ("count", "unit", "options"),
    [
        (2, 2, {}),
        (2, 1, {"format": "nvfp4", "activations": 4}),
        (3, 1, {"awq": False, "rounding": "nearest", "scales": "minmax"}),
        (EXPERTS + 2, 1, {}),
    ],
)
def test_a_layer_solved_by_several(count: int, unit: int, options: dict[str, Any]) -> None:
    """Every rank gets what one process gets, bit for bit, the report's numbers and lines included."""
    layer = make_layer(3)
    settings = Experts(**({"awq": Awq(grid=8)} | options)).model_copy(update={"group_size": GROUP})

    def work(dist: ProcessGroup) -> LayerResult:
        return solve(
            layer.recorded(), layer.weights(), norm=layer.norm, router=layer.router, gate=plain,
            shape=layer.router.shape, settings=settings, batch_size=unit, residents=Residents(2, unit, 0), dist=dist,
        )  # fmt: skip

    wanted = work(SINGLE_PROCESS)
    for got in together(count, work):
        assert isinstance(got, LayerResult)
        assert_same(got, wanted)
        assert got.error == wanted.error
        assert got.fallbacks == wanted.fallbacks


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_other_commands_are_for_one_process(
    rank: int, lines: int, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert command("recipes", "list") == 2
    said = command.err.splitlines()
    assert len(said) == lines
    assert all(
        line.startswith(
            "quantize: only run, eval, coverage, imatrix, compare and calibration why work with several processes"
        )
        for line in said
    )


def test_the_librarys_engine_is_for_one_process(tmp_path: Path, write_recipe: Callable[..., Path]) -> None:
    pytest.importorskip("llmcompressor", reason="it takes no transformers after 5.17")
    recipe = write_recipe(tmp_path, engine="llmcompressor")
    options = Options(tmp_path / "output", CPU, dist=one_of(0, 2))
    with pytest.raises(InputError, match=r"recipe\.yaml: experts\.engine: llmcompressor works in one process"):
        run(prepare(str(recipe)), options)


def test_a_different_recipe_is_refused(tmp_path: Path, write_recipe: Callable[..., Path]) -> None:
    """Before anything is written."""
    recipes = [write_recipe(tmp_path / "0"), write_recipe(tmp_path / "1", routed_weight=0.5)]

    def work(dist: ProcessGroup) -> None:
        run(prepare(str(recipes[dist.rank])), Options(tmp_path / "output", CPU, dist=dist))

    ended = together(2, work)
    assert "rank 1 of 2 on host0 has recipe " in str(ended[1])
    assert "; start the same command with the same recipe and sets on all machines" in str(ended[1])
    assert not list(tmp_path.rglob("layers"))


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu", one_of(1, 2, 1)).type == "cpu"
    monkeypatch.setattr(devices, "settle_gpu", lambda: None)  # it would hold for all tests after this one
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **named: named["device"])
    assert choose_device("auto", one_of(2, 4, 2)) == torch.device("cuda:2")
    assert choose_device("cuda", one_of(2, 4, 2)) == torch.device("cuda:2")
    assert choose_device("cuda:1", one_of(2, 4, 2)) == torch.device("cuda:1")
    assert choose_device("cuda") == torch.device("cuda")


def test_the_folder_is_held_until_the_last_has_ended(tmp_path: Path) -> None:
    """A rank that still writes after rank 0 has died keeps a new run out; other machines have a lock of their own."""

    def work(dist: ProcessGroup) -> None:
        with journal.locked(tmp_path, dist):
            dist.barrier()
        dist.barrier()  # rank 0 has let it go
        if dist.rank == 1:
            with (
                journal.locked(tmp_path, one_of(1, 2, 1)),
                pytest.raises(OutputError, match="is working here"),
                journal.locked(tmp_path),
            ):
                pass

    for nodes in (1, 2):
        assert together(2, work, nodes) == [None, None]
    with journal.locked(tmp_path):
        pass


@pytest.mark.slow
def test_an_evaluation_by_several(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of one process, by two machines too; cut off in one of three, it goes on with two and then alone."""
    monkeypatch.setattr(expert_batches, "CPU_TOKENS", 256)  # everybody has texts
    source, candidate, held_out = open_folder(small.model), open_folder(small.whole), small.folder / "held-out.yaml"

    def work(dist: ProcessGroup, folder: str, done: str | None = None) -> list[dict[str, Any]]:
        def check() -> None:
            if done and dist.rank == dist.world_size - 1 and (tmp_path / folder / done).exists():
                raise QuantizeError("", "cut here")

        return measure(source, [candidate], held_out, CPU, tmp_path / folder, check, dist=dist)

    wanted = work(SINGLE_PROCESS, "alone")
    found = together(2, lambda dist: work(dist, f"machine-{dist.node}"), nodes=2)
    assert found == [wanted, []]
    assert not (tmp_path / "machine-1").exists()
    for count, done in ((3, "layer-00001.json"), (2, "layer-00002.json")):
        ended = together(count, lambda dist, done=done: work(dist, "cut", done))
        assert "cut here" in str(ended[-1])
        assert (tmp_path / "cut" / done).exists()
    assert work(SINGLE_PROCESS, "cut") == wanted


@pytest.mark.slow
def test_long_texts_by_several(finished: Finished, tmp_path: Path) -> None:
    """They have rows and figures of their own, which are those of one process too."""
    source, candidate, data = open_folder(finished.source), open_folder(finished.folder), write_set(tmp_path)
    (wanted,) = measure(source, [candidate], data, CPU, tmp_path / "alone")
    assert wanted.long
    first, *others = together(3, lambda dist: measure(
        source, [candidate], data, CPU, tmp_path / "three", dist=dist,
    ))  # fmt: skip
    assert first == [wanted]
    assert others == [[], []]


@pytest.mark.slow
def test_coverage_by_several(finished: Finished, tmp_path: Path) -> None:
    question = Question(str(finished.source), "main", False, (finished.calibration,), "")
    wanted = measure_coverage(question, CoverageGate(), CPU, tmp_path, scored=True)
    for got in together(3, lambda dist: measure_coverage(question, CoverageGate(), CPU, tmp_path, dist, scored=True)):
        assert got == wanted
