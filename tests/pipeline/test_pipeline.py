"""The run as a whole: equal bytes, nothing half-finished, going on after a cut."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import Finished
from runs import cut_at, cut_in_layer, hashes, timeless
from tiny import write_job

from quantizers.cli import main as cli
from quantizers.forward import activation_stream
from quantizers.output import journal
from quantizers.pipeline import pipeline, quantize, quantizer
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import Job, prepare
from quantizers.system.errors import Interrupted, OutputError, QuantizeError

CPU = torch.device("cpu")


def test_two_runs_give_the_same_bytes(finished: Finished, tmp_path: Path) -> None:
    report = run(prepare(str(finished.recipe)), Options(tmp_path / "again", CPU))
    assert hashes(tmp_path / "again") == hashes(finished.folder)
    assert timeless(report) == timeless(finished.report)


def test_the_output_holds_what_the_contract_names(finished: Finished) -> None:
    names = {path.name for path in finished.folder.iterdir()}
    shards = {f"model-{n:05d}-of-00005.safetensors" for n in range(1, 6)}
    assert shards | {"model.safetensors.index.json", "config.json", "recipe.yaml", "report.json", "README.md"} <= names
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    assert journal.WORK not in names
    index = json.loads((finished.folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == shards
    assert set(finished.report["files"]) == names - {"report.json"} | {"README.md"} - {"report.json"}


def test_every_file_may_be_read_by_whom_the_umask_allows(finished: Finished, tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    modes = {path.name: path.stat().st_mode for path in finished.folder.iterdir()}
    assert set(modes.values()) == {(tmp_path / "any").stat().st_mode}, modes


def test_sizes_are_as_planned_to_the_byte(finished: Finished) -> None:
    from quantizers.planning.plan import summary

    job = prepare(str(finished.recipe))
    planned = summary(job.plan, job.sizes)
    shards = planned["shards"]
    assert isinstance(shards, dict)
    assert shards == {path.name: path.stat().st_size for path in finished.folder.glob("*.safetensors")}
    assert planned["index_bytes"] == (finished.folder / "model.safetensors.index.json").stat().st_size


def test_a_finished_output_is_left_alone(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in finished.folder.iterdir()}
    monkeypatch.setattr("sys.argv", ["quantize", "run", str(finished.recipe), "--output", str(finished.folder)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert before == {path.name: path.stat().st_mtime_ns for path in finished.folder.iterdir()}


def test_the_finished_output_of_another_recipe_is_refused(
    finished: Finished, tmp_path: Path, write_recipe: Callable[..., Path]
) -> None:
    other = write_recipe(tmp_path, rounding="nearest")
    with pytest.raises(OutputError, match="finished output of another recipe"):
        run(prepare(str(other)), Options(finished.folder, CPU))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path, dict[str, Any]]:
    """A random model of four layers: its job, what an unbroken run makes of it, and that run's report."""
    folder = tmp_path_factory.mktemp("small")
    job = prepare(str(write_job(folder)))
    return job, folder / "whole", run(job, Options(folder / "whole", CPU))


@pytest.mark.parametrize(
    ("module", "name", "calls"),
    [
        (quantizer, "solve_layer", 0),
        (quantizer, "solve_layer", 2),
        pytest.param(quantize, "write_shard", 0, marks=pytest.mark.slow),
        (quantizer, "write_shard", 1),
        pytest.param(quantizer, "audit_layer", 2, marks=pytest.mark.slow),
        pytest.param(quantizer, "finish", 3, marks=pytest.mark.slow),
        pytest.param(activation_stream, "attend", 5, marks=pytest.mark.slow),
        pytest.param(quantize, "write_json", 0, marks=pytest.mark.slow),
        pytest.param(quantize, "write_json", 2, marks=pytest.mark.slow),
        (quantize, "score", 0),
        pytest.param(pipeline, "assemble", 0, marks=pytest.mark.slow),
        pytest.param(pipeline, "run_report", 0, marks=pytest.mark.slow),
        (pipeline, "move_into_place", 0),
    ],
)
def test_a_run_that_was_cut_goes_on_and_gives_the_same_bytes(
    module: ModuleType, name: str, calls: int, small: tuple[Job, Path, dict[str, Any]], tmp_path: Path
) -> None:
    (job, whole, unbroken), options = small, Options(tmp_path / "output", CPU)
    cut_at(module, name, job, options, calls)
    assert not (options.output / "config.json").exists()
    assert not (options.output / "model.safetensors.index.json").exists()
    report = run(job, options)
    assert hashes(options.output) == hashes(whole)
    assert timeless(report) == timeless(unbroken)


