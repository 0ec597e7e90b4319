"""Memory of each GPU when vLLM serves the output: an estimate from the plan alone, and what would make it fit.

    weights + KV cache + activations + runtime  <=  the GPU's memory * `Gpus.utilisation`

Weights and KV cache follow from the tensors. The rest are assumptions, which predict that MiniMax-M2.1 in FP8 + INT4
fits two 96 GiB GPUs with all 196,608 tokens, as was measured (https://huggingface.co/mratsim/MiniMax-M2.1-FP8-INT4-AWQ).

How vLLM divides a model among tensor-parallel GPUs:

    heads       a GPU has whole ones; those of keys and values are repeated where there are more GPUs
    experts     no group of a scale may be split between GPUs (CompressedTensorsWNA16MoEMethod)
    FP8 blocks  are split neither between GPUs nor between the modules that are merged into one
                (validate_fp8_block_shape). Of merged modules that a GPU has in full, the last one may end within a
                block. FP8 with a scale per row has no such rule

The architecture spec says in `tensor_parallel` which linear modules are divided; every GPU has all of the others.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quantizers.architectures.architecture import Architecture, Parts
from quantizers.architectures.fused import FUSED
from quantizers.formats.format import INTEGERS, NAME, ExpertFormat, RowFormat
from quantizers.formats.fp8 import Fp8Blocks
from quantizers.formats.packed_integers import Integers
from quantizers.planning.allocation import candidates
from quantizers.planning.gpus import GIB, UTILISATION, Gpus, lacking_facts, most_unseen, parse_gpus
from quantizers.planning.job import Job
from quantizers.planning.plan import Plan, file_size
from quantizers.system.errors import InputError
from quantizers.system.formatting import size_between

from .engines import declared_scheme
from .kernels import only_humming_takes

MIB = 2**20
RUNTIME = 2 * GIB  # per GPU: CUDA context, graphs (since vLLM 0.21 in its share), kernels, NCCL, fragmentation
LARGE_GPU = 70 * GIB  # from this size vLLM prefills 8,192 tokens at a time, below it 2,048
SEQUENCES = 256  # at most decoded together, each with a row of float32 logits
KV_BLOCK = 16  # tokens per block of the KV cache
KvType = Literal["auto", "fp8"]
KV_BYTES: dict[KvType, int] = {"auto": 2, "fp8": 1}
COMMON = "1x24 2x24 1x48 4x24 2x48 1x96 8x24 4x48 2x96 4x80 8x80 8x141"  # GPUs, and GiB of each
HUMMING_ROWS, HUMMING_COLUMNS = 256, 128  # of which a GPU's part is filled up to multiples (utils/humming/moe.py, 411)
MARLIN_TILE = 64  # of an expert's width on a GPU; up to vLLM 0.32 it had to be whole, later ones fill it up with zeros
FP8_CACHE_SM = 89  # below it FlashInfer alone has an FP8 cache, and SGLang refuses FP8 weights in blocks
KNOWN_SM = 80  # below it nothing is known of kernels, see quantizers/recipe/cards.py
FLASHINFER = "--attention-backend FLASHINFER"
LITTLE = GIB // 2  # bytes that budgets leave on each GPU, and below which `notes` warns: RUNTIME is a guess
MOST_GPUS = 64  # more of the same are not suggested
HEADERS = 1e-4  # of an output's bytes, by which its headers may differ with other bits
USEFUL = 1024  # tokens; a shorter context is no remedy
EXPERTS, OTHERS = "experts", "others"
# Measured by `quantize run tiny-minimax-m2-fp8-int4` with the bits and group size set to these.
TINY_KL: dict[ExpertFormat, float] = {
    Integers(2, 128): 0.05446, Integers(2, 64): 0.04987, Integers(2, 32): 0.04526,
    Integers(3, 128): 0.01738, Integers(3, 64): 0.01664, Integers(3, 32): 0.01493,
    Integers(4, 128): 0.00765, Integers(4, 64): 0.00655, Integers(4, 32): 0.00598,
    Integers(8, 128): 0.00045, Integers(8, 64): 0.00040, Integers(8, 32): 0.00041,
}  # fmt: skip
Blocks = Mapping[str, tuple[int, int]]  # rows and columns of an FP8 block, by module, without the layer's prefix


@dataclass(frozen=True)
class Model:
    """The facts about a planned output that decide its serving memory, in bytes and tokens."""

    facts: Architecture  # with `kv_cache` and `tensor_parallel`
    layers: tuple[Mapping[str, int], ...]  # weights of a layer: its EXPERTS, each passthrough linear module, all OTHERS
    outside: int  # embedding, head and final norm
    bits: frozenset[int]  # of the experts
    groups: frozenset[int]  # columns of the experts' matrices that share a scale
    padded: frozenset[int]  # the layers whose experts vLLM's Humming has, which fills their shapes up
    blocks: Blocks  # of the passthrough linear modules that are FP8 in blocks
    longest: int  # the model's maximum context; 0 if config.json does not say
    fp8_cache: bool = False  # whether servers cache keys and values in FP8 by themselves
    beside: int = 0  # of the output's files, what no GPU holds: headers, and layers for speculative decoding

    @property
    def stored(self) -> int:
        """Bytes of all weights that GPUs hold."""
        return sum(size for layer in self.layers for size in layer.values()) + self.outside


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


def serving_model(plan: Plan, facts: Architecture) -> Model:
    """The facts about a plan's output; InputError where the architecture spec does not say how servers divide it."""
    if problem := lacking_facts(facts):
        raise InputError("", problem)
    linears = facts.every_linear()
    layers: list[Counter[str]] = [Counter() for _ in range(plan.layers)]  # MTP's serve speculative decoding alone
    blocks: dict[str, tuple[int, int]] = {}
    for number, layer in enumerate(layers):
        for action in plan.of_layer(number):
            module = (action.module or action.source.rpartition(".")[0]).removeprefix(facts.layer(number, ""))
            holder = EXPERTS if action.expert is not None else module if module in linears else OTHERS
            layer[holder] += sum(spec.bytes for spec in action.outputs.values())
            if holder == module and isinstance(action.written, Fp8Blocks):
                blocks[module] = action.written.edges
    outside = sum(spec.bytes for part in (*plan.tables, None) for spec in plan.shard(part).values())
    held = outside + sum(size for layer in layers for size in layer.values())
    return Model(
        facts=facts,
        layers=tuple(layers),
        outside=outside,
        bits=frozenset(form.bits for form in plan.expert_forms.values() if isinstance(form, ExpertFormat)),
        groups=frozenset(form.edges[1] for form in plan.expert_forms.values()),
        padded=frozenset(layer for layer, form in plan.expert_forms.items() if is_padded(form)),
        blocks=blocks,
        longest=facts.positions or 0,
        fp8_cache=bool(plan.cached),
        beside=sum(file_size(plan.shard(layer)) for layer in plan.parts) - held,
    )


