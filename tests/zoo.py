"""Tiny random models of every mixture-of-experts type of transformers, saved as such models are published.

A model is of its type's own classes, with the defaults of its config class but for the sizes below. What is special to
a type makes every kind of its layers occur: windows of 16, linear and sparse attention, dense layers, indexers.
Which of their outputs a real vLLM loads is in tests/serving/test_vllm_types.py, with the variable that tries all.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from calibration_tokenizer import write_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES, model_type_to_module_name

from quantizers.architectures.families import architecture_for
from quantizers.architectures.skeleton import FAILURES
from quantizers.checkpoint.reader import open_folder
from quantizers.formats.tensor_names import split_fused_experts
from quantizers.model.streamed_model import StreamedModel

Settings = dict[str, Any]
ATTENTION = ("sdpa", "eager")  # some classes have no other than the second

SIZES: Settings = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "share_expert_dim"), 96),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 96),
    "moe_shared_expert_intermediate_size": 96,
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "sliding_window": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_head_dim": 16,
    "index_topk": 8, "index_head_dim": 32, "index_n_heads": 4,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 0,
}  # fmt: skip
# Of towers for images and sound, through which no text goes.
VISION: Settings = {
    **dict.fromkeys(("hidden_size", "d_model", "output_channels"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "mlp_dim"), 64),
    **dict.fromkeys(("text_hidden_size", "out_hidden_size", "output_dim", "vision_output_dim"), 128),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers"), 1),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads", "encoder_attention_heads"), 2),
    "conf_num_attention_heads": 2, "n_layers": 6, "vocab_size": 320, "patch_size": 8, "image_size": 16,
    "patch_sizes": [4], "hidden_sizes": [32], "depths": [1], "mlp_layer_types": ["sparse"], "num_local_experts": 4,
    "per_layer_config": None, "moe_intermediate_size": 32, "adapter_in_dim": 32, "adapter_out_dim": 128,
    "adapter_input_size": 32, "audio_hidden_size": 32, "video_temporal_patch_size": 2, "blank_token_id": 0,
    "merge_kernel_size": [1, 1],
    "downsample_hidden_size": 16, "downsample_channels": [32, 32], "num_position_embeddings": 16,
    "deepstack_visual_indexes": [], "global_attn_indexes": [0], "fullatt_block_indexes": [0],
}  # fmt: skip


def _layers(letters: str) -> Settings:
    """The kind of attention of each layer."""
    names = {"f": "full", "s": "sliding", "l": "linear", "c": "chunked", "i": "indexed"}
    names |= {"d": "deepseek_sparse", "q": "qwen_sparse"}
    return {"layer_types": [f"{names[letter]}_attention" for letter in letters]}


def _rope(**section: Any) -> Settings:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | section}


FIRST_DENSE: Settings = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
NARROW: Settings = {"intermediate_size": 96}  # where this is the width of an expert
MLA: Settings = {"num_key_value_heads": 4, "head_dim": 16}
SHARED_INDEX: Settings = {"indexer_types": ["full", "full", "shared", "shared"]}
FACTORS: Settings = {
    "embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.6, "attention_multiplier": 0.2,
}  # fmt: skip
BLOCKS: Settings = {  # every matrix of whole blocks of 128 × 128
    "moe_intermediate_size": 128, "head_dim": 64,
    "linear_key_head_dim": 64, "linear_value_head_dim": 32,
}  # fmt: skip
INKLING2: Settings = {
    "layer_types": ["hybrid_sliding", "hybrid"] * 2, "sliding_window_size": 16, "rel_extent": 64,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 32, "n_layers_per_attn_res_block": 2,
    "unpadded_vocab_size": 320,
}  # fmt: skip
STEP: Settings = FIRST_DENSE | _layers("fsfs") | {
    "pad_token_id": 1, "num_sliding_attention_heads": 6, "query_pre_attn_scalar": 32, "per_layer_config": {},
    "swiglu_limits": [0.0, 0.0, 0.7, 0.4], "swiglu_limits_shared": [0.0, 0.0, 0.0, 0.5],
    "rope_parameters": {f"{kind}_attention": _rope()["rope_parameters"] for kind in ("full", "sliding")},
}  # fmt: skip

NEMOTRON: Settings = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "ssm_state_size": 16, "n_groups": 2,
    "mamba_num_heads": 8, "mamba_head_dim": 32, "chunk_size": 16, "use_mamba_kernels": False,
}  # fmt: skip

# Types that have a class for text alone and one with vision.
WITH_VISION = ("aria", "dots3_note", "gemma4", "inkling", "llama4", "minimax_m3_vl", "qwen3_5_moe", "qwen4_exp")
# What is special to the text model of each type, with what published files say besides and servers read.
TYPES: dict[str, Settings] = {
    "afmoe": _layers("sfsf") | {"mup_enabled": True, "route_scale": 2.5} | {
        "score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1,
    },
    "aria": {},
    "axk1": MLA,
    # With few heads, many scores of its indexer are 0, and which of these it takes depends on the batch.
    "axk2": MLA | FIRST_DENSE | _layers("dddd") | {"index_n_heads": 16},
    "bailing_hybrid": MLA | FIRST_DENSE | _layers("lllf") | {"short_conv_kernel_size": 4},
    "beam": FIRST_DENSE | _layers("sfsf") | {"n_group": 2, "topk_group": 1},
    "cohere2_moe": FIRST_DENSE | _layers("sfsf"),
    "deepseek_ocr2": FIRST_DENSE,
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "deepseek_v32": MLA | FIRST_DENSE | _layers("dddd") | {"n_group": 2, "topk_group": 1},
    "deepseek_v4": {
        "num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 32, "partial_rotary_factor": 0.5,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "doge": {"is_moe": True, "num_experts": 64, "keep_window_size": 512},
    "dots1": _layers("fsfs") | {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": FIRST_DENSE | _layers("isis") | {"num_key_value_heads": 4, "head_dim": 48} | {
        "index_n_heads": 16, "shared_experts_intermediate_size": 96, "pad_token_id": 2, "per_layer_config": {
            number: {"kv_lora_rank": 32, "num_attention_heads": 2, "num_key_value_heads": 2} for number in ("1", "3")
        },
    },
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 3},
    "ernie4_5_vl_moe": FIRST_DENSE | {"moe_intermediate_size": [96, 32]} | _rope(mrope_section=[6, 6, 4]),
    "exaone_moe": FIRST_DENSE | _layers("sssf"),
    "flex_olmo": NARROW,
    "flint": {"mlp_only_layers": [0]} | _layers("fsfs"),
    "gemma4": _layers("sssf") | {
        "pad_token_id": 2, "enable_moe_block": True, "per_layer_config": {"3": {"head_dim": 64}},
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 320, "tie_word_embeddings": False,
    },
    "glm4_moe": {"attention_bias": True},
    "glm4_moe_lite": MLA | FIRST_DENSE,
    "glm4v_moe": _rope(partial_rotary_factor=0.5, mrope_section=[2, 3, 3]) | {"head_dim": 32, "use_qk_norm": False},
    "glm5_next": FIRST_DENSE | _layers("llld") | {
        "num_key_value_heads": 4, "head_dim": 0, "qk_rope_head_dim": 0, "indexer_types": ["full"] * 4, "index_kpool": 4,
    },
    "glm_moe_dsa": MLA | FIRST_DENSE | SHARED_INDEX | _layers("dddd"),
    "gpt_oss": NARROW | _layers("sfsf"),
    "granitemoe": NARROW | FACTORS,
    "granitemoe_swa": NARROW | FACTORS | _layers("fssf") | {"layer_rope_theta": [10000.0] * 4},
    "granitemoehybrid": NARROW | FACTORS | _layers("lflf") | {
        "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_expand": 2, "mamba_chunk_size": 16,
    },
    "granitemoeshared": NARROW | FACTORS,
    "hunyuan_v1_moe": NARROW,
    "hy_v3": FIRST_DENSE | {"first_k_dense_replace": 1, "expert_hidden_dim": 96, "route_norm": True, "qk_norm": True},
    "hy_v4": MLA | FIRST_DENSE | SHARED_INDEX | _layers("dddd"),
    "hy_v4_vl": MLA | FIRST_DENSE | SHARED_INDEX | _layers("iiii") | _rope(mrope_section=[3, 3, 2]),
    "inkling": FIRST_DENSE | {
        "layer_types": ["hybrid_sliding", "hybrid"] * 2, "sliding_window_size": 16, "rel_extent": 64,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 32,
    },
    "inkling2": INKLING2,
    "inkling2_loop": INKLING2 | {"loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_gate_rank": 16},
    "jamba": NARROW | {"mamba_dt_rank": 8, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": NARROW | {"kv_channels": 32},
    "kimi_k25": MLA | {"first_k_dense_replace": 1, "tie_word_embeddings": False},
    "kimi_linear": MLA | FIRST_DENSE | _layers("lllf") | {"q_lora_rank": None},
    "kolibri1": _layers("sfsf"),
    "laguna": FIRST_DENSE | _layers("fsfs") | {
        "num_attention_heads_per_layer": [4, 6, 4, 6], "moe_routed_scaling_factor": 2.5,
    },
    "lara_mini": _layers("lsfl") | {"tie_word_embeddings": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4": NARROW | _layers("cccf") | {
        "intermediate_size_mlp": 256, "num_experts_per_tok": 1, "attention_chunk_size": 16, "moe_layers": [1, 3],
        "interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 1, 0],
    },
    "longcat_flash": MLA | {"num_layers": 2, "ffn_hidden_size": 256, "zero_expert_num": 4} | {
        "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity", "intermediate_size": 256,
        "moe_intermediate_size": 96,
    },
    "mellum": _layers("fsfs") | {"mlp_layer_types": ["sparse"] * 4},
    "mimo_v2_flash": FIRST_DENSE | _layers("fssf") | {
        "head_dim": 48, "moe_layer_freq": [0, 1, 1, 1], "hybrid_layer_pattern": [0, 1, 1, 0],
        "layernorm_epsilon": 1e-5, "sliding_window_size": 16, "add_swa_attention_sink_bias": True,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 48, "swa_v_head_dim": 32,
    },
    "minimax": NARROW | _layers("lflf") | {
        "block_size": 16, "full_attn_alpha_factor": 3.55, "linear_attn_alpha_factor": 3.55, "mlp_alpha_factor": 3.55,
    },
    "minimax_m2": NARROW,
    "minimax_m3_vl": NARROW | FIRST_DENSE | {
        "dense_intermediate_size": 256, "rotary_dim": 16, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_block_size": 8, "index_topk_blocks": 2, "index_local_blocks": 1,
    },
    "mistral4": {"num_key_value_heads": 4, "qk_rope_head_dim": 32, "head_dim": 64},
    "mistral_large4": FIRST_DENSE | _layers("iiii") | {
        "num_key_value_heads": 4, "no_rope_layers": [1, 1, 0, 1], "indexer_types": ["full", "full", "shared", "full"],
    },
    "mixtral": NARROW,
    "muse_spark": FIRST_DENSE | _layers("sfsf") | {"moe_hidden_size": 64, "layer_rope_theta": [10000.0, 0] * 2},
    "nemo_speechlm": NEMOTRON,
    "nemotron_h": NEMOTRON,
    "nemotron_h latent": NEMOTRON | {"moe_latent_size": 64},
    "nemotron_h_omni": NEMOTRON,
    "olmoe": NARROW,
    "phimoe": NARROW | {"attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {},
    "qwen3_5_moe": _layers("lflf"),
    "qwen3_5_moe as published": _layers("lflf") | BLOCKS | {"shared_expert_intermediate_size": 128},
    "qwen3_moe": {},
    "qwen3_next": _layers("lflf"),
    "qwen3_omni_moe": _rope(mrope_section=[6, 5, 5]),
    "qwen3_vl_moe": _rope(mrope_section=[6, 5, 5]) | {"norm_topk_prob": True, "sliding_window": None},
    "qwen3_vl_moe as published": BLOCKS
    | _rope(mrope_section=[12, 10, 10])
    | {"norm_topk_prob": True, "sliding_window": None},
    "qwen4_exp": _layers("lqlq") | {
        "hc_lowrank": 16, "ple_embed_dim": 32, "ngram_vocab_size_base": 500, "split_ngram_parts": 2,
        "heads_per_ngram": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32,
        "indexer_budget": 16, "indexer_compress_ratio": 2, "ple_layer_ids": [1],
    },
    "sarvam_mla": MLA,
    "sarvam_moe": {},
    "solar_open": {},
    "step3p7": STEP,
    "step3p7 as published": STEP | {"moe_intermediate_size": 256},
    "unlimited_ocr": FIRST_DENSE | {"layer_types": ["reference_sliding_attention"] * 4},
    "zaya": {"router_hidden_size": 32, "num_experts_per_tok": 1},
}  # fmt: skip
TYPES |= {f"{name} with vision": TYPES[name] for name in WITH_VISION}
# What is said of the types that are refused. Those that TYPES lacks cannot be built, or have no decoder alone.
REFUSED: dict[str, str] = {
    **dict.fromkeys(("inkling2", "inkling2_loop"), "layer 3: block_states is made of what earlier layers return"),
    "inkling with vision": "mlp.experts.w13_weight holds the experts in a layout of its own",
    "dbrx": "object has no attribute 'rope_theta'), nor of its class's own defaults; give another model",
    "doge": "DogeForCausalLM has no layers with a module called experts",
    **dict.fromkeys(
        ("nllb_moe", "switch_transformers"),
        "has an encoder, which this program does not compute",
    ),
    "jetmoe": "its experts hold weight [8, 64, 128], not gate_up_proj",
    "muse_spark": "its experts hold gate_up_proj [8, 192, 64], down_proj [8, 64, 96], post_expert_norm.weight [64]",
}
MODELS = Path(transformers.__file__).parent / "models"
# This class of transformers 5.24 fails behind its layers: what its text model returns has no such attribute.
if "outputs.image_outputs" in (MODELS / "llama4/modeling_llama4.py").read_text():
    REFUSED["llama4 with vision"] = "has no attribute 'image_outputs'"
# Until 5.17 and some time after, this class called its experts' matrices with tokens sorted by expert.
if "self.fc1 = AriaGroupedExpertsGemm" in (MODELS / "aria/modeling_aria.py").read_text():
    REFUSED |= dict.fromkeys(("aria", "aria with vision"), "its experts hold weight [8, 128, 512], not gate_up_proj")
# Types that a later transformers than the installed one has are none here. Several types may share a module.
MODULES = {*CONFIG_MAPPING_NAMES, *map(model_type_to_module_name, CONFIG_MAPPING_NAMES)}
LATER = {name for name in (*TYPES, *REFUSED) if name.partition(" ")[0] not in MODULES}
TYPES, REFUSED = (
    {name: value for name, value in entries.items() if name.partition(" ")[0] in MODULES}
    for entries in (TYPES, REFUSED)
)
# The class of the whole model where it is not the only ForCausalLM of its type.
CLASSES = {
    "aria": "AriaTextForCausalLM",
    "aria with vision": "AriaForConditionalGeneration",
    "deepseek_ocr2": "DeepseekOcr2ForConditionalGeneration",
    "dots3_note with vision": "Dots3NoteForConditionalGeneration",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeForConditionalGeneration",
    "gemma4 with vision": "Gemma4ForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "hy_v4_vl": "HYV4VLForConditionalGeneration",
    "inkling with vision": "InklingForConditionalGeneration",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
    "llama4 with vision": "Llama4ForConditionalGeneration",
    "minimax_m3_vl with vision": "MiniMaxM3SparseForConditionalGeneration",
    "mistral_large4": "MistralLarge4ForConditionalGeneration",
    "muse_spark": "MuseSparkForConditionalGeneration",
    "nemo_speechlm": "Nemotron3_5TranscribeForConditionalGeneration",
    "nemotron_h_omni": "NemotronH_Omni_Reasoning_V3",
    "qwen3_5_moe as published": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe with vision": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl_moe as published": "Qwen3VLMoeForConditionalGeneration",
    "qwen4_exp with vision": "Qwen4ExpForConditionalGeneration",
    "sarvam_mla": "DeepseekV3ForCausalLM",
    "sarvam_moe": "Glm4MoeForCausalLM",
    "step3p7": "Step3p7ForConditionalGeneration",
    "step3p7 as published": "Step3p7ForConditionalGeneration",
    "unlimited_ocr": "UnlimitedOcrForConditionalGeneration",
}
# Types that the class of another type computes.
OF_OTHERS = ("sarvam_mla", "sarvam_moe")
# transformers itself reads no model of these types with one tensor for each expert's matrix.
FUSED_ONLY = (
    "aria", "aria with vision", "gemma4", "gemma4 with vision", "gpt_oss",
    "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hy_v4",
    "hy_v4_vl", "inkling", "lara_mini", "llama4", "llama4 with vision", "longcat_flash", "minimax_m3_vl",
    "mistral4", "qwen3_vl_moe", "qwen3_vl_moe as published", "step3p7", "step3p7 as published", "zaya",
)  # fmt: skip
TRANSPOSED = ("gpt_oss", "llama4")  # their experts' matrices
# A size that the class works out of others, and does not take.
WORKED_OUT = {"jetmoe": "num_attention_heads"} | dict.fromkeys(
    ("nemo_speechlm", "nemotron_h", "nemotron_h_omni"), "num_hidden_layers"
)


@cache
def found() -> dict[str, tuple[str, ...]]:
    """The model types of the installed transformers with experts, and the names of their whole models' classes.

    Either a class of experts is in the type's own file, or the text of a model with its defaults is of such a type.
    """
    result = {}
    for name in sorted({model_type_to_module_name(model_type) for model_type in CONFIG_MAPPING_NAMES}):
        file = MODELS / name / f"modeling_{name}.py"
        text = file.read_text() if file.is_file() else ""
        whole = re.findall(r"^class (\w+For(?:CausalLM|ConditionalGeneration))\(", text, re.MULTILINE)
        if whole and re.search(r"^class \w*Experts\w*\(", text, re.MULTILINE):
            result[name] = tuple(whole)
    for name, whole_classes in _by_auto_model().items():
        if model_type_to_module_name(name) not in result and "experts" in _text_keys(name):
            result[name] = whole_classes
    return result


def _by_auto_model() -> dict[str, tuple[str, ...]]:
    mappings = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    names = {name: tuple({m[name] for m in mappings if name in m}) for name in CONFIG_MAPPING_NAMES}
    return {name: classes for name, classes in names.items() if classes}


def _text_keys(name: str) -> str:
    """The keys, in one string, that have a value in the config of the text of a model of a type with its defaults."""
    try:
        return " ".join(key for key, value in CONFIG_MAPPING[name]().get_text_config().to_dict().items() if value)
    except FAILURES:  # it has none: such a model is made of two others
        return ""


def whole_class(name: str) -> Any:
    """The class of the whole model of a type."""
    if name in CLASSES:
        return getattr(transformers, CLASSES[name])
    model_type = name.partition(" ")[0]
    module = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    (only,) = [class_name for class_name in dir(module) if class_name.endswith("ForCausalLM")]
    return getattr(module, only)


def config_class(name: str) -> Any:
    """The config class of a type."""
    return CONFIG_MAPPING[name] if name in OF_OTHERS else whole_class(name).config_class


def config_of(name: str) -> Any:
    """The config of the tiny model of a type, as its config class makes it."""
    of_type = config_class(name)
    default = of_type()
    text = default.get_text_config()
    if text is default:
        return of_type(**_text(default, name))
    parts = {part: getattr(default, part, None) for part in of_type.sub_configs}
    made = {p: _text(c, name) if c is text else _tower(c) for p, c in parts.items() if c is not None}
    # The whole model's own key: gemma4's embeddings are so large that with a tied head a text would repeat one token.
    return of_type(**made, **{key: TYPES[name][key] for key in ("tie_word_embeddings",) if key in TYPES[name]})


def _text(default: Any, name: str) -> Settings:
    keys = default.to_dict()
    given = {key: value for key, value in SIZES.items() if keys.get(key, False) is not False}
    given.pop(WORKED_OUT.get(name.partition(" ")[0], ""), None)
    return given | TYPES[name] | {"model_type": default.model_type}


def _tower(default: Any) -> Settings:
    keys = default.to_dict()
    inner = {part: _tower(getattr(default, part)) for part in default.sub_configs}
    return {key: value for key, value in VISION.items() if key in keys} | inner | {"model_type": default.model_type}


def whole_model(name: str, config: Settings, weights: dict[str, Tensor]) -> Any:
    """transformers' whole model of a type, in float32, of a config.json and the weights of its files.

    transformers itself fuses experts and renames parameters. Attention is sdpa where its classes have that.
    """
    whole = whole_class(name)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    of_type = config_class(name)
    made = of_type.from_dict(of_type._decode_special_floats(plain))
    text = made.get_text_config()
    if hasattr(text, "rotary_dim"):  # which transformers 5.17 does not read
        text.rope_parameters["partial_rotary_factor"] = text.rotary_dim / text.head_dim
    given = _fused(weights, name) if name in FUSED_ONLY else weights
    numbers = {name: one.float() if one.is_floating_point() else one for name, one in given.items()}
    settings = {"dtype": torch.float32, "experts_implementation": "eager", "output_loading_info": True}
    for attention in ATTENTION:
        try:
            model, info = whole.from_pretrained(
                None, config=made, state_dict=numbers, attn_implementation=attention, **settings
            )
        except ValueError as failure:
            if "attention implementation" not in str(failure) or attention == ATTENTION[-1]:
                raise
        else:
            break
    assert not info["missing_keys"], info
    assert not info["mismatched_keys"], info
    assert all(key.startswith("mtp.") for key in info["unexpected_keys"]), info
    return model.eval().requires_grad_(False)


@torch.no_grad()
def build(name: str) -> Any:
    """The tiny model of a type, in float32 and evaluation mode."""
    made, whole = config_of(name), whole_class(name)
    torch.manual_seed(0)
    for attention in ATTENTION:
        made._attn_implementation = attention
        try:
            return randomized(whole(made).eval().float())
        except ValueError as failure:
            if "attention implementation" not in str(failure) or attention == ATTENTION[-1]:
                raise
    raise AssertionError(name)


def randomized(model: Any) -> Any:
    """The model with matrices that keep a vector's length, and with vectors that differ from 1 and from 0."""
    for name, weight in model.named_parameters():
        values = torch.randn(weight.shape)
        if weight.dim() < 2:
            weight.add_(0.2 * values)
        else:
            weight.copy_(values * (0.5 if "embed" in name else weight.shape[-1] ** -0.5))
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.05 * torch.randn(buffer.shape))
        elif name.endswith("tid2eid"):  # for each token the experts that it goes through
            buffer.copy_(torch.rand(len(buffer), 8).argsort()[:, : buffer.shape[1]])
    return model


