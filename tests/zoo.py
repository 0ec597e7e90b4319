"""Tiny random models of every mixture-of-experts class that the installed transformers has, found by looking.

A class counts if transformers loads whole models with it and its file speaks of experts. Its config is its config
class's default with the sizes below; OWN holds what has to fit together otherwise, or what makes every kind of layer
occur: sliding windows of 16, linear and sparse attention, dense layers, layers with an indexer and without.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from calibration_tokenizer import write_tokenizer

WHOLE = ("ForCausalLM", "ForConditionalGeneration")
# By name of a class: why there is no tiny model of it.
NOT_BUILT = {
    "DbrxForCausalLM": "transformers 5.17 reads rope_theta of its config of attention, which has none",
    "DogeForCausalLM": "its forward passes a tuple to dropout in transformers 5.17",
}
SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "share_expert_dim"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    "moe_shared_expert_intermediate_size": 64,
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "sliding_window": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_head_dim": 16,
    "index_topk": 8, "index_head_dim": 32, "index_n_heads": 4,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 0,
}  # fmt: skip
# Of vision and audio towers, which text does not go through.
TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "output_channels"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "mlp_dim"), 64),
    **dict.fromkeys(("text_hidden_size", "out_hidden_size", "output_dim", "vision_output_dim"), 128),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers"), 1),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads", "encoder_attention_heads"), 2),
    "global_attn_indexes": [0], "fullatt_block_indexes": [0],
    "conf_num_attention_heads": 2, "vocab_size": 320, "patch_size": 8, "image_size": 16,
    "downsample_hidden_size": 16, "downsample_channels": [32, 32], "num_position_embeddings": 16,
    "n_layers": 6, "deepstack_visual_indexes": [],
}  # fmt: skip


def _kinds(*letters: str) -> dict[str, Any]:
    names = {"f": "full", "s": "sliding", "l": "linear", "c": "chunked", "d": "deepseek_sparse", "q": "qwen_sparse"}
    return {"layer_types": [f"{names[letter]}_attention" for letter in "".join(letters)]}


def _rope(**section: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | section}


SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
NARROW = {"intermediate_size": 64}  # where this is the experts'
MLA = {"num_key_value_heads": 4, "head_dim": 16}
SHARED_INDEX = {"indexer_types": ["full", "full", "shared", "shared"]}
# By model type of the text model.
OWN: dict[str, dict[str, Any]] = {
    "afmoe": _kinds("sfsf"),
    "axk1": MLA,
    "axk2": MLA | SPARSE | _kinds("dddd"),
    "cohere2_moe": SPARSE | _kinds("sfsf"),
    "deepseek_ocr2_text": SPARSE,
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "deepseek_v32": MLA | SPARSE | _kinds("dddd"),
    "deepseek_v4": {
        "num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 32, "partial_rotary_factor": 0.5,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2} | _kinds("fsfs"),
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 3},
    "ernie4_5_vl_moe_text": SPARSE | {"moe_intermediate_size": [64, 32]} | _rope(mrope_section=[6, 6, 4]),
    "exaone_moe": SPARSE | _kinds("sssf"),
    "flex_olmo": NARROW,
    "gemma4_text": _kinds("sssf") | {
        "pad_token_id": 2, "enable_moe_block": True, "per_layer_config": {"3": {"head_dim": 64}},
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 320,
    },
    "glm4_moe": {"attention_bias": True},
    "glm4_moe_lite": MLA | SPARSE,
    "glm4v_moe_text": _rope(partial_rotary_factor=0.5, mrope_section=[2, 3, 3]),
    "glm5_next_text": SPARSE | _kinds("llld") | {
        "num_key_value_heads": 4, "head_dim": 0, "qk_rope_head_dim": 0, "indexer_types": ["full"] * 4, "index_kpool": 4,
    },
    "glm_moe_dsa": MLA | SPARSE | SHARED_INDEX | _kinds("dddd"),
    "gpt_oss": NARROW | _kinds("sfsf"),
    "granitemoe": NARROW,
    "granitemoe_swa": NARROW | _kinds("fssf") | {"layer_rope_theta": [10000.0] * 4},
    "granitemoehybrid": NARROW | _kinds("lflf") | {
        "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_expand": 2, "mamba_chunk_size": 16,
    },
    "granitemoeshared": NARROW,
    "hunyuan_v1_moe": NARROW,
    "hy_v3": SPARSE,
    "hy_v4": MLA | SPARSE | SHARED_INDEX | _kinds("dddd"),
    "inkling_text": {
        "layer_types": ["hybrid_sliding", "hybrid"] * 2, "sliding_window_size": 16, "rel_extent": 64,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 32,
        "logits_mup_width_multiplier": 2.0,
    } | SPARSE,
    "jamba": NARROW | {"mamba_dt_rank": 8, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": NARROW | {"kv_channels": 32},
    "kimi_linear": MLA | SPARSE | _kinds("lllf") | {"q_lora_rank": None},
    "laguna": SPARSE | _kinds("fsfs") | {"num_attention_heads_per_layer": [4, 6, 4, 6]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": NARROW | _kinds("cccf") | {
        "intermediate_size_mlp": 256, "num_experts_per_tok": 1, "attention_chunk_size": 16, "moe_layers": [1, 3],
        "interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 1, 0],
    },
    "longcat_flash": MLA | {"num_layers": 2, "ffn_hidden_size": 256, "zero_expert_num": 4},
    "mellum": _kinds("fsfs") | {"mlp_layer_types": ["sparse"] * 4},
    "mimo_v2_flash": SPARSE | _kinds("fssf") | {"head_dim": 48},
    "minimax": NARROW | _kinds("lflf") | {"block_size": 16},
    "minimax_m2": NARROW,
    "minimax_m3_vl_text": NARROW | SPARSE | {
        "dense_intermediate_size": 256, "rotary_dim": 16, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_block_size": 8, "index_topk_blocks": 2, "index_local_blocks": 1,
    },
    "mistral4": {"num_key_value_heads": 4, "qk_rope_head_dim": 32, "head_dim": 64},
    "mixtral": NARROW,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "ssm_state_size": 16, "n_groups": 2,
        "mamba_num_heads": 8, "mamba_head_dim": 32, "chunk_size": 16, "use_mamba_kernels": False,
    },
    "olmoe": NARROW,
    "phimoe": NARROW,
    "qwen3_5_moe_text": _kinds("lflf"),
    "qwen3_next": _kinds("lflf"),
    "qwen3_omni_moe_text": _rope(mrope_section=[6, 5, 5]),
    "qwen3_vl_moe_text": _rope(mrope_section=[6, 5, 5]),
    "qwen4_exp_text": _kinds("lqlq") | {
        "hc_lowrank": 16, "ple_embed_dim": 32, "ngram_vocab_size_base": 500, "split_ngram_parts": 2,
        "heads_per_ngram": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32,
        "indexer_budget": 16, "indexer_compress_ratio": 2,
    },
    "step3p5": SPARSE | _kinds("fsfs") | {
        "pad_token_id": 1, "num_sliding_attention_heads": 6, "query_pre_attn_scalar": 32, "per_layer_config": {},
        "rope_parameters": {f"{kind}_attention": _rope()["rope_parameters"] for kind in ("full", "sliding")},
    },
    "zaya": {"router_hidden_size": 32, "num_experts_per_tok": 1},
}  # fmt: skip
# A size that the class works out of another one, and refuses or mistakes if it is given.
WORKED_OUT = {"jetmoe": ("num_attention_heads",), "nemotron_h": ("num_hidden_layers",)}


@cache
def classes() -> dict[str, Any]:
    """The installed transformers' classes of whole models with experts, causal and conditional, by name."""
    import transformers
    from transformers.models.auto import modeling_auto

    names: dict[str, None] = {}
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    ):  # fmt: skip
        names |= dict.fromkeys(name for name in mapping.values() if name.endswith(WHOLE))
    found = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = file.read_text()
        if re.search(r"self\.\w*experts = ", text):
            module = import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            found |= {n: getattr(module, n) for n in re.findall(r"^class (\w+)\(", text, re.MULTILINE) if n in names}
    return dict(sorted(found.items()))