def is_padded(form: RowFormat) -> bool:
    """Whether vLLM's Humming has experts in this format, which fills their shapes up."""
    return isinstance(form, ExpertFormat) and only_humming_takes(declared_scheme(form.config_group()))


def tensor_parallel_problem(model: Model, parallel: int) -> str | None:
    """Reason why vLLM cannot split this model over `parallel` GPUs; None if it can."""
    return next(obstacles(parallel, model.facts, model.groups, model.blocks), None)


def split_over(model: Model, gpus: Gpus, tensor_parallel: int | None = None) -> tuple[int, int]:
    """Tensor and pipeline parallelism that use all GPUs: as much of the former as was asked for, or as vLLM allows.

    Raises:
        InputError: the former does not divide GPUs or model, or there are more pipeline stages than layers.
    """
    if tensor_parallel is not None and (problem := _no_ranks(model, gpus, tensor_parallel)):
        most = min(gpus.count, model.facts.num_heads)
        possible = [f"--tp {n}" for n in range(1, most + 1) if can_split(model, gpus, n)]
        fewer = f"give --vram {_most_gpus(model, gpus)}, and leave --tp out"
        remedy = f"give {' or '.join(possible)}" if possible else fewer
        raise InputError(f"--tp {tensor_parallel}", problem, remedy)
    ranks = tensor_parallel or _most_ranks(model, gpus.count)
    stages, layers = gpus.count // ranks, len(model.layers)
    if stages > layers:
        raise InputError(
            f"--vram {gpus.name}",
            f"by tensor parallelism of {ranks} these are {stages:,} pipeline stages, and the model has {layers} layers",
            f"give {_most_gpus(model, gpus, tensor_parallel)}",
        )
    return ranks, stages


