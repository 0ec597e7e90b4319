"""Comparison of a candidate with its source after each layer: of the states of held-out texts, and of the weights.

Weights are compared with the smoothing undone: AWQ's scale between a norm and the matrices that read it is found as the
ratio of the norms, that between w3's rows and w2's columns by least squares. Neither changes what the model computes,
so neither counts as an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import split_first
from quantizers.checkpoint.reader import Checkpoint
from quantizers.device.devices import is_accelerator
from quantizers.device.prefetch import to_host
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.formats.dequantization import read_weight
from quantizers.model.activation_stream import ActivationStream
from quantizers.model.layer_forward import padded
from quantizers.model.layer_weights import ExpertWeights
from quantizers.planning.expert_batches import expert_batches, experts_per_batch
from quantizers.solve.folded_scales import row_scale, stored_norm_ratio

from .figures import LayerFigures, WeightError
from .metrics import Text, parts

Pair = tuple[torch.Tensor, torch.Tensor]  # the candidate's matrix, or matrices of several experts, and the source's


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
    batch of experts in memory at a time.
    """
    before, here = facts.norm, facts.of_layer(layer)

    def ratio(norm: str) -> torch.Tensor:
        offset = before.offset if before else 0
        return stored_norm_ratio(source, candidate, facts.layer(layer, norm), offset).to(device)

    def experts() -> Iterator[list[Pair]]:
        smooth = ratio(before.tensor) if before else torch.ones(1, device=device)
        both = [ExpertWeights(files, facts, layer, device, torch.float32) for files in (source, candidate)]
        size = experts_per_batch(is_accelerator(device), facts.expert_inputs, facts.expert_width)
        for first, last in expert_batches(facts.num_experts, size):
            then, now = (weights.batch(range(first, last)) for weights in both)
            *gate, up = split_first(then[0], len(facts.matrices))
            *g, u = split_first(now[0], len(facts.matrices))
            rows = row_scale(u / smooth, up) if here.inner else torch.ones_like(up[..., 0])
            unscaled = u / smooth / rows.unsqueeze(-1), now[1] * rows.unsqueeze(-2) ** max(here.inner, 1)
            yield list(zip((*(matrix / smooth for matrix in g), *unscaled), (*gate, up, then[1]), strict=True))
        for weights in both:
            weights.require_finite()

    def attention() -> Iterator[list[Pair]]:
        ratios = {norm: ratio(norm) for norm in facts.smoothing if norm in here.tensors}
        for name in here.linears:
            original, weight = (read_weight(files, facts.layer(layer, name), device) for files in (source, candidate))
            scale = ratios.get(facts.scaled_with(name) or "")
            yield [(weight if scale is None else weight / scale, original)]

    routed = 0.0 if layer in facts.dense else _relative(experts())
    return WeightError(experts=routed, attention=_relative(attention()))


def _relative(batches: Iterable[Sequence[Pair]]) -> float:
    """‖candidate − source‖ / ‖source‖ over many matrices of both; 0 without any."""
    error = size = 0.0  # sums of squares, in the order of experts
    for pairs in batches:
        squares = [(_squares(candidate - source), _squares(source)) for candidate, source in pairs]
        errors, sizes = (torch.stack(of_matrices, -1).flatten().tolist() for of_matrices in zip(*squares, strict=True))
        for of_error, of_size in zip(errors, sizes, strict=True):  # as in `compare`
            error += of_error
            size += of_size
    return math.sqrt(error / size) if size else 0.0


def _squares(matrix: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each matrix (…, R, C), in float64."""
    return matrix.double().square().sum((-2, -1))
