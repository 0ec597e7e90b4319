"""What a plan says beyond actions: sizes as written under several recipes, headers from the Hub, needs of a run."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import REPOSITORY, Finished
from hub_models import ModelHub

from quantizers.cli.tables.plan import needs_lines
from quantizers.cost import estimate
from quantizers.cost import seconds as files
from quantizers.cost.cards import CARDS
from quantizers.cost.estimate import estimate_run, memory_on_gpu
from quantizers.cost.visit import texts_of
from quantizers.cost.whole_run import count_run
from quantizers.plan.job import Job, prepare
from quantizers.plan.summary import listing, summary
from quantizers.run.options import Options
from quantizers.run.pipeline import run

REPO = "me/tiny"


@pytest.mark.parametrize(
    "experts",
    [
        {"bits": 4, "group_size": 32, "rounding": "nearest"},
        pytest.param({"bits": 8, "group_size": 64, "rounding": "nearest", "scales": "minmax"}, marks=pytest.mark.slow),
        pytest.param({"bits": 4, "group_size": 64, "awq": False, "rounding": "nearest"}, marks=pytest.mark.slow),
    ],
)
def test_planned_and_written_sizes_are_equal(
    experts: dict[str, Any], tmp_path: Path, write_recipe: Callable[..., Path]
) -> None:
    job = prepare(str(write_recipe(tmp_path, **experts)))
    planned = summary(job.plan, job.sizes)
    run(job, Options(tmp_path / "out", torch.device("cpu")))
    written = {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")}
    index = (tmp_path / "out" / "model.safetensors.index.json").stat().st_size
    assert planned["shards"] == written
    assert planned["index_bytes"] == index
    assert planned["output_bytes"] == sum(written.values()) + index


def test_kinds_and_listing_hold_every_tensor(published_job: Job) -> None:
    job = published_job
    numbers = summary(job.plan, job.sizes)
    kinds: Any = numbers["kinds"]
    rows = listing(job.plan)
    assert len(rows) == len(job.plan.actions) == sum(row["tensors"] for row in kinds)
    assert sum(row["bytes_before"] for row in kinds) == numbers["source_bytes"]
    w2 = next(row for row in kinds if row["kind"] == "model.layers.*.block_sparse_moe.experts.*.w2.weight")
    assert (w2["action"], w2["tensors"], w2["bytes_before"]) == ("quantize", 62 * 256, 62 * 256 * 3072 * 1536)


@pytest.mark.slow
def test_needs_of_the_published_model(published_job: Job) -> None:
    job = published_job
    needs = estimate_run(job, 131_803_409_011)
    assert needs.tokens == 590 * 8192
    assert needs.states is not None
    assert needs.states["CPU"] == 590 * 8192 * (2 * 4 * 3072 + 2 * 4 * 8 + 1)
    assert needs.held_out == 88 * 256 + 8 * 8192
    assert needs.seconds is not None
    for part in ("layers", "proof", "all"):
        assert needs.seconds["GPU"][part] < needs.seconds["CPU"][part]
    for seconds in needs.seconds.values():
        assert seconds["all"] == seconds["layers"] + seconds["proof"]
    assert len(needs.as_dict()["assumptions"]) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("file", ["README.md", "docs/long-runs.md"])
def test_the_pages_have_the_figures_that_plan_prints(published_job: Job, file: str) -> None:
    """Of the shipped recipe, parts included: time and memory of one H100, counted."""
    job = published_job
    needs = estimate_run(job, int(str(summary(job.plan, job.sizes)["output_bytes"]))).as_dict()
    row = next(line for line in needs_lines(needs)[1].splitlines() if line.startswith("GPU (H100)"))
    page = (REPOSITORY / file).read_text()
    (table,) = re.findall(r"counted, on one H100: (.*?) \((.*?)\), if", page)
    assert row.endswith("  " + ": ".join(table))
    (peak,) = re.findall(r"counted, on an H100: ([\d.]+ GB)", page)
    assert f"; counted {peak}  " in row


class NoTime:
    """A device on which only files take time."""

    name = "none"
    readers = 1

    def seconds(self, work: Any) -> float:
        return 0.0


def test_a_run_reads_hashes_and_writes(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of files, with one rate at a time; by one thread a shard is hashed three times."""
    job = prepare(str(finished.recipe))
    output = sum((finished.folder / file).stat().st_size for file in job.plan.shards())
    memory = memory_on_gpu(job, 2**30)
    work = count_run(job, [128] * 4, texts_of([128] * 2), memory, output)
    layers = [(sum(a.spec.bytes for a in job.plan.of_layer(n)), job.plan.shard(n)) for n in range(job.plan.layers)]
    sizes = [(source, sum(spec.bytes for spec in shard.values())) for source, shard in layers]
    around = sum(action.spec.bytes for action in job.plan.of_layer(None))

    def seconds(disk: float, hashing: float) -> dict[str, float]:
        monkeypatch.setattr(files, "HASH", hashing)
        return work.seconds(NoTime(), disk)

    assert seconds(math.inf, math.inf)["all"] == 0
    reading = seconds(1, math.inf)
    assert reading["layers"] == sum(source + shard for source, shard in sizes) + 2 * around
    assert reading["proof"] == output
    hashing = seconds(math.inf, 1)
    assert hashing["layers"] == sum(max(source, 3 * shard) for source, shard in sizes) + 4 * around
    assert hashing["proof"] == output


