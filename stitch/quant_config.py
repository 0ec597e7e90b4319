"""config.json's quantization_config for FP8 attention beside integer experts.

Validated against what compressed-tensors 0.17 to 0.20, vLLM and transformers read: only old fields,
no null options in a scheme. Three rules that are easy to get wrong, and load silently when wrong:
experts must match under both of vLLM's naming generations (w1/w2/w3 and gate/up/down_proj, below
`mlp.experts`); the attention regex names the fused qkv_proj for SGLang; and no group may target a
class name such as "Linear".
"""

from __future__ import annotations

from typing import Any

from quantizers.recipe import Experts

EXPERTS = r"re:.*\.experts\.\d+\.(w1|w2|w3|gate_proj|up_proj|down_proj)$"
ATTENTION = r"re:.*self_attn\.(q|k|v|o|qkv)_proj$"
IGNORE = ["lm_head", r"re:.*\.gate$", "model.embed_tokens"]


def quantization_config(experts: Experts, fp8_block: tuple[int, int] | None) -> dict[str, Any]:
    """The whole section; it replaces the source's own.

    Args:
        experts: the recipe's settings.
        fp8_block: rows and columns of the kept FP8 attention's blocks; None where it is not FP8.
    """
    groups: dict[str, Any] = {}
    if fp8_block is not None:
        groups["attention_fp8_block"] = {
            "targets": [ATTENTION],
            "format": "float-quantized",
            "weights": _scheme(8, "float", "block", block_structure=list(fp8_block)),
            "input_activations": _scheme(8, "float", "group", dynamic=True, group_size=fp8_block[1]),
        }
    groups["routed_experts"] = {
        "targets": [EXPERTS],
        "format": "pack-quantized",
        "weights": _scheme(experts.bits, "int", "group", group_size=experts.group_size),
        "input_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "pack-quantized",  # the one that vLLM, transformers and SGLang's INT4 MoE all accept
        "config_groups": groups,
        "ignore": IGNORE if fp8_block is not None else [*IGNORE, r"re:.*self_attn.*"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.17.0",
    }


def _scheme(bits: int, kind: str, strategy: str, dynamic: bool = False, **extra: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": dynamic,
        **extra,
    }


def output_config(source: dict[str, Any], experts: Experts, fp8_block: tuple[int, int] | None) -> dict[str, Any]:
    """config.json of the output: the source's fields as published, the quantization section replaced."""
    kept = {key: value for key, value in source.items() if key != "quantization_config"}
    return kept | {"quantization_config": quantization_config(experts, fp8_block)}
