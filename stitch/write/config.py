"""config.json's quantization_config for FP8 attention beside integer experts.

Validated against what compressed-tensors 0.17 to 0.20, vLLM and transformers read: only old fields, no
null options in a scheme. Three rules are easy to break, and a checkpoint that breaks them loads without an
error: the expert regex must match the names that both older and newer vLLM use (w1/w2/w3 and
gate/up/down_proj, below `mlp.experts`); the attention regex must match the fused qkv_proj, for SGLang; and no
group may target a class name such as "Linear".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantizers.architectures.architecture import Targets
from quantizers.checkpoint.fp8 import ROWS, Fp8
from quantizers.recipe.scheme import Scheme


def quantization_config(targets: Targets, schemes: Sequence[Scheme], fp8: Fp8 | None) -> dict[str, Any]:
    """The whole section; it replaces the source's own.

    Args:
        targets: of the family.
        schemes: of each layer's experts. If they differ, each gets a config group whose regex lists its layers.
        fp8: the form of the kept FP8 weights; None if none are.
    """
    groups: dict[str, Any] = {}
    if fp8 == ROWS:
        groups["attention_fp8_channel"] = {
            "targets": [f"re:{pattern}" for pattern in targets.fp8],
            "format": "float-quantized",
            "weights": _scheme(8, "float", "channel"),
            "input_activations": _scheme(8, "float", "token", dynamic=True),
        }
    elif fp8 is not None:
        groups["attention_fp8_block"] = {
            "targets": [f"re:{pattern}" for pattern in targets.fp8],
            "format": "float-quantized",
            "weights": _scheme(8, "float", "block", block_structure=list(fp8)),
            "input_activations": _scheme(8, "float", "group", dynamic=True, group_size=fp8[1]),
        }
    alike = len(set(schemes)) == 1
    for scheme in sorted(set(schemes), key=schemes.index):
        layers = "|".join(str(layer) for layer, own in enumerate(schemes) if own == scheme)
        name = "routed_experts" if alike else f"routed_experts_int{scheme.bits}_group{scheme.group_size}"
        groups[name] = {
            "targets": [f"re:.*{targets.experts}" if alike else rf"re:.*\.layers\.({layers})\..*{targets.experts}"],
            "format": "pack-quantized",
            "weights": _scheme(scheme.bits, "int", "group", group_size=scheme.group_size),
            "input_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "pack-quantized",  # the one that vLLM, transformers and SGLang's INT4 MoE all accept
        "config_groups": groups,
        "ignore": [*targets.ignore, *(targets.unquantized if fp8 is None else [])],
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


def output_config(
    source: dict[str, Any], targets: Targets, schemes: Sequence[Scheme], fp8: Fp8 | None
) -> dict[str, Any]:
    """config.json of the output: the source's fields unchanged, except for the quantization section."""
    kept = {key: value for key, value in source.items() if key != "quantization_config"}
    return kept | {"quantization_config": quantization_config(targets, schemes, fp8)}