def test_a_run_is_its_layers_and_its_scoring(finished: Finished) -> None:
    """Arithmetic by hand: products of the scoring, and as many visits as layers."""
    job = prepare(str(finished.recipe))
    work = count_run(job, [128] * 4, texts_of([100, 300]), memory_on_gpu(job, 2**30), 0)
    assert work.layers == (len(job.sizes.moe_layers), len(job.sizes.dense))
    logits = 2 * 2 * (99 + 299) * job.sizes["hidden"] * job.sizes["vocabulary"]
    assert work.scoring["scoring"].flops["bfloat16"] == logits
    visit = sum(sum(phase.flops.values()) for phase in work.routed.phases.values())
    assert work.flops() == work.layers[0] * visit + sum(work.scoring["scoring"].flops.values())
    card = CARDS["h100"]
    one = files.layer_seconds(work.routed, card)
    assert one.layer >= sum(one.phases.values())
    assert work.seconds(card)["layers"] > work.layers[0] * one.layer
    assert work.peak == max(work.routed.peak, work.scoring["scoring"].peak)


def test_needs_follow_each_source_s_own_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are counted by source; memory is that of a set whose every sequence is as long as the longest."""
    monkeypatch.setattr(estimate, "_counted", lambda *_: {})  # not the work
    tiny.make(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text("source: {model: model}\ncalibration: set.yaml\n")
    source = "{dataset: a/b, columns: [t], shape: text, samples: 5, category: c%s}"

    def needs(length: int, *own: str) -> tuple[Any, Any]:
        sources = ", ".join(source % one for one in own)
        (tmp_path / "set.yaml").write_text(f"name: x\nsequence_length: {length}\nsources: [{sources}]\n")
        job = prepare(str(tmp_path / "recipe.yaml"))
        return estimate_run(job, 1000), memory_on_gpu(job, 2**30)

    mixed, held = needs(16, "", ", sequence_length: 3000", ", sequence_length: 7")
    assert mixed.tokens == 5 * (16 + 3000 + 7)
    longest, same_held = needs(3000, "")
    assert mixed.memory["CPU"] == pytest.approx(longest.memory["CPU"], rel=1e-3)
    assert (held.resident, held.one_unit) == (same_held.resident, same_held.one_unit)
    assert mixed.memory != needs(16, "")[0].memory


def plan_in_a_process(hub: ModelHub, home: Path, *words: object) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    return subprocess.run(
        [sys.executable, "-m", "quantizers", "plan", *map(str, words), "--json"],
        env=kept | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
def test_headers_from_the_hub_without_shards(tmp_path: Path) -> None:
    model = tiny.make(tmp_path / "model", num_hidden_layers=3)
    (tmp_path / "set.yaml").write_text(
        "name: x\nsequence_length: 16\nsources: [{dataset: a/b, columns: [t], shape: text, samples: 5, category: c}]\n"
    )
    local, remote = tmp_path / "local.yaml", tmp_path / "remote.yaml"
    local.write_text("source: {model: model}\ncalibration: set.yaml\n")
    remote.write_text(f"source: {{model: {REPO}}}\ncalibration: set.yaml\n")
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    with ModelHub("hf_x", {REPO: {"main": files}}) as hub:
        here = json.loads(plan_in_a_process(hub, tmp_path / "home", local).stdout)
        assert hub.asked == []
        for _ in range(2):  # the second time the index is in the cache, the shards are not
            there = plan_in_a_process(hub, tmp_path / "home", remote)
            assert there.returncode == 0, there.stderr
            numbers = json.loads(there.stdout)
            assert numbers["basis"] == f"the headers of {REPO} on the Hub, commit {hub.commit(REPO, 'main')}"
            assert numbers | {"basis": "", "recipe": ""} == here | {"basis": "", "recipe": ""}
        assert not list((tmp_path / "home").rglob("*.safetensors"))
        lost = tmp_path / "lost.yaml"
        lost.write_text("source: {model: me/lost}\ncalibration: set.yaml\n")
        gone = plan_in_a_process(hub, tmp_path / "home", lost)
    assert gone.returncode == 2
    assert gone.stderr.startswith("quantize: me/lost: the Hub did not give its headers (")
    assert len(gone.stderr.splitlines()) == 1
