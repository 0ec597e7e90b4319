"""The benchmarks on the smallest sizes: what they return and print, not how long anything takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from tiny import write_job

from quantizers.architectures.families import architecture_for
from quantizers.architectures.sizes import sizes_of
from quantizers.bench import methods, scaling
from quantizers.bench.compare import compare_layer, compare_route, layer_sizes
from quantizers.bench.layer import LAYER_PHASES, extrapolate, measure_layer
from quantizers.bench.pictures import compare_picture, layer_picture, scaling_picture
from quantizers.bench.random_model import published, resized, write_random
from quantizers.calibration.load_set import load_set
from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.cli.tables.bench import compare_table, layer_table, methods_table, scaling_table
from quantizers.forward.layered_model import LayeredModel
from quantizers.plan.job import Job, prepare
from quantizers.plan.making import expected_tensors
from quantizers.recipe.read import set_location
from quantizers.system.errors import InputError

CPU = torch.device("cpu")
SMALL = {"hidden": 128, "width": 64, "experts": 8, "heads": 2, "kv_heads": 1}


def test_a_model_is_found_by_the_end_of_its_name_and_refused_by_name() -> None:
    assert published("minimax-m2.1") == published("MiniMaxAI/MiniMax-M2.1")
    assert published("minimax-m2.1")["num_local_experts"] == 256
    with pytest.raises(InputError, match=r"--like nothing: no facts are kept for it; give one of .*MiniMax-M2\.1"):
        published("nothing")


def test_a_random_checkpoint_has_the_published_layout(tmp_path: Path) -> None:
    """Names, dtypes and shapes as planned; weights of the size that keeps a vector's length."""
    config = resized(published("minimax-m2.1"), layers=2, vocabulary=256, **SMALL)
    checkpoint = write_random(tmp_path / "model", config, CPU)
    facts = architecture_for(config, "config.json")
    wanted = expected_tensors(facts, sizes_of(facts, config, "config.json"), config, "config.json")
    assert {name: Spec(info.dtype, info.shape) for name, info in checkpoint.tensors.items()} == wanted
    module = facts.expert(1, 3, "gate")
    weight = checkpoint.tensor(f"{module}.weight").float() * checkpoint.tensor(f"{module}.weight_scale_inv")
    assert float(weight.square().mean().sqrt()) == pytest.approx(128**-0.5, rel=0.1)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return measure_layer("minimax-m2.1", 64, 8, CPU, length=32, **{k: v for k, v in SMALL.items() if k != "experts"})


def test_a_layer_goes_through_every_phase(measured: dict[str, Any]) -> None:
    assert tuple(measured["seconds"]) == LAYER_PHASES
    assert all(seconds > 0 for seconds in measured["seconds"].values())
    assert set(measured["shares"]) <= set(LAYER_PHASES)
    assert measured["tokens"] == 64
    assert measured["whole_model"]["layers"] == 62
    text = layer_table(measured)
    assert all(phase in text for phase in LAYER_PHASES)
    assert "all 62 layers with experts of minimax-m2.1" in text


def test_the_first_layer_with_experts_is_the_one_that_is_measured() -> None:
    """DeepSeek-V3's, after three without, and without the layer that predicts further tokens."""
    small = {"hidden": 128, "width": 64, "dense_width": 128, "heads": 2, "q_lora": 64, "kv_lora": 64}
    measured = measure_layer("deepseek-v3", 64, 16, CPU, length=32, **small)
    assert all(seconds > 0 for seconds in measured["seconds"].values())
    assert measured["whole_model"]["layers"] == 61 - 3
    with pytest.raises(InputError, match="n_routed_experts 8 are not two or more in each of n_group 8 groups"):
        measure_layer("deepseek-v3", 64, 8, CPU, **small)


