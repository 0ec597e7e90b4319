"""A real vLLM reads and computes the outputs of every family; and what it would load or compute wrong is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from conftest import Finished, needs_vllm
from probed import computed, probed
from runs import change
from source_forms import per_row, write_plain, write_variant
from streamed import divergence, held_out_texts, log_probabilities
from torch import Tensor
from whole_models import stored

from eval.serving.check import check_folder
from eval.serving.engines import VLLM
from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for, known
from quantizers.pipeline.pipeline import Options, run
from quantizers.planning.job import prepare

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
VARIANTS = (("deepseek_v3", "bf16"), ("glm4_moe_lite", "fp8"), ("mixtral", "fp8"), ("qwen3_moe", "fp8-block"))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path]]:
    """A recipe and its output for each of families.MODELS, for attention in FP8 rows, and for each of VARIANTS.

    Those of CACHED follow.
    """
    home = tmp_path_factory.mktemp("families")
    recipes = [families.write_job(home / str(number), model) for number, model in enumerate(families.MODELS)]
    per_row(write_plain(home / "plain", "qwen3_moe"), home / "rows" / "model", torch.bfloat16)
    recipes.append(tiny.write_recipe(home / "rows"))
    recipes += [write_variant(home / f"{family} {attention}", family, attention) for family, attention in VARIANTS]
    recipes += [families.write_job(home / f"{family} cached", family) for family in CACHED]
    for recipe in recipes[-len(CACHED) :]:
        change(recipe, lambda body: body.update(kv_cache="fp8"))
    for recipe in recipes:
        change(recipe, lambda body: body.pop("verify"))
        run(prepare(str(recipe)), Options(recipe.parent / "output", torch.device("cpu")))
    return recipes, [recipe.parent / "output" for recipe in recipes]


def test_vllm_reads_every_family_as_it_was_written(
    outputs: tuple[list[Path], list[Path]], tmp_path: Path, say: Callable[[str], None]
) -> None:
    """In one process: the schemes are those of our rules, and every tensor lies in its own model, byte for byte.

    With a scale per block and per row of FP8, without FP8, with a layer that has no experts, and with one that predicts
    further tokens, whose experts are as the source has them; a config that takes them for INT4 is named by vLLM and us.
    """
    # The scales of FP8 blocks, which are powers of two, are alike in many places.
    recipes, folders = ([*some[: -len(CACHED) - 1], *some[-len(CACHED) :]] for some in outputs)
    misread = shutil.copytree(folders[[*families.MODELS].index("deepseek_v3")], tmp_path / "misread")
    config, _ = stored(misread)
    without_numbers(config)
    (misread / "config.json").write_text(json.dumps(config))
    code, report = probed(*folders, misread)
    damaged = report["checked"].pop()
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    say(f"{versions} read {', '.join(one['model_class'] for one in report['checked'])}")
    assert [one["problems"] for one in report["checked"]] == [[]] * len(folders)
    for recipe, folder, one in zip(recipes, folders, report["checked"], strict=True):
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
    assert {one["model_class"] for one in report["checked"]} == set(served)
    for one in report["checked"]:
        held = {"F32": "float32", "BF16": "bfloat16"}[served[one["model_class"]].router.served]
        assert one["router_dtype"] == held


@pytest.mark.parametrize("activations", [16, 4])
def test_vllm_takes_nvfp4_as_our_rules_say_and_its_cpu_build_has_no_kernel(activations: int, tmp_path: Path) -> None:
    recipe = families.write_job(tmp_path, "qwen3_moe", format="nvfp4", activations=activations)
    change(recipe, lambda body: body.pop("verify"))
    run(prepare(str(recipe)), Options(tmp_path / "output", torch.device("cpu")))
    (found,) = probed(tmp_path / "output")[1]["checked"]
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
    outputs: tuple[list[Path], list[Path]], tmp_path: Path, say: Callable[[str], None]
) -> None:
    """In float32, on any CPU: KL(ours || vLLM). A mistake in the output of one family is far from nothing."""
    recipes, folders = (some[: -len(CACHED)] for some in outputs)
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


def test_vllm_holds_all_of_a_finished_checkpoint_and_damages_are_named(finished: Finished, tmp_path: Path) -> None:
    """All folders in one process, whose start takes long; values are compared with the undamaged checkpoint's."""
    for name, (damage, _) in DAMAGES.items():
        config, tensors = stored(finished.folder)
        damage(config, tensors)
        tiny.write(tmp_path / name, config, tensors)
    folders = [finished.folder, *(tmp_path / name for name in DAMAGES)]
    code, report = probed(*folders, "--compare", finished.folder)
    good, *damaged = report["checked"]
    assert good["problems"] == []
    assert good["tensors"] == len(stored(finished.folder)[1])
    assert (good["model_class"], good["router_dtype"]) == ("MiniMaxM2ForCausalLM", "float32")
    assert code == 1
    for report, (name, (_, beginnings)) in zip(damaged, DAMAGES.items(), strict=True):
        for beginning in beginnings:
            assert any(re.match(beginning, line) for line in report["problems"]), (name, report["problems"])