def _most_gpus(model: Model, gpus: Gpus, tensor_parallel: int | None = None) -> str:
    """The largest number of such GPUs that `split_over` would not refuse, as a user writes them."""
    fewer = range(min(gpus.count, model.facts.num_heads * len(model.layers)), 0, -1)
    return gpus.of(next(n for n in fewer if can_split(model, gpus.of(n), tensor_parallel))).name


def _no_ranks(model: Model, gpus: Gpus, tensor_parallel: int) -> str | None:
    """The reason why GPUs cannot be used by a tensor parallelism; None if there is none."""
    if tensor_parallel < 1 or gpus.count % tensor_parallel:
        return f"does not divide the {gpus.count} GPUs of {gpus.name}"
    return tensor_parallel_problem(model, tensor_parallel)


def can_split(model: Model, gpus: Gpus, tensor_parallel: int | None = None) -> bool:
    """Whether `split_over` would not refuse these GPUs."""
    if tensor_parallel and _no_ranks(model, gpus, tensor_parallel):
        return False
    return gpus.count // (tensor_parallel or _most_ranks(model, gpus.count)) <= len(model.layers)


def _most_ranks(model: Model, count: int) -> int:
    """The largest tensor parallelism that vLLM allows and that divides a number of GPUs."""
    divisors = (n for n in range(min(count, model.facts.num_heads), 0, -1) if count % n == 0)
    return next((n for n in divisors if tensor_parallel_problem(model, n) is None), 1)