def save(name: str, folder: Path) -> Path:
    """The tiny model of a type as files in bfloat16 that transformers names, with a tokenizer; returns the folder.

    That "as published" has FP8 weights, see `_publish`.
    """
    build(name).bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name.endswith("as published"):
        _publish(folder)
    elif name == "longcat_flash":  # whose class writes matrices of experts that have none, and reads no others
        file = folder / "model.safetensors"
        tensors = {n: t for n, t in load_file(file).items() if not re.search(r"\.experts\.(8|9|10|11)\.", n)}
        save_file(tensors, file, metadata={"format": "pt"})
    return write_tokenizer(folder)


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> StreamedModel:
    """A saved model, to be streamed."""
    checkpoint = open_folder(folder)
    where = str(folder / "config.json")
    facts = architecture_for(checkpoint.config, where, None, checkpoint.tensors)
    return StreamedModel(split_fused_experts(checkpoint, facts), facts, torch.device("cpu"), dtype)


# As Qwen3.5-MoE, Qwen3-VL-MoE and Step-3.7 are published -----------------------------------------------------------

FP8: Settings = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
MTP_NORMS = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
# All linear modules of a layer but routers, gates and the two small ones of linear attention; of Step the experts.
FP8_WEIGHT = re.compile(
    r".*(self_attn\.\w_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)|(shared_expert|experts\.\d+)\.\w+_proj)\.weight"
)
FP8_EXPERTS = re.compile(r".*\.moe\.(gate|up|down)_proj\.weight")


