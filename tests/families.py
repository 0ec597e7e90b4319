"""A tiny random model of every family, made from transformers' own model and saved under the names that it saves.

Norms have outlier channels, and the matrices that read them undo these: on plain random weights every method of
quantizing looks alike. Layouts, dtypes and shapes are as published: FP8 in blocks, whole ones and parts of one, with
scales in the published dtype, with a scale per row, or bfloat16. transformers builds no layers that predict further
tokens (MTP), so these are written by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
from calibration_tokenizer import write_tokenizer
from safetensors.torch import load_file
from torch import Tensor

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PER_ROW = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": [r"re:.*_proj$"],  # GLM's says Linear; names tell the library's functions which module is one
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True
            },
            "format": "float-quantized",
        }
    },
    "ignore": ["lm_head"],
}  # fmt: skip
COMMON = {
    "hidden_act": "silu",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
# A dense layer before those with experts, and a shared expert in these.
SHARED = COMMON | {
    "intermediate_size": 512,
    "moe_intermediate_size": 192,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "attention_bias": False,
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
# kv_a has 160 rows: one block of FP8, and a quarter.
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_scaling": YARN,
}
WHOLE_BLOCKS = {"moe_intermediate_size": 256}  # vLLM takes no shared expert in parts of FP8 blocks
CONFIGS: dict[str, dict[str, Any]] = {
    "minimax_m2": COMMON
    | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": 128,
        "rotary_dim": 64,
        "intermediate_size": 192,
        "num_local_experts": 8,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
        "quantization_config": FP8 | {"fmt": "float8_e4m3fn"},
    },
    "qwen3_moe": COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 128,
        "intermediate_size": 512,
        "moe_intermediate_size": 192,
        "num_experts": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "quantization_config": FP8 | {"fmt": "e4m3", "modules_to_not_convert": ["lm_head"]},
    },
    "mixtral": COMMON
    | {
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": 192,
        "num_local_experts": 4,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
    },
    "glm4_moe": SHARED
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "head_dim": 128,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "quantization_config": PER_ROW,
    },
    "deepseek_v3": SHARED
    | MLA
    | WHOLE_BLOCKS
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 1,
        "quantization_config": FP8 | {"fmt": "e4m3", "scale_fmt": "ue8m0"},
    },
    "kimi_k2": SHARED
    | MLA
    | WHOLE_BLOCKS
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50000.0,
        "rope_scaling": YARN | {"factor": 32, "beta_fast": 1},
        "quantization_config": FP8 | {"fmt": "e4m3"},
    },
    "glm4_moe_lite": SHARED
    | MLA
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
    },
}
# Each family as it is published, and what its class can have besides: changes to config.json, by a name.
MODELS: dict[str, dict[str, Any]] = {name: {} for name in CONFIGS} | {
    "qwen3_moe with a dense layer and windows": {
        "mlp_only_layers": [0],
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "mixtral with windows": {"sliding_window": 16},
}
# Whose head is the embeddings: not every server builds such a model.
TIED: dict[str, dict[str, Any]] = {
    "qwen3_moe tied": {"tie_word_embeddings": True},
    "deepseek_v3 tied": {"tie_word_embeddings": True, "q_lora_rank": None, "norm_topk_prob": False},
}
SCALES = {"qwen3_moe": torch.bfloat16, "glm4_moe": torch.bfloat16}  # dtypes of published FP8 scales, or else float32
LINEAR = ("_proj.weight", "_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
FLOAT32 = {"minimax_m2": ("gate.weight", "e_score_correction_bias")}  # stored so, or else the biases alone
OUTLIERS, FACTOR = 5, 12.0


def config(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family} | CONFIGS[family] | changes


def family_of(model: str) -> str:
    """The model type of one of MODELS."""
    return model.partition(" ")[0]


def in_transformers(config: dict[str, Any]) -> tuple[Any, Any]:
    """The class of transformers' whole model, and its config; in this model attention is sdpa."""
    import transformers

    # The model type is the class's own: by it transformers finds how to take the experts apart when it saves them.
    others = ("quantization_config", "architectures", "torch_dtype", "model_type")
    fields = {k: v for k, v in config.items() if k not in others}
    if "rotary_dim" in config:  # which transformers 5.17 does not read
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        fields["rope_parameters"] = rope | {"partial_rotary_factor": config["rotary_dim"] / config["head_dim"]}
    model_class = getattr(transformers, config["architectures"][0])
    return model_class, model_class.config_class(**fields, attn_implementation="sdpa", experts_implementation="eager")


