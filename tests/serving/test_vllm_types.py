"""A real vLLM loads and computes the outputs of model types without a file of facts, each tensor in one place.

What it loads, through which class, what it computes, and what keeps it from the others is data here: a newer vLLM shows
by what changes.
`QUANTIZERS_TEST_VLLM_TYPES=all` tries every type, in about 8 minutes, instead of those in CI; names with commas between
them, these alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
import zoo
from conftest import needs_vllm
from made_once import made_once
from probed import computed, probed
from runs import change
from streamed import divergence, held_out_texts, log_probabilities
from whole_models import stored

from quantizers.architectures.families import known
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare

BACKEND = "TransformersMoEForCausalLM"  # vLLM runs transformers' own modules, but for the experts
# vLLM's class for each type that it loads.
LOADED = {
    "aria with vision": "AriaForConditionalGeneration",
    "afmoe": "AfmoeForCausalLM",
    "axk1": "AXK1ForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoe_swa": "GraniteMoeSharedForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "jamba": "JambaForCausalLM",
    "laguna": "LagunaForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "llama4 with vision": "Llama4ForConditionalGeneration",
    "longcat_flash": "LongcatFlashForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe as published": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe with vision": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl_moe as published": "Qwen3VLMoeForConditionalGeneration",
    **dict.fromkeys(
        (
            "axk2", "dots1", "flex_olmo", "hunyuan_v1_moe", "mellum", "minimax_m3_vl", "mistral4", "phimoe",
            "solar_open", "zaya",
        ),
        BACKEND,
    ),
}  # fmt: skip
QK_TURNED = [  # Llama 4's rotation takes pairs of neighbours, vLLM's halves: it turns these rows around on loading
    r"(language_model\.)?model\.layers\.\d\.self_attn\.[qk]_proj\.weight: found in 0 places of vLLM's model",
    r"(language_model\.)?model\.layers\.\d\.self_attn\.qkv_proj\.weight: 24576 of 32768 elements belong to no stored",
]
# The only problems of types that it loads.
PROBLEMS = {
    # A norm of a dense layer that its class has and never reads.
    "axk1": [r"model\.layers\.0\.post_mlp_layernorm\.weight: 128 of 128 elements were never written"],
    "aria with vision": [  # the same as gpt_oss, and a norm of the tower that its class does not have
        r"language_model\.model\.layers\.\d\.mlp\.experts\.\d\.\w+_proj\.weight_\w+: found in 0 places of vLLM's",
        r"language_model\.layers\.\d\.mlp\.experts\.routed_experts\.w\d+_\w+: \d+ of \d+ elements (were|belong) ",
        r"vision_tower\.post_layernorm\.(bias|weight): found in 0 places of vLLM's model",
    ],
    "gpt_oss": [  # plan, verify and the card say so
        r"model\.layers\.\d\.mlp\.experts\.(\d\.(gate|up|down)_proj\.weight_\w+|\w+_bias): found in 0 places of vLLM's",
        r"model\.layers\.\d\.mlp\.experts\.routed_experts\.w\d+_\w+: \d+ of \d+ elements (were never|belong to no)",
    ],
    **dict.fromkeys(("llama4", "llama4 with vision"), QK_TURNED),
    "longcat_flash": [  # vLLM multiplies a factor into these norms
        r"model\.layers\.[01]\.self_attn\.[01]\.(q_a|kv_a)_layernorm\.weight: found in 0 places of vLLM's model",
        r"model\.layers\.[01]\.self_attn\.[01]\.(q_a|kv_a)_layernorm\.weight: 64 of 64 elements belong to no stored",
    ],
    "laguna": [  # its class passes over the router's correction without a word
        r"model\.layers\.[123]\.mlp\.experts\.e_score_correction_bias: found in 0 places of vLLM's model",
        r"model\.layers\.[123]\.mlp\.experts\.routed_experts\.e_score_correction_bias: 8 of 8 elements were never",
    ],
}
# What it says of those that it loads and whose CPU build cannot compute in float32.
GATED_DELTA = "CPU GDN attention requires BF16"
NOT_COMPUTED = {
    "axk2": "'NoneType' object is not subscriptable",
    "jamba": "'_C' object has no attribute 'selective_scan_fwd'",
    **dict.fromkeys(("llama4", "llama4 with vision"), "attn_chunk_size 16 is not divisible by block_size 128"),
    "longcat_flash": "Head dimension 48 is not supported by MLA",
    "mimo_v2_flash": "module 'triton' has no attribute 'next_power_of_2'",
    "phimoe": "too many values to unpack",
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe as published", "qwen3_5_moe with vision", "qwen3_next"), GATED_DELTA),
}
# Why it computes these otherwise than transformers' own model, which is ours to the last bit (test_every_type.py).
OTHERWISE = {
    "cohere2_moe": "its windows are one token longer",
    "aria with vision": "its class loads no expert's own matrices, see above",
    "gpt_oss": "its class loads no expert's own matrices, see above",
    "laguna": "its class does not load the router's correction, see above",
    "minimax_m3_vl": "its Transformers backend has silu for the experts' own gate, no indexer and no rotary_dim",
}
# What it says of the others.
SPARSE = "Sparse Attention is not supported on CPU"
REFUSED = {
    "aria": "assert top_k is not None",  # under a name that its class has for it, moe_topk
    "deepseek_ocr2": "Can't load image processor",  # its Transformers backend wants one in the folder
    "deepseek_v32": SPARSE,
    "deepseek_v4": "The `mlp_layer_types` entries must be in ('sparse', 'dense')",  # by its transformers 5.19
    "ernie4_5_vl_moe": "'Ernie4_5_VLMoeVisionConfig' object has no attribute 'embed_dim'",  # no name of transformers'
    "gemma4 with vision": "Unrecognized configuration class <class 'NoneType'>",  # its class wants a tower
    "glm5_next": "'Glm5NextTextConfig' object has no attribute 'mhc'",
    "glm_moe_dsa": SPARSE,
    "hy_v4": "no valid sparse MLA backend is available",
    "inkling": "failed to be inspected",  # it imports numba
    "kimi_k25": "Can't load image processor",
    "kimi_linear": "No module named 'cutlass'",
    "minimax": "Layer 0 (linear_attention) does not dispatch through the Transformers attention interface",
    "minimax_m3_vl with vision": "object has no attribute 'img_token_compression_config'",
    **dict.fromkeys(("nemotron_h", "nemotron_h latent"), "is_act_and_mul=False is supported only for CUDA, XPU and"),
    "qwen3_omni_moe": "Invalid type of HuggingFace processor",
    "qwen4_exp": "pin_memory=True requires a CUDA or other accelerator backend",
    "qwen4_exp with vision": "'Qwen4ExpVisionConfig' object has no attribute 'deepstack_visual_indexes'",
    "step3p7": "'Step3p7VisionConfig' object has no attribute 'output_dim'",
    "step3p7 as published": "'Step3p7VisionConfig' object has no attribute 'output_dim'",
    # Its transformers 5.19 does not have these types.
    **dict.fromkeys(
        (
            "bailing_hybrid", "beam", "dots3_note", "flint", "hy_v4_vl", "kolibri1", "lara_mini", "mistral_large4",
            "nemo_speechlm", "nemotron_h_omni", "sarvam_mla", "sarvam_moe",
        ),
        "Transformers does not recognize this architecture",
    ),
    **dict.fromkeys(("dots3_note with vision", "unlimited_ocr"), "does not have `num_attention_heads` attribute"),
}  # fmt: skip
# Together they have every naming of experts and every way in which vLLM holds what is kept; and one that it refuses.
IN_CI = (
    "afmoe", "gemma4", "granitemoehybrid", "hunyuan_v1_moe", "jamba", "laguna", "mimo_v2_flash", "minimax",
    "qwen3_5_moe as published", "qwen3_vl_moe",
)  # fmt: skip
WANTED = os.environ.get("QUANTIZERS_TEST_VLLM_TYPES")  # environment variable
TRIED = tuple(WANTED.split(",")) if WANTED else IN_CI
TRIED = tuple(sorted((LOADED | REFUSED).keys() - zoo.LATER)) if TRIED == ("all",) else TRIED


def test_every_type_is_loaded_or_has_a_reason() -> None:
    derived = {name for name in zoo.TYPES if name not in zoo.REFUSED and name not in known()}
    assert ({*LOADED} | {*REFUSED}) - zoo.LATER - {*zoo.REFUSED} == derived
    assert not {*LOADED} & {*REFUSED}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The output for each type that is tried, beside its source and sets."""

    def made(home: Path) -> list[Path]:
        folders = []
        for name in TRIED:
            folder = home / name.replace(" ", "-")
            zoo.save(name, folder / "model")
            recipe = tiny.write_recipe(folder, words=20, samples=2, bits=4, group_size=32, rounding="nearest")
            change(recipe, lambda body: body.pop("verify"))
            run(prepare(str(recipe)), Options(folder / "output", torch.device("cpu"), ignore_source_check=True))
            folders.append(folder / "output")
        return folders

    return made_once(tmp_path_factory, "types", made)