def _publish(folder: Path) -> None:
    """One tensor for each expert's matrix, FP8 in blocks with bfloat16 scales; in Qwen3.5 a layer beyond the last."""
    file = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        tensors |= _unfused(name, tensor)
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "qwen3_5_moe":
        last = {name: t for name, t in tensors.items() if ".language_model.layers.3." in name}
        tensors |= {"mtp.layers.0." + name.partition(".layers.3.")[2]: t.clone() for name, t in last.items()}
        tensors["mtp.fc.weight"] = torch.randn(128, 256).bfloat16()
        tensors |= {f"mtp.{norm}.weight": torch.randn(128).bfloat16() for norm in MTP_NORMS}
    which = FP8_EXPERTS if config["model_type"] == "step3p7" else FP8_WEIGHT
    for name in [name for name in tensors if which.fullmatch(name)]:
        tensors[name], tensors[f"{name}_scale_inv"] = fp8(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})
    config["quantization_config"] = FP8
    (folder / "config.json").write_text(json.dumps(config))


def _unfused(name: str, tensor: Tensor) -> dict[str, Tensor]:
    experts, _, fused = name.rpartition(".")
    if not experts.endswith(".experts"):
        return {name: tensor}
    parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
    return {
        f"{experts}.{number}.{part}.weight": matrix.contiguous()
        for number, expert in enumerate(tensor)
        for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True)
    }


