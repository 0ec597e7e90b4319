"""Will it run on these cards? Memory of each card under vLLM, from the plan alone.

    weights + KV cache + activations + runtime  <=  the card's memory * UTILISATION

Weights and KV cache follow from the tensors. The rest are assumptions, stated here and printed with
every answer; with them a MiniMax-M2.1 in FP8 + INT4 takes two 96 GiB cards and all 196,608 tokens,
as has been measured (https://huggingface.co/mratsim/MiniMax-M2.1-FP8-INT4-AWQ).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from quantizers.architectures.architecture import Architecture, Sizes
from quantizers.system.byte_size import parse_bytes
from quantizers.system.errors import InputError

from .plan import Plan

GIB = 2**30
UTILISATION = 0.93  # vLLM's --gpu-memory-utilization; the rest stays with the driver and CUDA graphs
RUNTIME = 2 * GIB  # a card's CUDA context, kernels, NCCL buffers and fragmentation
LARGE_CARD = 70 * GIB  # from here vLLM prefills 8,192 tokens at a time, below 2,048
SEQUENCES = 256  # at most decoded together: so many rows of float32 logits
KV_BLOCK = 16  # tokens in a page of the cache
KvType = Literal["auto", "fp8"]
KV_BYTES: dict[KvType, int] = {"auto": 2, "fp8": 1}
COMMON = ("1x24GiB", "2x24GiB", "1x48GiB", "4x24GiB", "2x48GiB", "1x96GiB", "8x24GiB", "4x48GiB", "2x96GiB", "4x80GiB")


@dataclass(frozen=True)
class Cards:
    """`count` equal cards of `bytes` each; `name` as it was given."""

    name: str
    count: int
    bytes: int


@dataclass(frozen=True)
class LayerBytes:
    """Weight bytes of one decoder layer by how vLLM spreads them.

    Attributes:
        experts, attention: split over the tensor-parallel cards; attention without k and v.
        key_value: of k and v, split over at most as many cards as there are key-value heads.
        replicated: whole on every card.
    """

    experts: int
    attention: int
    key_value: int
    replicated: int


@dataclass(frozen=True)
class Model:
    """What serving needs to know of a planned output.

    Attributes:
        layers: their weights.
        outside: bytes of embedding, head and final norm together.
        group: weights under one scale, along an expert's inputs; the largest of all layers.
        block: rows of an FP8 block of the attention; 1 where it is not FP8.
        longest: the context that the model was made for, in tokens; 0 where config.json does not say.
    """

    sizes: Sizes
    layers: tuple[LayerBytes, ...]
    outside: int
    group: int
    block: int
    longest: int


@dataclass(frozen=True)
class Fit:
    """The fullest card. Bytes; `context` is what was asked for, `longest` what fits, both in tokens."""

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


def parse_cards(text: str) -> Cards:
    """`2x96GiB`, or `96GiB` for one card.

    Raises:
        InputError: it is neither.
    """
    match = re.fullmatch(r"(?:(\d+)\s*[xX×]\s*)?(.+)", text.strip())
    if match is None or match[1] == "0":
        raise InputError(f"--vram {text!r}: write the number of cards and the memory of each, as 2x96GiB")
    return Cards(text.strip(), int(match[1] or 1), parse_bytes(match[2], "--vram"))


def serving_model(
    plan: Plan, facts: Architecture, sizes: Sizes, config: dict[str, Any], block: tuple[int, int] | None
) -> Model:
    """Sum up a plan's output by how vLLM spreads it over cards."""
    key_value = {name for name in facts.linears if name.endswith(("k_proj", "v_proj"))}
    by_layer: list[dict[str, int]] = [dict.fromkeys(LayerBytes.__annotations__, 0) for _ in range(plan.layers)]
    for action in plan.actions:
        if action.layer is None:
            continue
        module = action.source.removeprefix(facts.layer(action.layer, "")).rpartition(".")[0]
        part = "experts" if action.expert is not None else "attention" if module in facts.linears else "replicated"
        part = "key_value" if module in key_value else part
        by_layer[action.layer][part] += sum(spec.bytes for spec in action.outputs.values())
    return Model(
        sizes=sizes,
        layers=tuple(LayerBytes(**sums) for sums in by_layer),
        outside=sum(spec.bytes for spec in plan.shard(None).values()),
        group=max(scheme.group_size for scheme in plan.schemes),
        block=block[0] if block else 1,
        longest=int(config.get("max_position_embeddings") or 0),
    )


