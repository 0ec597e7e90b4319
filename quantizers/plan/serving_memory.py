"""Estimate the memory of each card when vLLM serves the output, from the plan alone.

    weights + KV cache + activations + runtime  <=  the card's memory * UTILISATION

Weights and KV cache follow from the tensors. The rest are assumptions, which are printed with every answer.
They predict that MiniMax-M2.1 in FP8 + INT4 fits two 96 GiB cards with all 196,608 tokens, which agrees with
a measurement (https://huggingface.co/mratsim/MiniMax-M2.1-FP8-INT4-AWQ).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.fp8 import Fp8
from quantizers.system.errors import InputError

from .cards import GIB, Cards, parse_cards
from .plan import Plan

UTILISATION = 0.93  # vLLM's --gpu-memory-utilization; the rest is for the driver and CUDA graphs
RUNTIME = 2 * GIB  # per card: CUDA context, kernels, NCCL buffers, fragmentation
LARGE_CARD = 70 * GIB  # from this size vLLM prefills 8,192 tokens at a time, below it 2,048
SEQUENCES = 256  # at most decoded together, each with a row of float32 logits
KV_BLOCK = 16  # tokens per block of the KV cache
KvType = Literal["auto", "fp8"]
KV_BYTES: dict[KvType, int] = {"auto": 2, "fp8": 1}
COMMON = ("1x24GiB", "2x24GiB", "1x48GiB", "4x24GiB", "2x48GiB", "1x96GiB", "8x24GiB", "4x48GiB", "2x96GiB", "4x80GiB")


@dataclass(frozen=True)
class LayerBytes:
    """Weight bytes of one decoder layer, by how vLLM distributes them.

    Attributes:
        experts, attention: split over the tensor-parallel cards; attention with dense MLPs, without the k and v
            projections.
        key_value: k and v projections, split over at most as many cards as there are key-value heads.
        replicated: stored whole on every card.
    """

    experts: int
    attention: int
    key_value: int
    replicated: int


@dataclass(frozen=True)
class Model:
    """The facts about a planned output that decide its serving memory.

    Attributes:
        layers: weight bytes of each layer.
        outside: total bytes of embedding, head and final norm.
        group: the group size of the experts, the largest of all layers.
        block: rows of an FP8 block of the attention; 1 if it is not FP8, or has a scale per row.
        longest: the model's maximum context in tokens; 0 if config.json does not say.
    """

    sizes: Sizes
    layers: tuple[LayerBytes, ...]
    outside: int
    group: int
    block: int
    longest: int


@dataclass(frozen=True)
class Fit:
    """Memory of the fullest card, in bytes. `context` was asked for and `longest` fits, both in tokens."""

    cards: str
    tensor_parallel: int
    pipeline_parallel: int
    kv: KvType
    utilisation: float
    context: int
    budget: int
    weights: int
    kv_cache: int
    activations: int
    runtime: int
    left: int
    longest: int
    fits: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON and report.json."""
        return asdict(self)


def serving_model(plan: Plan, facts: Architecture, sizes: Sizes, config: dict[str, Any], fp8: Fp8 | None) -> Model:
    """Sum up the bytes of a plan's output by how vLLM distributes them over cards."""
    linears = facts.linears(dense=False) | facts.linears(dense=True)
    key_value = {name for name in linears if name.endswith(("k_proj", "v_proj"))}
    by_layer: list[dict[str, int]] = [dict.fromkeys(LayerBytes.__annotations__, 0) for _ in range(plan.layers)]
    for action in plan.actions:
        if action.layer is None or action.layer in plan.mtp:  # which is loaded for speculative decoding alone
            continue
        module = action.source.removeprefix(facts.layer(action.layer, "")).rpartition(".")[0]
        part = "experts" if action.expert is not None else "attention" if module in linears else "replicated"
        part = "key_value" if module in key_value else part
        by_layer[action.layer][part] += sum(spec.bytes for spec in action.outputs.values())
    return Model(
        sizes=sizes,
        layers=tuple(LayerBytes(**sums) for sums in by_layer),
        outside=sum(spec.bytes for spec in plan.shard(None).values()),
        group=max(scheme.group_size for scheme in plan.schemes),
        block=fp8[0] if isinstance(fp8, tuple) else 1,
        longest=int(config.get("max_position_embeddings") or 0),
    )