def kv_bytes_per_token(model: Model, kv: KvType, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
    """Bytes of a token's keys and values on one GPU: all of them, unless tensor parallelism divides their heads."""
    cache, linears = model.facts.kv_cache, model.facts.every_linear()
    assert cache is not None
    numbers = sum(linears[name][0] for name in cache.rows_of)
    layers = math.ceil(model.facts.num_layers / pipeline_parallel)
    gpus = min(tensor_parallel, model.facts.num_kv_heads) if cache.divided else 1
    return layers * numbers // gpus * KV_BYTES["fp8" if model.fp8_cache else kv]


def fit(
    model: Model, gpus: Gpus, context: int | None = None, kv: KvType = "auto", tensor_parallel: int | None = None
) -> Fit:
    """The memory of the fullest GPU.

    Args:
        context: tokens of one sequence, or of several in total; None for the model's maximum.

    Raises:
        InputError: the requested tensor parallelism is impossible, or the context longer than the model's maximum.
    """
    split = tensor, pipeline = split_over(model, gpus, tensor_parallel)
    kv = "fp8" if model.fp8_cache else kv
    if context is None and not model.longest:
        raise InputError("--context", "config.json does not say how long a text this model takes", "give the tokens")
    context = model.longest if context is None else context
    if context < 1 or (model.longest and context > model.longest):
        raise InputError(
            f"--context {context}", f"this model takes 1 to {model.longest:,} tokens", "leave it out for all of them"
        )
    weights, activations = _weights(model, *split), _activations(model, gpus, tensor)
    budget = int(gpus.bytes * gpus.utilisation)
    per_token = kv_bytes_per_token(model, kv, *split)
    room = budget - weights - activations - RUNTIME
    fitting = max(0, room // per_token // KV_BLOCK * KV_BLOCK)
    longest = min(fitting, model.longest) if model.longest else fitting
    cache = math.ceil(context / KV_BLOCK) * KV_BLOCK * per_token
    used = budget, weights, cache, activations, RUNTIME, room - cache
    return Fit(gpus.name, tensor, pipeline, kv, gpus.utilisation, context, *used, longest, room >= cache)


def _weights(model: Model, tensor: int, pipeline: int) -> int:
    """Weight bytes on the fullest GPU: equal runs of layers, the embedding in the first, the head in the last."""
    names = {name for layer in model.layers for name in layer}
    gpus = {name: module_gpus(name, tensor, model.facts) for name in names} | {EXPERTS: tensor}
    filled = dict.fromkeys(model.padded, _filled_up(model.facts, tensor))
    layers = [
        sum(size / gpus[name] * (filled.get(number, 1) if name == EXPERTS else 1) for name, size in layer.items())
        for number, layer in enumerate(model.layers)
    ]
    per_stage = math.ceil(len(layers) / pipeline)
    in_layers = max(sum(layers[first : first + per_stage]) for first in range(0, len(layers), per_stage))
    return math.ceil(in_layers + model.outside / tensor / (1 if pipeline == 1 else 2))


def _filled_up(facts: Architecture, tensor: int) -> float:
    """The size of a GPU's part of the experts in Humming, relative to what is stored of it."""

    def up(count: int, step: int) -> int:
        return math.ceil(count / step) * step

    hidden, share = facts.hidden_size, facts.expert_width // tensor
    gate_up = up(2 * share, HUMMING_ROWS) * up(hidden, HUMMING_COLUMNS)
    return (gate_up + up(hidden, HUMMING_ROWS) * up(share, HUMMING_COLUMNS)) / (3 * share * hidden)


def _activations(model: Model, gpus: Gpus, tensor: int) -> int:
    """Bytes at the peak of a prefill step: vLLM's two MoE workspaces, hidden states, what attention reads, logits."""
    facts, tokens = model.facts, step_tokens(gpus)
    width, hidden = facts.expert_width // tensor, facts.hidden_size
    experts = tokens * facts.top_k * (max(2 * width, hidden) + width)
    attention = tokens * _attention_rows(model, tensor)
    return 2 * (experts + attention + 4 * tokens * hidden) + 2 * 4 * SEQUENCES * facts.vocab_size


def _attention_rows(model: Model, tensor: int) -> int:
    """Numbers that a GPU computes of a token before attention: all rows but those of its output."""
    facts = model.facts
    assert facts.tensor_parallel is not None
    rows = {
        name: shape[0]
        for name, shape in facts.every_linear().items()
        if _units(facts).get(name) != "own" and name not in facts.tensor_parallel.columns
    }
    divided = sum(count for name, count in rows.items() if name in facts.tensor_parallel.rows)
    return divided // tensor + sum(rows.values()) - divided


def step_tokens(gpus: Gpus) -> int:
    """Tokens in one prefill step: vLLM's default for a GPU of this size."""
    return 8192 if gpus.bytes >= LARGE_GPU else 2048


def assumptions(gpus: Sequence[Gpus]) -> list[str]:
    """The assumptions behind an estimate, one line each."""
    steps = " or ".join(f"{tokens:,}" for tokens in sorted({step_tokens(cards) for cards in gpus}))
    nominal = ", ".join(dict.fromkeys(cards.name for cards in gpus if cards.nominal))
    shares = {cards.utilisation: "a GPU" for cards in gpus if cards.utilisation == UTILISATION}
    shares |= {cards.utilisation: cards.name for cards in gpus if cards.utilisation != UTILISATION}
    lines = [
        *(f"vLLM may use {share:.0%} of {whose} (--gpu-memory-utilization {share})" for share, whose in shares.items()),
        f"{RUNTIME / GIB:.0f} GiB a GPU for CUDA context and graphs, kernels, NCCL and fragmentation, a guess; "
        f"therefore experts.budget as named here leaves {LITTLE / GIB:g} GiB more",
        f"activations: {steps} tokens in a prefill step, logits of {SEQUENCES} sequences",
        "KV cache for one sequence of that context, or several that share it; no speculative decoding",
    ]
    if any(cards.sm is None or cards.sm < FP8_CACHE_SM for cards in gpus):
        lines.append(f"an FP8 KV cache below SM{FP8_CACHE_SM} (RTX 3090, A100): {FLASHINFER}; others refuse it")
    if old := ", ".join(dict.fromkeys(cards.name for cards in gpus if cards.sm is not None and cards.sm < KNOWN_SM)):
        lines.append(f"{old}: memory alone; below SM{KNOWN_SM} there is no bfloat16, and no kernel is known here")
    if shared := ", ".join(dict.fromkeys(cards.name for cards in gpus if cards.shared)):
        lines.append(f"{shared}: CPU and GPU share this memory, which is counted once, as the GPU's")
    if nominal:
        lines.append(f"{nominal}: the nominal memory; torch and vLLM see up to {most_unseen():.0%} less")
    return lines


def needs_flashinfer(gpus: Gpus, kv: KvType) -> bool:
    """Whether vLLM has this cache on these GPUs with FlashInfer alone: FlashAttention and Triton refuse it there."""
    return kv == "fp8" and gpus.sm is not None and gpus.sm < FP8_CACHE_SM


def notes(model: Model, fits: Iterable[Fit]) -> list[str]:
    """Needs besides memory, and where little of it is left, one line each."""
    rows = list(fits)
    shares = {row.tensor_parallel: model.facts.expert_width // row.tensor_parallel for row in rows}
    marlin = [
        f"vLLM 0.33 or newer for TP {ranks}: {share} of an expert's width on a GPU are no multiple of {MARLIN_TILE}, "
        "and older ones do not fill up Marlin's tiles"
        for ranks, share in sorted(shares.items())
        if share % MARLIN_TILE and len(model.padded) < len(model.facts.moe_layers)
    ]
    humming = [
        f"vLLM's Humming fills experts up to {HUMMING_ROWS} rows and {HUMMING_COLUMNS} columns: with TP {ranks} "
        f"they take {_filled_up(model.facts, ranks) - 1:.0%} more memory than on disk"
        for ranks in sorted(shares)
        if model.padded and _filled_up(model.facts, ranks) > 1
    ]
    little = [
        f"{row.cards}: {row.left / MIB:,.0f} MiB of a GPU are left; if vLLM says that memory is full, its message "
        "decides what helps: docs/how-to/serve-with-vllm.md#out-of-memory"
        for row in rows
        if row.fits and row.left < LITTLE and row.longest < model.longest
    ]
    return marlin + humming + little


def common_fits(model: Model) -> list[Fit]:
    """Estimates for common sets of GPUs, from small to large, without those that fit fewer than 8,192 tokens.

    The last is the second that fits the model's maximum context with a 16-bit KV cache; an FP8 one is listed only
    where that does not fit, or the model has scales for it. Without a known maximum there are none.
    """
    rows: list[Fit] = []
    kvs = tuple(KV_BYTES)[model.fp8_cache :]
    for text in COMMON.split() if model.longest else ():
        gpus = parse_gpus(f"{text}GiB")
        for kv in kvs if can_split(model, gpus) else ():
            row = fit(model, gpus, kv=kv)
            if row.longest >= min(8192, model.longest):
                rows.append(row)
            if row.fits:
                break
        if sum(row.fits and row.kv == kvs[0] for row in rows) == 2:
            break
    return rows


def weights_alone(plan: Plan, gpus: Sequence[Gpus]) -> list[dict[str, str | int]]:
    """Bytes that vLLM may use on each set of GPUs, of the weights, and of the rest, where facts are lacking."""
    held = [part for part in plan.parts if part not in plan.mtp]  # without those for speculative decoding
    weights = sum(spec.bytes for part in held for spec in plan.shard(part).values())
    rows: list[dict[str, str | int]] = []
    for cards in gpus:
        usable = cards.count * int(cards.bytes * cards.utilisation)
        rows.append({"cards": cards.name, "usable": usable, "weights": weights, "left": usable - weights})
    return rows


def module_gpus(module: str, ranks: int, facts: Architecture) -> int:
    """The number of GPUs among which a passthrough linear module is divided: 1 if each has all of it."""
    units = _units(facts).get(module)
    return min(ranks, facts.num_kv_heads) if units == "kv_heads" else ranks if units else 1


def obstacles(ranks: int, facts: Architecture, groups: Iterable[int], blocks: Blocks) -> Iterator[str]:
    """Every reason why a model cannot be divided among `ranks` GPUs.

    Args:
        facts: with `kv_cache` and `tensor_parallel`, see `lacking_facts`.
        groups: columns of the experts' matrices that share a scale, and must not be split.
        blocks: of the passthrough linear modules that are FP8 with a scale per block.
    """
    assert facts.kv_cache is not None
    assert facts.tensor_parallel is not None
    heads = facts.num_heads
    width = facts.expert_width
    split = facts.num_kv_heads if facts.kv_cache.divided else 0
    shapes, divided = facts.every_linear(), _units(facts)
    edges = {module: int(module not in facts.tensor_parallel.rows) for module in divided}  # rows, 0, or columns, 1
    if heads % ranks:
        yield f"{heads} attention heads are not a multiple of {ranks}"
    if split and split % ranks and ranks % split:
        yield f"{split} key-value heads and {ranks} GPUs are no multiples of each other"
    if width % ranks:
        yield f"the experts' width {width} is not a multiple of {ranks}"
    for group in sorted(groups, reverse=True):
        if width // ranks % group:
            yield (
                f"the experts' width per rank, {width // ranks}, is not a multiple of the group, {group}: groups would "
                "be split between ranks"
            )
    for module, units in divided.items():
        if module in shapes and units == "own" and (own := shapes[module][edges[module]]) % ranks:
            yield f"{module} has {own} parts, which are not a multiple of {ranks}"
    # What vLLM makes one module of: all but the last must end with a block.
    merged = FUSED | (facts.servers["vllm"].fused if "vllm" in facts.servers else {})
    for module, block in blocks.items():
        rows = shapes[module][0]
        if ranks > 1 and module in divided:
            edge = edges[module]
            share = shapes[module][edge] // module_gpus(module, ranks, facts)
            if share % block[edge]:
                side = ("rows", "columns")[edge]
                yield f"{module}'s {side} per rank, {share}, are not a multiple of the FP8 block, {block[edge]}"
        elif rows % block[0] and any(module.rpartition(".")[2] in members[:-1] for members in merged.values()):
            yield f"{module}'s rows, {rows}, are merged with others and not a multiple of the FP8 block, {block[0]}"


def _units(facts: Architecture) -> dict[str, Parts]:
    """Units by which tensor parallelism can divide each module, along rows or columns."""
    assert facts.tensor_parallel is not None
    return facts.tensor_parallel.rows | facts.tensor_parallel.columns


@dataclass(frozen=True)
class Remedy:
    """A change, in the words of options and keys, and the estimate with it, which fits."""

    say: str
    fit: Fit


def remedies(job: Job, model: Model, gpus: Gpus, asked: Fit, tensor_parallel: int | None = None) -> Iterator[Remedy]:
    """The changes that would make the output fit on these GPUs, the cheapest first; none where it fits already.

    Args:
        model: of the job's plan.
        asked: the estimate, for which the user gave `tensor_parallel` or None.
    """
    if asked.fits:
        return
    in_fp8 = fit(model, gpus, asked.context, "fp8", tensor_parallel)
    if in_fp8.fits:
        yield Remedy("--kv fp8", in_fp8)
    kvs: tuple[KvType, ...] = ("auto", "fp8") if asked.kv == "auto" and not in_fp8.fits else (asked.kv,)
    for kv in kvs:
        longest = fit(model, gpus, asked.context, kv, tensor_parallel).longest
        if longest >= USEFUL:
            shorter = fit(model, gpus, longest, kv, tensor_parallel)
            yield Remedy(f"{'' if kv == asked.kv else f'--kv {kv} '}--context {longest}", shorter)
    fitting: list[tuple[ExpertFormat, Model, Fit]] = []
    schemes = candidates(job.facts, 1) if job.recipe.experts.convert is None else []
    for scheme in reversed(schemes):
        smaller = with_scheme(model, scheme)
        if smaller.stored < model.stored and can_split(smaller, gpus):
            estimate = fit(smaller, gpus, asked.context, asked.kv)
            if estimate.fits and tensor_parallel in (None, estimate.tensor_parallel):
                fitting.append((scheme, smaller, estimate))
    roomy = [choice for choice in fitting if choice[2].left >= LITTLE] if job.recipe.experts.by_budget else []
    for scheme, smaller, estimate in (roomy or fitting)[:1]:
        yield Remedy(f"experts.{_asking_for(scheme, job, smaller, estimate)} in the recipe", estimate)
    step, most = tensor_parallel or 1, MOST_GPUS
    for kv in kvs:  # the smallest number of such GPUs; a still smaller one with keys and values in FP8
        larger = range(gpus.count + step, most + 1, step)
        counts = [count for count in larger if can_split(model, gpus.of(count), tensor_parallel)]
        fits = (fit(model, gpus.of(count), asked.context, kv, tensor_parallel) for count in counts)
        for count, more in zip(counts, fits, strict=True):
            if more.fits:
                yield Remedy(f"--vram {shlex.quote(more.cards)}{'' if kv == asked.kv else f' --kv {kv}'}", more)
                most = count - 1
                break


def _asking_for(scheme: ExpertFormat, job: Job, model: Model, fitting: Fit) -> str:
    """The key of a recipe's experts for a scheme in every layer, or for the largest budget, of the kind that it has."""
    if job.recipe.experts.bits_per_weight is not None:
        return f"bits_per_weight: {scheme.bits_per_weight:g}"
    if job.recipe.experts.budget is not None:
        plan = job.plan.with_schemes([scheme] * job.plan.layers)
        least = sum(file_size(plan.shard(layer)) for layer in plan.parts)
        return f"budget: {size_between(least, max(least, largest_budget(model, fitting)))}"
    integers = f"{NAME}: {INTEGERS}, " if "bits" not in job.recipe.experts.scheme.keys else ""
    return f"{integers}bits: {scheme.bits} with group_size: {scheme.group_size}"


def largest_budget(model: Model, fitting: Fit) -> int:
    """The largest `experts.budget` in bytes, with the split and the kernels of an output that fits.

    What is left on the fullest GPU, but for LITTLE, holds in each layer of its stage a part of that layer. Where less
    is left, the budget is smaller than that output.
    """
    tensor, pipeline = fitting.tensor_parallel, fitting.pipeline_parallel
    layers = len(model.layers)
    grown = tensor * layers / math.ceil(layers / pipeline) / (_filled_up(model.facts, tensor) if model.padded else 1)
    return int(model.stored + model.beside + (fitting.left - LITTLE) * grown)


def with_budget(model: Model, size: int) -> Model:
    """The same output with experts that grow evenly in all layers, until its files take `size` bytes."""
    experts = sum(layer.get(EXPERTS, 0) for layer in model.layers)
    factor = 1 + (size - model.stored - model.beside) / experts
    layers: list[Mapping[str, int]] = []
    for layer in model.layers:
        grown = {EXPERTS: math.ceil(layer[EXPERTS] * factor)} if EXPERTS in layer else {}
        layers.append({**layer, **grown})
    return replace(model, layers=tuple(layers))


def with_scheme(model: Model, scheme: ExpertFormat) -> Model:
    """The same output with one scheme in every layer."""
    shapes = [model.facts.expert_linears[matrix].shape for matrix in model.facts.matrices]
    stored = sum(spec.bytes for shape in shapes for spec in scheme.specs("", shape).values())
    experts = {EXPERTS: model.facts.num_experts * stored}
    layers = tuple({**layer, **experts} if EXPERTS in layer else layer for layer in model.layers)
    padded = [number for number, layer in enumerate(layers) if EXPERTS in layer] if is_padded(scheme) else []
    return replace(
        model,
        layers=layers,
        bits=frozenset({scheme.bits}),
        groups=frozenset({scheme.group_size}),
        padded=frozenset(padded),
    )


@dataclass(frozen=True)
class Way:
    """An output with one scheme in every layer, on some GPUs.

    Attributes:
        budget: by the KV cache's type, the largest `experts.budget` that leaves LITTLE on each GPU at the context asked
            for, with this split and this scheme's kernels, its bits spread evenly over pipeline stages; 0 where this
            output does not fit.
        mixture: the same for a recipe, rounded down to 0.1 GB; empty where that is no more than this output takes.
    """

    scheme: str
    bytes: int  # of its weights
    output: int  # bytes of its shards, with what no GPU holds of them
    tensor_parallel: int
    pipeline_parallel: int
    longest: dict[KvType, int]  # by the KV cache's type, the context that fits, in tokens
    budget: dict[KvType, int]
    mixture: dict[KvType, str]
    tiny_kl: float | None  # its mean KL on the tiny MiniMax-M2, in nats; None where that is not known


def ways(model: Model, gpus: Gpus, context: int, tensor_parallel: int | None = None) -> list[Way]:
    """Estimates for a set of GPUs: each scheme, from small to large, that vLLM can split over them."""
    rows = []
    for scheme in candidates(model.facts, tensor_parallel or 1):
        variant = with_scheme(model, scheme)
        if not can_split(variant, gpus, tensor_parallel):
            continue
        fits = {kv: fit(variant, gpus, context, kv, tensor_parallel) for kv in KV_BYTES}
        tensor, pipeline = fits["auto"].tensor_parallel, fits["auto"].pipeline_parallel
        output = variant.stored + variant.beside
        budget = {kv: largest_budget(variant, row) if row.fits else 0 for kv, row in fits.items()}
        mixture = {kv: _mixture(output, most) for kv, most in budget.items()}
        longest = {kv: row.longest for kv, row in fits.items()}
        kl = TINY_KL.get(scheme)
        rows.append(Way(str(scheme), variant.stored, output, tensor, pipeline, longest, budget, mixture, kl))
    return rows


def _mixture(output: int, most: int) -> str:
    """A budget of at most so many bytes, in 0.1 GB; empty where a mixture would be no larger than an output."""
    tenths = most // 10**8
    return f"{tenths / 10:g}GB" if tenths * 10**8 > output * (1 + HEADERS) else ""
