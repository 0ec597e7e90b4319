"""Comparison of a candidate with its source after each layer: of the states of held-out texts, and of the weights.

Weights are compared with the smoothing undone: AWQ's scale between a norm and the matrices that read it is found as the
ratio of the norms, that between w3's rows and w2's columns by least squares. Neither changes what the model computes,
so neither counts as an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.checkpoint.reader import Checkpoint
from quantizers.device.prefetch import to_host
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.formats.dequantization import read_weight
from quantizers.model.activation_stream import ActivationStream
from quantizers.model.layer_forward import padded
from quantizers.solve.folded_scales import row_scale, stored_norm_ratio

from .figures import LayerFigures, WeightError
from .metrics import Text, parts

Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]  # the candidate's matrix and the source's


@dataclass(frozen=True)
class OfText:
    """Comparison of one text after a layer.

    Attributes:
        same: expert choices of the source that the candidate makes too; 0 without experts.
        difference, size: ‖h_candidate − h_source‖² and ‖h_source‖² of the states that leave the layer.
    """

    same: float
    difference: float
    size: float


def compare(
    source: ActivationStream,
    candidate: ActivationStream,
    texts: Sequence[Text],
    *,
    routed: bool = True,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> LayerFigures:
    """Figures of the layer that both streams have just passed through, `routed` if it has experts.

    They have those of the long texts as well if these are reported separately, see `metrics.parts`.
    """
    compared = by_text(source, candidate, routed=routed, dist=dist)

    def together(numbers: Sequence[int]) -> LayerFigures:
        difference = size = 0.0
        for i in numbers:  # added in their order, without the correction that sum() makes since Python 3.12
            difference += compared[i].difference
            size += compared[i].size
        choices = sum(source.chosen.lengths[i] for i in numbers) * source.chosen.width if routed else 0
        agreement = sum(compared[i].same for i in numbers) / choices if choices else None
        return LayerFigures(agreement=agreement, hidden_error=math.sqrt(difference / size))

    top, long = parts(texts)
    figures = together(top)
    return figures.changed(long=together(long)) if long else figures


def by_text(
    source: ActivationStream, candidate: ActivationStream, *, routed: bool, dist: ProcessGroup = SINGLE_PROCESS
) -> dict[int, OfText]:
    """Compare each text after the layer that both streams have just passed through; keys are text numbers."""
    batches = to_host({str(b.start): _of_batch(source, candidate, b, routed) for b in source.left.owned_batches})
    own = {int(first) + i: OfText(*row) for first, rows in batches.items() for i, row in enumerate(rows.tolist())}
    compared: dict[int, OfText] = {}
    for of_process in dist.all_gather_object(own):
        compared.update(of_process)
    return compared


def _of_batch(source: ActivationStream, candidate: ActivationStream, batch: range, routed: bool) -> torch.Tensor:
    """The numbers of `OfText` of each text of a batch (B, 3) float64, on the streams' device."""
    device = source.model.device
    rows, lengths = source.left.of_batch(batch)
    a, b = (stream.left.flat[rows, : stream.model.hidden].to(device) for stream in (source, candidate))
    same = torch.zeros(len(a), dtype=torch.float64, device=device)
    if routed:
        ours, theirs = (stream.chosen.flat[rows].to(device) for stream in (source, candidate))
        same += (ours.unsqueeze(-1) == theirs.unsqueeze(-2)).any(-1).sum(-1)
    difference = (a.float() - b.float()).double().square().sum(-1)
    of_rows = torch.stack([same, difference, a.double().square().sum(-1)], dim=-1)
    return padded(of_rows, lengths).sum(1)


# Weights -----------------------------------------------------------------------------------------------------------


def weight_errors(
    source: Checkpoint, candidate: Checkpoint, facts: Architecture, layer: int, device: torch.device
) -> WeightError:
    """‖candidate − source‖ / ‖source‖ of one layer, over all matrices of the experts and all of attention; holds one
    expert in memory at a time.
    """
    before, here = facts.norm, facts.of_layer(layer)

    def ratio(norm: str) -> torch.Tensor:
        offset = before.offset if before else 0
        return stored_norm_ratio(source, candidate, facts.layer(layer, norm), offset).to(device)

    def experts() -> Pairs:
        smooth = ratio(before.tensor) if before else torch.ones(1, device=device)
        for expert in range(0 if layer in facts.dense else facts.num_experts):
            modules = [facts.expert(layer, expert, matrix) for matrix in facts.matrices]
            *gate, up, down = (read_weight(source, module, device) for module in modules)
            *g, u, d = (read_weight(candidate, module, device) for module in modules)
            rows = row_scale(u / smooth, up) if here.inner else torch.ones_like(up[:, 0])
            yield from ((now / smooth, then) for now, then in zip(g, gate, strict=True))
            yield from ((u / smooth / rows.unsqueeze(1), up), (d * rows ** max(here.inner, 1), down))

    def attention() -> Pairs:
        ratios = {norm: ratio(norm) for norm in facts.smoothing if norm in here.tensors}
        for name in here.linears:
            original, weight = (read_weight(files, facts.layer(layer, name), device) for files in (source, candidate))
            scale = ratios.get(facts.scaled_with(name) or "")
            yield weight if scale is None else weight / scale, original

    return WeightError(experts=_relative(experts()), attention=_relative(attention()))


def _relative(pairs: Pairs) -> float:
    """‖candidate − source‖ / ‖source‖ over many matrices of both; 0 without any."""
    error = size = 0.0  # sums of squares
    for candidate, source in pairs:
        error += float((candidate - source).double().square().sum())
        size += float(source.double().square().sum())
    return math.sqrt(error / size) if size else 0.0
