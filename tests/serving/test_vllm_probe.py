"""A real vLLM reads and computes the outputs of every family; and what it would load or compute wrong is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from conftest import Finished, needs_vllm
from made_once import made_once
from probed import computed, probed
from runs import change
from source_forms import per_row, write_plain, write_variant
from streamed import divergence, held_out_texts, log_probabilities
from torch import Tensor
from whole_models import stored

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for, known
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.serving.check import check_folder
from quantizers.serving.engines import VLLM

EXPERTS = "model.layers.1.block_sparse_moe.experts"
EXPERT = f"{EXPERTS}.3"
BLOCKS = "FP8 block 128x128"
SCHEMES = {"glm4_moe": "FP8 per channel"}  # of the experts in layers that predict further tokens, or else BLOCKS
Damage = Callable[[dict[str, Any], dict[str, Tensor]], object]


def facts_of(model_type: str) -> Architecture:
    return architecture_for(families.config(model_type), "here")


def without_numbers(config: dict[str, Any]) -> None:
    """The target of the INT4 experts as it is in families that have no layers beyond the last."""
    group = config["quantization_config"]["config_groups"]["routed_experts"]
    group["targets"] = [r"re:.*\.experts\.\d+\.(gate_proj|up_proj|down_proj)$"]


def without_a_scale(_config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors[f"{EXPERTS}.2.w3.weight_scale"]


def with_swapped_scales(_config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    one, other = f"{EXPERTS}.2.w3.weight_scale", f"{EXPERTS}.3.w3.weight_scale"
    tensors[one], tensors[other] = tensors[other], tensors[one]


def renamed(old: str, new: str) -> Damage:
    def rename(_config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return rename


def with_a_stray_tensor(_config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.attn.k_scale"] = tensors["model.norm.weight"][:1].clone()


NOWHERE = "found in 0 places of vLLM's model"
# A damage, and expressions for the beginnings of the problems that it must give.
DAMAGES: dict[str, tuple[Damage, list[str]]] = {
    "a scale is missing": (
        without_a_scale,
        [
            f"{EXPERTS}.2.w3.weight_scale: {NOWHERE}$",
            f"{EXPERTS}.routed_experts.w13_weight_scale: 512 of 16384 elements were never written",
        ],
    ),
    "two scales are swapped": (
        with_swapped_scales,
        [
            f"{EXPERTS}.2.w3.weight_scale: {NOWHERE}; its bytes lie in "
            f"{EXPERTS}.routed_experts.w13_weight_scale, 1, 3, w3$"
        ],
    ),
    "FP8 scales have the source's name": (
        renamed("_proj.weight_scale", "_proj.weight_scale_inv"),
        ["vLLM, loading the weights: "],
    ),
    "experts have another family's names": (
        renamed(".w1.", ".gate_proj."),
        [
            f"model.layers.0.block_sparse_moe.experts.0.gate_proj.weight_packed: {NOWHERE}$",
            rf"{EXPERTS}.routed_experts.w13_weight_packed: \d+ of \d+ elements were never written",
        ],
    ),
    "a tensor has no place": (with_a_stray_tensor, [f"model.layers.1.self_attn.attn.k_scale: {NOWHERE}$"]),
}


pytestmark = [pytest.mark.slow, needs_vllm]
CACHED = ("minimax_m2", "qwen3_moe")  # with scales for an FP8 cache of keys and values, which lie in their parameters
NVFP4 = (16, 4)  # bits of activations
VARIANTS = (("deepseek_v3", "bf16"), ("glm4_moe_lite", "fp8"), ("mixtral", "fp8"), ("qwen3_moe", "fp8-block"))


Outputs = tuple[list[Path], list[Path]]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """A recipe and its output for each of families.MODELS, for attention in FP8 rows, and for each of VARIANTS.

    Those of CACHED follow, and those in NVFP4.
    """

    def made(home: Path) -> Outputs:
        def written(name: str, model: str, **experts: Any) -> Path:
            return families.write_job(home / name, model, rounding="nearest", **experts)

        recipes = [written(str(number), model) for number, model in enumerate(families.MODELS)]
        per_row(write_plain(home / "plain", "qwen3_moe"), home / "rows" / "model", torch.bfloat16)
        recipes.append(tiny.write_recipe(home / "rows", words=20, samples=3, rounding="nearest"))
        recipes += [write_variant(home / f"{family} {attention}", family, attention) for family, attention in VARIANTS]
        recipes += [written(f"{family} cached", family) for family in CACHED]
        for recipe in recipes[-len(CACHED) :]:
            change(recipe, lambda body: body.update(kv_cache="fp8"))
        for activations in NVFP4:
            recipes.append(written(f"W4A{activations}", "qwen3_moe", format="nvfp4", activations=activations))
        for recipe in recipes:
            change(recipe, lambda body: body.pop("verify"))
            run(prepare(str(recipe)), Options(recipe.parent / "output", torch.device("cpu")))
        return recipes, [recipe.parent / "output" for recipe in recipes]

    return made_once(tmp_path_factory, "vllm", made)


READ = len(families.MODELS) + 1 + len(VARIANTS) - 1 + len(CACHED)


def read_by_vllm(outputs: Outputs) -> Iterator[tuple[Path, Path]]:
    """Recipe and output of those that vLLM reads, READ of them.

    Not of the last of VARIANTS: the scales of FP8 blocks, which are powers of two, are alike in many places.
    """
    for number, pair in enumerate(zip(*outputs, strict=True)):
        if number != READ - len(CACHED) and number <= READ:
            yield pair


@pytest.fixture(scope="module")
def report(
    outputs: Outputs, finished: Finished, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, Any]]:
    """The probe's exit code and report on all of them, in one process, whose start takes long.

    After the outputs come one of them whose config is misread, those in NVFP4, the finished checkpoint, and this with
    each of DAMAGES, the values of which are compared with the undamaged one's.
    """

    def made(home: Path) -> tuple[int, dict[str, Any]]:
        folders = [folder for _, folder in read_by_vllm(outputs)]
        misread = shutil.copytree(folders[[*families.MODELS].index("deepseek_v3")], home / "misread")
        config, _ = stored(misread)
        without_numbers(config)
        (misread / "config.json").write_text(json.dumps(config))
        for name, (damage, _) in DAMAGES.items():
            config, tensors = stored(finished.folder)
            damage(config, tensors)
            tiny.write(home / name, config, tensors)
        damaged = [home / name for name in DAMAGES]
        return probed(*folders, misread, *outputs[1][-len(NVFP4) :], "--compare", *[finished.folder] * 2, *damaged)

    return made_once(tmp_path_factory, "probed", made)


def test_vllm_reads_every_family_as_it_was_written(
    outputs: Outputs, report: tuple[int, dict[str, Any]], say: Callable[[str], None]
) -> None:
    """In one process: the schemes are those of our rules, and every tensor lies in its own model, byte for byte.

    With a scale per block and per row of FP8, without FP8, with a layer that has no experts, and with one that predicts
    further tokens, whose experts are as the source has them; a config that takes them for INT4 is named by vLLM and us.
    """
    recipes, folders = zip(*read_by_vllm(outputs), strict=True)
    code, found_by_vllm = report
    checked, damaged = found_by_vllm["checked"][:READ], found_by_vllm["checked"][READ]
    misread = Path(damaged["folder"])
    assert [one["folder"] for one in checked] == [*map(str, folders)]
    versions = ", ".join(f"{name} {version}" for name, version in found_by_vllm["versions"].items())
    say(f"{versions} read {', '.join(one['model_class'] for one in checked)}")
    assert [one["problems"] for one in checked] == [[]] * len(folders)
    for recipe, folder, one in zip(recipes, folders, checked, strict=True):
        source, tensors = stored(recipe.parent / "model")
        assert one["tensors"] == len(stored(folder)[1])
        assert "INT4 group 32" in str(one["schemes"]["experts"])
        has = any(families.is_mtp(source, name) for name in tensors)
        experts = "plain" if not source.get("quantization_config") else SCHEMES.get(source["model_type"], BLOCKS)
        assert [answer.partition(" (")[0] for answer in one["schemes"].get("MTP experts", ())] == [experts] * has
    assert code == 1
    assert any(line.startswith("vLLM, loading the MTP model's weights: ") for line in damaged["problems"])
    assert not [line for line in damaged["problems"] if "the rules here say" in line]
    found = check_folder(misread)
    assert found is not None
    (error,) = [error for error in found.errors if VLLM.name in error.engine]
    assert error.where == "model.layers.3.mlp.experts.0.gate_proj"
    assert "MTP experts: takes the scheme INT4 group 32" in error.problem
    served = {facts.model_class: facts for facts in map(facts_of, known()) if "vllm" in facts.servers}
    assert {one["model_class"] for one in checked} == set(served)
    for one in checked:
        held = {"F32": "float32", "BF16": "bfloat16"}[served[one["model_class"]].router.served]
        assert one["router_dtype"] == held


@pytest.mark.parametrize("activations", NVFP4)
def test_vllm_takes_nvfp4_as_our_rules_say_and_its_cpu_build_has_no_kernel(
    activations: int, report: tuple[int, dict[str, Any]]
) -> None:
    found = report[1]["checked"][READ + 1 + NVFP4.index(activations)]
    assert f"W4A{activations}" in found["folder"]
    (problem,) = found["problems"]
    assert problem.endswith("No NvFp4 MoE backend supports the deployment configuration.")
    (scheme,) = found["schemes"]["experts"]
    assert scheme == f"NVFP4 W4A{activations} (CompressedTensorsW4A4Nvfp4MoEMethod)"


def uncompensated(source: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    for name in (name for name in tensors if name.endswith("block_sparse_moe.gate.weight")):
        tensors[name] = source[name]


def with_gate_and_up_swapped(_source: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    for part in ("weight_packed", "weight_scale"):
        one, other = (f"{EXPERT}.{matrix}.{part}" for matrix in ("w1", "w3"))
        tensors[one], tensors[other] = tensors[other], tensors[one]


def with_larger_scales(_source: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    for name in (name for name in tensors if name.endswith(".w2.weight_scale")):
        tensors[name] *= 1.02


MISTAKES = (uncompensated, with_gate_and_up_swapped, with_larger_scales)


def test_vllm_computes_every_family_as_it_was_evaluated(
    outputs: Outputs, tmp_path: Path, say: Callable[[str], None]
) -> None:
    """In float32, on any CPU: KL(ours || vLLM). A mistake in the output of one family is far from nothing."""
    recipes, folders = (some[: -len(CACHED) - len(NVFP4)] for some in outputs)
    texts = [held_out_texts(recipe.parent) for recipe in recipes]
    ours = [log_probabilities(folder, own) for folder, own in zip(folders, texts, strict=True)]
    minimax = [*families.MODELS].index("minimax_m2")
    for mistake in MISTAKES:
        config, tensors = stored(folders[minimax])
        mistake(stored(recipes[minimax].parent / "model")[1], tensors)
        tiny.write(tmp_path / mistake.__name__, config, tensors)
    damaged = [tmp_path / mistake.__name__ for mistake in MISTAKES]
    found = computed([*folders, *damaged], [*texts, *[texts[minimax]] * len(damaged)])
    assert [one.problem for one in found] == [""] * len(found)
    ours += [ours[minimax]] * len(damaged)
    apart = [divergence(own, one.logs) for own, one in zip(ours, found, strict=True)]
    names = [
        *families.MODELS,
        "qwen3_moe in FP8 rows",
        *map(" as ".join, VARIANTS),
        *(mistake.__name__ for mistake in MISTAKES),
    ]
    say("KL(ours || vLLM in float32), seconds")
    for name, kl, one in zip(names, apart, found, strict=True):
        say(f"{kl:9.1e} {one.seconds:5.1f}  {name}")
    assert max(apart[: len(folders)]) < 1e-9
    assert min(apart[len(folders) :]) > 1e-6


def test_vllm_holds_all_of_a_finished_checkpoint_and_damages_are_named(
    finished: Finished, report: tuple[int, dict[str, Any]]
) -> None:
    """Values are compared with the undamaged checkpoint's."""
    good, *damaged = report[1]["checked"][READ + 1 + len(NVFP4) :]
    assert good["problems"] == []
    assert good["tensors"] == len(stored(finished.folder)[1])
    assert (good["model_class"], good["router_dtype"]) == ("MiniMaxM2ForCausalLM", "float32")
    for one, (name, (_, beginnings)) in zip(damaged, DAMAGES.items(), strict=True):
        for beginning in beginnings:
            assert any(re.match(beginning, line) for line in one["problems"]), (name, one["problems"])