def test_only_what_grows_with_experts_is_extrapolated() -> None:
    """One second in each phase, 8 of 256 experts, 62 layers; reading and writing beside the rest."""
    config = published("minimax-m2.1")
    facts = architecture_for(config, "config.json")
    whole = sizes_of(facts, config, "config.json")
    small = sizes_of(facts, resized(config, experts=8), "config.json")
    result = extrapolate(dict.fromkeys(LAYER_PHASES, 1.0), small, whole)
    assert result["seconds"] == 62 * (13 * 32 + 2)
    assert result["seconds_overlapped"] == 62 * (9 * 32 + 2)


def test_both_engines_solve_the_same_layer() -> None:
    result = compare_layer(layer_sizes(4, 128, 64), 48, 1, CPU)
    assert result["tokens"] == 48
    for who in ("ours", "library"):
        assert result[who]["seconds"] > 0
        assert len(result[who]["each"]) == 1
    assert result["faster"] == result["library"]["seconds"] / result["ours"]["seconds"]


def test_exponents_are_slopes_of_logarithms() -> None:
    assert scaling.slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    assert scaling.slope([1, 10], [5, 5]) == pytest.approx(0)


def test_every_size_is_varied_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = {"tokens": (32, 64), "experts": (2, 4), "grid": (3, 5), "layers": (1, 2)}
    monkeypatch.setattr(scaling, "STEPS", steps)
    monkeypatch.setattr(scaling, "BASE", {"tokens": 64, "experts": 4, "grid": 3, "layers": 1})
    result = scaling.measure_scaling(128, 64, 1, CPU)
    assert {name: tuple(row[name] for row in part["rows"]) for name, part in result["varied"].items()} == steps
    assert set(result["varied"]["tokens"]["exponents"]) >= {"forced pass", "sums", "search", "rounding"}
    assert "exponent" in scaling_table(result)
    scaling_picture(result, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 1000


def test_results_are_drawn_and_printed(measured: dict[str, Any], tmp_path: Path) -> None:
    times = {"seconds": 2.0, "cpu_seconds": 2.0, "memory_bytes": 10**6}
    side = times | {"kl": 0.01, "steps": {"solve": 2.0}, "bytes": {"output": 10}}
    layer = {"ours": side, "library": side, "sizes": layer_sizes(4, 128, 64), "tokens": 48}
    route = {"ours": side, "library": side, "tokens": 48, "kl_ratio": 1.0, "model": "tiny", "set": "embedded"}
    result = {"layer": layer, "route": route, "repeats": 1, "machine": {"threads": 1, "device": "cpu"}}
    assert "bytes written: output 10" in compare_table(result)
    compare_picture(result, tmp_path / "compare.png")
    layer_picture(measured, tmp_path / "layer.png")
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("compare.png", "layer.png"))


@pytest.fixture(scope="module")
def small_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return prepare(str(write_job(tmp_path_factory.mktemp("job"), layers=1)))


def test_all_methods_go_through_a_whole_model(small_job: Job) -> None:
    result = methods.compare_methods(small_job, CPU, repeats=1, most_tokens=256)
    asked = methods.methods(small_job.recipe.experts, small_job.facts, torch.float32)
    names = [method.name for method in asked.rows]
    assert [row["method"] for row in result["rows"]] == names
    assert all(row["kl"] > 0 for row in result["rows"])
    text = methods_table(result)
    assert all(name in text for name in names)
    assert any("norm not folded" in name for name in names)
    assert asked.left_out == {"gram AWQ, default, router in F32": "the default is that"}  # as MiniMax-M2's is served
    assert text.endswith("\nleft out: gram AWQ, default, router in F32: the default is that")


