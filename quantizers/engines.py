"""The gram engine: one layer's recorded inputs and weights ─► its solved experts.

Order: sums of x ─► one scale for the norm and all its readers ─► chunk by chunk of experts: blended
sums ─► a scale per expert for w3 → w2 ─► group scales ─► rounding. All experts of a chunk are solved
as batched matrices. The other engine, the library's own, is llmcompressor_engine.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .awq import fold_gram, fold_norm, grid_scales, scale_losses, weight_means
from .recipe import Experts
from .rounding import dequantize, gptq, minmax_scales, mse_scales, nearest
from .solved import Matrix, Solved
from .statistics import Activation, Blend, ExpertSums, Recorded, blend, expert_sums, input_sums, route_counts


def solve(
    recorded: Sequence[Recorded],
    gate_up: torch.Tensor,
    down: torch.Tensor,
    norm: torch.Tensor,
    router: torch.Tensor,
    activation: Activation,
    settings: Experts,
    chunk: int,
) -> Solved:
    """Solve one layer from sums.

    Args:
        recorded: what the MoE block saw, one entry a calibration sequence, on the weights' device.
            Read several times, always in order.
        gate_up: (E, 2I, H), w1 above w3, in the dtype of the forward pass.
        down: (E, H, I), w2.
        norm: (H,) as stored, in the source's dtype.
        router: (E, H) float32.
        chunk: experts solved at a time; bounds memory. Part of the run's fingerprint on a GPU.

    Returns:
        The solved layer; `error` holds the AWQ objective per token before and after the search, and
        the rounding error of the three matrices on the calibration inputs, relative to their output.
    """
    experts, _double_width, hidden = gate_up.shape
    group, bits = settings.group_size, settings.bits
    all_gram, all_abs, tokens = input_sums(recorded)
    blended = blend(recorded, experts, settings.routed_weight, full_share_at=hidden)
    most = _most_routed(recorded, experts)
    chunks = [(first, min(first + chunk, experts)) for first in range(0, experts, chunk)]
    error: dict[str, float] = {}

    smooth = torch.ones(hidden, device=gate_up.device)
    folded = norm
    if settings.awq:
        means = torch.cat([weight_means(gate_up[a:b].float(), group) for a, b in chunks])
        grid = grid_scales(
            all_abs.unsqueeze(0) / tokens,
            means.mean(0, keepdim=True),
            settings.awq.grid,
            settings.awq.duo_scaling,
        )
        table = torch.cat(
            [scale_losses(gate_up[a:b].float(), all_gram.unsqueeze(0), grid, group, bits) for a, b in chunks],
            dim=1,
        )
        losses = table.double().sum(1)  # (P,), experts in order
        best = int(losses.argmin())
        error["norm_search_before"], error["norm_search_after"] = (float(losses[i]) / tokens for i in (0, best))
        folded, smooth = fold_norm(norm, grid[best, 0])

    codes: dict[Matrix, list[torch.Tensor]] = {"gate": [], "up": [], "down": []}
    scales: dict[Matrix, list[torch.Tensor]] = {"gate": [], "up": [], "down": []}
    totals: dict[str, float] = {}
    fallbacks: list[str] = []
    for first, last in chunks:
        sums = expert_sums(recorded, gate_up[first:last], activation, blended, all_gram, most, first)
        _solve_chunk(
            gate_up[first:last].float(),
            down[first:last].float(),
            smooth,
            sums,
            settings,
            first,
            codes,
            scales,
            totals,
            fallbacks,
        )
        fallbacks += _fallback_lines(sums, blended, settings, first)
    for key in [key for key in totals if key.endswith("_error")]:
        error[key] = math.sqrt(totals[key] / totals[key.replace("_error", "_norm")])
    for key in ("down_search_before", "down_search_after"):
        if key in totals:
            error[key] = totals[key] / experts
    return Solved(
        folded,
        smooth,
        router.float() * smooth if settings.awq else None,
        {matrix: torch.cat(parts) for matrix, parts in codes.items()},
        {matrix: torch.cat(parts) for matrix, parts in scales.items()},
        error,
        fallbacks,
    )


def _most_routed(recorded: Sequence[Recorded], experts: int) -> list[int]:
    """For each sequence the largest number of tokens that one expert gets; one synchronisation a layer."""
    counts = torch.stack([route_counts(sequence.chosen, experts).amax() for sequence in recorded])
    return [int(n) for n in counts.tolist()]


def _solve_chunk(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    smooth: torch.Tensor,
    sums: ExpertSums,
    settings: Experts,
    first: int,
    codes: dict[Matrix, list[torch.Tensor]],
    scales: dict[Matrix, list[torch.Tensor]],
    totals: dict[str, float],
    fallbacks: list[str],
) -> None:
    """Scale, round and append the experts of one chunk (all float32)."""
    width = gate_up.shape[1] // 2
    width_gram = sums.width_gram
    gate, up = gate_up[:, :width] * smooth, gate_up[:, width:] * smooth
    if settings.awq:
        means = weight_means(down, settings.group_size)
        grid = grid_scales(sums.width_mean, means, settings.awq.grid, settings.awq.duo_scaling)
        losses = scale_losses(down, width_gram, grid, settings.group_size, settings.bits)  # (P, c)
        best = losses.argmin(0)  # (c,)
        s = grid[best, torch.arange(len(best), device=best.device)]  # (c, I)
        _add(totals, "down_search_before", losses[0].double().sum())
        _add(totals, "down_search_after", losses.gather(0, best[None]).double().sum())
        up, down, width_gram = up / s.unsqueeze(-1), down * s.unsqueeze(1), fold_gram(width_gram, s)
    input_gram = fold_gram(sums.input_gram, smooth.unsqueeze(0))
    # gate and up read the same inputs, so they share one factorization.
    both = torch.cat([gate, up], dim=1)
    for matrices, weight, gram in ((("gate", "up"), both, input_gram), (("down",), down, width_gram)):
        step = (
            mse_scales(weight, gram.diagonal(dim1=-2, dim2=-1), settings.group_size, settings.bits)
            if settings.scales == "mse"
            else minmax_scales(weight, settings.group_size, settings.bits)
        )
        if settings.rounding == "gptq":
            whole, damping = gptq(weight, gram, step, settings.bits)
            fallbacks += _damping_lines(damping, first, "/".join(matrices))
        else:
            whole = nearest(weight, step, settings.bits)
        delta = dequantize(whole, step) - weight
        _add(totals, f"{matrices[-1]}_error", ((delta @ gram) * delta).double().sum())
        _add(totals, f"{matrices[-1]}_norm", ((weight @ gram) * weight).double().sum())
        for matrix, code, scale in zip(
            matrices, whole.to(torch.int8).chunk(len(matrices), 1), step.chunk(len(matrices), 1), strict=True
        ):
            codes[matrix].append(code)
            scales[matrix].append(scale)


def _add(totals: dict[str, float], key: str, value: torch.Tensor) -> None:
    totals[key] = totals.get(key, 0.0) + float(value)


def _damping_lines(damping: torch.Tensor, first: int, matrices: str) -> list[str]:
    return [
        f"expert {first + i}: {matrices}: "
        + (
            "rounded to nearest, its Gram matrix has no usable factor"
            if math.isinf(used)
            else f"damping raised to {used:g}"
        )
        for i, used in enumerate(damping.tolist())
        if used > 0.011
    ]


def _fallback_lines(sums: ExpertSums, blended: Blend, settings: Experts, first: int) -> list[str]:
    lines = []
    routed = blended.routed_tokens[first : first + len(sums.seen)].tolist()
    for i, (seen, dropped, count) in enumerate(zip(sums.seen.tolist(), sums.dropped.tolist(), routed, strict=True)):
        if dropped:
            lines.append(f"expert {first + i}: {dropped} of {seen + dropped} rows not finite, left out of the sums")
        if settings.routed_weight and count < blended.full_share_at:
            lines.append(
                f"expert {first + i}: {count} routed tokens, fewer than {blended.full_share_at}: "
                f"routed share {float(blended.share[first + i]):.3f} instead of {settings.routed_weight}"
            )
    return lines