def tensor_parallel_problem(model: Model, parallel: int) -> str | None:
    """Why vLLM cannot split this model over `parallel` cards; None if it can."""
    sizes = model.sizes
    heads, kv_heads, width, head = (sizes[word] for word in ("heads", "kv_heads", "width", "head_dim"))
    if heads % parallel:
        return f"{heads} attention heads are not a multiple of {parallel}"
    if kv_heads % parallel and parallel % kv_heads:
        return f"{kv_heads} key-value heads and {parallel} cards are no multiples of each other"
    if width % (parallel * model.group):
        return f"an expert's width {width} / {parallel} is not a multiple of the group of {model.group}"
    if parallel > 1 and (heads // parallel * head % model.block or max(1, kv_heads // parallel) * head % model.block):
        return f"the attention split in {parallel} does not consist of whole FP8 blocks of {model.block} rows"
    return None


def split(model: Model, cards: Cards, tensor_parallel: int | None) -> tuple[int, int]:
    """Tensor and pipeline parallelism that use all cards, with as much tensor parallelism as vLLM allows.

    Raises:
        InputError: the requested tensor parallelism is impossible.
    """
    if tensor_parallel is not None:
        if tensor_parallel < 1 or cards.count % tensor_parallel:
            factors = " or ".join(str(n) for n in range(1, cards.count + 1) if cards.count % n == 0)
            raise InputError(
                f"--tp {tensor_parallel} does not divide the {cards.count} cards of {cards.name}; {factors} do"
            )
        if problem := tensor_parallel_problem(model, tensor_parallel):
            raise InputError(f"--tp {tensor_parallel}: {problem}; choose another")
        return tensor_parallel, cards.count // tensor_parallel
    divisors = [n for n in range(cards.count, 0, -1) if cards.count % n == 0]
    best = next((n for n in divisors if tensor_parallel_problem(model, n) is None), 1)
    return best, cards.count // best


def kv_bytes_per_token(model: Model, kv: KvType, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
    """Bytes of one token's keys and values on one card."""
    heads = max(1, model.sizes["kv_heads"] // tensor_parallel)
    layers = math.ceil(model.sizes["layers"] / pipeline_parallel)
    return 2 * layers * heads * model.sizes["head_dim"] * KV_BYTES[kv]


def fit(
    model: Model, cards: Cards, context: int | None = None, kv: KvType = "auto", tensor_parallel: int | None = None
) -> Fit:
    """Estimate the memory of the fullest card.

    Args:
        context: tokens of one sequence, or of several in total; None for the model's maximum.

    Raises:
        InputError: as `split`, or the context is longer than the model's maximum.
    """
    tensor, pipeline = split(model, cards, tensor_parallel)
    context = model.longest if context is None else context
    if context < 1 or (model.longest and context > model.longest):
        raise InputError(f"--context {context}: this model takes 1 to {model.longest:,} tokens")
    weights = _weights(model, tensor, pipeline)
    activations = _activations(model, cards, tensor)
    budget = int(cards.bytes * UTILISATION)
    per_token = kv_bytes_per_token(model, kv, tensor, pipeline)
    room = budget - weights - activations - RUNTIME
    tokens_that_fit = max(0, room // per_token // KV_BLOCK * KV_BLOCK)
    cache = math.ceil(context / KV_BLOCK) * KV_BLOCK * per_token
    return Fit(
        cards.name,
        tensor,
        pipeline,
        kv,
        UTILISATION,
        context,
        budget,
        weights,
        cache,
        activations,
        RUNTIME,
        room - cache,
        min(tokens_that_fit, model.longest) if model.longest else tokens_that_fit,
        room >= cache,
    )


def _weights(model: Model, tensor: int, pipeline: int) -> int:
    """Weight bytes on the fullest card: equal runs of layers, the embedding in the first, the head in the last."""
    per_stage = math.ceil(len(model.layers) / pipeline)
    stages = [model.layers[first : first + per_stage] for first in range(0, len(model.layers), per_stage)]
    key_value_cards = min(tensor, model.sizes["kv_heads"])
    in_layers = max(
        sum(
            (layer.experts + layer.attention) / tensor + layer.key_value / key_value_cards + layer.replicated
            for layer in stage
        )
        for stage in stages
    )
    return math.ceil(in_layers + model.outside / tensor / (1 if pipeline == 1 else 2))


def _activations(model: Model, cards: Cards, tensor: int) -> int:
    """Bytes live at the peak of a prefill step: vLLM's two MoE workspaces, hidden states, q/k/v (16 bit), logits."""
    sizes, tokens = model.sizes, step_tokens(cards)
    width, hidden = sizes["width"] // tensor, sizes["hidden"]
    experts = tokens * sizes["chosen"] * (max(2 * width, hidden) + width)
    attention = tokens * (sizes["heads"] + 2 * sizes["kv_heads"]) * sizes["head_dim"] // tensor
    return 2 * (experts + attention + 4 * tokens * hidden) + 2 * 4 * SEQUENCES * sizes["vocabulary"]


def step_tokens(cards: Cards) -> int:
    """Tokens in one prefill step: vLLM's default for a card of this size."""
    return 8192 if cards.bytes >= LARGE_CARD else 2048


def assumptions(cards: Sequence[Cards]) -> list[str]:
    """The assumptions behind an estimate, one line each."""
    steps = " or ".join(f"{n:,}" for n in sorted({step_tokens(c) for c in cards}))
    return [
        f"vLLM may use {UTILISATION:.0%} of a card (--gpu-memory-utilization {UTILISATION})",
        f"{RUNTIME / GIB:.0f} GiB a card for the CUDA context, kernels, NCCL and fragmentation",
        f"activations: {steps} tokens in a prefill step, logits of {SEQUENCES} sequences",
        "KV cache for one sequence of that context, or several that share it; no speculative decoding",
    ]


def common_fits(model: Model) -> list[Fit]:
    """Estimates for common sets of cards, from small to large, without those that fit fewer than 8,192 tokens.

    The list ends with the second set that fits the model's maximum context with a 16-bit KV cache. An FP8 KV cache
    is listed only if the maximum context does not fit in 16 bit.
    """
    rows: list[Fit] = []
    if "kv_heads" not in model.sizes:  # until tensor parallelism follows the facts
        return rows
    for cards in map(parse_cards, COMMON):
        for kv in KV_BYTES:
            row = fit(model, cards, kv=kv)
            if row.longest >= min(8192, model.longest):
                rows.append(row)
            if row.fits:
                break
        if sum(row.fits and row.kv == "auto" for row in rows) == 2:
            break
    return rows
