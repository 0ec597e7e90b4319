"""The gram engine: one layer's recorded inputs and weights ─► its solved experts.

Order: sums of x ─► one scale for the norm and all its readers, where it is folded ─► chunk by chunk of experts, as
batched matrices, what expert_chunk.py does. The other engine, the library's own, is llmcompressor_engine.py.

Legend: E experts, c experts of a chunk, H hidden, I expert width, G Gram matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from quantizers.architectures.matrices import MATRICES
from quantizers.device.allocator import release_free_memory
from quantizers.device.timing import phase
from quantizers.forward.recorded import Recorded
from quantizers.recipe.schema import Awq, Experts
from quantizers.team.ranks import ALONE, Ranks

from .awq import fold_gram, fold_norm, grid_scales, row_step, scale_losses, weight_means
from .expert_chunk import DAMPING, SolvedChunk, solve_chunk
from .expert_sums import Activation, WidthSums, input_grams, width_sums
from .solved import Leaning, Solved
from .token_weights import Blend, InputSums, batches, blend, input_sums

SEARCH_TOKENS = 16  # with 8 bits, tokens for each column of w2: with more, s is searched over every n-th batch only
# On a CPU a chunk has at most so many experts, and bytes of their weights in float32, so that it stays in the cache.
CPU_EXPERTS, CPU_CACHE_BYTES = 8, 6 * 2**20


def solve(
    recorded: Sequence[Recorded],
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    norm: torch.Tensor | None,
    offset: int = 0,
    router: torch.Tensor,
    activation: Activation,
    settings: Experts,
    chunk: int,
    ranks: Ranks = ALONE,
) -> Solved:
    """Solve one layer from sums.

    Args:
        recorded: what the MoE block saw, one entry a calibration sequence, on the weights' device.
            Read several times, always in order.
        gate_up: (E, 2I, H), w1 above w3, in the dtype of the forward pass.
        down: (E, H, I), w2.
        norm: (H,) as stored, in the source's dtype; None if no scale is to be folded into it.
        offset: what the model adds to the stored norm, 0 or 1.
        router: (E, H) float32.
        activation: of the gate, usually SiLU.
        chunk: experts solved at a time; bounds memory. Part of the run's fingerprint on a GPU. On a CPU
            at most as many as lie in its cache; there the result is the same for any number.
        ranks: each process solves its share of the chunks, which are those of one process, so that not
            even the shape of a matmul differs; all of them get the whole result.

    Returns:
        The solved layer; `error` holds the AWQ objective per token before and after the search, and
        the rounding errors on the calibration inputs, relative to the output of the matrices that were
        rounded (with gptq that is the corrected w2, on the inputs that the rounded w1 and w3 give it); and
        `expert_tokens`, the fewest tokens that an expert saw.
    """
    experts, _, hidden = gate_up.shape
    if gate_up.device.type == "cpu":
        chunk = min(chunk, CPU_EXPERTS, max(1, CPU_CACHE_BYTES // (6 * gate_up[0].numel())))  # w1, w3 and w2 in float32
    chunks = [(first, min(first + chunk, experts)) for first in range(0, experts, chunk)]
    chunks = [chunks[i] for i in ranks.contiguous(len(chunks))]
    with phase("sums"):
        inputs = input_sums(recorded)
        blended = blend(recorded, experts, settings.routed_weight, full_share_at=hidden)
        together = batches(recorded, experts)
        some = together[:: max(1, inputs.tokens // (SEARCH_TOKENS * down.shape[-1]))]
    error: dict[str, float] = {}
    folded, smooth = norm, torch.ones(hidden, device=gate_up.device)
    folding = norm is not None and bool(settings.awq)
    if norm is not None and folding:
        with phase("search"):
            shared = _norm_scale(gate_up, inputs, settings, chunks, error, ranks=ranks)
            folded, smooth = fold_norm(norm, shared, offset)
    parts = []
    for first, last in chunks:
        release_free_memory()  # otherwise memory that one chunk freed sometimes adds to the peak of the next
        with phase("sums"):
            input_gram = input_grams(recorded, together, blended, inputs.gram, first, last)
            input_gram = fold_gram(input_gram, smooth.unsqueeze(0))
        own = gate_up[first:last]
        width_inputs = partial(width_sums, recorded, activation=activation, blended=blended, first=first)
        of_source = partial(width_inputs, some, own)
        of_rounded = partial(_sums_when_rounded, partial(width_inputs, together), own, smooth)
        parts.append(
            solve_chunk(own.float() * smooth, down[first:last].float(), input_gram, of_source, of_rounded, settings)
        )
    # Numbers for the report are fetched once all chunks are under way: a GPU never waits for them.
    whole = _together(parts, ranks, gate_up.device)
    error["expert_tokens"] = float(whole.totals["seen"].min())
    return Solved(
        folded,
        smooth,
        router.float() * smooth if folding else None,
        {matrix: whole.codes[matrix] for matrix in MATRICES},
        {matrix: whole.scales[matrix] for matrix in MATRICES},
        error | _errors(whole.totals),
        inputs.fallbacks() + _fallbacks(whole, blended, settings),
        _leaning(blended) if settings.routed_weight else None,
    )


def _norm_scale(
    gate_up: torch.Tensor,
    inputs: InputSums,
    settings: Experts,
    chunks: Sequence[tuple[int, int]],
    error: dict[str, float],
    *,
    ranks: Ranks,
) -> torch.Tensor:
    """The scale (H,) that the norm, the router and every w1 and w3 share, before the norm is rounded."""
    assert isinstance(settings.awq, Awq)
    group, bits, step = settings.group_size, settings.bits, row_step(*gate_up.shape[:2])
    means = _all_rows([weight_means(gate_up[a:b].float(), group) for a, b in chunks], ranks, gate_up.device)
    means = means.mean(0, keepdim=True)
    grid = grid_scales(inputs.mean.unsqueeze(0), means, settings.awq.grid, settings.awq.duo_scaling)
    losses = [
        scale_losses(gate_up[a:b, ::step].float(), inputs.gram.unsqueeze(0), grid, group, bits).T for a, b in chunks
    ]
    total = _all_rows(losses, ranks, gate_up.device).T.double().sum(1) * step  # (P,), added in the order of experts
    best = int(total.argmin())
    error["norm_search_before"], error["norm_search_after"] = (float(total[i]) / inputs.tokens for i in (0, best))
    return grid[best, 0]


def _all_rows(parts: Sequence[torch.Tensor], ranks: Ranks, device: torch.device) -> torch.Tensor:
    """(E, …): the rows of all experts, from those (c, …) of this process's chunks."""
    return ranks.gather({"rows": torch.cat(list(parts))} if parts else {}, device)["rows"]


