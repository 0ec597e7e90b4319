"""config.json's quantization_config for FP8 attention beside integer experts.

Validated against what compressed-tensors 0.17 to 0.20, vLLM and transformers read: only old fields, no
null options in a scheme. Five rules are easy to break, and a checkpoint that breaks them loads without an
error, or only until it is served in another way:

- The expert regex must match the names that both older and newer vLLM use (w1/w2/w3 and gate/up/down_proj, below
  `mlp.experts`).
- The attention regex must match the fused qkv_proj, for SGLang.
- No group may target a class name such as "Linear".
- Layers that predict further tokens (MTP) keep their experts as they are. A server builds them for speculative
  decoding alone, and then looks them up like any other layer (vLLM) or under a name of their own (SGLang).
- transformers takes the first group that names experts for the routed ones, though it may mean shared ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from quantizers.architectures.architecture import Architecture
from quantizers.checkpoint.fp8 import ROWS, Fp8
from quantizers.plan.plan import Plan


def quantization_config(facts: Architecture, plan: Plan, fp8: Fp8 | None) -> dict[str, Any]:
    """The whole section; it replaces the source's own.

    Args:
        facts: of the family.
        plan: whose schemes are those of each layer's experts. If they differ, each gets a config group whose regex
            lists its layers.
        fp8: the form of the kept FP8 weights; None if none are.
    """
    kept_experts = list(_mtp_experts(facts, plan))
    patterns = [*facts.targets.fp8, *(kept_experts if plan.mtp_in_fp8 else [])]
    routed = dict(_routed_groups(facts, plan))
    kept: dict[str, Any] = {}
    if fp8 == ROWS:
        kept["attention_fp8_channel"] = {
            "targets": [f"re:{pattern}" for pattern in patterns],
            "format": "float-quantized",
            "weights": _scheme(8, "float", "channel"),
            "input_activations": _scheme(8, "float", "token", dynamic=True),
        }
    elif fp8 is not None:
        kept["attention_fp8_block"] = {
            "targets": [f"re:{pattern}" for pattern in patterns],
            "format": "float-quantized",
            "weights": _scheme(8, "float", "block", block_structure=list(fp8)),
            "input_activations": _scheme(8, "float", "group", dynamic=True, group_size=fp8[1]),
        }
    plain = [] if plan.mtp_in_fp8 else [f"re:{pattern}" for pattern in kept_experts]
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "pack-quantized",  # the one that vLLM, transformers and SGLang's INT4 MoE all accept
        "config_groups": routed | kept if any("experts" in pattern for pattern in patterns) else kept | routed,
        "ignore": [*facts.targets.ignore, *plain, *(facts.targets.unquantized if fp8 is None else [])],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.17.0",
    }


def _routed_groups(facts: Architecture, plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """A config group for each scheme of the routed experts, by its name."""
    layers = plan.quantized_layers
    schemes = [plan.schemes[layer] for layer in layers]
    for scheme in sorted(set(schemes), key=schemes.index):
        within = ""
        if len(set(schemes)) > 1:
            own = "|".join(str(layer) for layer in layers if plan.schemes[layer] == scheme)
            within = rf"\.layers\.({own})\..*"
        elif plan.mtp:
            within = rf"\.layers\.(?!({_numbers(plan)})\.)\d+\..*"
        yield (
            f"routed_experts_int{scheme.bits}_group{scheme.group_size}" if len(set(schemes)) > 1 else "routed_experts",
            {
                "targets": [f"re:.*{within}{facts.targets.experts}"],
                "format": "pack-quantized",
                "weights": _scheme(scheme.bits, "int", "group", group_size=scheme.group_size),
                "input_activations": None,
            },
        )


def _mtp_experts(facts: Architecture, plan: Plan) -> Iterator[str]:
    """Expressions for the experts of layers that predict further tokens, under all names that servers have for them."""
    if plan.mtp:
        yield rf".*\.layers\.({_numbers(plan)})\..*{facts.targets.experts}"
        for prefix in dict.fromkeys(server.mtp_prefix for server in facts.servers.values()):
            if prefix is not None:
                yield rf".*{re.escape(prefix)}.*{facts.targets.experts}"


def _numbers(plan: Plan) -> str:
    return "|".join(map(str, plan.mtp))


def _scheme(bits: int, kind: str, strategy: str, dynamic: bool = False, **extra: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": dynamic,
        **extra,
    }


def output_config(source: dict[str, Any], facts: Architecture, plan: Plan, fp8: Fp8 | None) -> dict[str, Any]:
    """config.json of the output: the source's fields unchanged, except for the quantization section.

    Of the source's section, only those keys are kept that servers read whatever the method is.
    """
    kept = {key: value for key, value in source.items() if key != "quantization_config"}
    section = source.get("quantization_config")
    own = {key: section[key] for key in facts.targets.keys if key in section} if isinstance(section, dict) else {}
    return kept | {"quantization_config": quantization_config(facts, plan, fp8) | own}
