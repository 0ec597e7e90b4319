"""The result of an engine: one layer's quantized experts, norm and router, and figures for the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quantizers.architectures.matrices import Matrix

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LayerResult:
    """The quantized experts of one layer, its norm and router, and how far they are off.

    E experts, H hidden, I expert width, g group size. Dictionaries of tensors have the keys gate (w1), up (w3) and down
    (w2). An expert's matrix on the unfolded input is code · scale, up's rows times s, down's columns divided by s, and
    gate's and up's columns divided by `smooth`, where s is AWQ's scale between w3 and w2, which is not stored;
    down then approximates w2 with its ridge correction, where that was made.

    Attributes:
        norm: (H,) in the source's dtype: the folded norm. Where nothing was folded, the source's own, or None.
        smooth: (H,) float32: what the norm was divided by, exactly norm / norm' of the stored values;
            ones where nothing was folded.
        router: (E, H) float32: the router weight times `smooth`; None where nothing was folded.
        codes: int8, gate and up (E, I, H), down (E, H, I), each in [-2^(bits-1), 2^(bits-1) - 1]; or E2M1's, see
            grid.py.
        scales: bfloat16, (E, rows, columns / g); weight = code * scale, and with NVFP4 divided by the global scale.
        error: numbers about the search and the rounding, of a GramErrors or LlmcompressorErrors, on calibration
            tokens.
        fallbacks: one line for each expert that did not get the method asked for, and why.
        under_routed: the experts that depend on tokens which the router did not send them, see under_routed.py:
            `full_share_at` is n0, `experts` the number of those with fewer routed tokens, `smallest_share` the least
            share of all. None where all tokens count alike.
        global_scales: (E,) float32 of each matrix, with NVFP4; gate and up have the same.
        input_scales: the same of their inputs, where these are quantized too.
    """

    norm: torch.Tensor | None
    smooth: torch.Tensor
    router: torch.Tensor | None
    codes: dict[Matrix, torch.Tensor]
    scales: dict[Matrix, torch.Tensor]
    error: dict[str, float] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    under_routed: dict[str, float] | None = None
    global_scales: dict[Matrix, torch.Tensor] = field(default_factory=dict)
    input_scales: dict[Matrix, torch.Tensor] = field(default_factory=dict)