def test_a_move_that_was_cut_goes_on(finished: Finished, tmp_path: Path) -> None:
    """The renames at the end, cut after each one of them."""
    job, output = prepare(str(finished.recipe)), tmp_path / "output"
    moves = len(list(finished.folder.iterdir()))
    work = journal.work_folder(output)
    shutil.copytree(finished.folder, work / "output")
    (work / "moving").touch()
    (work / "lock").touch()
    real = journal.os.replace
    for _ in range(moves - 1):
        count = iter(range(1_000_000))

        def once(a: Path, b: Path, count: Any = count) -> None:
            if next(count) == 1:
                raise QuantizeError("cut here")
            real(a, b)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(journal.os, "replace", once)
            with pytest.raises(QuantizeError, match="cut here"):
                run(job, Options(output, CPU))
        assert not (output / "config.json").exists()
    run(job, Options(output, CPU))
    assert hashes(output) == hashes(finished.folder)
    assert not work.exists()


def test_a_changed_setting_is_refused_by_name(
    finished: Finished, tmp_path: Path, write_recipe: Callable[..., Path]
) -> None:
    output = tmp_path / "output"
    cut_in_layer(1, prepare(str(finished.recipe)), Options(output, CPU))
    other = write_recipe(tmp_path / "other", rounding="nearest")
    with pytest.raises(OutputError, match=r'experts\.rounding \("gptq", now "nearest"\)'):
        run(prepare(str(other)), Options(output, CPU))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(OutputError, match=rf"machine\.threads \({threads}, now {threads + 1}\)"):
            run(prepare(str(finished.recipe)), Options(output, CPU))
    finally:
        torch.set_num_threads(threads)


def test_two_runs_on_one_folder(finished: Finished, tmp_path: Path) -> None:
    with journal.locked(tmp_path), pytest.raises(OutputError, match="is working here"):
        run(prepare(str(finished.recipe)), Options(tmp_path, CPU))


@pytest.mark.own_signals
def test_an_interrupt_ends_between_steps(finished: Finished, tmp_path: Path) -> None:
    import os
    import signal

    output = tmp_path / "output"
    with pytest.MonkeyPatch.context() as patched:
        real = quantizer.solve_layer

        def signalled(*arguments: Any, **named: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return real(*arguments, **named)

        patched.setattr(quantizer, "solve_layer", signalled)
        with pytest.raises(Interrupted, match="the same command again") as ended:
            run(prepare(str(finished.recipe)), Options(output, CPU))
    assert ended.value.exit_code == 143
    assert not (output / "config.json").exists()


def test_a_failed_gate_finishes_the_output_and_exits_3(
    tmp_path: Path, write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("min_routed_tokens: 1", "min_routed_tokens: 1000000"))
    for _ in range(2):  # the second time it is finished already, and the gate has still failed
        monkeypatch.setattr("sys.argv", ["quantize", "run", str(recipe), "--output", str(tmp_path / "output")])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 3
        assert (tmp_path / "output" / "config.json").exists()


def test_fresh_discards_an_unfinished_run_and_nothing_else(finished: Finished, tmp_path: Path) -> None:
    output = tmp_path / "output"
    shutil.copytree(finished.folder, output)
    (output / "mine.txt").write_text("not of this program")
    journal.discard(output)
    assert [path.name for path in output.iterdir()] == ["mine.txt"]
