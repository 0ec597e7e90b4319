"""Estimate the memory of each GPU when vLLM serves the output, from the plan alone.

    weights + KV cache + activations + runtime  <=  the GPU's memory * UTILISATION

Weights and KV cache follow from the tensors. The rest are assumptions, which are printed with every answer.
They predict that MiniMax-M2.1 in FP8 + INT4 fits two 96 GiB GPUs with all 196,608 tokens, which agrees with
a measurement (https://huggingface.co/mratsim/MiniMax-M2.1-FP8-INT4-AWQ).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.safetensors_header import FP8
from quantizers.formats.fp8 import Fp8
from quantizers.system.errors import InputError

from .gpus import GIB, Gpus, parse_gpus
from .plan import Plan
from .tensor_parallel import MARLIN_TILE, cache_cards, module_cards, obstacles, unsaid

UTILISATION = 0.93  # vLLM's --gpu-memory-utilization; the rest is for the driver and CUDA graphs
RUNTIME = 2 * GIB  # per GPU: CUDA context, kernels, NCCL buffers, fragmentation
LARGE_GPU = 70 * GIB  # from this size vLLM prefills 8,192 tokens at a time, below it 2,048
SEQUENCES = 256  # at most decoded together, each with a row of float32 logits
KV_BLOCK = 16  # tokens per block of the KV cache
KvType = Literal["auto", "fp8"]
KV_BYTES: dict[KvType, int] = {"auto": 2, "fp8": 1}
COMMON = (
    "1x24GiB",
    "2x24GiB",
    "1x48GiB",
    "4x24GiB",
    "2x48GiB",
    "1x96GiB",
    "8x24GiB",
    "4x48GiB",
    "2x96GiB",
    "4x80GiB",
    "8x80GiB",
    "8x141GiB",
)


@dataclass(frozen=True)
class LayerBytes:
    """Weight bytes of one decoder layer, by how vLLM distributes them.

    Attributes:
        experts: split over the tensor-parallel GPUs.
        linears: of each kept linear module, without the layer's prefix; `module_cards` says over how many it is split.
        others: stored whole on every GPU.
    """

    experts: int
    linears: Mapping[str, int]
    others: int


@dataclass(frozen=True)
class Model:
    """The facts about a planned output that decide its serving memory.

    Attributes:
        facts: with `kv_cache` and `tensor_parallel`.
        layers: weight bytes of each layer.
        outside: total bytes of embedding, head and final norm.
        groups: the group sizes of the experts.
        blocks: of the kept linear modules that are FP8 in blocks, see `tensor_parallel.obstacles`.
        longest: the model's maximum context in tokens; 0 if config.json does not say.
    """

    facts: Architecture
    sizes: Sizes
    layers: tuple[LayerBytes, ...]
    outside: int
    groups: frozenset[int]
    blocks: Mapping[str, tuple[int, int]]
    longest: int


@dataclass(frozen=True)
class Fit:
    """Memory of the fullest GPU, in bytes. `context` was asked for and `longest` fits, both in tokens."""

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
    """Sum up the bytes of a plan's output by how vLLM distributes them over GPUs.

    Raises:
        InputError: the facts do not say how servers divide such a model.
    """
    if problem := unsaid(facts):
        raise InputError(problem)
    linears = facts.linears(dense=False) | facts.linears(dense=True)
    experts, others = [0] * plan.layers, [0] * plan.layers
    kept: list[Counter[str]] = [Counter() for _ in range(plan.layers)]
    blocks: dict[str, tuple[int, int]] = {}
    for action in plan.actions:
        if action.layer is None or action.layer in plan.mtp:  # which is loaded for speculative decoding alone
            continue
        module = action.source.removeprefix(facts.layer(action.layer, "")).rpartition(".")[0]
        written = sum(spec.bytes for spec in action.outputs.values())
        if action.expert is not None:
            experts[action.layer] += written
        elif module not in linears:
            others[action.layer] += written
        else:
            kept[action.layer][module] += written
            if action.spec.dtype == FP8 and isinstance(fp8, tuple):
                blocks[module] = fp8
    return Model(
        facts=facts,
        sizes=sizes,
        layers=tuple(map(LayerBytes, experts, kept, others)),
        outside=sum(spec.bytes for spec in plan.shard(None).values()),
        groups=frozenset(plan.schemes[layer].group_size for layer in plan.quantized_layers),
        blocks=blocks,
        longest=int(config.get("max_position_embeddings") or 0),
    )


def tensor_parallel_problem(model: Model, parallel: int) -> str | None:
    """Why vLLM cannot split this model over `parallel` GPUs; None if it can."""
    return next(obstacles(parallel, model.facts, model.sizes, model.groups, model.blocks), None)


def split(model: Model, gpus: Gpus, tensor_parallel: int | None) -> tuple[int, int]:
    """Tensor and pipeline parallelism that use all GPUs, with as much tensor parallelism as vLLM allows.

    Raises:
        InputError: the requested tensor parallelism is impossible.
    """
    if tensor_parallel is not None:
        if tensor_parallel < 1 or gpus.count % tensor_parallel:
            factors = " or ".join(str(n) for n in range(1, gpus.count + 1) if gpus.count % n == 0)
            raise InputError(
                f"--tp {tensor_parallel} does not divide the {gpus.count} GPUs of {gpus.name}; {factors} do"
            )
        if problem := tensor_parallel_problem(model, tensor_parallel):
            raise InputError(f"--tp {tensor_parallel}: {problem}; choose another")
        return tensor_parallel, gpus.count // tensor_parallel
    divisors = [n for n in range(gpus.count, 0, -1) if gpus.count % n == 0]
    best = next((n for n in divisors if tensor_parallel_problem(model, n) is None), 1)
    return best, gpus.count // best


def kv_bytes_per_token(model: Model, kv: KvType, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
    """Bytes on one GPU of what is cached of a token."""
    assert model.facts.kv_cache is not None
    numbers = model.sizes.value(model.facts.kv_cache.numbers)
    layers = math.ceil(model.sizes["layers"] / pipeline_parallel)
    return layers * numbers // cache_cards(tensor_parallel, model.facts, model.sizes) * KV_BYTES[kv]


def fit(
    model: Model, gpus: Gpus, context: int | None = None, kv: KvType = "auto", tensor_parallel: int | None = None
) -> Fit:
    """Estimate the memory of the fullest GPU.

    Args:
        context: tokens of one sequence, or of several in total; None for the model's maximum.

    Raises:
        InputError: as `split`, or the context is longer than the model's maximum.
    """
    tensor, pipeline = split(model, gpus, tensor_parallel)
    context = model.longest if context is None else context
    if context < 1 or (model.longest and context > model.longest):
        raise InputError(f"--context {context}: this model takes 1 to {model.longest:,} tokens")
    weights = _weights(model, tensor, pipeline)
    activations = _activations(model, gpus, tensor)
    budget = int(gpus.bytes * UTILISATION)
    per_token = kv_bytes_per_token(model, kv, tensor, pipeline)
    room = budget - weights - activations - RUNTIME
    tokens_that_fit = max(0, room // per_token // KV_BLOCK * KV_BLOCK)
    cache = math.ceil(context / KV_BLOCK) * KV_BLOCK * per_token
    return Fit(
        gpus.name,
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
    """Weight bytes on the fullest GPU: equal runs of layers, the embedding in the first, the head in the last."""
    per_stage = math.ceil(len(model.layers) / pipeline)
    stages = [model.layers[first : first + per_stage] for first in range(0, len(model.layers), per_stage)]
    gpus = {
        name: module_cards(name, tensor, model.facts, model.sizes) for layer in model.layers for name in layer.linears
    }
    in_layers = max(
        sum(
            layer.experts / tensor + sum(size / gpus[name] for name, size in layer.linears.items()) + layer.others
            for layer in stage
        )
        for stage in stages
    )
    return math.ceil(in_layers + model.outside / tensor / (1 if pipeline == 1 else 2))


def _activations(model: Model, gpus: Gpus, tensor: int) -> int:
    """Bytes live at the peak of a prefill step: vLLM's two MoE workspaces, hidden states, what attention reads (all in
    16 bit), and logits.
    """
    sizes, tokens = model.sizes, step_tokens(gpus)
    width, hidden = sizes["width"] // tensor, sizes["hidden"]
    experts = tokens * sizes["chosen"] * (max(2 * width, hidden) + width)
    attention = tokens * _attention_rows(model, tensor)
    return 2 * (experts + attention + 4 * tokens * hidden) + 2 * 4 * SEQUENCES * sizes["vocabulary"]


def _attention_rows(model: Model, tensor: int) -> int:
    """How many numbers a GPU makes of a token before attention: all rows but those of its output."""
    facts, sizes = model.facts, model.sizes
    assert facts.tensor_parallel is not None
    rows = {
        name: sizes.value(shape[0])
        for name, shape in facts.every_layer.linears.items()
        if name not in facts.tensor_parallel.columns
    }
    divided = sum(count for name, count in rows.items() if name in facts.tensor_parallel.rows)
    return divided // tensor + sum(rows.values()) - divided


def step_tokens(gpus: Gpus) -> int:
    """Tokens in one prefill step: vLLM's default for a GPU of this size."""
    return 8192 if gpus.bytes >= LARGE_GPU else 2048


