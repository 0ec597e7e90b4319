"""How far a candidate's weights are from the source's, layer by layer, smoothing undone.

AWQ moves a scale from a norm into the matrices that read it, and another between w3's rows and w2's
columns; neither changes what the model computes, and neither is an error. The first is read off the
ratio of the norms, the second off w3's rows by least squares; the rest is what quantization did.
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
    """‖found − wanted‖ / ‖wanted‖ over many matrices."""

    def __init__(self) -> None:
        self.lost = self.whole = 0.0

    def add(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        self.lost += float((found - wanted).double().square().sum())
        self.whole += float(wanted.double().square().sum())

    def relative(self) -> float:
        return math.sqrt(self.lost / self.whole) if self.whole else 0.0


def weight_errors(
    source: Checkpoint,
    candidates: Sequence[Checkpoint],
    facts: Architecture,
    sizes: Sizes,
    layer: int,
    device: torch.device,
) -> list[dict[str, float]]:
    """Relative error of one layer's experts and attention, for each candidate; a matrix in memory at a time.

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
        wanted = read_weight(source, facts.layer(layer, name), device)
        for total, candidate, ratio in zip(attention, candidates, ratios, strict=True):
            found = read_weight(candidate, facts.layer(layer, name), device)
            reads_norm = ratio is not None and not name.endswith("o_proj") and len(ratio) == found.shape[1]
            total.add(found / ratio if reads_norm and ratio is not None else found, wanted)
    return [{"experts": e.relative(), "attention": a.relative()} for e, a in zip(experts, attention, strict=True)]