def test_where_the_norm_has_another_reader_rows_with_a_fold_are_left_out_by_name(small_job: Job) -> None:
    """Nothing is folded there, so no router is left out, kept or rounded; but the library folds nevertheless."""
    base, facts = small_job.recipe.experts, small_job.facts
    norm = facts.norm.model_copy(update={"readers": [*facts.norm.readers, "self_attn.q_proj"]})
    other = facts.model_copy(update={"norm": norm})
    found = methods.methods(base, other, torch.float32)
    assert len(found.rows) == 8
    assert [row.name for row in found.rows if row.others_left_out] == ["llm-compressor AWQ, other readers left out"]
    assert found.base == "llm-compressor AWQ, norm not folded"
    assert not found.left_out.keys() & {row.name for row in found.rows}
    assert len(found.left_out) == 4
    (why,) = set(found.left_out.values())
    assert why.startswith("post_attention_layernorm.weight is also read by self_attn.q_proj, ")
    jobs = {row.name: methods.variant(replace(small_job, facts=other), row) for row in found.rows}
    assert [name for name, job in jobs.items() if job.plan.folds] == ["llm-compressor AWQ, other readers left out"]
    table = methods_table(
        {
            "rows": [{"method": name, "kl": 1, "top1": 1, "router": 1, "increase": 0, "seconds": 1} for name in jobs],
            "base": found.base,
            "left_out": found.left_out,
            "calibration": {"tokens": 1},
            "held_out_tokens": 1,
            "machine": {"threads": 1},
            "repeats": 1,
        }
    )
    assert table.count("left out: ") == 1
    assert all(name in table for name in found.left_out)


@pytest.mark.slow
def test_a_router_written_in_float32_is_measured_unrounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepare(str(families.write_job(tmp_path, "qwen3_moe")))
    base, facts = job.recipe.experts, job.facts
    assert not any(method.router for method in methods.methods(base, facts, torch.bfloat16).rows)  # it would be rounded
    compared = methods.methods(base, facts, torch.float32)
    rows = [m for m in compared.rows if m.router or m.name.endswith("(default)")]
    compared = replace(compared, rows=rows)
    assert [row.router for row in rows] == [None, "F32"]
    seen = []

    def measure(source: Checkpoint, candidates: list[Checkpoint], *arguments: Any, **options: Any) -> Any:
        for candidate in candidates:
            model = LayeredModel(candidate, facts, job.sizes, CPU, torch.float32)
            with model.layer(0) as layer:
                seen.append(layer.mlp.gate.weight.clone())
        return measured_by_all(source, candidates, *arguments, **options)

    measured_by_all = methods.measure
    monkeypatch.setattr(methods, "methods", lambda *arguments: compared)
    monkeypatch.setattr(methods, "measure", measure)
    result = methods.compare_methods(job, CPU, repeats=1, most_tokens=256)
    rounded, unrounded = seen
    assert torch.equal(rounded, unrounded.bfloat16().float())
    assert not torch.equal(rounded, unrounded)
    assert result["rows"][0]["kl"] != result["rows"][1]["kl"]


@pytest.mark.slow
def test_the_librarys_mapping_without_the_shared_expert_is_far_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a model with a dense layer, whose seconds are none."""
    job = prepare(str(families.write_job(tmp_path, "glm4_moe")))
    found = methods.methods(job.recipe.experts, job.facts, torch.float32)
    rows = [row for row in found.rows if row.others_left_out or row.name == found.base]
    found = replace(found, rows=rows)
    monkeypatch.setattr(methods, "methods", lambda *arguments: found)
    result = methods.compare_methods(job, CPU, repeats=1, most_tokens=256)
    left_out, exact = result["rows"]
    assert left_out["method"] == "llm-compressor AWQ, other readers left out"
    assert left_out["kl"] > 5 * exact["kl"]
    assert exact["seconds"] > 0


def test_both_routes_go_through_a_whole_model(small_job: Job) -> None:
    assert small_job.source is not None
    data = load_set(set_location(small_job.recipe.calibration_set, small_job.path), small_job.source.folder)
    result = compare_route(small_job, data, 1, CPU)
    assert result["ours"]["kl"] > 0
    assert result["kl_ratio"] == result["ours"]["kl"] / result["library"]["kl"]
    assert set(result["library"]["bytes"]) == {"bf16", "saved", "stitched"}
