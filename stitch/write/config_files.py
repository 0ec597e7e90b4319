"""Config, index and tokenizer files of an output; config.json's section for FP8 attention and integer experts.

Validated against compressed-tensors 0.17 to 0.20, vLLM and transformers: only old fields, no null options in a scheme.
Five rules are easy to break, and a checkpoint that breaks them loads without an error, or fails only when it is served
in another way:

- The expert regex must match the names that both older and newer vLLM use (w1/w2/w3 and gate/up/down_proj, below
  `mlp.experts`).
- The attention regex must match the fused qkv_proj, for SGLang.
- No group may target a class name such as "Linear".
- Experts of MTP layers are not quantized. A server builds these layers for speculative decoding only, and looks them up
  like any other layer (vLLM) or under a separate name (SGLang).
- transformers applies the first group that names experts to the routed ones, even if it targets shared experts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.facts import Targets
from quantizers.checkpoint.reader import CONFIG, INDEX, Checkpoint, side_files
from quantizers.formats.fp8 import ROWS, Fp8, block_size
from quantizers.planning.plan import Plan, index_json
from quantizers.system.files import copy_file, write_text

from .targets import beside_routed, list_of_layers, targets_of


def write_config_files(folder: Path, source: Checkpoint, plan: Plan, facts: Architecture) -> None:
    """Write index, config.json and the source's side files into a folder of finished shards.

    Any other file there is removed first: an earlier attempt may have had other options.

    Args:
        source: the checkpoint that the plan was made for.
        facts: of its family.
    """
    shards = plan.shards()
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in shards:
            path.unlink()
    for file in side_files(source.folder):
        copy_file(file, folder / file.relative_to(source.folder))
    write_text(index_json(plan), folder / INDEX)
    config = output_config(source.config, facts, plan, plan.fp8_form(block_size(source)))
    write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", folder / CONFIG)


def output_config(source: dict[str, Any], facts: Architecture, plan: Plan, fp8: Fp8 | None) -> dict[str, Any]:
    """config.json of the output: the source's, with a new quantization_config.

    Of the source's section only the keys survive that servers read for any method. The model's class is named even if
    the source does not: servers look the model up by it.
    """
    passthrough = {key: value for key, value in source.items() if key != "quantization_config"}
    if not passthrough.get("architectures"):
        passthrough["architectures"] = [facts.model_class]
    section = source.get("quantization_config")
    own = {key: section[key] for key in facts.section_keys if key in section} if isinstance(section, dict) else {}
    return passthrough | {"quantization_config": quantization_config(facts, plan, fp8) | own}


def quantization_config(facts: Architecture, plan: Plan, fp8: Fp8 | None) -> dict[str, Any]:
    """The whole section, which replaces the source's.

    Args:
        facts: of the family.
        plan: with each layer's scheme. If they differ, each gets a config group whose regex lists its layers.
        fp8: the format of passthrough FP8 weights; None if there are none.
    """
    targets = targets_of(plan, facts)
    mtp_experts = list(_mtp_experts(facts, plan, targets))
    patterns = [*targets.fp8, *(mtp_experts if plan.mtp_in_fp8 else [])]
    routed = dict(_routed_groups(facts, plan, targets))
    attention: dict[str, Any] = {}
    if fp8 == ROWS:
        attention["attention_fp8_channel"] = {
            "targets": [f"re:{pattern}" for pattern in patterns],
            "format": "float-quantized",
            "weights": _scheme(8, "float", "channel"),
            "input_activations": _scheme(8, "float", "token", dynamic=True),
        }
    elif fp8 is not None:
        attention["attention_fp8_block"] = {
            "targets": [f"re:{pattern}" for pattern in patterns],
            "format": "float-quantized",
            "weights": _scheme(8, "float", "block", block_structure=list(fp8)),
            "input_activations": _scheme(8, "float", "group", dynamic=True, group_size=fp8[1]),
        }
    plain = [] if plan.mtp_in_fp8 else [f"re:{pattern}" for pattern in mtp_experts]
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "pack-quantized",  # accepted by vLLM, transformers and SGLang's INT4 MoE
        "config_groups": routed | attention if any("experts" in p for p in patterns) else attention | routed,
        "ignore": [*targets.ignore, *plain, *(targets.unquantized if fp8 is None else [])],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.17.0",
    }


def _routed_groups(facts: Architecture, plan: Plan, targets: Targets) -> Iterator[tuple[str, dict[str, Any]]]:
    """One config group per scheme of the routed experts, by name."""
    layers = plan.quantized_layers
    schemes = [plan.schemes[layer] for layer in layers]
    beside, numbered = beside_routed(plan, facts), list_of_layers(facts)
    for scheme in sorted(set(schemes), key=schemes.index):
        within = ""
        if len(set(schemes)) > 1:
            own = "|".join(str(layer) for layer in layers if plan.schemes[layer] == scheme)
            within = rf"\.{numbered}\.({own})\..*"
        elif plan.mtp:
            within = rf"\.{numbered}\.(?!({_numbers(plan)})\.)\d+\..*"
        yield (
            f"routed_experts_int{scheme.bits}_group{scheme.group_size}" if len(set(schemes)) > 1 else "routed_experts",
            {
                "targets": [f"re:{beside}.*{within}{targets.experts}"],
                "format": "pack-quantized",
                "weights": _scheme(scheme.bits, "int", "group", group_size=scheme.group_size),
                "input_activations": None,
            },
        )


def _mtp_experts(facts: Architecture, plan: Plan, targets: Targets) -> Iterator[str]:
    """Regular expressions for the experts of MTP layers, under the name of every server."""
    if plan.mtp:
        yield rf".*\.{list_of_layers(facts)}\.({_numbers(plan)})\..*{targets.experts}"
        for prefix in dict.fromkeys(server.mtp_prefix for server in facts.servers.values()):
            if prefix is not None:
                yield rf".*{re.escape(prefix)}.*{targets.experts}"


def _numbers(plan: Plan) -> str:
    return "|".join(map(str, plan.mtp))


def _scheme(bits: int, kind: str, strategy: str, dynamic: bool = False, **extra: Any) -> dict[str, Any]:
    fixed = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": dynamic}
    return fixed | extra
