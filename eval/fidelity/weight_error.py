"""How far a candidate's weights are from the source's, layer by layer, with the smoothing undone.

AWQ moves one scale from a norm into the matrices that read it, and another between w3's rows and w2's columns.
Neither changes what the model computes, so neither counts as an error: the first is found as the ratio of the
norms, the second from w3's rows by least squares, and both are undone. The rest is the quantization error.
"""

from __future__ import annotations

import math

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import MATRICES
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.reader import Checkpoint
from quantizers.formats.dequantization import read_weight
from quantizers.solve.folded_scales import row_scale, stored_norm_ratio


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
    source: Checkpoint, candidate: Checkpoint, facts: Architecture, sizes: Sizes, layer: int, device: torch.device
) -> dict[str, float]:
    """Relative error of one layer's experts and attention; holds one expert in memory at a time.

    Returns:
        experts and attention: ‖candidate − source‖ / ‖source‖ over all their matrices.
    """
    experts, attention, dense = _Total(), _Total(), layer in sizes.dense
    smooth = stored_norm_ratio(source, candidate, facts.layer(layer, facts.norm.tensor), facts.norm.offset).to(device)
    for expert in range(0 if dense else sizes["experts"]):
        modules = [facts.expert(layer, expert, matrix) for matrix in MATRICES]
        gate, up, down = (read_weight(source, module, device) for module in modules)
        g, u, d = (read_weight(candidate, module, device) for module in modules)
        rows = row_scale(u / smooth, up)
        experts.add(g / smooth, gate)
        experts.add(u / smooth / rows.unsqueeze(1), up)
        experts.add(d * rows, down)
    ratios = {
        norm: stored_norm_ratio(source, candidate, facts.layer(layer, norm), facts.norm.offset).to(device)
        for norm in facts.smoothing
        if norm in facts.tensors(dense)
    }
    for name in facts.linears(dense):
        original = read_weight(source, facts.layer(layer, name), device)
        weight = read_weight(candidate, facts.layer(layer, name), device)
        ratio = ratios.get(facts.scaled_with(name) or "")
        attention.add(weight if ratio is None else weight / ratio, original)
    return {"experts": experts.relative(), "attention": attention.relative()}