def randomized(config: dict[str, Any], seed: int) -> Any:
    """A whole model in float32 with weights that keep a vector's length.

    Every norm has outlier channels that its readers undo.
    """
    from transformers.initialization import no_init_weights

    model_class, made = in_transformers(config)
    with no_init_weights():  # all its weights are written below
        model = model_class(made).eval().requires_grad_(False)
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator)

    for name, weight in model.named_parameters():
        if name.endswith(".bias"):
            weight.copy_(0.1 * normal(weight))
        elif weight.dim() == 1:
            weight.copy_(1 + 0.2 * normal(weight))
        elif "embed" in name:
            weight.copy_(normal(weight) * (weight.shape[-1] ** -0.5 if made.tie_word_embeddings else 1))
        else:
            weight.copy_(normal(weight) * weight.shape[-1] ** -0.5)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_((0.3 if groups_of(model) > 1 else 0.05) * normal(bias))  # so that it chooses other groups
    for layer in model.model.layers:
        attention, block = layer.self_attn, layer.mlp
        dense = not hasattr(block, "experts")
        possible = (getattr(attention, f"{n}_proj", None) for n in ("q_a", "q", "k", "v"))
        first = [linear for linear in (*possible, getattr(attention, "kv_a_proj_with_mqa", None)) if linear is not None]
        shared = block if dense else getattr(block, "shared_experts", None)
        read = (shared.gate_proj, shared.up_proj) if shared is not None else ()
        pairs = (
            (layer.input_layernorm, first),
            (layer.post_attention_layernorm, read if dense else (block.gate, *read)),
        )
        for norm, readers in pairs:
            channels = torch.randperm(len(norm.weight), generator=generator)[:OUTLIERS]
            norm.weight[channels] *= FACTOR
            for reader in readers:
                reader.weight[:, channels] /= FACTOR
            if norm is layer.post_attention_layernorm and not dense:
                block.experts.gate_up_proj[:, :, channels] /= FACTOR
        if dense:
            continue
        block.gate.weight *= 4  # so that the router decides
        width = block.experts.down_proj.shape[-1]
        spread = torch.randn(width, generator=generator).exp()  # of what w2 reads: for a scale between w3 and w2
        block.experts.gate_up_proj[:, width:] *= spread[:, None]
        block.experts.down_proj /= spread
    return model


def write(folder: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint in the layout in which the family is published, with a tokenizer."""
    own = config(family, **changes)
    folder.mkdir(parents=True)
    randomized(own, seed).save_pretrained(folder)
    named = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "generation_config.json").unlink()
    named |= mtp_layers(own, named)
    tensors: dict[str, Tensor] = {}
    section, dtype = own.get("quantization_config"), SCALES.get(family, torch.float32)
    precise = FLOAT32.get(family, ("e_score_correction_bias",))
    for name, tensor in named.items():
        if not section or not name.endswith(LINEAR) or name.endswith("eh_proj.weight"):
            tensors[name] = tensor if name.endswith(precise) else tensor.bfloat16()
        elif "weight_block_size" in section:
            tensors[name], scale = tiny.fp8(tensor)
            tensors[f"{name}_scale_inv"] = scale.to(dtype)
        else:
            tensors[name], tensors[f"{name}_scale"] = tiny.fp8_rows(tensor, dtype)
    tiny.write(folder, own, tensors)
    write_tokenizer(folder)
    return folder


def groups_of(model: Any) -> int:
    """Into how many groups the router divides the experts."""
    return getattr(model.config, "n_group", None) or 1


def mtp_layers(own: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layers that predict further tokens: the last layer with other numbers, and what such a layer has besides."""
    made: dict[str, Tensor] = {}
    last, hidden = own["num_hidden_layers"] - 1, own["hidden_size"]
    for number in range(last + 1, last + 1 + (own.get("num_nextn_predict_layers") or 0)):
        generator = torch.Generator().manual_seed(number)
        before, prefix = f"model.layers.{last}.", f"model.layers.{number}."
        made |= {prefix + n.removeprefix(before): t.flip(0) for n, t in tensors.items() if n.startswith(before)}
        made |= {f"{prefix}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
        made[f"{prefix}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5
        table = tensors["model.embed_tokens.weight"]
        made[f"{prefix}embed_tokens.weight"] = table.clone()
        made[f"{prefix}shared_head.head.weight"] = tensors.get("lm_head.weight", table).clone()
    return made


def is_mtp(own: dict[str, Any], name: str) -> bool:
    """Whether a tensor lies in a layer after the last one that transformers builds."""
    number = name.removeprefix("model.layers.").partition(".")[0]
    return number.isdecimal() and int(number) >= own["num_hidden_layers"]


def whole_model(own: dict[str, Any], weights: dict[str, Tensor]) -> Any:
    """transformers' whole model in float32 with these weights, which have the names of published files.

    transformers itself fuses the experts and renames the modules.
    """
    model_class, made = in_transformers(own)
    weights = {name: tensor.float() for name, tensor in weights.items() if not is_mtp(own, name)}
    loaded, info = model_class.from_pretrained(
        None, config=made, state_dict=weights, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert loaded.config._attn_implementation == "sdpa"
    return loaded.eval().requires_grad_(False)


def write_job(folder: Path, model: str, **experts: Any) -> Path:
    """A checkpoint of one of MODELS, two sets, and the recipe of them."""
    write(folder / "model", family_of(model), **(MODELS | TIED)[model])
    return tiny.write_recipe(folder, words=20, samples=3, **experts)
