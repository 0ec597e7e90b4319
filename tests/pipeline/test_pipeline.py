"""The run as a whole: equal bytes, nothing half-finished, going on after a cut."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command
from commands import quantize as quantize_command
from conftest import Finished
from runs import Small, assert_same, change, cut_at, cut_in_layer, hashes

from quantizers.model import activation_stream
from quantizers.output import journal
from quantizers.pipeline import layer as layering
from quantizers.pipeline import layer_entry, pipeline, quantize, quantizer
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.system.errors import Interrupted, OutputError, QuantizeError

CPU = torch.device("cpu")


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


def test_a_finished_output_is_left_alone(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in finished.folder.iterdir()}
    assert quantize_command(monkeypatch, "run", finished.recipe, "--output", finished.folder) == 0
    assert before == {path.name: path.stat().st_mtime_ns for path in finished.folder.iterdir()}


def test_the_finished_output_of_another_recipe_is_refused(
    finished: Finished, tmp_path: Path, write_recipe: Callable[..., Path]
) -> None:
    other = write_recipe(tmp_path, rounding="nearest")
    with pytest.raises(OutputError, match="finished output of another recipe"):
        run(prepare(str(other)), Options(finished.folder, CPU))


def test_a_run_that_was_cut_goes_on_and_gives_the_same_bytes(small: Small, tmp_path: Path) -> None:
    """One run that is cut at every kind of place, each time later than the last."""
    options = Options(tmp_path / "output", CPU)
    for module, name, calls in (
        (quantize, "write_shard", 0),  # of what is outside the layers
        (quantizer, "solve_layer", 0),
        (activation_stream, "attend", 0),
        (layering, "write_shard", 0),
        (layering, "audit_layer", 0),
        (layer_entry, "write_json", 0),  # layer 0 is on the disk, and not in the journal
        (quantizer, "solve_layer", 1),
        (quantizer, "finish", 1),
        (layer_entry, "write_json", 1),
        (quantize, "score", 0),
        (pipeline, "write_config_files", 0),
        (pipeline, "run_report", 0),
        (pipeline.journal, "move_into_place", 0),
    ):
        cut_at(module, name, small.job, options, calls)
        assert not (options.output / "config.json").exists()
        assert not (options.output / "model.safetensors.index.json").exists()
    run(small.job, options)
    assert_same(options.output, small.whole)


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
                raise QuantizeError("", "cut here")
            real(a, b)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(journal.os, "replace", once)
            with pytest.raises(QuantizeError, match="cut here"):
                run(job, Options(output, CPU))
        assert not (output / "config.json").exists()
    run(job, Options(output, CPU))
    assert hashes(output) == hashes(finished.folder)
    assert not work.exists()


def test_what_a_run_was_begun_with_cannot_change(small: Small, tmp_path: Path) -> None:
    """Settings, number of tokens, threads, held-out set: each is refused by its name."""
    moved, options = small.copied(tmp_path / "job"), Options(tmp_path / "output", CPU)
    cut_in_layer(1, moved.job, options)
    recipe = moved.recipe.read_text()
    for edit, said in (
        ({"experts": {"awq": {"grid": 3}, "rounding": "nearest"}}, r'experts\.rounding \("gptq", now "nearest"\)'),
        ({"calibration": {"set": "calibration.yaml", "tokens": 302}}, r"calibration\.tokens \(null, now 302\)"),
    ):
        change(moved.recipe, lambda body, edit=edit: body.update(edit))
        with pytest.raises(OutputError, match=rf"unfinished run with another {said}"):
            run(moved.job, options)
        moved.recipe.write_text(recipe)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(OutputError, match=rf"machine\.threads \({threads}, now {threads + 1}\)"):
            run(moved.job, options)
    finally:
        torch.set_num_threads(threads)
    rows = (moved.folder / "held-out.jsonl").read_text().splitlines()
    (moved.folder / "held-out.jsonl").write_text("\n".join(rows[1:]) + "\n")
    with pytest.raises(QuantizeError, match=r"unfinished run with another held_out .*; restore it, or start over"):
        run(moved.job, options)


@pytest.mark.own_signals
def test_an_interrupt_ends_between_steps(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = quantizer.solve_layer

    def signalled(*arguments: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **named)

    monkeypatch.setattr(quantizer, "solve_layer", signalled)
    with pytest.raises(Interrupted, match="the same command again") as ended:
        run(small.job, Options(tmp_path / "output", CPU))
    assert ended.value.exit_code == 143
    assert not (tmp_path / "output" / "config.json").exists()


@pytest.mark.parametrize(("limit", "failed"), [(0.0, ["kl p99"]), (1e3, ["coverage"])])
def test_a_failed_gate_finishes_the_output_and_exits_3(
    limit: float, failed: list[str], small: Small, tmp_path: Path, command: Command
) -> None:
    """A limit of the 99th percentile of the KL that the report has, and of routed tokens; that of the mean is kept."""
    moved, output = small.copied(tmp_path / "job"), tmp_path / "output"

    def limits(body: dict[str, Any]) -> None:
        body["verify"]["perplexity"].update(max_kl=1e3, max_p99=limit)

    change(moved.recipe, limits)
    given = [f"--set=verify.coverage.min_routed_tokens={10**6 if 'coverage' in failed else 0}"]
    for _ in range(2):  # the second time it is finished already, and the gate has still failed
        assert command("run", moved.recipe, "--output", output, *given) == 3
        assert (output / "config.json").exists()
        shows = f"`quantize coverage {moved.recipe} {given[0].replace('=', ' ', 1)}` shows which experts"
        assert (shows in command.out) == ("coverage" in failed)
    (lost := sorted(output.glob("*.safetensors"))[1]).rename(tmp_path / "lost")
    assert command("run", moved.recipe, "--output", output, *given) == 2
    assert f"{output}: was finished before, and {lost.name} went missing since; put back" in command.err
    report = json.loads((output / "report.json").read_text())
    gates = {gate["name"]: gate for gate in report["gates"]}
    assert gates["kl"]["passed"]
    assert [name for name, gate in gates.items() if not gate["passed"]] == failed
    assert gates["kl p99"] == {
        "name": "kl p99",
        "passed": "kl p99" not in failed,
        "value": small.report["kl"]["p99"],
        "limit": limit,
        "meaning": "99th percentile of KL(source || output), nats",
    }


def test_fresh_discards_an_unfinished_run_and_nothing_else(finished: Finished, tmp_path: Path) -> None:
    output = tmp_path / "output"
    shutil.copytree(finished.folder, output)
    (output / "mine.txt").write_text("not of this program")
    journal.discard(output)
    assert [path.name for path in output.iterdir()] == ["mine.txt"]