def _together(parts: Sequence[SolvedChunk], ranks: Ranks, device: torch.device) -> SolvedChunk:
    """All experts in their order, from this process's chunks."""
    rows = {
        f"{field}.{key}": torch.cat([getattr(part, field)[key] for part in parts])
        for field in SolvedChunk.__annotations__
        for key in (getattr(parts[0], field) if parts else ())
    }
    whole = SolvedChunk({}, {}, {}, {})
    for name, tensor in ranks.gather(rows, device).items():
        field, key = name.split(".")
        getattr(whole, field)[key] = tensor
    return whole


def _sums_when_rounded(
    sums: Callable[..., WidthSums], gate_up: torch.Tensor, smooth: torch.Tensor, rounded: torch.Tensor, compare: bool
) -> WidthSums:
    """Sums of what w2 reads when w1 and w3 are rounded.

    Args:
        sums: `width_sums`, given everything but weights.
        gate_up: (c, 2I, H), the source's w1 and w3.
        rounded: (c, 2I, H) float32, codes times scales, which read x / smooth.
        compare: also sum the changes from what the source's w1 and w3 give.
    """
    # One rounding of the weights to the dtype of the forward pass, as a server does it.
    return sums((rounded / smooth).to(gate_up.dtype), source=gate_up if compare else None)


def _errors(totals: dict[str, torch.Tensor]) -> dict[str, float]:
    """Means and ratios over all experts, added in their order whatever chunks they were solved in."""
    sums = {key: float(value.sum()) for key, value in totals.items()}
    experts = len(totals["seen"])
    errors = {key: value / experts for key, value in sums.items() if key.startswith("down_search")}
    for name in ("gate_up", "down"):
        whole = sums[f"{name}_whole"]
        errors[f"{name}_rounding"] = math.sqrt(sums[f"{name}_lost"] / whole) if whole > 0 else 0.0
    return errors


def _leaning(blended: Blend) -> Leaning:
    fewer = int((blended.routed_tokens < blended.full_share_at).sum())
    return Leaning(blended.full_share_at, fewer, float(blended.share.min()))


def _fallbacks(whole: SolvedChunk, blended: Blend, settings: Experts) -> list[str]:
    """One line for every expert that did not get what the recipe asks for; a smaller share is part of the method."""
    lines = []
    columns = (whole.totals["seen"], whole.totals["dropped"], blended.routed_tokens, blended.share)
    for expert, (rows, left_out, count, share) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        name = f"expert {expert}"
        if left_out:
            lines.append(f"{name}: {left_out} of {rows + left_out} rows not finite or too large, left out of the sums")
        if settings.routed_weight and not share:
            lines.append(f"{name}: {count} routed tokens, so all tokens count alike for it")
    for matrix, damping in whole.damping.items():
        for expert, used in enumerate(damping.tolist()):
            if math.isinf(used):
                lines.append(f"expert {expert}: {matrix}: rounded to nearest, because its Gram matrix is not usable")
            elif used > 1.5 * DAMPING:
                lines.append(f"expert {expert}: {matrix}: damping raised to {used:g}")
    return lines