def tensor_parallel_problem(model: Model, parallel: int) -> str | None:
    """Why vLLM cannot split this model over so many cards; None where it can."""
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
    """Tensor and pipeline parallelism over all the cards: as much of the first as vLLM allows.

    Raises:
        InputError: the tensor parallelism that was asked for is impossible.
    """
    if tensor_parallel is not None:
        if tensor_parallel < 1 or cards.count % tensor_parallel:
            raise InputError(f"--tp {tensor_parallel} does not divide the {cards.count} cards of {cards.name}")
        if problem := tensor_parallel_problem(model, tensor_parallel):
            raise InputError(f"--tp {tensor_parallel}: {problem}; choose another")
        return tensor_parallel, cards.count // tensor_parallel
    divisors = [n for n in range(cards.count, 0, -1) if cards.count % n == 0]
    best = next((n for n in divisors if tensor_parallel_problem(model, n) is None), 1)
    return best, cards.count // best


def kv_bytes_per_token(model: Model, kv: KvType, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
    """Bytes of keys and values of one token on one card."""
    heads = max(1, model.sizes["kv_heads"] // tensor_parallel)
    layers = math.ceil(model.sizes["layers"] / pipeline_parallel)
    return 2 * layers * heads * model.sizes["head_dim"] * KV_BYTES[kv]


def fit(
    model: Model, cards: Cards, context: int | None = None, kv: KvType = "auto", tensor_parallel: int | None = None
) -> Fit:
    """Memory of the fullest card.

    Args:
        context: tokens of one sequence, or of several together; the model's own longest when None.

    Raises:
        InputError: see `split`; or a context longer than the model's.
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
    most = max(0, room // per_token // KV_BLOCK * KV_BLOCK)
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
        min(most, model.longest) if model.longest else most,
        room >= cache,
    )


def _weights(model: Model, tensor: int, pipeline: int) -> int:
    """Bytes of weights on the fullest card: layers in equal runs, the embedding in the first, the head in the last."""
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
    """Bytes alive at the peak of a prefill step: vLLM's two MoE workspaces, states, q/k/v, logits; 16 bit."""
    sizes, tokens = model.sizes, step_tokens(cards)
    width, hidden = sizes["width"] // tensor, sizes["hidden"]
    experts = tokens * sizes["chosen"] * (max(2 * width, hidden) + width)
    attention = tokens * (sizes["heads"] + 2 * sizes["kv_heads"]) * sizes["head_dim"] // tensor
    return 2 * (experts + attention + 4 * tokens * hidden) + 2 * 4 * SEQUENCES * sizes["vocabulary"]


def step_tokens(cards: Cards) -> int:
    """Tokens of one prefill step, vLLM's default for a card of this size."""
    return 8192 if cards.bytes >= LARGE_CARD else 2048


def assumptions(cards: Sequence[Cards]) -> list[str]:
    """What an answer rests on, a line each."""
    steps = " or ".join(f"{n:,}" for n in sorted({step_tokens(c) for c in cards}))
    return [
        f"vLLM may use {UTILISATION:.0%} of a card (--gpu-memory-utilization {UTILISATION})",
        f"{RUNTIME / GIB:.0f} GiB a card for the CUDA context, kernels, NCCL and fragmentation",
        f"activations: {steps} tokens in a prefill step, logits of {SEQUENCES} sequences",
        "KV cache for one sequence of that context, or several that share it; no speculative decoding",
    ]


def common_fits(model: Model) -> list[Fit]:
    """Usual sets of cards by their memory, as far as they hold the weights: up to the second that takes
    the model's longest context. FP8 keys and values only where 16 bit do not take it.
    """
    rows: list[Fit] = []
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