def config(name: str) -> Any:
    """The config of the tiny model of a class, as its config class makes it."""
    config_class = classes()[name].config_class
    default = config_class()
    if default.get_text_config() is default:
        return config_class(**_text(default))
    parts = {part: getattr(default, part, None) for part in config_class.sub_configs}
    text = default.get_text_config()
    return config_class(**{part: _text(c) if c is text else _tower(c) for part, c in parts.items() if c is not None})


def _text(default: Any) -> dict[str, Any]:
    keys = default.to_dict()
    given = {key: value for key, value in SIZES.items() if keys.get(key, False) is not False}
    for key in WORKED_OUT.get(default.model_type, ()):
        given.pop(key, None)
    return given | OWN.get(default.model_type, {}) | {"model_type": default.model_type}


def _tower(default: Any) -> dict[str, Any]:
    keys = default.to_dict()
    inner = {part: _tower(getattr(default, part)) for part in default.sub_configs}
    return {key: value for key, value in TOWER.items() if key in keys} | inner | {"model_type": default.model_type}


@torch.no_grad()
def build(name: str) -> Any:
    """The tiny model of a class, in float32 and evaluation mode."""
    torch.manual_seed(0)
    made = config(name)
    made._experts_implementation = "eager"
    try:
        made._attn_implementation = "sdpa"
        model = classes()[name](made)
    except ValueError as failure:
        if "attention implementation" not in str(failure):
            raise
        made._attn_implementation = "eager"
        model = classes()[name](made)
    return randomized(model.eval().float().requires_grad_(False))


def randomized(model: Any) -> Any:
    """The model with weights that keep a vector's length, norms and biases that differ from 1 and 0."""
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.add_(0.2 * torch.randn(weight.shape))
        else:
            size = 0.5 if "embed" in name else weight.shape[-1] ** -0.5
            weight.copy_(size * torch.randn(weight.shape))
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.05 * torch.randn(buffer.shape))
    return model


def save(name: str, folder: Path) -> Path:
    """The tiny model of a class, in bfloat16 under the names that transformers saves, with a tokenizer."""
    build(name).bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer(folder)
    return folder
