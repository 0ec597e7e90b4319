"""Sizes of models without their files: the tensors that transformers' class would write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
import zoo

from quantizers.architectures.class_tensors import class_tensors
from quantizers.architectures.families import known, published_config, published_models
from quantizers.checkpoint.reader import open_folder
from quantizers.planning.job import prepare
from quantizers.system.errors import ArchitectureError

# Of each: output and source in bytes of all tensors that are planned. The published FP8 files of GLM-5.3-Flash take
# "about 306 GiB" (vllm-project/recipes, models/zai-org/GLM-5.3-Flash.yaml) with MTP's layer, which is not counted.
SHIPPED = {
    "qwen3.8-flash-next-int4": (181.2, 354.8),
    "qwen3.8-flash-next-fp8-int4": (130.0, 182.8),
    "glm-5.3-flash-fp8-int4": (187.4, 320.6),
    "nemotron-3-nano-30b-a3b-int4": (20.9, 63.2),
    "nemotron-3-super-120b-a12b-int4": (79.3, 241.3),
}


@pytest.mark.parametrize(
    "name",
    [
        "qwen4_exp",
        "glm5_next",
        "qwen3_5_moe with vision",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("granitemoe", "inkling", "longcat_flash")),
    ],
)
def test_they_are_those_that_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    saved = open_folder(zoo.save(name, tmp_path))
    made = class_tensors(saved.config)
    assert {n: header.shape for n, header in made.items()} == {n: info.shape for n, info in saved.tensors.items()}
    for tensor, info in saved.tensors.items():  # the tiny model is in bfloat16 as a whole
        assert made[tensor].dtype in ({"F32", "BF16"} if info.dtype == "BF16" else {info.dtype})


def config_dict(name: str) -> dict[str, Any]:
    return zoo.config_of(name).to_dict() | {"architectures": [zoo.whole_class(name).__name__]}


def test_float32_is_what_transformers_keeps_so_by_the_class_own_names() -> None:
    """deepseek_v4's files call ffn_norm what its class calls post_attention_layernorm."""
    made = class_tensors(config_dict("deepseek_v4"))
    dtypes = {name.removeprefix("model.layers.0."): header.dtype for name, header in made.items()}
    assert (dtypes["ffn_norm.weight"], dtypes["hc_attn_scale"], dtypes["attn.wq_a.weight"]) == ("F32", "F32", "BF16")


def test_tied_matrices_are_written_once() -> None:
    config = config_dict("qwen3_moe")
    assert class_tensors(config).keys() - class_tensors(config | {"tie_word_embeddings": True}).keys() == {
        "lm_head.weight"
    }


def test_several_sets_of_experts_are_refused() -> None:
    with pytest.raises(ArchitectureError, match=r"has several sets of experts; .* without files; give the files, or"):
        class_tensors(config_dict("ernie4_5_vl_moe"))


def test_fp8_is_as_quantization_config_says() -> None:
    config = zoo.config_of("qwen4_exp").to_dict() | {"architectures": ["Qwen4ExpForCausalLM"]}
    section = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [r"(?!.*\.experts\.\d).*"],
    }
    made = class_tensors(config | {"quantization_config": section | {"modules_to_convert": ["ngram_embedding"]}})
    plain = class_tensors(config)
    experts = [name for name in plain if ".experts." in name]
    table = "model.layers.0.ple.ple_embedding.ngram_embedding"
    fp8 = {name for name, header in made.items() if header.dtype == "F8_E4M3"}
    assert fp8 == {*experts, f"{table}.shard_0.weight", f"{table}.shard_1.weight"}
    assert made.keys() - plain.keys() == {*(f"{name}_scale_inv" for name in experts), f"{table}.weight_scale"}
    assert made[f"{experts[0]}_scale_inv"] == ("F32", (1, 1))
    with pytest.raises(ArchitectureError, match="which tensors it means is not known without the files"):
        class_tensors(config | {"quantization_config": {"quant_method": "mxfp4"}})


RECIPES = [pytest.param(name, marks=pytest.mark.slow if "next" in name else pytest.mark.every) for name in SHIPPED]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_shipped_recipe_is_planned_without_a_network(recipe: str) -> None:
    job = prepare(recipe, offline_facts=True)
    assert job.source is None
    assert "as kept here, and its class" in job.basis
    written = sum(spec.bytes for part in job.plan.parts for spec in job.plan.shard(part).values())
    read = sum(action.spec.bytes for action in job.plan.actions)
    # What a class keeps in float32 differs between versions of transformers.
    assert (written / 1e9, read / 1e9) == pytest.approx(SHIPPED[recipe], abs=0.3)


def test_every_kept_config_is_of_a_class_that_there_is() -> None:
    for model in published_models():
        config = published_config(model)
        assert config is not None
        if config["model_type"] not in known():
            assert hasattr(transformers, config["architectures"][0]), model
