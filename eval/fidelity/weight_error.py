"""How far a candidate's weights are from the source's, layer by layer, with the smoothing undone.

AWQ moves one scale from a norm into the matrices that read it, and another between w3's rows and w2's columns.
Neither changes what the model computes, so neither counts as an error: the first is found as the ratio of the
norms, the second from w3's rows by least squares, and both are undone. The rest is the quantization error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quantizers.architectures.architecture import Architecture, Sizes
from quantizers.architectures.matrices import MATRICES
from quantizers.checkpoint.reader import Checkpoint
from quantizers.forward.smoothing import norm_ratio, row_scale
from quantizers.forward.weights import read_weight

INPUT_NORM = "input_layernorm.weight"


class _Total:
    """Accumulates ‖candidate − source‖ / ‖source‖ over many matrices."""

    def __init__(self) -> None:
        self.error = self.size = 0.0  # sums of squares

    def add(self, candidate: torch.Tensor, source: torch.Tensor) -> None:
        self.error += float((candidate - source).double().square().sum())
        self.size += float(source.double().square().sum())

    def relative(self) -> float:
        return math.sqrt(self.error / self.size) if self.size else 0.0


def weight_errors(
    source: Checkpoint,
    candidates: Sequence[Checkpoint],
    facts: Architecture,
    sizes: Sizes,
    layer: int,
    device: torch.device,
) -> list[dict[str, float]]:
    """Relative error of one layer's experts and attention, for each candidate; holds one expert in memory at a time.

    Returns:
        experts and attention: ‖candidate − source‖ / ‖source‖ over all their matrices.
    """
    experts, attention = ([_Total() for _ in candidates] for _ in range(2))
    smooth = [norm_ratio(source, c, facts.layer(layer, facts.fold.norm)).to(device) for c in candidates]
    for expert in range(sizes["experts"]):
        modules = [facts.expert(layer, expert, matrix) for matrix in MATRICES]
        gate, up, down = (read_weight(source, module, device) for module in modules)
        for total, candidate, s in zip(experts, candidates, smooth, strict=True):
            g, u, d = (read_weight(candidate, module, device) for module in modules)
            rows = row_scale(u / s, up)
            total.add(g / s, gate)
            total.add(u / s / rows.unsqueeze(1), up)
            total.add(d * rows, down)
    has_norm = INPUT_NORM in facts.in_layer
    ratios = [
        norm_ratio(source, c, facts.layer(layer, INPUT_NORM)).to(device) if has_norm else None for c in candidates
    ]
    for name in facts.linears:
        original = read_weight(source, facts.layer(layer, name), device)
        for total, candidate, ratio in zip(attention, candidates, ratios, strict=True):
            weight = read_weight(candidate, facts.layer(layer, name), device)
            reads_norm = ratio is not None and not name.endswith("o_proj") and len(ratio) == weight.shape[1]
            total.add(weight / ratio if reads_norm and ratio is not None else weight, original)
    return [{"experts": e.relative(), "attention": a.relative()} for e, a in zip(experts, attention, strict=True)]