def _fused(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The weights with the matrices of a layer's experts in two tensors, as their class holds them."""
    result = dict(weights)
    transposed = name.startswith(TRANSPOSED)
    for first in weights:
        if first.endswith(".experts.0.gate_proj.weight"):
            experts = first.removesuffix(".0.gate_proj.weight")
            matrices: dict[str, list[Tensor]] = {part: [] for part in ("gate_proj", "up_proj", "down_proj")}
            for number, part in product(range(8), matrices):
                matrices[part].append(result.pop(f"{experts}.{number}.{part}.weight").float())
            gate, up, down = (torch.stack(each) for each in matrices.values())
            both = torch.stack([gate, up], 2).flatten(1, 2) if name == "gpt_oss" else torch.cat([gate, up], 1)
            if name == "longcat_flash":
                both = torch.cat([both, both.new_zeros(4, *both.shape[1:])])
            result |= {
                f"{experts}.gate_up_proj": both.mT if transposed else both,
                f"{experts}.down_proj": down.mT if transposed else down,
            }
    return result


def fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight of whole blocks of 128 × 128, or several, as codes and as the bfloat16 scales of their blocks."""
    *several, rows, columns = weight.shape
    blocks = weight.float().view(*several, rows // 128, 128, columns // 128, 128)
    scale = (blocks.abs().amax((-3, -1)) / 448).bfloat16()
    codes = (blocks / scale.float()[..., :, None, :, None]).clamp(-448, 448).view(weight.shape)
    return codes.to(torch.float8_e4m3fn), scale
