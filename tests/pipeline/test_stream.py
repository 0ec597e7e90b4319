"""A run whose source stays on the Hub: the same output, each byte fetched once, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zoo
from commands import Command
from conftest import REPOSITORY
from hub_stand_in import HubStandIn, reached
from on_the_hub import MODEL, Watching, in_order, job_on_the_hub, resharded, sent
from runs import assert_same, hashes, timeless
from tiny import write_recipe

from quantizers.checkpoint.reader import open_folder
from quantizers.checkpoint.window import schedule
from quantizers.planning.job import parts_of_run, prepare

KILLS = 10
RUN = ("--device", "cpu")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """A recipe in the current folder, of a model on this Hub of which `model` has the files."""
    files = job_on_the_hub(tmp_path)
    monkeypatch.chdir(tmp_path)
    with HubStandIn(repositories={MODEL: {"main": files}}) as stand_in:
        reached(stand_in, tmp_path / "home", monkeypatch)
        yield stand_in


def source_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))


def smallest(recipe: str = "recipe.yaml") -> int:
    """Bytes of the smallest window of a run."""
    job = prepare(recipe, stream=True)
    return schedule(job.opened, parts_of_run(job)).needed


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def same(streamed: Path, cached: Path) -> None:
    """Two outputs of the same commit: all files equal, the report but for times, and for its kind of digest."""
    pages = {"report.html", "README.md"}
    first, second = ({k: v for k, v in hashes(one).items() if k not in pages} for one in (streamed, cached))
    assert first == second
    reports = [timeless(report(folder)) for folder in (streamed, cached)]
    for one in reports:
        del one["source"]["digest"], one["sha256"]
    assert reports[0] == reports[1]


@pytest.mark.slow
@pytest.mark.parametrize("scattered", [False, True])
def test_a_run_through_the_smallest_window(scattered: bool, hub: HubStandIn, command: Command, tmp_path: Path) -> None:
    """Against a run of the downloaded model: equal files, every byte fetched once, never more on the disk."""
    if scattered:
        model = tmp_path / "model"
        names = [name for group in in_order(model, 1) for name in group]
        resharded(model, [names[n::5] for n in range(5)])
        hub.repositories[MODEL]["main"] = {path.name: path.read_bytes() for path in model.iterdir()}
    size, needed = source_size(tmp_path), smallest()
    assert needed == size if scattered else needed < size
    before, output = sent(hub), tmp_path / "streamed"
    with Watching(output / ".quantize" / "source") as watched:
        assert command("run", "recipe.yaml", "--output", output, "--stream", "--window", f"{needed}B", *RUN) == 0
    assert "shards, compared with the Hub's SHA-256" in command.err
    assert "quantize verify streamed --stream\n" in command.out
    assert f"quantize eval {MODEL} streamed --data held-out --stream" in command.out
    assert "whether the source makes sense" not in command.err  # which was not asked for
    assert sent(hub) - before <= 1.02 * size
    assert 0 < watched.largest <= needed
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    assert command("verify", output, "--stream") == 0, command.err
    assert command("run", "recipe.yaml", "--output", tmp_path / "cached", *RUN) == 0
    same(output, tmp_path / "cached")
    assert report(output)["source"]["revision"] == hub.commit(MODEL)
    assert f"revision: {hub.commit(MODEL)}" in (output / "recipe.yaml").read_text()
    for again in (("--stream",), ()):  # the same source, however it is read
        assert command("run", "recipe.yaml", "--output", output, "--json", *again, *RUN) == 0, command.err
        assert json.loads(command.out)["already_done"]


@pytest.mark.slow
def test_a_table_of_ngrams_stays_on_the_disk_while_its_layer_looks_rows_up(
    hub: HubStandIn, command: Command, tmp_path: Path
) -> None:
    """In shards of its own: every byte is fetched once, and the output is that of the downloaded model."""
    model = tmp_path / "model"
    shutil.rmtree(model)
    zoo.save("qwen4_exp", model)
    names = list(open_folder(model).tensors)
    tables = [name for name in names if "ngram_embedding" in name]
    outside = [name for name in names if ".layers." not in name]
    layers = [[name for name in names if f".layers.{n}." in name and name not in tables] for n in range(4)]
    resharded(model, [outside, *([name] for name in tables), *layers])
    hub.repositories[MODEL]["main"] = {path.name: path.read_bytes() for path in model.iterdir()}
    needed, before, output = smallest(), sent(hub), tmp_path / "streamed"
    assert needed < source_size(tmp_path)
    assert command("run", "recipe.yaml", "--output", output, "--stream", "--window", f"{needed}B", *RUN) == 0, (
        command.err
    )
    assert sent(hub) - before <= 1.02 * source_size(tmp_path)
    assert command("verify", output, "--stream") == 0, command.err
    assert command("run", "recipe.yaml", "--output", tmp_path / "cached", *RUN) == 0, command.err
    same(output, tmp_path / "cached")


@pytest.mark.slow
def test_a_budget_fetches_the_source_twice(hub: HubStandIn, command: Command, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, bits_per_weight=5)
    recipe.write_text(recipe.read_text().replace("model: model", f"model: {MODEL}"))
    needed = smallest()
    assert command("plan", recipe, "--json") == 0, command.err
    size, ways = source_size(tmp_path), {way["name"]: way for way in json.loads(command.out)["source_ways"]}
    assert ways["streamed"]["source"] == needed
    assert ways["streamed"]["download"] == 2 * size
    before, output = sent(hub), tmp_path / "streamed"
    assert command("run", recipe, "--output", output, "--stream", "--window", f"{needed}B", *RUN) == 0, command.err
    assert sent(hub) - before <= 2.02 * size
    assert command("run", recipe, "--output", tmp_path / "cached", *RUN) == 0, command.err
    same(output, tmp_path / "cached")


@pytest.mark.slow
def test_killed_at_ten_points(hub: HubStandIn, tmp_path: Path) -> None:
    """At seeded moments spread over the whole run; the outputs are the unbroken run's."""
    script, needed = REPOSITORY / "tests" / "forked_runs.py", smallest()
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, str(script), "recipe.yaml", str(tmp_path), "SIGKILL", str(KILLS), "7"]
    done = subprocess.run(
        [*command, "--stream", "--window", f"{needed}B"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment | {"HF_HOME": str(tmp_path / "home")},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ended"] == [-9] * KILLS
    assert result["last"] == 0
    for output in result["outputs"]:
        assert_same(tmp_path / output, tmp_path / "whole")


@pytest.mark.slow
def test_faults_end_with_a_line_and_the_same_command_goes_on(
    hub: HubStandIn, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import _http

    monkeypatch.setattr(_http.time, "sleep", lambda _, real=_http.time.sleep: real(0.001))
    output, last = tmp_path / "output", f"{MODEL}/model-00007-of-00009.safetensors"
    run = ("run", "recipe.yaml", "--output", output, "--stream", "--window", f"{smallest()}B", *RUN)

    def refused(code: int, words: str) -> None:
        assert command(*run) == code, command.err
        assert words in command.err.splitlines()[-1]

    hub.spoiled = {last: 99}
    refused(1, "what came from the Hub is not what it has")
    hub.spoiled = {}
    hub.failing = {last}
    refused(1, "the Hub stopped answering")
    hub.failing = set()
    hub.gated = {MODEL}
    refused(2, "is gated")
    hub.gated = set()
    main = hub.repositories[MODEL]["main"]
    hub.repositories[MODEL]["main"] = main | {"README.md": b"# another"}
    refused(2, "the Hub has no revision")  # which the run was begun with
    hub.repositories[MODEL] = {"main": main | {"README.md": b"# another"}, "before": main}
    assert command("run", "recipe.yaml", "--output", output, *RUN) == 2
    assert "give --stream, or leave it out, as before" in command.err.splitlines()[-1]
    assert command(*run) == 0, command.err  # of the commit that it was begun with, though main has moved on
    assert report(output)["source"]["revision"] == hub.commit(MODEL, "before")
    assert command("run", "recipe.yaml", "--output", output, "--stream", "--json", *RUN) == 0, command.err
    assert json.loads(command.out)["already_done"]  # for main has the same shards


def test_options_that_do_not_go_together(hub: HubStandIn, command: Command, tmp_path: Path) -> None:
    for words, said in (
        (("recipe.yaml", "--window", "1GB"), "--window is that of --stream"),
        (("recipe.yaml", "--stream", "--source", "model"), "a folder is read where it lies; leave --stream out"),
        (("local.yaml", "--stream"), "is a folder, which is read where it lies; leave --stream out"),
        (("recipe.yaml", "--stream", "--window", "1kB"), "of the source must lie on the disk at a time"),
    ):
        assert command("run", *words, "--output", tmp_path / "out") == 2
        assert said in command.err.splitlines()[-1]
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_source_that_makes_no_sense_is_refused_at_the_end(hub: HubStandIn, command: Command, tmp_path: Path) -> None:
    """Before the first layer it would be fetched twice; the finished layers stay for whoever wants them."""
    output = tmp_path / "output"
    assert (
        command("run", "recipe.yaml", "--output", output, "--stream", "--set", "verify.perplexity.max_source=10") == 2
    )
    assert "whether the source makes sense of text is checked at the end" in command.err
    assert "makes no sense of text: on the 4 texts of held-out.yaml its perplexity is" in command.err
    assert not (output / "config.json").exists()


@pytest.mark.slow
def test_an_evaluation_of_what_stays_on_the_hub(hub: HubStandIn, command: Command, tmp_path: Path) -> None:
    data = ("--data", "held-out.yaml", "--no-picture", "--json")
    assert command("eval", MODEL, "model", "--stream", *data) == 0, command.err
    found = json.loads(command.out)["candidates"][0]
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    assert sent(hub) <= 1.02 * source_size(tmp_path)
    assert found["kl"]["mean"] == 0
    assert command("eval", "model", "model", *data) == 0, command.err
    assert json.loads(command.out)["candidates"][0]["perplexity"] == found["perplexity"]
    assert command("eval", "model", "model", "--stream", *data) == 2
    assert "--stream: all checkpoints are folders" in command.err
