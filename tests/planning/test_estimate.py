"""The needs and time of a run, tables of a plan, and headers from the Hub."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import Command
from conftest import REPOSITORY
from hub_stand_in import HubStandIn, reached
from planned import published

from quantizers.checkpoint.window import DEFAULT
from quantizers.planning.estimate import Estimate, Work, estimate_run, layer_work, memory_on_gpu
from quantizers.planning.gpus import Rates
from quantizers.planning.job import Job, prepare
from quantizers.planning.plan import listing, summary
from quantizers.recipe.cards import Card
from quantizers.system.progress import duration

REPO = "me/tiny"
PRICE = 3  # dollars an hour
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def numbers(published_job: Job) -> dict[str, Any]:
    """Of MiniMax-M2.1."""
    return summary(published_job.plan, published_job.facts)


@pytest.fixture(scope="module")
def needs(published_job: Job, numbers: dict[str, Any]) -> Estimate:
    """Of MiniMax-M2.1, with 16 processes besides."""
    return estimate_run(published_job, numbers["output_bytes"], processes=16)


def test_kinds_and_listing_hold_every_tensor(published_job: Job, numbers: dict[str, Any]) -> None:
    kinds, rows = numbers["kinds"], listing(published_job.plan)
    assert len(rows) == len(published_job.plan.actions) == sum(row["tensors"] for row in kinds)
    assert sum(row["bytes_before"] for row in kinds) == numbers["source_bytes"]
    w2 = next(row for row in kinds if row["kind"] == "model.layers.*.block_sparse_moe.experts.*.w2.weight")
    assert (w2["action"], w2["tensors"], w2["bytes_before"]) == ("quantize", 62 * 256, 62 * 256 * 3072 * 1536)


def test_needs_of_the_published_model(needs: Estimate) -> None:
    """By several processes all GPUs are faster; where files do not take longer, nearly as many times."""
    assert needs.tokens == 590 * 8192
    assert needs.states is not None
    assert needs.states["CPU"] == 590 * 8192 * (2 * 4 * 3072 + 2 * 4 * 8 + 1)
    assert needs.held_out == 88 * 256 + 8 * 8192
    assert needs.seconds is not None
    assert needs.several is not None
    assert list(needs.seconds) == ["CPU", "RTX 3090", "RTX 4090", "A100", "RTX PRO 6000", "H100", "H200"]
    for seconds in needs.seconds.values():
        assert seconds["all"] == seconds["layers"] + seconds["verification"]
    for name, seconds in needs.several.items():
        alone = needs.seconds[name]["all"]
        assert needs.seconds["CPU"]["all"] > alone > seconds["all"] > alone / 16
    assert len(needs.assumptions) >= 4


def test_more_processes_than_expert_batches_save_no_time(
    published_job: Job, numbers: dict[str, Any], needs: Estimate
) -> None:
    """MiniMax-M2.1 has 16 batches of 16 experts in a layer."""
    many = estimate_run(published_job, numbers["output_bytes"], processes=10**9)
    assert many.several == needs.several
    assert "1,000,000,000 processes: computing divided by 16, as a layer has so many" in many.assumptions[-1]


@pytest.mark.parametrize("cards", [(), ("hopper", "ampere")])
def test_the_closed_form_by_hand(published_job: Job, cards: tuple[Card, ...]) -> None:
    """One layer of MiniMax-M2.1: 3072 x 1536, 256 experts of which 8 are chosen, attention of 48 heads of 128."""
    verify = published_job.recipe.verify.model_copy(update={"as_served": cards})
    job = replace(published_job, recipe=published_job.recipe.model_copy(update={"verify": verify}))
    lengths, texts, models = [8192] * 16, [256, 512], 2 + 2 * len(cards)
    tokens, passes = 131_072, 131_072 + models * 768
    kept = 2 * 3072 * 6144 + 2 * 3072 * 1024 + 256 * 3072  # q and o, k and v, the router
    pairs = 16 * 8192**2 + models * (256**2 + 512**2)
    products = 2 * passes * kept + 2 * 6144 * pairs
    products += 4 * tokens * 256 * 3072 * 1536 + tokens * (256 * 1536**2 + 9 * 3072**2)
    products += 6 * 8 * passes * 3072 * 1536 + 1.7 * 8 * tokens * (4 * 3072 * 1536 + 2 * 1536**2)
    work = layer_work(job, 0, lengths, texts)
    assert work.products == pytest.approx(products)
    assert work.factorization == pytest.approx(4 / 3 * 256 * (3072**3 + 1536**3))
    square = 2 * 3072**2 * 1536 + 3072 * 1536**2
    assert work.float32 == pytest.approx(6 * 256 * square + 20 * 256 * 3072 * 1536 * (3072 + 1536) / 4)
    layer = [action.spec.bytes for action in job.plan.of_layer(0)]
    assert work.files == sum(layer) + sum(spec.bytes for spec in job.plan.shard(0).values())


def test_seconds_are_work_over_the_shares_of_nominal_rates() -> None:
    rates = Rates(
        "GPU", 80, 100.0, 1000.0, 10.0, {"bandwidth": 0.5, "products": 0.5, "float32": 1, "factorization": 0.1}
    )
    work = Work(products=1500, float32=40, factorization=5, moved=300, files=8)
    assert work.seconds(rates, disk=10) == 3 + 4 + 5 + 6
    assert work.seconds(rates, processes=6, disk=10) == 3
    assert work.seconds(rates, processes=6, disk=1) == 8  # files are not divided


def test_a_gpu_that_is_too_small_has_no_time(published_job: Job) -> None:
    """A layer of DeepSeek-V3 does not fit on 24 GB."""
    large = published("deepseek-ai/DeepSeek-V3", layers=4)
    needs = estimate_run(replace(published_job, plan=large.plan()), 1)
    assert list(needs.seconds or ())[:2] == ["CPU", "A100"]


def test_the_page_has_the_time_that_plan_prints(needs: Estimate) -> None:
    assert needs.seconds is not None
    page = (REPOSITORY / "docs/explanation/memory-and-time.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"estimated, on one H100.*?: (.*?), if every", page)
    assert said == duration(needs.seconds["H100"]["all"])


def test_the_readme_has_the_figures_that_plan_prints(command: Command) -> None:
    """Those of its first table, rounded: gigabytes, minutes, and dollars for them."""
    full, part = (plan_of(command, f"minimax-m2.1-fp8-int4{part}") for part in ("", "-131k"))
    needs, ways = full["needs"], {way["name"]: way for way in full["source_ways"]}
    seconds, fewer = (one["needs"]["seconds"]["H100"]["all"] for one in (full, part))
    around = (ways["cached"]["download"] + full["output_bytes"]) / 100e6 + 1800  # at 100 MB/s, and half an hour
    hours, fewer_hours = ((one + around) / 3600 for one in (seconds, fewer))
    for words in (
        f"{gb(full['source_bytes'])} of FP8 become {gb(full['output_bytes'])}",
        f"{duration(seconds)} of computing on one H100 at most, {hours:.1f} h with set-up",
        f"[{part['needs']['tokens']:,} tokens](",
        f"{fewer / 60:.0f} min, {fewer_hours:.1f} h and ${fewer_hours * PRICE:.0f} (",
        f"upload: ${hours * PRICE:.0f} at ${PRICE} an hour",
        f"from {needs['memory']['GPU'][0] / 1e9:.1f} GB on the GPU; {needs['host'] / 1e9:.1f} GB of host memory",
        f"up to {gb(needs['states']['GPU'])} for hidden states",
        f"{gb(ways['cached']['source'])} of source and {gb(ways['cached']['output'])} of output",
        f"; {DEFAULT / 1e9:.0f} and {gb(ways['published']['output'])} with",
    ):
        assert words in README


def plan_of(command: Command, recipe: str) -> Any:
    """What `plan --json` prints."""
    assert command("plan", recipe, "--json") == 0
    return json.loads(command.out)


def gb(amount: float) -> str:
    """Bytes as the README rounds them."""
    return f"{amount / 1e9:.0f} GB"


def test_needs_follow_each_source_s_own_length(tmp_path: Path) -> None:
    """Tokens are counted by source; memory is that of a set whose every sequence is as long as the longest.

    None is longer than the model's positions, here 2048.
    """
    tiny.make(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text("source: {model: model}\ncalibration: set.yaml\n")
    source = "{dataset: a/b, columns: [t], shape: text, samples: 5, category: c%s}"

    def planned(length: int, *sources_own: str) -> tuple[Any, Any]:
        sources = ", ".join(source % one for one in sources_own)
        (tmp_path / "set.yaml").write_text(f"name: x\nsequence_length: {length}\nsources: [{sources}]\n")
        job = prepare(str(tmp_path / "recipe.yaml"))
        return estimate_run(job, 1000), memory_on_gpu(job, 2**30)

    mixed, memory = planned(16, "", ", sequence_length: 2000", ", sequence_length: 7")
    assert mixed.tokens == 5 * (16 + 2000 + 7)
    longest, same = planned(2000, "")
    assert mixed.memory["CPU"] == pytest.approx(longest.memory["CPU"], rel=1e-3)
    assert (memory.resident, memory.one_unit) == (same.resident, same.one_unit)
    assert mixed.memory != planned(16, "")[0].memory
    assert planned(2048, "") == planned(10**12, "")


@pytest.mark.slow
def test_headers_from_the_hub_without_shards(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.make(tmp_path / "model", num_hidden_layers=3)
    (tmp_path / "set.yaml").write_text(
        "name: x\nsequence_length: 16\nsources: [{dataset: a/b, columns: [t], shape: text, samples: 5, category: c}]\n"
    )
    local, remote = tmp_path / "local.yaml", tmp_path / "remote.yaml"
    local.write_text("source: {model: model}\ncalibration: set.yaml\n")
    remote.write_text(f"source: {{model: {REPO}}}\ncalibration: set.yaml\n")
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    with HubStandIn("hf_x", {REPO: {"main": files}}) as hub:
        reached(hub, tmp_path / "home", monkeypatch)
        assert command("plan", local, "--json") == 0
        here = json.loads(command.out)
        assert hub.asked == []
        for _ in range(2):  # the second time the index is in the cache, the shards are not
            assert command("plan", remote, "--json") == 0, command.err
            numbers = json.loads(command.out)
            assert numbers["basis"] == f"the headers of {REPO} on the Hub, commit {hub.commit(REPO, 'main')}"
            assert numbers | {"basis": "", "recipe": ""} == here | {"basis": "", "recipe": ""}
        assert not list((tmp_path / "home").rglob("*.safetensors"))
        lost = tmp_path / "lost.yaml"
        lost.write_text("source: {model: me/lost}\ncalibration: set.yaml\n")
        assert command("plan", lost) == 2
    assert command.err.startswith("quantize: me/lost: the Hub did not give its headers (")
    assert len(command.err.splitlines()) == 1