def assumptions(gpus: Sequence[Gpus]) -> list[str]:
    """The assumptions behind an estimate, one line each."""
    steps = " or ".join(f"{n:,}" for n in sorted({step_tokens(c) for c in gpus}))
    return [
        f"vLLM may use {UTILISATION:.0%} of a GPU (--gpu-memory-utilization {UTILISATION})",
        f"{RUNTIME / GIB:.0f} GiB a GPU for the CUDA context, kernels, NCCL and fragmentation",
        f"activations: {steps} tokens in a prefill step, logits of {SEQUENCES} sequences",
        "KV cache for one sequence of that context, or several that share it; no speculative decoding",
    ]


def notes(model: Model, fits: Iterable[Fit]) -> list[str]:
    """What some of these ways to divide the model need besides memory, one line each."""
    shares = {row.tensor_parallel: model.sizes["width"] // row.tensor_parallel for row in fits}
    return [
        f"vLLM 0.33 or newer for TP {ranks}: {share} of an expert's width on a GPU are no multiple of {MARLIN_TILE}, "
        "and older ones do not fill up Marlin's tiles"
        for ranks, share in sorted(shares.items())
        if share % MARLIN_TILE
    ]


def common_fits(model: Model) -> list[Fit]:
    """Estimates for common sets of GPUs, from small to large, without those that fit fewer than 8,192 tokens.

    The list ends with the second set that fits the model's maximum context with a 16-bit KV cache. An FP8 KV cache
    is listed only if the maximum context does not fit in 16 bit.
    """
    rows: list[Fit] = []
    for gpus in map(parse_gpus, COMMON):
        for kv in KV_BYTES:
            row = fit(model, gpus, kv=kv)
            if row.longest >= min(8192, model.longest):
                rows.append(row)
            if row.fits:
                break
        if sum(row.fits and row.kv == "auto" for row in rows) == 2:
            break
    return rows
