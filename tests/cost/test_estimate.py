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
from quantizers.plan.run_needs import estimate_run, memory_on_gpu

from quantizers.cli.tables.plan import needs_lines
from quantizers.forward import weights
from quantizers.plan import run_needs
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


def test_the_readme_has_the_time_that_plan_prints(published_job: Job) -> None:
    """Of the shipped recipe, parts included; both say that it is computed."""
    job = published_job
    needs = estimate_run(job, int(str(summary(job.plan, job.sizes)["output_bytes"]))).as_dict()
    row = next(line for line in needs_lines(needs)[1].splitlines() if line.startswith("GPU"))
    (table,) = re.findall(r"computed, not measured: (.*?) \((.*?)\), if", (REPOSITORY / "README.md").read_text())
    assert row.endswith("  " + ": ".join(table))


def test_a_run_costs_what_it_reads_hashes_and_dequantizes(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of run_needs.py against a run whose work is counted; what is read, tests/run/test_visit.py counts."""
    dequantized = list[int]()  # also by the audit's thread
    job = prepare(str(finished.recipe))

    real = weights.is_finite  # of all numbers that are made of what is stored
    monkeypatch.setattr(weights, "is_finite", lambda numbers: dequantized.append(numbers.numel()) or real(numbers))
    run(job, Options(tmp_path / "output", torch.device("cpu")))
    source = sum(action.spec.bytes for action in job.plan.actions)
    output = sum((finished.folder / file).stat().st_size for file in job.plan.shards())
    held = [a for a in job.plan.actions if a.kind not in ("drop", "rename")]
    in_layers = sum(math.prod(a.spec.shape) for a in held if a.layer is not None)
    # For the texts and the audit, the source's and the output's; the source's again for the norm's scale, twice, and
    # to be solved. The attention, a tenth, is dequantized for the texts only.
    assert sum(dequantized) == pytest.approx(7 * in_layers, rel=0.15)

    def seconds(part: str, **rates: Any) -> float:
        with pytest.MonkeyPatch.context() as patched:
            endless = {"RATES": {"CPU": (math.inf, math.inf)}, "WEIGHTS": {"CPU": math.inf}}
            for name, value in (endless | {"DISK_RATE": math.inf, "HASH_RATE": math.inf} | rates).items():
                patched.setattr(run_needs, name, value)
            needed = estimate_run(job, output).seconds
        assert needed is not None
        return needed["CPU"][part]

    assert seconds("all") == 0
    assert seconds("layers", DISK_RATE=1) == source + output
    assert seconds("proof", DISK_RATE=1) == output
    assert seconds("layers", HASH_RATE=1) == source + 3 * output
    assert seconds("proof", HASH_RATE=1) == output
    assert seconds("layers", WEIGHTS={"CPU": 1}) == 7 * sum(math.prod(a.spec.shape) for a in held)
    needs = estimate_run(job, output)
    assert needs.held_out == 12 * 128
    assert seconds("proof", RATES={"CPU": (1, math.inf)}) == 2 * 2 * 12 * 128 * 128 * job.sizes["vocabulary"]
    attention = 2 * 128 * (job.sizes["heads"] + job.sizes["kv_heads"]) * job.sizes["head_dim"]
    routed = 2 * 3 * 128 * 64
    forced = 16 * (2 * 128 * 64 + 64**2) + 3 * 128**2
    assert needs.tokens is not None
    kept = attention + 16 * 128  # and the router
    forward = needs.tokens * (kept + forced + routed) + 2 * 12 * 128 * (kept + routed)
    assert seconds("layers", RATES={"CPU": (1, math.inf)}) == 2 * 4 * forward


def test_needs_follow_each_source_s_own_length(tmp_path: Path) -> None:
    """Tokens are counted by source; memory is that of a set whose every sequence is as long as the longest."""
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
