"""One random layer through the code of a run, and the arithmetic of the whole run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import families
import pytest
import tiny
import torch
from layer_measurement import GROWS_WITH, extrapolated, measure_layer, random_job, write_random
from planned import published

from quantizers.checkpoint.safetensors_header import Spec
from quantizers.planning.job import Job, prepare
from quantizers.system.errors import ArchitectureError, InputError

CPU = torch.device("cpu")
# What each phase of the tiny layer is multiplied with: 2 of 4 experts, 100 of 1,536 tokens, of both sets.
TOKENS, EXPERTS = 1536 / 100, 2.0
HESSIANS = (4 * 64**2 + 3 * 128**2) / (2 * 64**2 + 3 * 128**2)
FACTORS = {
    "read": EXPERTS, "materialise": EXPERTS, "dequantize": EXPERTS, "search": EXPERTS, "rounding": EXPERTS,
    "other solving": EXPERTS, "pack": EXPERTS, "write": EXPERTS, "reference": TOKENS, "candidate": TOKENS,
    "compare": TOKENS, "observe": TOKENS, "propagate": TOKENS, "changes": TOKENS, "forced pass": TOKENS * EXPERTS,
    "Hessians": TOKENS * HESSIANS,
}  # fmt: skip


def test_a_layer_goes_through_every_phase_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checkpoint's shards, as plan works; the checkpoint and its folder are gone afterwards."""
    recipe = tiny.write_job(tmp_path / "job", layers=3, samples=6)
    for shard in (tmp_path / "job" / "model").glob("*.safetensors"):
        shard.unlink()
    job = prepare(str(recipe), offline_facts=True)
    assert [job.facts.sizes[name].value for name in ("experts", "hidden", "width", "chosen")] == [4, 128, 64, 2]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = measure_layer(job, CPU, tokens=100, experts=2)
    assert not list(tmp_path.glob("quantize-measure-*"))
    assert [row["phase"] for row in found["phases"]] == list(GROWS_WITH)
    for row in found["phases"]:
        assert row["run"] == pytest.approx(row["seconds"] * FACTORS[row["phase"]])
        assert row["seconds"] > 0 or row["phase"] in ("write", "other solving")
    of_run = {row["phase"]: row["run"] for row in found["phases"]}
    computing = sum(of_run.values()) - of_run["read"]
    assert found["layer"] == pytest.approx(max(of_run["read"], computing))
    assert found["run"] == pytest.approx(3 * found["layer"])
    assert (found["tokens"], found["held_out"], found["run_tokens"]) == (100, 100, 1536)
    assert found["peak_memory_bytes"] > 1e8


@pytest.fixture(scope="module")
def deepseek() -> Job:
    return prepare("deepseek-v3.1-fp8-int4", offline_facts=True)


@pytest.mark.slow
def test_a_whole_run_by_hand(deepseek: Job) -> None:
    """DeepSeek-V3: 58 layers with experts and 3 without, a second in each phase, and 200 of reading."""
    ratios = {"tokens": 10, "evaluation tokens": 4, "experts": 2, "Hessians": 1.5}
    phases = dict.fromkeys(GROWS_WITH, 1.0)
    found = extrapolated(deepseek, phases, [{"observe": 3.0, "pack": 1.0, "reference": 1.0}] * 3, ratios)
    # dequantize, search, rounding, other solving, pack, write, materialise; observe, propagate, changes; forced; sums
    layer = 7 * 2 + 3 * 10 + 20 + 15 + 3 * 4
    assert found["layer"] == layer
    assert found["dense_layer"] == 3 * 10 + 1 + 4
    assert found["run"] == 58 * layer + 3 * 35
    assert extrapolated(deepseek, phases | {"read": 200.0}, [], ratios)["layer"] == 400


def test_layers_without_experts_are_measured_too(tmp_path: Path) -> None:
    job = prepare(str(families.write_job(tmp_path, "glm4_moe")))
    found = measure_layer(job, CPU, tokens=64)
    assert found["dense_layers"] == len(job.facts.dense) > 0
    assert 0 < found["dense_layer"] < found["layer"]
    assert found["sizes"]["experts"] == job.facts.num_experts  # all fit


def test_a_random_checkpoint_has_the_published_layout(tmp_path: Path) -> None:
    """Names, dtypes and shapes as planned; weights of the size that keeps a vector's length."""
    small = {"layers": 2, "vocabulary": 256, "hidden": 128, "width": 64, "experts": 8, "heads": 2, "kv_heads": 1}
    model = published("MiniMaxAI/MiniMax-M2.1", **small)
    checkpoint = write_random(tmp_path / "model", model.config, model.facts, CPU)
    assert {name: Spec(info.dtype, info.shape) for name, info in checkpoint.tensors.items()} == model.tensors
    module = model.facts.expert(1, 3, "gate")
    weight = checkpoint.tensor(f"{module}.weight").float() * checkpoint.tensor(f"{module}.weight_scale_inv")
    assert float(weight.square().mean().sqrt()) == pytest.approx(128**-0.5, rel=0.1)


@pytest.mark.slow
def test_a_published_models_layer_has_its_real_size_and_needs_no_files(deepseek: Job) -> None:
    """As deep as the first layer with experts, and without the layer that predicts further tokens."""
    with pytest.raises(InputError, match=r"^--experts 8: .*n_routed_experts 8 are not two or more in each"):
        measure_layer(deepseek, CPU, experts=8)
    small = random_job(deepseek, 16)
    assert (small.facts.num_layers, small.facts.hidden_size, small.facts.expert_width) == (4, 7168, 2048)
    assert small.facts.dense == {0, 1, 2}
    assert not small.plan.mtp


def test_facts_about_one_model_are_refused(tmp_path: Path) -> None:
    job, file = prepare(str(tiny.write_job(tmp_path))), tmp_path / "facts.yaml"
    file.write_text(job.facts.as_yaml())
    with pytest.raises(ArchitectureError, match=r"facts.yaml: these are facts about one model, and one of other sizes"):
        random_job(replace(job, facts_file=file), 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"experts": 17}, "--experts 17: the model has 16; give as many"),
        ({"limit": 1 << 20}, "of device memory is too"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: dict[str, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        measure_layer(prepare("tiny-minimax-m2-fp8-int4"), CPU, **given)
