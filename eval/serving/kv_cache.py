"""What servers make of scales for an FP8 cache of keys and values: `kv_cache_scheme`, `self_attn.k_scale`, `.v_scale`.

    vLLM          the cache is FP8 by itself, unless --kv-cache-dtype says otherwise. A scale that is missing is 1, and
                  one under another name is dropped, both without a word. FlashInfer multiplies by the scales even if
                  the cache is not quantized
    SGLang        the same for a scheme per tensor, but only some of its models load the scales; the others take 1
    transformers  rounds keys and values so, with or without a cache

From the sources of vLLM 0.33 (compressed_tensors.py, CompressedTensorsKVCacheMethod, and base_config.py,
get_cache_scale_mapper), SGLang 0.5.23 (each model's load_weights) and transformers 5.17.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.sizes import Sizes
from quantizers.planning.plan import KV_SCALES

from .engines import SERVERS, SGLANG, TRANSFORMERS

SCHEME = "kv_cache_scheme"
SGLANG_LOADS = ("minimax_m2", "llama", "qwen3_5_moe")  # model types
VLLM_NAMES = tuple(server.name for server in SERVERS if not server.is_sglang)
ON_CARDS = (
    "its cache becomes FP8, which GPUs of SM80 to 88 have with FlashInfer alone; --kv-cache-dtype bfloat16 turns it "
    "off, but FlashInfer would multiply by the scales all the same; FlashAttention 3 and Triton quantize the query too"
)
TAKES_ONES = "its cache becomes FP8, but its model of this type loads no scales: it takes 1 without a word"
Remark = tuple[
    Literal["error", "warning"], Sequence[str], str, str, str
]  # severity, engines, place, problem, consequence


def kv_remarks(
    section: Mapping[str, Any], tensors: Collection[str], facts: Architecture, sizes: Sizes
) -> Iterator[Remark]:
    """What is to be said of a checkpoint's scales, if it has or declares any; `section` is its quantization_config."""
    attention = {n: name for n in range(sizes["layers"]) if (name := facts.of_layer(n).cached) is not None}
    names = [facts.layer(n, f"{module}.{scale}") for n, module in attention.items() for scale in KV_SCALES]
    missing = [name for name in names if name not in tensors]
    place, problem = f"quantization_config.{SCHEME}", "scales for an FP8 cache of keys and values"
    if not section.get(SCHEME):
        for name in (name for name in names if name in tensors):
            consequence = "not loaded, or multiplied into keys and values that are not quantized"
            yield "error", [*VLLM_NAMES, SGLANG.name], name, f"a scale without {SCHEME}", consequence
        return
    for name in missing:
        yield "error", [*VLLM_NAMES, SGLANG.name, TRANSFORMERS], name, "missing", "it takes 1 without a word"
    if "vllm" in facts.servers or not facts.servers:
        yield "warning", VLLM_NAMES, place, problem, ON_CARDS
    if "sglang" in facts.servers and facts.model_type not in SGLANG_LOADS:
        yield "warning", [SGLANG.name], place, problem, TAKES_ONES
    bare = [n for n in (*range(sizes["layers"]), *sizes.mtp) if n not in attention]
    if bare:
        where = f"layers {', '.join(map(str, bare))} have none"
        consequence = "where such a layer has a cache of keys and values, it is filled with scales of 1"
        yield "warning", VLLM_NAMES, place, where, consequence