@pytest.mark.slow
@needs_vllm
def test_vllm_computes_what_was_evaluated(outputs: list[Path], say: Callable[[str], None]) -> None:
    """In float32 and in one process: KL(ours || vLLM), by types derived from transformers' class alone."""
    say("KL(ours || vLLM in float32), seconds")
    folders = {name: folder for name, folder in zip(TRIED, outputs, strict=True) if name in LOADED}
    texts = [held_out_texts(folder.parent, length=48) for folder in folders.values()]
    found = dict(zip(folders, computed([*folders.values()], texts), strict=True))
    for (name, one), own in zip(found.items(), texts, strict=True):
        if name in NOT_COMPUTED:
            assert NOT_COMPUTED[name] in one.problem, name
            continue
        assert one.problem == "", name
        facts = folders[name] / "facts.yaml"
        apart = divergence(log_probabilities(folders[name], own, facts if facts.exists() else None), one.logs)
        say(f"{apart:9.1e} {one.seconds:5.1f}  {name}")
        assert (apart > 1e-9) == (name in OTHERWISE), name


@pytest.mark.slow
@needs_vllm
def test_vllm_has_each_tensor_in_one_place(outputs: list[Path]) -> None:
    """In one process: its class is the one above, and every tensor of the files lies in its model, byte for byte."""
    _, report = probed(*outputs)
    for name, folder, one in zip(TRIED, outputs, report["checked"], strict=True):
        problems = one["problems"]
        if name in REFUSED:
            assert len(problems) == 1, (name, problems)
            assert REFUSED[name] in problems[0], name
            continue
        expected = PROBLEMS.get(name, [])
        assert [line for line in problems if not any(re.match(e, line) for e in expected)] == [], name
        assert all(any(re.match(e, line) for line in problems) for e in expected), (name, problems)
        missing = sum("found in 0 places" in line for line in problems)
        assert (one["model_class"], one["tensors"]) == (LOADED[name], len(stored(folder)[1]) - missing)
